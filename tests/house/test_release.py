"""The workflow of a release runs targets of the Makefile, so that every step can be tried without it."""

import re

import pytest

from tests.helpers import ROOT

yaml = pytest.importorskip("yaml")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def jobs():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["jobs"]


def test_every_step_is_a_target_of_the_makefile():
    commands = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    targets = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)}
    steps = [command for command in commands if not re.match("pip install|sudo apt-get", command)]
    assert len(steps) == 4
    for step in steps:
        run = re.fullmatch(r"make ([\w-]+)( PYTHONS=.*)?", step)
        assert run and run[1] in targets, step
    scripts = {path.name for path in (ROOT / "release").glob("*.sh")}
    assert scripts == {*re.findall(r"release/(\w+\.sh)", MAKEFILE)}


def test_every_supported_python_has_a_wheel_that_is_tried():
    (build,) = (
        s["env"]["CIBW_BUILD"]
        for s in jobs()["wheels"]["steps"]
        if "CIBW_BUILD" in s.get("env", {})
    )
    assert build.split() == [f"cp{version.replace('.', '')}-*" for version in PYTHONS]
    assert jobs()["try"]["strategy"]["matrix"]["python"] == PYTHONS
    minors = re.search(r"foreach minor,([\d ]+),", MAKEFILE)[1].split()
    assert [f"3.{minor}" for minor in minors] == PYTHONS
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10"' in project
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == PYTHONS


def test_modules_that_scripts_run_exist():
    scripts = [ROOT / "Makefile", *ROOT.glob("release/*.sh"), *ROOT.glob("benchmarks/*.sh")]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        for name in re.findall(r"-m ((?:fastenc|benchmarks|tests)(?:\.\w+)*)(?![\w.$])", text):
            path = ROOT / ("python" if name.startswith("fastenc") else "") / name.replace(".", "/")
            runs = path.with_name(f"{path.name}.py").is_file() or (path / "__main__.py").is_file()
            assert runs, f"{script.name}: python -m {name}"
