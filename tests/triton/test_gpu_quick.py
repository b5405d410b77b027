"""The scripts for a GPU machine at small sizes: a mistake in them would waste the time of the machine."""

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression

from benchmarks import _cases, _compare, _compare_ops, bench_attention, bench_models, gpu_quick
from benchmarks.gpu_quick import __main__ as command
from benchmarks.gpu_quick import check, peers, pretrain, prewarm, problems, rules, timing
from fastenc.cli.commands import command_named
from fastenc.profiling import models
from tests.helpers import ROOT, sanitize
from tests.helpers.processes import compiling


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    from fastenc.profiling import Ceilings

    ceilings = Ceilings("cpu", copy_bytes=1 << 16, product_size=32)
    monkeypatch.setattr(_compare, "ceilings", lambda: ceilings)
    monkeypatch.setattr(_compare, "TURN", 1e-4)
    monkeypatch.setattr(_compare, "PAUSE", 0)
    for section in (timing, peers):
        monkeypatch.setattr(section, "SECONDS", 0)


def run(section, tmp_path, size=gpu_quick.SMALL):
    """Run the section's cases in this process: {case: row}."""
    written = _cases.Report(tmp_path / "report.json")
    assert _cases.run_cases(written, section, gpu_quick.cases_of(section, size)) == 0
    return json.loads((tmp_path / "report.json").read_text())[section]["cases"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the visit itself runs there")
@pytest.mark.parametrize("section", gpu_quick.SECTIONS)
def test_every_section_runs_and_is_written(section, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "FOLDER", tmp_path)
    cases = run(section, tmp_path)
    assert cases or section == "rules"
    assert not [name for name, row in cases.items() if "failed" in row]
    if section == "check":
        assert all(row["right"] for row in cases.values())
    if section == "time":
        rows = [row for case in cases.values() for row in case.values()]
        assert rows and all(row["percent_of_roofline"] > 0 for row in rows)
    if section == "pretrain":
        (row,) = cases.values()
        assert row["tokens_per_s"] > 0 and row["log"][0]["loss"] > 0


def test_the_sections_run_on_the_kernels(triton_target, monkeypatch, tmp_path):
    # The interpreter stores bfloat16 as integers.
    monkeypatch.setattr(problems, "DTYPE", torch.float32)
    size = gpu_quick.SMALL._replace(tokens=64, lengths=(32, 64))
    assert all(row["right"] for row in run("check", tmp_path, size).values())


def test_the_pretraining_runs_options_are_taken():
    run = ["texts.txt", "-o", "folder", *pretrain.RUN]
    assert command_named("pretrain").from_arguments("pretrain", run).training.max_steps == 150


def test_one_wrong_row_of_thousands_is_wrong():
    true = torch.randn(16384, 64, dtype=torch.float64)
    mine = true.clone()
    mine[77] = -true[77]
    whole, row = check.errors(mine, true)
    assert whole < _compare_ops.TOLERANCES[torch.bfloat16], "the norm of all does not show it"
    assert row > problems.ROW_TOLERANCE
    rounded, of_a_row = check.errors(true.bfloat16(), true)
    assert rounded < 0.01 and of_a_row < problems.ROW_TOLERANCE
    assert not all(error < 1 for error in check.errors(mine * torch.nan, true))


def test_forwards_are_timed_as_in_training(monkeypatch):
    """With gradients. A loss that computes its gradient in the forward reads and writes more, and has no backward."""
    seen = []

    def compare(providers, *, work, **options):
        provider = providers["fastenc"]
        out = provider.prepare() if isinstance(provider, _compare.Prepared) else provider()
        seen.append((out.requires_grad, work))
        return {"fastenc": {"median_ms": 1.0}}

    monkeypatch.setattr(_compare, "compare", compare)
    size = gpu_quick.SMALL
    made = dict(problems.problems(size))
    for name in ("layer_norm, dropout 0.0", "masked_cross_entropy"):
        timing.time_op(name, made[name])
    assert len(seen) == 3 and all(gradients for gradients, _ in seen)
    logits = size.tokens // 8 * size.vocabulary
    assert seen[-1][1].bytes == 2 * logits * problems.DTYPE.itemsize


def test_output_gradients_are_random_and_the_same_for_every_dtype():
    like = problems.random_like(torch.empty(100, dtype=torch.float64))
    assert like.unique().numel() == 100
    assert torch.equal(problems.random_like(torch.empty(100)).double(), like.float().double())


STUB_CASES = """
import sys, time
from pathlib import Path
from benchmarks._cases import Report, run_cases

def raises():
    raise ValueError("no such shape")

def poisons():
    global works
    works = False
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def poisoned(number):
    if not works:
        raise RuntimeError("the context is lost")
    return {"us": number}

works = True
cases = [("first", lambda: poisoned(1)), ("raises", raises), ("second", lambda: poisoned(2)),
         ("hangs", lambda: time.sleep(600)), ("third", lambda: poisoned(3)), ("poisons", poisons),
         ("last", lambda: poisoned(4))]
raise SystemExit(run_cases(Report(Path(sys.argv[1])), "time", cases, limit=2, works=lambda: works))
"""


def test_a_case_that_raises_hangs_or_loses_the_context_costs_no_other_case(tmp_path):
    path = tmp_path / "report.json"
    failed = _cases.supervise([sys.executable, "-c", STUB_CASES, str(path)], path, ["time"])
    assert failed == ["raises", "hangs", "poisons"]
    cases = json.loads(path.read_text())["time"]["cases"]
    figures = {name: row["us"] for name, row in cases.items() if "us" in row}
    assert figures == {"first": 1, "second": 2, "third": 3, "last": 4}
    assert cases["raises"]["failed"] == "ValueError: no such shape"
    assert cases["hangs"]["failed"] == "it ended its process, with code 1"
    assert "illegal memory access" in cases["poisons"]["failed"]


def test_a_section_that_does_not_begin_is_a_failure(tmp_path):
    path = tmp_path / "report.json"
    failed = _cases.supervise([sys.executable, "-c", "raise SystemExit(3)"], path, ["check"])
    assert failed == ["check"]


def test_every_case_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "report.json"

    def second():
        section = json.loads(path.read_text())["check"]
        assert section["cases"] == {"first": {"us": 1}} and section["running"] == "second"
        return {"us": 2}

    cases = [("first", lambda: {"us": 1}), ("second", second)]
    assert _cases.run_cases(_cases.Report(path), "check", cases) == 0
    assert not _cases.Report(path).failed("check")


def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path):
    timed = []
    cases = [(name, lambda name=name: timed.append(name) or {"us": 1}) for name in ("a", "b", "c")]
    monkeypatch.setattr(command, "cases_of", lambda section, size: iter(cases))
    checked = {"a": {"right": True}, "b": {"right": False}, "c": {"failed": "ValueError"}}
    path = tmp_path / gpu_quick.FILE
    path.write_text(json.dumps({"check": {"cases": checked}}))
    assert command.main(["time", "--small", "--cases", "--output", str(tmp_path)]) == 0
    rows = json.loads(path.read_text())["time"]["cases"]
    assert timed == ["a"] and rows["b"] == rows["c"] == {"failed": "its result is wrong, see check"}


