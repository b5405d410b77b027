"""Builds the C++ extension; everything declarative is in pyproject.toml."""

import os
import sys

from setuptools import find_packages, setup

REMEDY = """fastenc's extension is compiled against the torch you already have, so install in two steps:
    pip install "torch>=2.11" setuptools wheel ninja pybind11
    pip install --no-build-isolation fastenc
or set FASTENC_BUILD=0 to install the pure Python reference path."""


def extension():
    """The extension and its build command, or nothing where the pure Python package is wanted."""
    if os.environ.get("FASTENC_BUILD", "1" if sys.platform == "linux" else "0") == "0":
        print("fastenc: extension not built, the reference path will be used")
        return {}
    try:
        import pybind11
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        raise SystemExit(f"{error}\n{REMEDY}") from error
    from glob import glob

    # CUDA sources will join under csrc/cuda/; until then the extension has a CPU side only.
    print("fastenc: building for CPU (baseline, AVX2 and AVX-512 chosen at run time)")
    flags = [
        "-O3",
        "-std=c++20",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
    ]
    extension = CppExtension(
        "fastenc._C",
        sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")),
        include_dirs=[os.path.abspath("csrc"), pybind11.get_include()],
        # 2.11 is the oldest torch whose stable ABI the sources may use.
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
        extra_compile_args=flags,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(no_python_abi_suffix=False)},
    }


setup(
    package_dir={"": "python", "fastenc.kernels": "kernels"},
    packages=[*find_packages("python"), "fastenc.kernels"],
    **extension(),
)
