"""The quick visit's script at small sizes, so that no mistake in it costs a visit."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import _harness, gpu_quick


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    from fastenc.profiling import Ceilings

    ceilings = Ceilings("cpu", copy_bytes=1 << 16, product_size=32)
    monkeypatch.setattr(_harness, "ceilings", lambda: ceilings)
    monkeypatch.setattr(_harness, "TURN", 1e-4)
    monkeypatch.setattr(_harness, "PAUSE", 0)
    monkeypatch.setattr(gpu_quick, "SECONDS", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the visit itself runs there")
def test_every_section_runs_and_is_written(tmp_path, capsys):
    assert gpu_quick.main(["--small", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_quick.json").read_text())
    assert set(gpu_quick.SECTIONS) < set(report)
    assert all("failed" not in report[name]["found"] for name in gpu_quick.SECTIONS)
    assert all(case["right"] for case in report["check"]["found"].values())
    rows = report["time"]["found"].values()
    assert rows and all(row["percent_of_roofline"] > 0 for row in rows)
    assert capsys.readouterr().out.count("\n") < 6 * 40


def test_the_sections_run_on_the_kernels(triton_target, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_quick, "DTYPE", torch.float32)  # the interpreter's bfloat16 is integers
    monkeypatch.setattr(gpu_quick, "TOLERANCES", {torch.float32: 1e-4})
    assert gpu_quick.main(["check", "--small", "--output", str(tmp_path)]) == 0


def test_a_section_that_fails_is_written_and_the_next_one_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu_quick.SECTIONS, "check", lambda size: 1 // 0)
    assert gpu_quick.main(["check", "sweep", "--small", "--output", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "gpu_quick.json").read_text())
    assert report["check"]["found"]["failed"].startswith("ZeroDivisionError")
    assert "sweep" in report


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_quick, "ON_GPU", False)
    with pytest.raises(SystemExit):
        gpu_quick.main([])
    assert "torch sees no GPU here: --small" in capsys.readouterr().err


@pytest.mark.parametrize("part", "123")
def test_the_commands_of_each_part_name_what_there_is(part):
    root = Path(__file__).parents[2]
    script = str(root / "benchmarks" / "gpu_parts.sh")
    command = ["bash", script, "--dry-run", part]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"build_{part}: at most")
    for module in set(re.findall(r"-m ((?:benchmarks|fastenc|tests)[.\w]*)", done.stdout)):
        assert importlib.util.find_spec(module), module
    for path in set(re.findall(r"tests/[\w/.]+", done.stdout)):
        assert (root / path).exists(), path


def test_without_a_part_it_explains_itself():
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_parts.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 2 and "three parts" in done.stderr