def test_a_new_run_of_a_section_forgets_the_last_one(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(command, "supervise", lambda *arguments: called.append(arguments) or [])
    path = tmp_path / gpu_quick.FILE
    path.write_text(json.dumps({"check": {"cases": {"old": {}}}, "time": {"cases": {"kept": {}}}}))
    assert command.main(["check", "--small", "--output", str(tmp_path)]) == 0
    written = json.loads(path.read_text())
    assert "check" not in written and "kept" in written["time"]["cases"]
    assert called[0][0][1:4] == ["-m", "benchmarks.gpu_quick", "check"]
    assert "--cases" in called[0][0]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "ON_GPU", False)
    with pytest.raises(SystemExit):
        command.main([])
    assert "torch sees no GPU here: --small" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the visit itself runs there")
def test_kernels_are_compiled_by_several_processes(monkeypatch):
    monkeypatch.setattr(prewarm, "PROCESSES", 2)
    every = prewarm.work_of(gpu_quick.SMALL)
    assert every[0][0] == "minilm" and len(every) > 10
    items = [("bias_gelu", number, 0) for number in (0, 999)]
    monkeypatch.setattr(prewarm, "work_of", lambda size: items)
    report = prewarm.prewarm(gpu_quick.SMALL)
    assert report["items"] == 2 and report["wrong"]["bias_gelu"].startswith("IndexError")


