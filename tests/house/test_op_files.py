"""Adding an op touches the files that CONTRIBUTING.md lists, and no other."""

import re
import subprocess

from fastenc import ops
from tests.helpers import ROOT

# They name many ops for their own sake: a new op needs no entry there.
USERS = {
    "CHANGELOG.md",
    "benchmarks/gpu_quick/problems.py",
    "benchmarks/launch_costs.py",
    "docs/benchmarks.md",
    "tests/helpers/sanitize.py",  # the fuzzers' calls stand for an op that is not there
    "tests/triton/test_ops_triton.py",  # what random calls do not cover
}


def listed():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Adding an op")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_an_op_touches_at_most_12_files():
    files = listed()
    assert len(set(files)) == len(files) <= 12
    for name in files:
        assert (ROOT / name.replace("<op>", "bias_gelu").replace("nn/bias_", "nn/")).exists(), name


def test_no_other_file_lists_the_ops():
    """A file that names a third of the ops is a list to which a new op would have to be added."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.cpp", "*.h", "*.inc", "*.toml", "*.sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    # Names that prose does not have.
    names = [name for name in ops.__all__ if "_" in name and name != "cross_attention"]
    found = set()
    for path in tracked:
        words = set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
        if len(words.intersection(names)) > len(names) / 3:
            found.add(path)
    assert found - USERS <= set(listed())
