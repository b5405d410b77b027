"""Cleans files into files. A killed run can be resumed."""

import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fastenc._files import write_atomically
from fastenc.data.cleaning import Cleaner

CHUNK = 1000  # documents between two records of the progress
PROGRESS = "progress.json"


def clean_files(
    cleaner: Cleaner,
    texts: Mapping[str, Iterable[str]],
    output: str | Path,
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Write the documents that are kept to ``<language>.jsonl`` ("text" for ""), and report.json.

    Until the run is complete, the files are in ``output``/unfinished, beside the cleaner's memories. After every
    ``CHUNK`` documents everything is flushed and the sizes of the files are recorded. A resumed run reads the finished
    documents again without cleaning them, and writes the same files as an uninterrupted run.

    Args:
        texts: {language: documents}; a resumed run needs the same documents in the same order.
        settings: the cleaner's settings as JSON values; a resumed run needs the same.
        resume: continue a killed run, or start one if there is none.
    Returns: the cleaner's report.
    Raises: ValueError if there is an unfinished run and ``resume`` is False, if it had other settings or texts, or if
        no document is kept; then nothing is left behind.
    """
    output = Path(output)
    folder = output / "unfinished"
    settings = json.loads(json.dumps({**settings, "languages": list(texts)}))
    done = _begun(folder, settings, resume)
    cleaner.restore(done["report"], {name: _numbers(folder, name) for name in cleaner.memories})
    if not done["finished"]:
        done = _clean(cleaner, texts, folder, done)
    if not cleaner.documents["kept"]:
        shutil.rmtree(folder, ignore_errors=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        reasons = ", ".join(f"{number:,} {why}" for why, number in cleaner.dropped.items())
        raise ValueError(
            f"none of {cleaner.documents['read']:,} documents was kept ({reasons}): look at the texts, or take fewer "
            "--steps"
        )
    for path in folder.glob("*.jsonl"):
        os.replace(path, output / path.name)
    text = json.dumps(cleaner.report(), indent=1, ensure_ascii=False) + "\n"
    write_atomically(output / "report.json", lambda path: path.write_text(text, encoding="utf-8"))
    shutil.rmtree(folder)
    return cleaner.report()


def _clean(
    cleaner: Cleaner, texts: Mapping[str, Iterable[str]], folder: Path, done: dict[str, Any]
) -> dict[str, Any]:
    read, checksum = 0, 0
    before, expected = done["report"]["documents"]["read"], done["checksum"]
    for language, every in texts.items():
        documents = iter(every)
        while part := list(islice(documents, CHUNK)):
            read += len(part)
            for document in part:
                checksum = zlib.crc32(document.encode("utf-8", "surrogatepass") + b"\0", checksum)
            if read < before:
                continue
            if read == before:
                _check(checksum == expected, folder)
                continue
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in cleaner.clean(part)]
            _append(folder / f"{language or 'text'}.jsonl", "".join(f"{x}\n" for x in lines))
            for name, memory in cleaner.memories.items():
                _append(_path(folder, name), memory.new.tobytes())
                del memory.new[:]
            done = {**done, "checksum": checksum, "report": cleaner.report()}
            _note(folder, done)
    _check(read >= before, folder)
    done = {**done, "finished": True}
    if read:
        _note(folder, done)
    return done


def _begun(folder: Path, settings: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """The progress of an earlier run. What it wrote after the last record is truncated."""
    if not (folder / PROGRESS).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        report = Cleaner(()).report()
        return {"settings": settings, "finished": False, "checksum": 0, "report": report}
    if not resume:
        raise ValueError(
            f"{folder} holds a cleaning that did not end: resume it (--resume), or remove the folder"
        )
    done = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    for name, value in settings.items():
        if done["settings"].get(name) != value:
            raise ValueError(
                f"{folder} was begun with {name}={done['settings'].get(name)!r}, now it is {value!r}: use the same, "
                "or remove the folder"
            )
    for path in folder.iterdir():
        if path.name in done["sizes"]:
            os.truncate(path, done["sizes"][path.name])
        elif path.name != PROGRESS:
            path.unlink()
    return done


def _check(same: bool, folder: Path) -> None:
    if not same:
        raise ValueError(
            f"{folder} was begun with other texts than those given now: give the same in the same order, or remove "
            "the folder"
        )


def _note(folder: Path, done: dict[str, Any]) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != PROGRESS}
    text = json.dumps({**done, "sizes": sizes}, ensure_ascii=False)
    write_atomically(folder / PROGRESS, lambda path: path.write_text(text, encoding="utf-8"))


def _append(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _path(folder: Path, memory: str) -> Path:
    return folder / f"{memory}.seen"


def _numbers(folder: Path, memory: str) -> array:
    path = _path(folder, memory)
    return array("Q", path.read_bytes() if path.is_file() else b"")
