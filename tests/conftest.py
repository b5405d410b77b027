import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(min(2, torch.get_num_threads()))

try:
    from fastenc import _C
except ImportError:
    _C = None

needs_cpp = pytest.mark.skipif(_C is None, reason="the compiled extension is not available")


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets named by FASTENC_DATA."""
    folder = os.environ.get("FASTENC_DATA")
    if not folder:
        pytest.skip("FASTENC_DATA does not name the folder of data sets")
    return Path(folder)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instruction_set(request):
    """Runs a test on each instruction set that the extension holds and this processor has."""
    if _C is None:
        pytest.skip("the compiled extension is not available")
    before = _C.build_info()["instruction_set"]
    if request.param not in _C.build_info()["usable_instruction_sets"].split():
        pytest.skip(f"this processor has no {request.param}")
    _C.set_instruction_set(request.param)
    yield request.param
    _C.set_instruction_set(before)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
