"""transformers' own model tests, from the sdist that ``make transformers-suite`` fetches."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

# Tests that the sdist does not contain: of generation and of exports.
LEFT_OUT = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}


def load(folder: str) -> type:
    """``ModelTesterMixin`` of the unpacked sdist. Its package gets another name: ours is ``tests`` too."""
    package = ModuleType("transformers_tests")
    package.__path__ = [str(Path(folder) / "tests")]
    sys.modules[package.__name__] = package
    for name, mixin in LEFT_OUT.items():
        module = ModuleType(name)
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"{package.__name__}.{name}"] = module
    # Its markers are not declared here; pytest without a configuration accepts any marker.
    with mock.patch.object(pytest, "mark", pytest.MarkGenerator(_ispytest=True)):
        module = importlib.import_module(f"{package.__name__}.test_modeling_common")
    return module.ModelTesterMixin
