"""Wheel, sdist, and an installation without a compiler, each checked from outside the checkout."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastenc
from fastenc.ops import compiled
from tests.helpers import ROOT
from tests.helpers.extension import _C, needs_cpp


def run(*command, cwd, python=sys.executable, **environment):
    done = subprocess.run(
        [python, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def build(checkout, target, distribution, **environment):
    command = ("-m", "build", distribution, "--no-isolation", "--outdir", str(target))
    run(*command, cwd=checkout, **environment)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the files that git tracks, so that a build does not change the working tree."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    target = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    # A repository, because setuptools-scm asks git which files belong to a package.
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=target, check=True)
    return target


def fresh_environment(folder, wheel):
    """An environment with the wheel's files and this environment's libraries, but without its editable fastenc.

    Returns: its Python, and the folder with the unpacked wheel.
    """
    run("-m", "venv", "--without-pip", str(folder), cwd=ROOT)
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Path files are read in the folder itself, not in the folders that they name.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python"), site


def source_modules(root):
    """The modules that an installation has: all except the demo's."""
    names = {
        path.relative_to(root / "python").as_posix()
        for path in (root / "python").rglob("*.py")
        if path.parent.name != "demo"
    }
    return names | {f"fastenc/kernels/{path.name}" for path in (root / "kernels").glob("*.py")}


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    """The unpacked source distribution."""
    tuned = checkout / "kernels" / "tuned" / "sm_00.json"
    tuned.parent.mkdir(exist_ok=True)
    tuned.write_text('{"entries": []}')
    target = tmp_path_factory.mktemp("sdist")
    build(checkout, target, "--sdist", FASTENC_BUILD="0")
    with tarfile.open(next(target.glob("*.tar.gz"))) as archive:
        archive.extractall(target, filter="data")
    return next(path for path in target.iterdir() if path.is_dir())


def test_sdist_holds_what_a_build_needs(checkout, sdist):
    names = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*")}
    wanted = {
        path.relative_to(checkout).as_posix()
        for folder in ("csrc", "kernels", "python")
        for path in (checkout / folder).rglob("*")
        if path.suffix in {".cpp", ".h", ".inc", ".cu", ".cuh", ".py", ".toml", ".json"}
        and path.parent.name != "demo"
    }
    assert wanted <= names
    assert {"csrc/cuda/masked_cross_entropy.cu", "csrc/cuda/vector.cuh"} <= wanted
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the source distribution, without the ops and without optimisation: both would take minutes."""
    for path in (path for path in (sdist / "csrc").rglob("*.c*") if path.suffix in {".cpp", ".cu"}):
        if path.name not in {"build.cpp", "isa.cpp", "module.cpp"}:
            path.unlink()
    setup = (sdist / "setup.py").read_text(encoding="utf-8")
    assert setup.count('"-O3"') == 1
    (sdist / "setup.py").write_text(setup.replace('"-O3"', '"-O0"'), encoding="utf-8")
    target = tmp_path_factory.mktemp("wheel")
    build(sdist, target, "--wheel", FASTENC_BUILD="1", FASTENC_CUDA="0")
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return fresh_environment(tmp_path_factory.mktemp("environment"), wheel)


def test_wheel_holds_every_module_and_the_extension(sdist, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert source_modules(sdist) <= names
    assert not [name for name in names if name.startswith("fastenc/demo")]
    assert "fastenc/kernels/tuned/sm_00.json" in names
    recipes = (sdist / "python/fastenc/train/recipes").glob("*.toml")
    shipped = {f"fastenc/train/recipes/{path.name}" for path in recipes}
    assert len(shipped) >= 7 and shipped <= names
    assert len([name for name in names if name.startswith("fastenc/_C.")]) == 1
    assert f"fastenc/{compiled.LIBRARY}" in names
    assert not [
        name for name in names if name.startswith(("tests", "benchmarks", "kernels/", "csrc"))
    ]


@needs_cpp
def test_an_installed_wheel_runs_an_op_of_its_library(environment, tmp_path):
    python, site = environment
    ops = Path(fastenc.__file__).with_name(compiled.LIBRARY)
    assert str(ROOT).encode() not in ops.read_bytes(), "error texts name the folder of the build"
    shutil.copy(ops, site / "fastenc")
    code = (
        "import torch, fastenc, fastenc.kernels\n"
        f"assert fastenc.__file__.startswith({str(site)!r}), fastenc.__file__\n"
        "fastenc.ops.layer_norm(torch.ones(2, 8), impl='cpp')\n"
        f"assert fastenc._C.__file__.startswith({str(site)!r})\n"
    )
    run("-c", code, cwd=tmp_path, python=python)


def test_without_the_extension_everything_takes_the_reference_path_and_says_so_once(
    environment, tmp_path
):
    python, site = environment
    for path in ((site / "fastenc").glob(pattern) for pattern in ("_C.*", "libfastenc.*")):
        next(path).unlink()
    code = (
        "import torch, fastenc\n"
        "x = torch.randn(3, 8, requires_grad=True)\n"
        "y = fastenc.ops.layer_norm(fastenc.ops.bias_gelu(x))\n"
        "y.sum().backward()\n"
        "torch.testing.assert_close(y, torch.nn.functional.layer_norm(torch.nn.functional.gelu(x), (8,)))\n"
        "try: fastenc.ops.layer_norm(x, impl='cpp')\n"
        "except ValueError as error: assert 'not available' in str(error)\n"
        "else: raise SystemExit('fell back')\n"
    )
    done = run("-c", code, cwd=tmp_path, python=python)
    assert done.stderr.count("compiled extension is not available") == 1


def read_setup(monkeypatch):
    """The names that setup.py defines."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("FASTENC_BUILD", "0")
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


