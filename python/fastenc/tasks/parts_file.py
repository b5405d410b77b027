"""A file that is written part by part, and that a run which was killed goes on with."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastenc._files import write_atomically


class PartsFile:
    """Appends finished parts to ``output``.part and counts them in ``output``.part.json; at the end .part takes the
    place of ``output``. A context manager.

    Args:
        settings: what a resumed run must share, as JSON values.
        resume: go on after the last finished part of a run that was killed, or start if there is none.
    Attributes:
        parts: how many are finished.
    Raises: ValueError when an unfinished run is there and ``resume`` is False, or when it had other settings.
    """

    def __init__(self, output: Path, settings: dict[str, Any], resume: bool):
        self.output = output
        self._written = output.with_name(f"{output.name}.part")
        self._progress = output.with_name(f"{output.name}.part.json")
        self._done = self._read_progress(json.loads(json.dumps(settings)), resume)

    @property
    def parts(self) -> int:
        return self._done["parts"]

    def __enter__(self) -> "PartsFile":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._written, "r+b" if self._written.exists() else "w+b")
        # What was appended after the last count is written again.
        self._file.truncate(self._done["bytes"])
        self._file.seek(self._done["bytes"])
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._file.close()
        if kind is None:
            self._progress.unlink(missing_ok=True)
            os.replace(self._written, self.output)
        elif not self.parts:
            self._written.unlink(missing_ok=True)

    def append(self, pieces: Iterable[bytes]) -> None:
        """Add a part, which is on the disk when this returns."""
        for piece in pieces:
            self._file.write(piece)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._done = {**self._done, "parts": self.parts + 1, "bytes": self._file.tell()}
        text = json.dumps(self._done)
        write_atomically(self._progress, lambda path: path.write_text(text))

    def _read_progress(self, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
        """How far an earlier run came: {"settings", "parts", "bytes"}."""
        if not (self._written.exists() and self._progress.exists()):
            self._progress.unlink(missing_ok=True)
            return {"settings": settings, "parts": 0, "bytes": 0}
        done = json.loads(self._progress.read_text())
        if not resume:
            raise ValueError(
                f"{self._written} is of a run that did not end: resume it (--resume), or delete the file"
            )
        for name, value in settings.items():
            if done["settings"].get(name) != value:
                raise ValueError(
                    f"{self._written} was begun with another {name}, {done['settings'].get(name)}, got {value}: "
                    "go on with the same, or delete the file"
                )
        return done


def file_stamp(path: Path, output: str) -> list[list[Any]]:
    """Name, size and time of change of a file, or of a folder's files but the output's; nothing for a name on the
    hub."""
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    left_out = (output, f"{output}.part", f"{output}.part.json")
    return [
        [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.name not in left_out
    ]
