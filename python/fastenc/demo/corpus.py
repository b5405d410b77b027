"""Text that every Python installation has: the docstrings of its libraries."""

import ast
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Packages that the demo itself needs are there to be read; a missing one is left out.
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "sklearn",
    "matplotlib",
    "datasets",
    "pip",
    "setuptools",
)
SKIPPED_FOLDERS = {"tests", "test", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def docstrings(folder: Path, max_files: int, seed: int = 0) -> Iterator[str]:
    """The docstrings of the Python files below ``folder``, one text each, in a fixed random order of files."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(folder).parts)
    )
    random.Random(seed).shuffle(files)
    for path in files[:max_files]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's invalid escapes
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 40:
                    yield inspect.cleandoc(text)


def standard_library(max_files: int = 500) -> list[str]:
    """Docstrings of the standard library, duplicates removed."""
    return list(dict.fromkeys(docstrings(Path(sysconfig.get_path("stdlib")), max_files)))


def which_package(
    max_texts: int = 1200, max_files: int = 400, seed: int = 0
) -> list[tuple[str, str]]:
    """(text, package) pairs in random order: a real task with real labels.

    Each text is one docstring on one line, cut to 300 characters, with every package's name taken out, so
    that the label cannot simply be read. A text that occurs in two packages is left out.
    """
    names = re.compile(
        r"\b(" + "|".join([*PACKAGES, "scikit", "hugging ?face", "pytorch"]) + r")\w*", re.I
    )
    site = Path(sysconfig.get_path("purelib"))
    owners: dict[str, set[str]] = {}
    for package in PACKAGES:
        if not (site / package).is_dir():
            continue
        found = 0
        for text in docstrings(site / package, max_files, seed):
            line = " ".join(names.sub("…", text).split())[:300]
            if len(line) >= 40:
                owners.setdefault(line, set()).add(package)
                found += 1
            if found >= max_texts:
                break
    pairs = [(text, next(iter(owner))) for text, owner in owners.items() if len(owner) == 1]
    random.Random(seed).shuffle(pairs)
    return pairs
