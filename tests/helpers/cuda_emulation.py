"""Compiles the CUDA source of an op as plain C++ over tests/cuda/emulated_cuda/ and registers its ops.

The ops are torch.ops.fastenc_emulated.NAME.
"""

import contextlib
import ctypes
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.helpers import ROOT

EMULATED = ROOT / "tests" / "cuda" / "emulated_cuda"
OPS = ("masked_cross_entropy_fwd", "masked_cross_entropy_", "scale_labelled_rows_")


def build(folder: Path) -> ctypes.CDLL:
    """Compile and load; the ops take CPU tensors."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the emulation")
    target = folder / "emulated.so"
    flags = ["-shared", "-fPIC", "-O2", "-std=c++20", "-fvisibility=hidden", "-fno-strict-aliasing"]
    flags += ["-Wl,-Bsymbolic", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    folders = [EMULATED, ROOT / "csrc", *include_paths()]
    source = EMULATED / "masked_cross_entropy.cpp"
    command = [compiler, *flags, *(f"-I{path}" for path in folders), source, "-o", target]
    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, *libraries], check=True)
    schemas = torch.library.Library("fastenc_emulated", "FRAGMENT")
    for name in OPS:
        schema = str(getattr(torch.ops.fastenc, name).default._schema)
        schemas.define(schema.removeprefix("fastenc::"))
    torch.ops.load_library(str(target))
    library = ctypes.CDLL(str(target))
    library.schemas = schemas  # keep them alive: the ops end with their schemas
    return library


@contextlib.contextmanager
def in_place_of_cpp():
    """A context in which the public ops call the emulated kernels for CPU tensors."""
    library = torch.library.Library("fastenc", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the kernel is overridden
        for name in OPS:
            kernel = getattr(torch.ops.fastenc_emulated, name)
            library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()