def test_a_new_architecture_is_asked_for_its_rules(monkeypatch):
    from fastenc.kernels import launch

    seen = []
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_100")
    monkeypatch.delenv("FASTENC_WARP_GROUPS", raising=False)
    choice = lambda: launch.warp_groups.__wrapped__(torch.device("cuda"))
    monkeypatch.setattr(rules, "check", lambda *_: seen.append(choice()) or {"right": True})
    monkeypatch.setattr(timing, "time_op", lambda *_: {"forward": {}})
    cases = dict(rules.cases(gpu_quick.SMALL))
    assert len(cases) == 12 and choice() is False
    for run_case in list(cases.values())[:2]:
        assert run_case() == {"right": True, "forward": {}}
    assert seen == [False, True] and "FASTENC_WARP_GROUPS" not in os.environ
    for known in ("sm_90", None):
        monkeypatch.setattr(launch, "architecture", lambda device, known=known: known)
        assert not list(rules.cases(gpu_quick.SMALL))


def test_cudnns_row_is_asked_for_as_the_op_takes_it(monkeypatch):
    """Without a GPU it is refused, only because of the device."""
    monkeypatch.setattr(bench_attention, "ON_GPU", True)
    case = bench_attention.Case("two", [5, 3], dtype=torch.bfloat16)
    row = bench_attention.Batch(case).providers()["fastenc, cuDNN"]
    with pytest.raises(ValueError, match="it runs on CUDA tensors"):
        row.forward()


DRY_RUN = """
import json, sys
from benchmarks import _dry_run, _fake_gpu
from pathlib import Path

_dry_run.as_on_a_gpu()
_dry_run._compare.compare = _dry_run.compare
from benchmarks import gpu_quick
from benchmarks import _cases
from benchmarks.gpu_quick import timing
size = gpu_quick.SMALL._replace(tokens=64, lengths=(32, 64))
wanted = ("bias_gelu", "masked_cross_entropy")
cases = [case for case in timing.cases(size) if case[0] in wanted]
cases.append(("nothing", lambda: {"median_ms": 1.0}))
_cases.run_cases(_cases.Report(Path(sys.argv[1])), "time", _dry_run.noted(cases))

import torch
from fastenc import ops
from fastenc.packing import pack_sequences

def unpacked():
    print(ops.unpack(torch.tensor([7, 8, 9]), pack_sequences([[1], [2, 3]]), -100).tolist())

idle = lambda: None
providers = {"fastenc": unpacked, "fastenc, idle": idle, "eager": idle, "another": "not installed"}
_dry_run.running = "packing"
print(json.dumps(_dry_run.compare(providers)))
"""


@pytest.fixture
def c_compiler():
    pytest.importorskip("triton")
    import shutil

    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("the driver that starts nothing takes a C compiler")
    if torch.cuda.is_available():
        pytest.skip("a real libcuda is loaded here")


