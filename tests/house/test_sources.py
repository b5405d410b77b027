"""Rules for every Python file."""

import pkgutil
import re
import subprocess
import warnings

from tests.helpers import ROOT

REFERENCE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?(fastenc(?:\.\w+)+)`")
IN_COMMENTS = re.compile(r"# [^\n\"]*?\b(fastenc(?:\.\w+)+)")


def test_every_file_compiles_without_a_warning():
    """Newer Python versions warn of more; since 3.12 of unknown escapes in strings. Tests make warnings errors."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.splitlines()]
    assert files
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in filter(lambda path: path.is_file(), files):
            compile(path.read_text(encoding="utf-8"), str(path), "exec")


def test_objects_that_docstrings_and_comments_refer_to_exist():
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    names = {
        name for text in texts for each in (REFERENCE, IN_COMMENTS) for name in each.findall(text)
    }
    assert len(names) > 50
    for name in sorted(names):
        pkgutil.resolve_name(name)
