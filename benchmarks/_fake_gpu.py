"""Triton's own CUDA driver and launcher on a libcuda that starts nothing (_fake_cuda.c); tensors are on the CPU.

Importing this module makes it Triton's driver. :func:`launches` returns what was started.
"""

import atexit
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import triton

FOLDER = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
LOG = FOLDER / "launches.jsonl"


def _build() -> Path:
    """Build a library with the real one's name, so that Triton's module uses it."""
    library = FOLDER / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_name("_fake_cuda.c")
    compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-I", str(include)]
    subprocess.run(
        [*command, f"-Wl,-soname,{library.name}", str(source), "-o", str(library)], check=True
    )
    return library


LOG.touch()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
os.environ["FAKE_CUDA_LOG"] = str(LOG)
os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
_library = ctypes.CDLL(str(_build()), mode=ctypes.RTLD_GLOBAL)

from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.runtime import driver  # noqa: E402

cuda = nvidia.CudaDriver.__new__(nvidia.CudaDriver)
cuda.utils = nvidia.CudaUtils()
cuda.launcher_cls = nvidia.CudaLauncher
cuda.get_current_device = lambda: 0
cuda.set_current_device = lambda device: None
cuda.get_current_stream = lambda device: 0x77
cuda.get_device_capability = lambda device=0: (9, 0)
driver.set_active(cuda)


def launches(since: int = 0) -> list[dict]:
    """{"kernel", "grid", "threads", "shared", "parameters": [[bytes, value], ...]} of each launch since number
    ``since``.

    "parameters" is [[bytes, value], ...].
    """
    return [json.loads(line) for line in LOG.read_text().splitlines()[since:]]
