"""The demo's texts: docstrings of the installed Python packages."""

import ast
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

# The demo needs most of these packages, so they are installed. A missing one is left out.
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
MAX_CHARACTERS = 200
SKIPPED_FOLDERS = {"tests", "test", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__"}


class Docstring(NamedTuple):
    """A docstring, and the number of its file in the order of reading."""

    text: str
    file: int


def docstrings(folder: Path, max_files: int, seed: int = 0) -> Iterator[Docstring]:
    """The docstrings of the Python files below ``folder``, in a fixed random order of files."""
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(folder).parts)
    )
    random.Random(seed).shuffle(files)
    for number, path in enumerate(files[:max_files]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the files that are read
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 40:
                    yield Docstring(inspect.cleandoc(text), number)


def standard_library(max_files: int = 500) -> list[str]:
    """Docstrings of the standard library, duplicates removed."""
    texts = docstrings(Path(sysconfig.get_path("stdlib")), max_files)
    return list(dict.fromkeys(docstring.text for docstring in texts))


def which_package(
    max_texts: int = 1200, max_files: int = 400, seed: int = 0
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(text, package) pairs for training, and others for testing, in random order.

    A text is the beginning of a docstring on one line. The names of the packages are removed, because they would reveal
    the label. A text that occurs in two packages is left out. One file in five is for testing, so that training and
    test do not share phrases that are repeated within a file.

    Args:
        max_texts: largest number of texts of a package.
        max_files: largest number of files of a package that are read.
    """
    names = re.compile(
        r"\b(" + "|".join([*PACKAGES, "scikit", "hugging ?face", "pytorch"]) + r")\w*", re.I
    )
    packages_of: dict[str, set[str]] = {}
    for_testing: set[str] = set()
    for package in PACKAGES:
        # importlib.util.find_spec would ask setuptools' import hook, which warns when it looks for pip.
        spec = PathFinder.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        count = 0
        for text, file in docstrings(Path(spec.submodule_search_locations[0]), max_files, seed):
            line = " ".join(names.sub("…", text).split())[:MAX_CHARACTERS]
            if len(line) >= 40:
                packages_of.setdefault(line, set()).add(package)
                if file % 5 == 0:
                    for_testing.add(line)
                count += 1
            if count >= max_texts:
                break
    pairs = [
        (text, next(iter(of_text))) for text, of_text in packages_of.items() if len(of_text) == 1
    ]
    random.Random(seed).shuffle(pairs)
    return (
        [pair for pair in pairs if pair[0] not in for_testing],
        [pair for pair in pairs if pair[0] in for_testing],
    )