def test_the_pure_package_compiles_nothing(monkeypatch):
    assert read_setup(monkeypatch)["extension"]() == {}


@pytest.mark.parametrize("compiler", ["c++", "false"])
def test_headers_are_read_once_by_a_compiler_that_can(compiler, monkeypatch, tmp_path):
    (tmp_path / "torch/csrc/stable").mkdir(parents=True)
    for name in ("library.h", "ops.h"):
        (tmp_path / "torch/csrc/stable" / name).write_text(
            "int answer = VALUE;\n" * (name == "ops.h")
        )
    (tmp_path / "source.cpp").write_text("int main() { return answer; }\n")
    options = {"cxx": ["-O1"]}
    extension = SimpleNamespace(
        define_macros=[("VALUE", "3")], include_dirs=[tmp_path], extra_compile_args=options
    )
    monkeypatch.setenv("CXX", compiler)
    read_setup(monkeypatch)["precompile_headers"](
        SimpleNamespace(compiler_so=["cc", "-fPIC"]), extension, tmp_path
    )
    if compiler == "false":
        assert options["cxx"] == ["-O1"]
        return
    # Without the folder of the headers.
    command = ["c++", "-fPIC", "-DVALUE=3", *options["cxx"], "-MMD", "-c", "source.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    # They are among what ninja compiles the source again for.
    assert str(tmp_path / "torch/csrc/stable/ops.h") in (tmp_path / "source.d").read_text()


def test_on_macos_the_library_is_one_that_a_module_can_be_linked_with(monkeypatch):
    usual = ["clang++", "-bundle", "-undefined", "dynamic_lookup"]
    commands = {}

    class Base:
        compiler = SimpleNamespace(linker_so=usual, linker_so_cxx=usual, compiler_so=["clang"])

        def get_ext_filename(self, name):
            return f"{name.replace('.', '/')}.cpython-311-darwin.so"

        get_ext_fullpath = get_ext_filename

        def build_extension(self, extension):
            commands[extension.name] = self.compiler.linker_so_cxx

    setup = read_setup(monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    command = setup["build_command"](Base)()
    assert command.get_ext_filename("fastenc.libfastenc") == "fastenc/libfastenc.dylib"
    for name in ("fastenc.libfastenc", "fastenc._C"):
        command.build_extension(SimpleNamespace(name=name, library_dirs=[]))
    library = ["clang++", "-dynamiclib", "-undefined", "dynamic_lookup"]
    assert commands == {"fastenc.libfastenc": library, "fastenc._C": usual}
    assert Base.compiler.linker_so == usual


def test_cuda_asked_for_where_torch_has_none_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("FASTENC_CUDA", "1")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="FASTENC_CUDA=1 needs a torch with CUDA and a CUDA_HOME"):
        read_setup(monkeypatch)["cuda_targets"](torch, "/usr/local/cuda")


def test_an_nvcc_that_is_a_script_elsewhere_does_not_hide_cuda(tmp_path, monkeypatch):
    name_cuda_home = read_setup(monkeypatch)["name_cuda_home"]
    script, usual = tmp_path / "bin" / "nvcc", tmp_path / "cuda"
    for path in (script, usual / "include" / "cuda.h"):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", "mine")
    name_cuda_home(str(usual))
    assert os.environ["CUDA_HOME"] == "mine"
    monkeypatch.delenv("CUDA_HOME")
    name_cuda_home(str(tmp_path / "nowhere"))
    assert "CUDA_HOME" not in os.environ
    name_cuda_home(str(usual))
    assert os.environ["CUDA_HOME"] == str(usual)
    monkeypatch.delenv("CUDA_HOME")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    name_cuda_home(str(usual))
    assert "CUDA_HOME" not in os.environ  # torch finds the one beside nvcc


def test_the_module_reads_a_pybind11_that_refuses_torchs_stable_abi(checkout, tmp_path):
    """torch 2.11's copy does that."""
    (tmp_path / "pybind11").mkdir()
    for name in ("pybind11.h", "stl.h"):
        guard = "#ifdef TORCH_TARGET_VERSION\n#error stable ABI\n#endif\n"
        (tmp_path / "pybind11" / name).write_text(guard)
    source = checkout / "csrc" / "python" / "module.cpp"
    folders = (f"-I{folder}" for folder in (tmp_path, checkout / "csrc"))
    command = ["c++", "-E", "-DTORCH_TARGET_VERSION=1", *folders, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_cpp
@pytest.mark.parametrize(
    ("owner", "name", "other", "message"),
    [
        (
            compiled,
            "LIBRARY",
            "libnone.so",
            r"needs the library of its own build .* without libnone\.so",
        ),
        (
            _C,
            "BUILD_ID",
            "0.1.0+0",
            r"from one build of this version, got lib.* and _C\..* of 0\.1\.0\+0",
        ),
        (fastenc, "__version__", "0.0.9", r"fastenc 0\.0\.9 needs .* got libfastenc.* of [\d.]+\+"),
        (_C, "library_build_id", None, r"_C\..* does not fit libfastenc"),
    ],
)
def test_a_library_and_a_module_that_do_not_belong_together_are_refused(
    owner, name, other, message, monkeypatch
):
    assert compiled.load() is _C
    if other is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, other)
    with pytest.raises(ImportError, match=message + r"(.|\n)*build_ext --inplace"):
        compiled.load()