def test_a_dry_run_starts_kernels_and_tells_no_figure(tmp_path, c_compiler):
    path = tmp_path / "report.json"
    done = compiling("-c", DRY_RUN, str(path))
    cases = json.loads(path.read_text())["time"]["cases"]
    assert cases["bias_gelu"]["kernels"] == {
        "_bias_gelu_fwd_kernel": 1,
        "_bias_gelu_bwd_kernel": 1,
    } or (set(cases["bias_gelu"]["kernels"]) == {"_bias_gelu_fwd_kernel", "_bias_gelu_bwd_kernel"})
    assert cases["nothing"]["failed"] == "it starts no kernel"
    assert all(row["dry run"].startswith("a dry run") for row in cases.values())
    assert "_ms" not in path.read_text()
    padded, rows = done.stdout.splitlines()[-2:]
    assert json.loads(padded) == [[7, -100], [8, 9]], "labels and masks keep their values"
    started = {"dry run": "not timed", "kernels": "_unpack_kernel"}
    nothing = {"dry run": "not timed", "kernels": ""}
    assert json.loads(rows) == {
        "fastenc": started,
        "fastenc, idle": nothing | {"failed": "it starts no kernel"},
        "eager": nothing,
        "another": {"missing": "not installed"},
    }


STUB = """#!/usr/bin/env bash
echo "$(basename "$0") ${*@Q}" >>"$CALLS"
case "$*" in
  *get_device_capability*) echo 9.0 ;;
  *EXT_SUFFIX*) echo .none.so ;;
  *build_info*) exit "${WITHOUT_CUDA:-0}" ;;
esac
case "$*" in *"$FAILING"*) exit "${CODE:-0}" ;; esac
"""
BY_PART = {
    "1": ["check", "time+step+peers+invariant+graphs+rules", "pretrain", "archive"],
    "2": [
        "tests",
        *(
            f"{mode}:{model}"
            for model in ("bert-base", "minilm")
            for mode in ("training", "inference")
        ),
        "families",
        "seq2seq",
        "ncu",
    ],
    "3": ["sweep", "check", "time+step", "archive"],
    "profile": ["profile"],
    "host_costs": ["host_costs"],
    "memcheck": ["memcheck"],
    "bench:layer_norm": ["bench:layer_norm"],
}


STAGE = re.compile(r"(.*?): \d+ s, code ")


