"""The resources of the compiled CUDA source, without a GPU."""

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import cuda_binaries

NVCC = shutil.which("nvcc")
ELEMENTS = {"float": "If", "half": "I6__half", "bfloat16": "I13__nv_bfloat16"}  # as mangled

# Registers a thread, bytes of shared memory a block. With 64 registers 1,024 threads fit on a multiprocessor: two
# blocks of the 16-bit types. With 32 registers the scaling kernel fills a multiprocessor.
BUDGETS = {
    ("masked_cross_entropy", "float"): (64, 400),
    ("masked_cross_entropy", "half"): (64, 400),
    ("masked_cross_entropy", "bfloat16"): (64, 400),
    ("scale_rows", "float"): (32, 0),
    ("scale_rows", "half"): (32, 0),
    ("scale_rows", "bfloat16"): (32, 0),
}


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_every_kernel_keeps_its_budget():
    source = Path(cuda_binaries.ROOT, "csrc", "cuda", "masked_cross_entropy.cu")
    architectures = [80, 90, 100] if os.environ.get("FASTENC_ALL_KERNELS") else [90]
    usages = cuda_binaries.compile_for(architectures, source, NVCC)
    assert len(usages) == len(architectures) * len(BUDGETS)
    for (kernel, element), (registers, shared) in BUDGETS.items():
        of_element = [
            u for (name, _), u in usages.items() if f"{kernel}{ELEMENTS[element]}E" in name
        ]
        assert len(of_element) == len(architectures), (kernel, element, list(usages))
        for usage in of_element:
            assert usage.registers <= registers and usage.shared <= shared, (kernel, usage)
            assert usage.stack == usage.spills == 0, (kernel, usage)
