"""The quick visit's script at small sizes, so that no mistake in it costs a visit."""

import fnmatch
import json
import os
import shlex
import subprocess
from itertools import islice

import pytest
import torch
from _pytest.mark.expression import Expression

from benchmarks import _harness, bench_attention, bench_models, gpu_quick
from fastenc.cli.commands import command_named
from fastenc.profiling import models
from tests.helpers import ROOT, sanitize


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the visit itself runs there")
def test_kernels_are_compiled_by_several_processes(monkeypatch):
    every = gpu_quick.problems
    monkeypatch.setattr(gpu_quick, "problems", lambda size: islice(every(size), 2))
    monkeypatch.setattr(gpu_quick, "ON_GPU", True)
    assert gpu_quick.prewarm(gpu_quick.SMALL)["problems"] == 2


def test_cudnns_row_is_asked_for_as_the_op_takes_it(monkeypatch):
    """Without a GPU it is refused for the device alone."""
    monkeypatch.setattr(bench_attention, "ON_GPU", True)
    case = bench_attention.Case("two", [5, 3], dtype=torch.bfloat16)
    row = bench_attention.Batch(case).providers()["fastenc, cuDNN"]
    with pytest.raises(ValueError, match="it runs on CUDA tensors"):
        row.call()


STUB = """#!/usr/bin/env bash
echo "$(basename "$0") ${*@Q}" >>"$CALLS"
"""
BY_PART = {
    "1": ("build_1", "quick", "ncu"),
    "2": ("build_2", "tests", "quick_again"),
    "3": ("build_3", "models_minilm", "models_bert-base", "profile", "host_costs", "memcheck"),
}


@pytest.fixture
def commands(tmp_path):
    """Runs a part with programs that note their arguments; returns these, and what the part printed."""
    for name in ("python", "ncu", "compute-sanitizer"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)
    calls = tmp_path / "calls"

    def run(part):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "bin" / "python"),
            "OUT": str(tmp_path / "out"),
            "CALLS": str(calls),
        }
        script = ["bash", str(ROOT / "benchmarks" / "gpu_parts.sh"), part]
        done = subprocess.run(script, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        return [shlex.split(line) for line in calls.read_text().splitlines()], done.stdout

    return run


def module_of(command):
    """(module, its arguments) of a command that has python -m MODULE in it, or None."""
    return (
        (command[(at := command.index("-m")) + 1], command[at + 2 :]) if "-m" in command else None
    )


@pytest.mark.parametrize("part", BY_PART)
def test_each_parts_commands_are_taken_by_their_programs(commands, part, tmp_path, monkeypatch):
    called, printed = commands(part)
    stages = tuple(line.split(":")[0] for line in printed.splitlines())
    assert stages == BY_PART[part] and "not begun" not in printed
    ran = []
    for name in gpu_quick.SECTIONS:
        monkeypatch.setitem(
            gpu_quick.SECTIONS, name, lambda size, name=name: ran.append(name) or {}
        )
    checks = {
        "benchmarks.gpu_quick": lambda given: gpu_quick.main([*given, "--small"]) == 0,
        "benchmarks.bench_models": lambda given: set(given) <= {*models.SIZES, *bench_models.MODES},
        "benchmarks.bench_host_costs": lambda given: given == [],
        "fastenc.cli": lambda given: command_named(given[0]).from_arguments(given[0], given[1:]),
        "tests.helpers.sanitize": lambda given: fnmatch.filter(sanitize.CASES, given[0]),
        "pytest": lambda given: (
            Expression.compile(given[given.index("-k") + 1])
            and all((ROOT / path).exists() for path in given if path.startswith("tests/"))
        ),
    }
    for module, given in filter(None, map(module_of, called)):
        assert checks[module](given), (module, given)
    assert ran == {
        "1": [*gpu_quick.SECTIONS, "check"],
        "2": ["check", "time", "step", "graphs"],
    }.get(part, [])


def test_without_a_part_it_explains_itself():
    script = str(ROOT / "benchmarks" / "gpu_parts.sh")
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and "three parts" in done.stderr