@pytest.fixture
def commands(tmp_path):
    """Runs a part in a tree of its own, with programs that record their arguments: (arguments, output, exit code)."""
    tree, calls = tmp_path / "tree", tmp_path / "calls"
    for folder in ("benchmarks", "csrc/cpu", "python/fastenc", "kernels/tuned"):
        (tree / folder).mkdir(parents=True)
    for file in ("setup.py", "csrc/a.h", "csrc/cpu/a.h", "kernels/tuned/sm_90.json"):
        (tree / file).touch()
    for name in ("gpu_parts.sh",):
        (tree / "benchmarks" / name).write_text((ROOT / "benchmarks" / name).read_text())
    for name in ("python", "ncu", "compute-sanitizer"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)

    def run(part, **environment):
        calls.write_text("")
        kept = {name: value for name, value in os.environ.items() if name != "VISIT_FOLDER"}
        given = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "bin" / "python"),
            "OUT": str(tmp_path / "out"),
            "CALLS": str(calls),
            "FAILING": "no such command",
        }
        script = ["bash", str(tree / "benchmarks" / "gpu_parts.sh"), part]
        done = subprocess.run(
            script, env=kept | given | environment, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == "", done.stdout
        called = [shlex.split(line) for line in calls.read_text().splitlines()]
        return called, done.stdout, done.returncode

    run.out = tmp_path / "out"
    run.tree = tree
    return run


def module_of(command):
    """(module, its arguments) of a command that contains python -m MODULE, or None."""
    return (
        (command[(at := command.index("-m")) + 1], command[at + 2 :]) if "-m" in command else None
    )


@pytest.mark.parametrize("part", BY_PART)
def test_each_parts_commands_are_taken_by_their_programs(commands, part, monkeypatch):
    called, printed, _ = commands(part)
    stages = [each[1] for each in map(STAGE.match, printed.splitlines()) if each]
    assert stages == ["install", "extension", *BY_PART[part]]
    assert "not begun" not in printed
    monkeypatch.setattr(command, "supervise", lambda *arguments: [])
    checks = {
        "benchmarks.gpu_quick": lambda given: command.main([*given, "--small"]) == 0,
        "benchmarks.gpu_quick.profiled": lambda given: given == [],
        "benchmarks.bench_models": lambda given: (
            set(given) <= {*models.SIZES, *bench_models.MODES, bench_models.NO_COMPILE}
        ),
        "fastenc": lambda given: command_named(given[0]).from_arguments(given[0], given[1:]),
        "tests.helpers.sanitize": lambda given: fnmatch.filter(sanitize.CASES, given[0]),
        "pip": lambda given: given[0] == "install",
        "pytest": lambda given: (
            Expression.compile(given[given.index("-k") + 1])
            and all((ROOT / path).exists() for path in given if path.startswith("tests/"))
        ),
    }
    for module, given in filter(None, map(module_of, called)):
        if module.startswith("benchmarks.bench_") and module not in checks:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file() and not given
        else:
            assert checks[module](given), (module, given)


def test_a_part_brings_home_a_few_small_files(commands):
    cache = commands.tree / "build" / "visit" / "triton" / "key"
    cache.mkdir(parents=True)
    for suffix in ("source", "ttir", "ttgir", "llir", "ptx", "cubin", "json"):
        (cache / f"kernel.{suffix}").touch()
    _, printed, code = commands("1")
    names = {path.name for path in commands.out.iterdir()}
    assert names == {"log.txt", "sm_90.json", "cache.tar.xz"}
    with tarfile.open(commands.out / "cache.tar.xz") as archive:
        suffixes = {Path(member.name).suffix for member in archive if member.isfile()}
    assert suffixes == {".cubin", ".json"}, "what a launch needs of a compiled kernel"
    kept = commands.tree / "build" / "visit"
    assert kept.is_dir(), "what the next part takes stays in the tree"
    (kept / "quick").mkdir()
    (kept / "quick" / "gpu_quick.json").write_bytes(b"0" * (17 << 20))
    _, printed, code = commands("2")
    assert code == 1 and "one of more than 16 MiB" in printed


def test_a_later_part_takes_the_launch_parameters_of_the_first(commands):
    table = commands.tree / "kernels" / "tuned" / "sm_90.json"
    table.write_text("tuned")
    commands("1")
    table.unlink()
    commands("2")
    assert table.read_text() == "tuned"


def test_a_build_that_fails_leaves_the_rest_to_run(commands):
    _, printed, code = commands("2", FAILING="setup.py", CODE="1")
    assert code == 1 and "extension:" in printed and "families:" in printed


def test_an_extension_is_built_once_for_a_source(commands):
    built = lambda called: any("setup.py" in word for line in called for word in line)
    for name in ("_C.none.so", "libfastenc.so"):
        (commands.tree / "python/fastenc" / name).touch()
    first, _, _ = commands("2", WITHOUT_CUDA="1")
    assert built(first)
    (commands.tree / "csrc/a.h").write_text("// changed")
    assert built(commands("2")[0])


def test_without_a_part_it_explains_itself():
    script = str(ROOT / "benchmarks" / "gpu_parts.sh")
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 2 and "1|2|3|STAGE" in done.stderr


def test_kernels_of_another_folder_are_found_in_this_one(commands):
    """Triton's cache has the whole paths of its files."""
    cache = commands.tree / "build" / "visit" / "triton" / "key"
    cache.mkdir(parents=True)
    group = cache / "__grp__kernel.json"
    group.write_text(json.dumps({"child_paths": {"kernel.cubin": "/far/away/key/kernel.cubin"}}))
    commands("time")
    assert json.loads(group.read_text()) == {
        "child_paths": {"kernel.cubin": f"{cache}/kernel.cubin"}
    }
