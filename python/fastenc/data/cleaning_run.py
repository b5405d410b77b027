"""Runs the stages of a cleaning pipeline on this machine, and reports what they dropped."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.filters.regex_filter import RegexFilter
from datatrove.utils.logging import logger

from fastenc._base.files import write_text_atomically
from fastenc._base.locks import open_locked
from fastenc._base.resumption import check_begun_with
from fastenc.data.cleaning import Stage
from fastenc.data.cleaning_steps import TextWriter

SETTINGS = "settings.json"


def run_locally(
    stages: Sequence[Stage],
    output: Path,
    settings: Mapping[str, object],
    processes: int,
    resume: bool,
) -> dict[str, Any]:
    """Run stages on this machine, write report.json and remove the intermediate files.

    Args:
        output: the folder that the stages were made for.
        settings: the arguments of ``cleaning_stages``; a resumed run needs the same.
        processes: number of tasks that run in parallel.
        resume: continue a killed run; its finished tasks are not run again.
    Returns: the report: the numbers of documents read and kept, and of documents and lines dropped, by reason.
    Raises: ValueError for fewer processes than one, if another process cleans into the folder, if there is an
        unfinished run and ``resume`` is False, if that run had other settings, if the output folder holds anything
        else, or if no document is kept. In the last case the output folder is removed.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}: give more")
    logger.disable("datatrove")  # an error is raised too, and report.json has the counts
    work = output / "work"
    _check_free(work)
    with _locked(work):
        _begin(work, json.loads(json.dumps(settings)), resume)
        return _run(stages, output, work, processes)


def _run(stages: Sequence[Stage], output: Path, work: Path, processes: int) -> dict[str, Any]:
    for stage in stages:
        LocalPipelineExecutor(
            stage.pipeline, tasks=stage.tasks, workers=processes, logging_dir=stage.logs
        ).run()
        if stage.name == "filter" and not any((*work.glob("filter/*"), *output.glob("*/*.jsonl"))):
            break
    report = _report(stages)
    if not report["documents"]["kept"]:
        for folder in (work, output / "dropped"):
            shutil.rmtree(folder, ignore_errors=True)
        output.rmdir()
        reasons = ", ".join(f"{number:,} {why}" for why, number in report["dropped"].items())
        raise ValueError(
            f"none of {report['documents']['read']:,} documents was kept ({reasons}): look at the texts, or take "
            "fewer steps"
        )
    write_text_atomically(output / "report.json", json.dumps(report, indent=1) + "\n")
    shutil.rmtree(work)
    return report


def _check_free(work: Path) -> None:
    """Raises: ValueError if the output folder holds something else than an unfinished run."""
    output = work.parent
    if (
        not (work / SETTINGS).is_file()
        and output.is_dir()
        and any(path != work for path in output.iterdir())
    ):
        raise ValueError(
            f"{output} must be an empty folder or hold a run that did not finish, got one with other files: give "
            "another output"
        )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """A context in which no other process runs in the folder. Raises: ValueError if one does already."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_locked(work / "lock")
    except BlockingIOError:
        raise ValueError(
            f"{work.parent} is the output of another run: wait for it, or give another output"
        ) from None
    with lock:
        yield


def _begin(work: Path, settings: Mapping[str, object], resume: bool) -> None:
    record = work / SETTINGS
    if record.is_file():
        if not resume:
            raise ValueError(
                f"{work} holds a cleaning run that did not finish: continue it with resume=True, or remove the folder"
            )
        begun = json.loads(record.read_text(encoding="utf-8"))
        check_begun_with(begun, settings, work, "remove the folder")
    write_text_atomically(record, json.dumps(settings))


def _report(stages: Sequence[Stage]) -> dict[str, Any]:
    """Sums of the counts that the tasks left in their stages' logs."""
    documents, dropped = Counter(read=0, kept=0), Counter[str]()
    reasons = {RegexFilter: "bad_word"}  # for a step that does not name its reason
    for stage in stages:
        for path in sorted(Path(stage.logs).glob("stats/*.json")):
            for step, block in zip(stage.pipeline, json.loads(path.read_text()), strict=True):
                counts = {
                    name: value["total"] if isinstance(value, dict) else value
                    for name, value in block["stats"].items()
                }
                documents["read"] += counts.get("read", 0)
                if isinstance(step, TextWriter):
                    documents["kept"] += counts.get("total", 0)
                for name, number in counts.items():
                    if name.startswith(("dropped_", "line-filter-")):
                        dropped[name.removeprefix("dropped_")] += number
                if "dropped" in counts and not any(name.startswith("dropped_") for name in counts):
                    dropped[reasons.get(type(step), stage.name)] += counts["dropped"]
    return {"documents": dict(documents), "dropped": dict(sorted(dropped.items()))}
