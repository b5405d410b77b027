"""Reads the imports of every file: no layer imports one above it, and the core needs torch only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "python" / "fastenc"

# Helpers of every layer but those that list them one by one; they import each other alone.
BASE = {path.stem for path in PACKAGE.glob("_*.py")} - {"__init__"}
# layer: what of fastenc it may import
ALLOWED = {
    "reference": {"reference"},
    "ops": {"reference", "ops", "_C", "kernels", "packing"},
    "_transfer": set(),
    "_seeds": set(),
    "_options": set(),
    "packing": {"_transfer"},
    "nn": {"ops", "packing", "nn", "_extras"},
    "models": {"ops", "packing", "nn", "models", *BASE},
    "data": {"packing", "models", "data", *BASE},
}
ALLOWED["adapt"] = {"ops", "nn", "adapt"} | ALLOWED["data"]
ALLOWED["objectives"] = {"ops", "nn", "objectives"} | ALLOWED["data"]
ALLOWED["tasks"] = ALLOWED["objectives"] | {"tasks"}
ALLOWED["analysis"] = ALLOWED["tasks"] | {"analysis"}
ALLOWED["profiling"] = ALLOWED["models"] | {"profiling"}
ALLOWED["integrations"] = ALLOWED["models"] | {"integrations"}
ALLOWED["testing"] = {"ops", "testing"}
ALLOWED["freezing"] = {"integrations", "nn"}
ALLOWED["train"] = ALLOWED["tasks"] | {"adapt", "train"}
ALLOWED["cli"] = ALLOWED["train"] | {"analysis", "profiling", "testing", "cli"}
ALLOWED["demo"] = ALLOWED["train"] | {"analysis", "demo"}
ALLOWED = {name: BASE for name in sorted(BASE)} | ALLOWED
# Outside the project's own modules, these layers may import only:
LIBRARIES = {"reference": {"torch"}, "ops": {"torch"}, "nn": {"torch"}}
LIBRARIES |= {"packing": {"torch"}, "_transfer": {"torch"}, "_seeds": set(), "_options": set()}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if node.module == "fastenc":
                yield from (f"fastenc.{alias.name}" for alias in node.names)
            else:
                yield node.module


def files(layer: str):
    folder = PACKAGE / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{layer}.py"]


@pytest.mark.parametrize("layer", ALLOWED)
def test_layer_imports_nothing_above_it(layer):
    assert files(layer), layer
    for path in files(layer):
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "fastenc" and rest not in ("", "__version__"):
                assert rest.split(".")[0] in ALLOWED[layer], f"{path.name} imports {name}"
            elif layer in LIBRARIES and top not in sys.stdlib_module_names:
                assert top in LIBRARIES[layer], f"{path.name} imports {name}"


def test_every_module_of_the_package_has_a_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} <= set(ALLOWED)


def design_layers():
    """{layer: what the table of DESIGN.md says that it imports}."""
    table = (ROOT / "DESIGN.md").read_text(encoding="utf-8").split("\n\n")[1]
    found = {}
    for line in table.splitlines()[2:]:
        folders, _, imported = (cell.strip() for cell in line.split("|")[1:-1])
        for name in re.findall(r"`(?:python/fastenc/)?(\w+)(?:\.py)?/?`", folders):
            found[name] = set(re.findall(r"\w+", imported))
    return found


def test_the_map_of_the_house_is_the_table_of_imports():
    """A layer imports what DESIGN.md names for it, and what lies below that."""
    said = design_layers()
    below: dict[str, set[str]] = {}

    def everything_below(layer):
        if layer not in below:
            below[layer] = set()
            below[layer] = said.get(layer, set()).union(
                *(everything_below(name) for name in said.get(layer, ()))
            )
        return below[layer]

    helpers = {name for name in ALLOWED if name[0] == "_"} | {"_C"}
    for layer, allowed in ALLOWED.items():
        if layer in said and "everything" not in said[layer]:
            assert allowed - helpers - {layer} <= everything_below(layer), layer


def test_kernels_import_torch_triton_and_references_only():
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in {"torch", "triton", *sys.stdlib_module_names} or name.startswith(
                ("fastenc.kernels", "fastenc.reference")
            ), f"{path.name} imports {name}"


def test_nothing_imports_tests_or_benchmarks():
    for path in sorted(PACKAGE.rglob("*.py")):
        assert not {name.split(".")[0] for name in imports(path)} & {
            "tests",
            "benchmarks",
            "conftest",
        }


def test_tests_lie_in_folders_and_share_through_helpers():
    assert not list((ROOT / "tests").glob("test_*.py")), "a test belongs into its layer's folder"
    for path in (ROOT / "tests").rglob("*.py"):
        for name in imports(path):
            assert not name.split(".")[0].startswith("test_"), f"{path.name} imports {name}"


def test_core_imports_without_any_optional_library():
    blocked = [
        "triton",
        "transformers",
        "tokenizers",
        "safetensors",
        "accelerate",
        "datasets",
        "numpy",
    ]
    blocked += ["tqdm", "rich", "matplotlib", "sklearn", "huggingface_hub"]
    code = (
        "import torch, sys\n"
        f"for name in {blocked!r}:\n"
        "    for loaded in [m for m in sys.modules if m.split('.')[0] == name]: del sys.modules[loaded]\n"
        "    sys.modules[name] = None\n"
        "import fastenc, fastenc.ops, fastenc.nn, fastenc.packing\n"
        "print(fastenc.ops.layer_norm(torch.ones(2, 8)).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 0.0
