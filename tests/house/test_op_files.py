"""Adding an op touches the files that CONTRIBUTING.md lists, and no other."""

import re
import subprocess
from pathlib import Path

from fastenc import ops
from tests.helpers import ROOT

MOST = 13
# These name many ops for reasons of their own: a new op needs no entry there.
USERS = {
    "CHANGELOG.md",
    "docs/benchmarks.md",
    "docs/ops.md",  # names the ops without a gradient; a test compares the list with the ops
    "docs/reference/ops.md",  # make pages writes it
    "tests/triton/test_ops_triton.py",  # dropout of three ops, and those without a Triton kernel
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


def words_of(path):
    return set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))


def lists(tracked):
    """The files that name a third of the ops: each is a list to which a new op has to be added."""
    # Names that prose does not have.
    names = [name for name in ops.__all__ if "_" in name and name != "cross_attention"]
    suffixes = (".py", ".md", ".cpp", ".h", ".inc", ".toml", ".sh")
    read = [path for path in tracked if path.endswith(suffixes) and path not in USERS]
    return {path for path in read if len(words_of(path).intersection(names)) > len(names) / 3}


def test_an_op_touches_the_files_that_are_listed():
    """Of every op with C++ and Triton kernels of its own: its files, and the lists that are in the tree."""
    files, tracked = listed(), tracked_files()
    assert len(set(files)) == len(files)
    for name in files:
        assert (ROOT / name.replace("<op>", "bias_glu").replace("nn/bias_glu", "nn/gelu")).exists()
    shared = lists(tracked)
    assert shared <= set(files)
    stems = {Path(path).stem for path in tracked if path.startswith("kernels/")}
    complete = stems & {Path(path).stem for path in tracked if path.startswith("csrc/cpu/")}
    complete &= {getattr(ops, name).__module__.rpartition(".")[2] for name in ops.__all__}
    assert len(complete) > 7
    for op in complete:
        own = named_after(op, tracked)
        assert own <= {name.replace("<op>", op) for name in files}
        touched = own | shared
        assert len(touched) <= MOST, sorted(touched)
    assert len(files) == MOST
