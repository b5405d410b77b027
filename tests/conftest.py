import gc
import os
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils._device import _device_constructors

# Until all modules are imported there is no garbage, only more and more objects to look at.
gc.disable()
torch.set_num_threads(min(2, torch.get_num_threads()))
# torch keeps every seed for the devices that are missing, with the stack of its caller. That takes milliseconds.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

# cuBLAS is deterministic only if this is set before its first use in a process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Without a GPU, Triton's interpreter runs the kernels. Triton reads this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from fastenc.ops import gemm  # noqa: E402
from fastenc.testing.operators import triton_kernels_on_cpu  # noqa: E402
from tests.helpers.curves import without_curves  # noqa: E402
from tests.helpers.extension import _C  # noqa: E402


def pytest_collection_finish():
    """The imported modules stay: no collection of garbage needs to look at their objects.

    A test makes models of thousands of objects, which Python's threshold of 700 would look at again and again.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.manual_seed(0)  # a test's random numbers do not depend on the tests before it


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data sets named by FASTENC_DATA."""
    folder = os.environ.get("FASTENC_DATA")
    if not folder:
        pytest.skip("FASTENC_DATA does not name the folder of data sets")
    return Path(folder)


@pytest.fixture(params=["baseline", "avx2", "avx512", "neon", "neon_bf16"])
def instruction_set(request):
    """Runs a test on each instruction set that the extension holds and this processor has."""
    if _C is None:
        pytest.skip("the compiled extension is not available")
    before = _C.build_info()["instruction_set"]
    if request.param not in _C.build_info()["usable_instruction_sets"].split():
        pytest.skip(f"this processor has no {request.param}")
    gemm.has_vectors()  # caches the answer for the processor's own set, which later tests read
    _C.set_instruction_set(request.param)
    yield request.param
    _C.set_instruction_set(before)


@pytest.fixture(params=["our products", "torch's"])
def ours(request, monkeypatch):
    """Runs a test with our float32 products and with torch's, whichever this processor would choose."""
    wanted = request.param == "our products"
    if wanted and _C is None:
        pytest.skip("the compiled extension is not available")
    monkeypatch.setattr(gemm, "cpp_product_is_faster", lambda: wanted)
    if not wanted:  # nor for few rows
        monkeypatch.setattr(gemm, "has_vectors", lambda: False)
    return wanted


class TritonTarget(NamedTuple):
    """The device and the ``impl`` with which a test runs an op's Triton kernel."""

    device: torch.device
    impl: str
    dtypes: tuple[torch.dtype, ...]


def poisoned(new):
    """``new``, with NaN in its uninitialised result, so that an element that no kernel writes shows."""

    @wraps(new)
    def filled(*arguments, **options):
        tensor = new(*arguments, **options)
        with torch.no_grad():
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return filled


@pytest.fixture
def triton_kernels():
    """A GPU; or the CPU, where interpreted Triton kernels replace the C++ code of the same ops."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        every = (torch.float32, torch.float16, torch.bfloat16)
        yield TritonTarget(torch.device("cuda"), "triton", every)
        return
    if _C is None:
        pytest.skip("the compiled extension is not available")
    from tests.helpers.interpreter import spare_work  # it imports triton

    spare_work()
    # The interpreter stores bfloat16 as integers and would multiply these.
    usable = (torch.float32, torch.float16)
    with triton_kernels_on_cpu():
        yield TritonTarget(torch.device("cpu"), "cpp", usable)


@pytest.fixture
def triton_target(triton_kernels, monkeypatch):
    """The same, with NaN in all memory that is allocated."""
    _device_constructors()  # a table of them, kept as they are at its first use
    makers = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    for owner, name in makers:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    return triton_kernels


@pytest.fixture(scope="session", autouse=True)
def no_curves():
    """Training draws curves.png within ``with_curves`` only: drawing takes longer than training a tiny model."""
    with without_curves():
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
