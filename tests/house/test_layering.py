"""Reads the imports of every file: no layer imports one above it, and the core needs torch only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "python" / "fastenc"

# A room is a folder, or a file in the package's root. Room: the rooms that its files may import.
ROOMS = {
    room: set(imported.split())
    for room, imported in {
        "_base": "",
        "reference": "",
        "packing": "_base",
        "text": "_base",
        "ops": "_base reference _C kernels packing",
        "nn": "_base ops packing",
        "testing": "ops",
        "data": "_base packing text",
        "models": "_base models/adapters models/architectures models/embedding models/heads nn ops packing text",
        "models/architectures": "models nn ops",
        "models/adapters": "_base models nn text",
        "models/embedding": "_base models models/architectures nn ops packing text",
        "models/heads": "_base models models/architectures models/embedding nn ops packing text",
        "integrations": "_base models models/adapters models/architectures nn ops packing text",
        "freezing": "integrations nn",
        "graphs": "_base models ops packing",
        "profiling": "_base graphs models nn ops packing",
        "adapt": "_base models models/adapters nn packing",
        "objectives": "_base data models models/heads nn ops packing text",
        "tasks": "_base data models models/embedding models/heads nn objectives packing text",
        "analysis": "_base data models models/embedding nn ops packing text",
        "train": "_base adapt data graphs models models/adapters models/architectures nn objectives packing tasks text",
        "demo": "_base analysis data models objectives packing tasks train",
        "__main__": "cli",
        "cli": "_base adapt analysis data models models/adapters ops packing profiling tasks testing text train",
    }.items()
}
# From outside the standard library and the project, these rooms may import only:
LIBRARIES = {"_base": {"torch", "tqdm", "triton"}, "text": {"tokenizers", "transformers"}}
LIBRARIES |= {name: {"torch"} for name in ("reference", "ops", "nn", "packing")}


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


def module_name(path: Path) -> str:
    name = ".".join(("fastenc", *path.relative_to(PACKAGE).with_suffix("").parts))
    return name.removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module of the package: "models/heads" for fastenc.models.heads.masked_lm."""
    parts = module.split(".")[1:]
    inner = "/".join(parts[:2])
    return inner if inner in ROOMS else parts[0]


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_nothing_but_the_rooms_of_its_row(room):
    of_room = {
        name: path for name, path in FILES.items() if name != "fastenc" and room_of(name) == room
    }
    assert of_room, room
    for path in of_room.values():
        for name in imports(path):
            top = name.partition(".")[0]
            if top == "fastenc" and name not in ("fastenc", "fastenc.__version__"):
                assert room_of(name) in ROOMS[room] | {room}, f"{path} imports {name}"
            elif room in LIBRARIES and top not in sys.stdlib_module_names | {"fastenc"}:
                assert top in LIBRARIES[room], f"{path} imports {name}"


def test_every_module_of_the_package_has_a_room():
    assert {room_of(name) for name in FILES if name != "fastenc"} == set(ROOMS)


def imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Those of ``files`` that a file imports, also inside its functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & set(files) or {node.module}
    return names & set(files)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The files of a circle of imports, or an empty list."""
    done: set[str] = set()

    def follow(name: str, above: list[str]) -> list[str]:
        if name in above:
            return above[above.index(name) :]
        if name in done:
            return []
        for imported in sorted(graph[name]):
            if chain := follow(imported, [*above, name]):
                return chain
        done.add(name)
        return []

    return next((chain for name in graph if (chain := follow(name, []))), [])


def test_files_import_each_other_in_no_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    kernels = {f"fastenc.kernels.{path.stem}": path for path in (ROOT / "kernels").glob("*.py")}
    assert len(kernels) > 20
    for files in (FILES, kernels):
        assert not circle({name: imported_files(path, files) for name, path in files.items()})


def test_kernels_share_public_names_only():
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name} imports {private}"


def calls(tree: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") in names or getattr(node.func, "attr", "") in names)
        for node in ast.walk(tree)
    )


def test_layers_run_in_the_loop_of_the_stack_alone():
    """run_layer runs one layer. Only the two layer modules call it, and only run_stack calls these modules."""
    callers = {
        name for name, path in FILES.items() if calls(ast.parse(path.read_text()), {"run_layer"})
    }
    assert callers == {"fastenc.models.layer_stack", "fastenc.integrations.transformers.live_layer"}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.For) and name != "fastenc.nn.stack":
                assert not calls(node, {"layer", "block", "run_layer"}), (
                    f"{name}, line {node.lineno}"
                )


def design_layers():
    """{layer: the imports that the table of DESIGN.md states}."""
    table = (ROOT / "DESIGN.md").read_text(encoding="utf-8").split("\n\n")[1]
    layers = {}
    for line in table.splitlines()[2:]:
        folders, _, imported = (cell.strip() for cell in line.split("|")[1:-1])
        for name in re.findall(r"`(?:python/fastenc/)?(\w+)(?:\.py)?/?`", folders):
            layers[name] = set(re.findall(r"\w+", imported))
    return layers


def test_the_table_of_design_md_states_the_imports():
    """A room imports the rooms that DESIGN.md states for it, and what these import in turn."""
    said = design_layers()
    below: dict[str, set[str]] = {}

    def everything_below(room):
        if room not in below:
            below[room] = set()
            below[room] = said.get(room, set()).union(
                *(everything_below(name) for name in said.get(room, ()))
            )
        return below[room]

    assert set(said) >= {room.split("/")[0] for room in ROOMS}
    for room, allowed in ROOMS.items():
        own = room.split("/")[0]
        if "everything" not in said.get(own, {"everything"}):
            folders = {name.split("/")[0] for name in allowed}
            assert folders - {"_base", "_C", own} <= everything_below(own), room


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
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    total, compiler = done.stdout.split()
    assert float(total) == 0.0
    assert compiler == "False", "importing the compiler takes as long as importing torch"
