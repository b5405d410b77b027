"""The documents: their code and commands run, their tables match the committed results, files that they name exist."""

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastenc.data.samples import write_samples
from fastenc.ops import int8_products
from tests.helpers import ROOT
from tests.helpers.commands import run
from tests.helpers.hub_models import local_folders
from tests.helpers.page_code import run_page
from tests.helpers.processes import python

LIBRARIES = sorted((ROOT / "docs" / "with").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *LIBRARIES]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
RECORDS = sorted((ROOT / "docs" / "design").glob("*.md"))
DOCUMENTS = [*PAGES, *RECORDS, ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"]
# Where a reader trains for minutes, a test trains for two steps. Of an option given twice, the last one counts.
MODEL = [
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--intermediate",
    "64",
    "--block-size",
    "64",
]
STEPS = ["--max-steps", "2", "--warmup-steps", "1"]
BATCHES = ["--batch-size", "2", "--global-batch-size", "4"]
VOCABULARY = ["--vocab-size", "300"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def made_small(arguments):
    """A command's arguments, followed by arguments that shorten its run."""
    command = arguments[0] if arguments[0] != "--nproc-per-node" else "pretrain"
    if command == "finetune" and "word-sense" not in arguments:
        return [*arguments, *STEPS, *BATCHES]
    if command != "pretrain":
        return arguments
    # A store is already tokenised, and with it --batch-tokens sizes batches by tokens, not by sequences.
    return [*arguments, *MODEL, *STEPS, *([] if "store" in arguments else BATCHES + VOCABULARY)]


needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)


def pages_with(language):
    return [
        pytest.param(path, id=path.stem, marks=needs_int8 if path.stem == "int8" else ())
        for path in PAGES
        if blocks(path, language)
    ]


def missing_library(code):
    """The first library that the code imports and that is not installed, or None."""
    imported = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return next((name for name in imported if importlib.util.find_spec(name) is None), None)


def run_code(codes, folder, *errors):
    """Run blocks one after another; folders of small models replace the hub's names."""
    local = []
    for code in codes:
        for name, path in local_folders(folder / "hub", code).items():
            code = code.replace(f'"{name}"', f'"{path}"')
        # One process of a pool shows all. Each imports the library, which takes most of the page's time.
        local.append(code.replace('["cpu", "cpu"]', '["cpu"]'))
    run_page(local, folder, errors)


@pytest.mark.parametrize(
    "page", [page for page in pages_with("python") if page.values[0] not in LIBRARIES]
)
def test_code_runs(page, tmp_path):
    run_code(blocks(page, "python"), tmp_path, {})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_imports_public_names(path):
    for code in blocks(path, "python"):
        for module, names in re.findall(
            r"^from (fastenc[\w.]*) import ([\w, ]+)$", code, re.MULTILINE
        ):
            assert {*names.split(", ")} <= {*importlib.import_module(module).__all__}, module


# Other libraries have warnings of their own; a warning of ours would say that something is not fused.
OURS = [dict(message=start, category=UserWarning) for start in ("fastenc", "attention takes")]


@pytest.mark.parametrize("page", LIBRARIES, ids=lambda page: page.stem)
def test_code_with_other_libraries_runs_fused(page, tmp_path):
    run_code(
        [code for code in blocks(page, "python") if not missing_library(code)], tmp_path, *OURS
    )


@pytest.mark.parametrize(
    ("page", "library"),
    [
        pytest.param(page, library, id=library)
        for page in LIBRARIES
        for library in sorted(set(map(missing_library, blocks(page, "python"))) - {None})
    ],
)
def test_code_of_a_library_that_is_not_installed_compiles(page, library):
    for number, code in enumerate(blocks(page, "python")):
        if missing_library(code) == library:
            compile(code, f"{page.name}, block {number}", "exec")
    pytest.skip(f"{library} is not installed: the block was compiled and not run")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A folder with the files that the commands name, and a small encoder in runs/small."""
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder)
    run(*made_small(["pretrain", folder / "wiki.txt.gz", "-o", folder / "runs" / "small"]))
    return folder


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_run(page, samples, tmp_path, monkeypatch):
    """The commands run one after another, in a copy of the samples."""
    monkeypatch.chdir(shutil.copytree(samples, tmp_path / "copy"))
    for line in "".join(blocks(page, "sh")).splitlines():
        program, *arguments = shlex.split(line)
        if arguments[-2:] == ["-o", "runs/small"]:  # the samples already have it
            shutil.rmtree("runs/small")
        if program == "torchrun":
            done = python(*TORCHRUN, *made_small(arguments), cwd=Path.cwd(), timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            assert program == "fastenc", line
            run(*made_small(arguments))


def test_shell_blocks_are_run_or_need_more_than_a_test_has():
    """``sh`` blocks run here. ``console`` blocks install something, need a GPU or take minutes."""
    known = {"python", "sh", "console", "bibtex", ""}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"^```(\w*)", text, re.MULTILINE)) <= known, path
        for code in blocks(path, "console"):
            assert all(
                re.match(r"pip|make|fastenc (bench|info)|benchmarks/", c) for c in code.splitlines()
            )


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 215


def test_tables_are_those_of_the_results():
    done = python("-m", "benchmarks.tables", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_pages_are_current():
    """The reference, and the tables of warnings and defaults. A warning without a remedy is an error too."""
    done = python("-W", "ignore", "docs/hooks/pages.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_can_be_read_as_files():
    import fastenc
    import fastenc.train

    pages = {path.stem: path.read_text(encoding="utf-8") for path in REFERENCE}
    markers = re.compile(r"^(\[\[|:::)", re.MULTILINE)
    assert not [name for name, text in pages.items() if markers.search(text)]
    for name in fastenc.__all__:
        assert name.startswith("_") or f"## {name}\n" in pages["fastenc"] or name in pages
    assert "- `encoder`: a `fastenc" not in pages["fastenc"]  # encode's own, which is self
    for command in ("finetune", "pretrain", "embed"):
        assert f"## fastenc {command}\n" in pages["commands"]
    assert "| `--learning-rate`, `--lr` |" in pages["commands"]
    signature = pages["train"].split("\nclass PretrainConfig(\n")[1].split("\n)\n")[0]
    for name, each in inspect.signature(fastenc.train.PretrainConfig).parameters.items():
        default = "" if each.default is each.empty else f" = {each.default!r}"
        line = rf"^    {name}: [^=]+{re.escape(default)},$"
        assert re.search(line, signature, re.MULTILINE), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    """Paths in backticks are relative to the repository's root or to the package."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", path.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "python" / "fastenc")
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(name):
    """The build of the site checks those of docs/."""
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if file.startswith("http"):
            continue
        page = ROOT / (file or name)
        assert page.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert anchor in slugs, link


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "reference" / "ops.html").read_text(encoding="utf-8")
    assert "LayerNorm" in page and "fastenc.ops.attention.attention" in page
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    locations = {entry["location"] for entry in index["docs"] if "rotary" in entry["text"].lower()}
    assert "reference/ops.html#fastenc.ops.rotary.rotary" in locations
