"""Adding an op touches the files that CONTRIBUTING.md lists, and no other."""

import re
import subprocess
from pathlib import Path

from fastenc import ops
from tests.helpers import ROOT

# These name many ops for reasons of their own: a new op needs no entry there.
USERS = {
    "CHANGELOG.md",
    "benchmarks/gpu_quick/problems.py",
    "benchmarks/launch_costs.py",
    "docs/benchmarks.md",
    "docs/ops.md",  # names the ops without a gradient; a test compares the list with the ops
    "docs/reference/ops.md",  # make pages writes it
    "tests/helpers/sanitize.py",  # needs no entry: the fuzzers' calls are the default
    "tests/triton/test_ops_triton.py",  # what random calls do not cover
}


def listed():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Adding an op")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def named_after(op, tracked):
    """The files with an op's name in the folders of ops, their tests and benchmarks."""
    names = {op, f"bench_{op}", f"test_{op}", f"test_{op}_triton"}
    folders = ("python/fastenc/reference", "python/fastenc/ops", "python/fastenc/nn", "csrc")
    folders += ("kernels", "tests", "benchmarks")
    return {
        path
        for path in tracked
        if Path(path).stem in names
        and path.startswith(tuple(f"{each}/" for each in folders))
        and not path.startswith("benchmarks/results/")
    }


def tracked_files(*patterns):
    command = ["git", "ls-files", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_op_touches_the_files_that_are_listed():
    """For every op with C++ and Triton kernels: each file that has the op's name, and the lists."""
    files, tracked = listed(), tracked_files()
    assert len(set(files)) == len(files) == 14
    for name in files:
        assert (ROOT / name.replace("<op>", "bias_glu").replace("nn/bias_glu", "nn/gelu")).exists()
    stems = {Path(path).stem for path in tracked if path.startswith("kernels/")}
    complete = stems & {Path(path).stem for path in tracked if path.startswith("csrc/cpu/")}
    complete &= {getattr(ops, name).__module__.rpartition(".")[2] for name in ops.__all__}
    assert len(complete) > 7
    for op in complete:
        found = named_after(op, tracked)
        assert found <= {name.replace("<op>", op) for name in files}
        lists = [name for name in files if "<op>" not in name]
        assert len(found) + len(lists) <= 14


def test_no_other_file_lists_the_ops():
    """A file that names a third of the ops is a list to which a new op would have to be added."""
    kinds = ("*.py", "*.md", "*.cpp", "*.h", "*.inc", "*.toml", "*.sh")
    tracked = tracked_files(*kinds)
    # Op names that do not occur in prose.
    names = [name for name in ops.__all__ if "_" in name and name != "cross_attention"]
    found = set()
    for path in tracked:
        words = set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
        if len(words.intersection(names)) > len(names) / 3:
            found.add(path)
    assert found - USERS <= set(listed())
