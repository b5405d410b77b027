"""Builds the C++ extension; everything declarative is in pyproject.toml."""

import os
import re
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

REMEDY = """fastenc's extension is compiled against the torch you already have, so install in two steps:
    pip install "torch>=2.11" setuptools wheel ninja
    pip install --no-build-isolation fastenc
or set FASTENC_BUILD=0 to install the pure Python reference path."""


def name_cuda_home(usual="/usr/local/cuda"):
    """Tell torch where CUDA is if the nvcc on the PATH is a script beside which it would look in vain."""
    nvcc = shutil.which("nvcc")
    if not nvcc or {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys():
        return
    has_header = lambda home: Path(home, "include", "cuda.h").is_file()
    if not has_header(Path(nvcc).parents[1]) and has_header(usual):
        os.environ["CUDA_HOME"] = usual


def cuda_targets(torch, home):
    """GPU architectures to compile for, as TORCH_CUDA_ARCH_LIST has them; "" for no CUDA side."""
    header, choice = Path(home or "", "include", "cuda.h"), os.environ.get("FASTENC_CUDA")
    if choice == "0" or not (torch.version.cuda and home and header.is_file()):
        if choice == "1":
            raise SystemExit(
                "FASTENC_CUDA=1 needs a torch with CUDA and a CUDA_HOME that has the headers, got "
                f"torch {torch.__version__} and CUDA_HOME {home}: install them or leave it unset"
            )
        return ""
    version = int(re.search(r"#define CUDA_VERSION (\d+)", header.read_text())[1])
    known = "8.0 9.0 10.0+PTX" if version >= 12080 else "8.0 9.0+PTX"
    return os.environ.setdefault("TORCH_CUDA_ARCH_LIST", known)


def extension():
    """The extension and its build command, or nothing where the pure Python package is wanted."""
    if os.environ.get("FASTENC_BUILD", "1" if sys.platform == "linux" else "0") == "0":
        print("fastenc: extension not built, the reference path will be used")
        return {}
    name_cuda_home()
    try:
        import torch
        from torch.utils import cpp_extension as cpp
    except ImportError as error:
        raise SystemExit(f"{error}\n{REMEDY}") from error
    cuda = cuda_targets(torch, cpp.CUDA_HOME)
    print("fastenc: building for CPU (baseline, AVX2 and AVX-512 chosen at run time)")
    print(f"fastenc: building for CUDA {cuda}" if cuda else "fastenc: building without CUDA")
    folders = ["*.cpp", "cpu/*.cpp"] + ["cuda/*.cu"] * bool(cuda)
    common = ["-O3", "-std=c++20"]
    speed = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    # Python's own flags often have -g, which makes the extension ten times as large. CFLAGS=-g keeps the symbols.
    wanted = any(flag.startswith("-g") for flag in os.environ.get("CFLAGS", "").split())
    symbols = [] if wanted else ["-g0"]
    # 2.11 is the oldest torch whose stable ABI the sources may use.
    macros = [("TORCH_TARGET_VERSION", "0x020b000000000000")] + [("USE_CUDA", None)] * bool(cuda)
    module = (cpp.CUDAExtension if cuda else cpp.CppExtension)(
        "fastenc._C",
        sorted(path for folder in folders for path in glob(f"csrc/{folder}")),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros,
        extra_compile_args={
            "cxx": [*common, *speed, *symbols, "-fvisibility=hidden"],
            "nvcc": [*common, "-Xcompiler=-fvisibility=hidden"],
        },
    )
    command = cpp.BuildExtension.with_options(no_python_abi_suffix=False)
    return {"ext_modules": [module], "cmdclass": {"build_ext": command}}


setup(
    license="Apache-2.0",
    package_dir={"": "python", "fastenc.kernels": "kernels"},
    packages=[*find_packages("python", exclude=["fastenc.demo*"]), "fastenc.kernels"],
    package_data={"fastenc.kernels": ["tuned/*.json"], "fastenc.train": ["recipes/*.toml"]},
    # Where setuptools-scm is installed, True would add every file that git tracks, the demo's too.
    include_package_data=False,
    **extension(),
)
