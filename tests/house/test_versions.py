"""The versions in docs/versions.md are those of pyproject.toml, of the code's check and of this environment."""

import re
import sys
from importlib import metadata

import pytest

import fastenc
from fastenc._base import extras
from tests.helpers import ROOT
from tests.helpers.families import model


def rows():
    """{library: (needed, newest tested)} from the page's table."""
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: (needed, newest) for name, needed, _, newest, _ in cells[1:]}


def test_the_needed_versions_are_those_of_the_package():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = {name: {*re.findall(rf'"{name}>=([\d.]+)"', declared)} for name in rows()}
    for name, (needed, _) in rows().items():
        assert bounds[name] == {*re.findall(r"^([\d.]+) or newer", needed)}, name
    assert all(bounds[name] == {oldest} for name, oldest in extras.OLDEST.items())


# torch is left out, because the tests also run on machines with other versions of it.
@pytest.mark.parametrize("library", [*rows()][1:])
def test_the_tested_versions_are_the_installed_ones(library):
    version = metadata.version(library.lower())
    assert ".".join(version.split(".")[:2]) == rows()[library][1]


@pytest.mark.parametrize("entry_point", [fastenc.patch, lambda m: fastenc.register_attention()])
@pytest.mark.parametrize("version", ["4.57.6", "5.9.1"])
def test_an_old_transformers_is_named_with_what_is_needed(version, entry_point, monkeypatch):
    ours = model("bert")
    # Not by an import statement at the top: transformers replaces its own module while it loads a class.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    message = rf"needs transformers 5\.10 or newer, got {re.escape(version)}: pip install"
    with pytest.raises(ImportError, match=message):
        entry_point(ours)
