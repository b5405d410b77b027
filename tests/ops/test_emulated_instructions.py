"""Kernels whose instructions few processors have (AMX, AVX-VNNI, AVX-512), with these instructions in plain C++."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.skipif(platform.machine() != "x86_64", reason="they are instructions of x86-64")
@pytest.mark.parametrize(
    "name, found",
    [("int8", "the same bits"), ("bf16", "near the sums in double")],
)
def test_products_by_emulated_instructions(name, found, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the emulation")
    source, program = Path(__file__).parent / f"{name}_emulation.cpp", tmp_path / "emulation"
    flags = ("-std=c++20", "-Og", "-w", "-Wno-psabi", "-ffp-contract=fast", "-mavx2", "-mfma")
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{found}\n")
