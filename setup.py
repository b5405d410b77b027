"""Builds the C++ extension; everything declarative is in pyproject.toml."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup

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


def build_id():
    """The version, and a digest of what the library and the modules share: they fit together if both agree."""
    version = re.search(r'__version__ = "(.+)"', Path("python/fastenc/__init__.py").read_text())
    return f"{version[1]}+{hashlib.sha256(Path('csrc/build.h').read_bytes()).hexdigest()[:8]}"


def flags(*roots):
    """Options of every compiler, of the C++ compiler and of the linker.

    Args:
        roots: other folders of sources. Error texts name a source without them and without this folder.
    """
    # Python's own flags often have -g, which makes the extension ten times as large. CFLAGS=-g keeps the symbols.
    symbols = any(flag.startswith("-g") for flag in os.environ.get("CFLAGS", "").split())
    common = ["-O3", "-std=c++20"]
    paths = [f"-ffile-prefix-map={os.path.abspath(root)}/=" for root in (".", *roots)]
    link = ["-Wl,--as-needed", *["-Wl,-s"] * (not symbols)] if sys.platform == "linux" else []
    return common, [*paths, *["-g0"] * (not symbols), "-fvisibility=hidden"], link


def library(cpp, cuda):
    """The ops, in one shared library without Python."""
    common, cxx, link = flags(Path(cpp.__file__).parents[2])  # torch's headers
    folders = ["*.cpp", "cpu/*.cpp"] + ["cuda/*.cu"] * bool(cuda)
    speed = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    # 2.11 is the oldest torch whose stable ABI the sources may use.
    macros = [("TORCH_TARGET_VERSION", "0x020b000000000000")] + [("USE_CUDA", None)] * bool(cuda)
    # The name by which a module looks for it; elsewhere that is the file's.
    name = ["-Wl,-install_name,@rpath/libfastenc.dylib"] * (sys.platform == "darwin")
    return (cpp.CUDAExtension if cuda else cpp.CppExtension)(
        "fastenc.libfastenc",
        sorted(path for folder in folders for path in glob(f"csrc/{folder}")),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=[*macros, ("FASTENC_BUILD_ID", f'"{build_id()}"')],
        extra_compile_args={
            "cxx": [*common, *cxx, *speed],
            "nvcc": [*common, *(f"-Xcompiler={flag}" for flag in cxx)],
        },
        extra_link_args=[*link, *name],
        py_limited_api=True,  # torch then leaves out its own library for Python
    )


def precompile_headers(compiler, extension, folder):
    """Compile torch's headers once for all sources, which takes a second, and would take a second in each of them.

    A compiler that does not take GCC's options compiles them in each source.

    Args:
        folder: where the compiled header is written.
    """
    header, options = Path(folder, "headers.h").absolute(), extension.extra_compile_args["cxx"]
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists():  # a newer file would make ninja compile every source again
        header.write_text(
            "#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/ops.h>\n"
        )
    command = [*shlex.split(os.environ.get("CXX", "c++")), *compiler.compiler_so[1:]]
    command += [f"-D{name}" + f"={value}" * bool(value) for name, value in extension.define_macros]
    command += [f"-I{path}" for path in extension.include_dirs]
    use = ["-fpch-deps"]  # a source still depends on the headers
    command += [*options, *use, "-MMD", "-MF", f"{header}.d", "-x", "c++-header", str(header)]
    if subprocess.run([*command, "-o", f"{header}.gch"], capture_output=True).returncode == 0:
        options += ["-include", str(header), *use]


def module(pybind11):
    """What is not an op, for one Python version; linked with the library that lies beside it."""
    common, cxx, link = flags(pybind11)
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    return Extension(
        "fastenc._C",
        ["csrc/python/module.cpp"],
        include_dirs=[os.path.abspath("csrc"), pybind11],
        define_macros=[("FASTENC_BUILD_ID", f'"{build_id()}"')],
        libraries=["fastenc"],
        extra_compile_args=[*common, *cxx],
        extra_link_args=[*link, f"-Wl,-rpath,{origin}"],
        language="c++",
    )


def as_dylib(command):
    """Python's command to link, but for a library: on macOS it makes bundles, with which no module can be linked."""
    return ["-dynamiclib" if word == "-bundle" else word for word in command]


def build_command(base, compiled=None):
    """The build_ext that names the library without Python and links the module with it.

    Args:
        compiled: the library, where it was compiled before. It is then copied.
    """

    class Build(base):
        def get_ext_filename(self, name):
            usual = super().get_ext_filename(name)
            if name.endswith("_C"):
                return usual
            suffix = ".dylib" if sys.platform == "darwin" else ".so"
            return str(Path(usual).with_name(f"libfastenc{suffix}"))

        def build_extension(self, extension):
            target = Path(self.get_ext_fullpath(extension.name))
            if extension.name == "fastenc._C":
                extension.library_dirs.append(str(target.parent))
            elif compiled:
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(compiled, str(target))
                return
            elif sys.platform == "linux":
                precompile_headers(self.compiler, extension, self.build_temp)
            linkers = {k: v for k, v in vars(self.compiler).items() if k.startswith("linker_so")}
            if extension.name != "fastenc._C":
                vars(self.compiler).update({k: as_dylib(v) for k, v in linkers.items()})
            super().build_extension(extension)
            vars(self.compiler).update(linkers)

    return Build


def extension():
    """The library, the module and their build command, or nothing where the pure Python package is wanted."""
    if os.environ.get("FASTENC_BUILD", "1" if sys.platform == "linux" else "0") == "0":
        print("fastenc: extension not built, the reference path will be used")
        return {}
    if compiled := os.environ.get("FASTENC_LIBRARY"):
        # release/build.sh compiles the library once: a module needs neither torch nor much time.
        import pybind11
        from setuptools.command.build_ext import build_ext

        parts = [Extension("fastenc.libfastenc", []), module(pybind11.get_include())]
        return {"ext_modules": parts, "cmdclass": {"build_ext": build_command(build_ext, compiled)}}
    name_cuda_home()
    try:
        import torch
        from torch.utils import cpp_extension as cpp
    except ImportError as error:
        raise SystemExit(f"{error}\n{REMEDY}") from error
    cuda = cuda_targets(torch, cpp.CUDA_HOME)
    print("fastenc: building for CPU (the instruction set is chosen at run time)")
    print(f"fastenc: building for CUDA {cuda}" if cuda else "fastenc: building without CUDA")
    # torch's copy of pybind11 is among its headers.
    parts = [library(cpp, cuda), module(cpp.include_paths()[0])]
    return {"ext_modules": parts, "cmdclass": {"build_ext": build_command(cpp.BuildExtension)}}


setup(
    license="Apache-2.0",
    package_dir={"": "python", "fastenc.kernels": "kernels"},
    packages=[*find_packages("python", exclude=["fastenc.demo*"]), "fastenc.kernels"],
    package_data={"fastenc.kernels": ["tuned/*.json"], "fastenc.train": ["recipes/*.toml"]},
    # Where setuptools-scm is installed, True would add every file that git tracks, the demo's too.
    include_package_data=False,
    **extension(),
)
