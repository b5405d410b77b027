"""The README's code runs, and its tables are those of the committed results."""

import re
import subprocess
import sys

import pytest

from fastenc.demo.checkpoint import minilm_folder
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_code_runs(code, tmp_path):
    """As a script of its own, with the hub's name replaced by the same checkpoint's folder."""
    local = code.replace("sentence-transformers/all-MiniLM-L6-v2", str(minilm_folder()))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", local],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_three_ways_in():
    assert len(BLOCKS) >= 3


def test_tables_are_those_of_the_results():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
