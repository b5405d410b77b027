"""A driver for Triton that compiles for a GPU that is not present and starts nothing.

It does not work with Triton's interpreter (TRITON_INTERPRET). Kernels are compiled for sm_90. A launch does everything
but start the kernel. Tensors are on the CPU.
"""

import triton.compiler.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_MEMORY = 227 * 1024


class _Utils:
    def load_binary(self, *arguments):
        return 1, 1, 64, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}


class _Launcher:
    last: tuple = ()  # arguments of the last launch

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        _Launcher.last = arguments


class StubDriver:
    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return -1  # as a CPU tensor's get_device()

    def get_current_stream(self, device):
        return 0

    def get_device_capability(self, device):
        return 9, 0


driver.set_active(StubDriver())
triton.compiler.compiler.max_shared_mem = lambda device: SHARED_MEMORY
