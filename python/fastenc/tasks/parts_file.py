"""A file that is written part by part, so that a killed run can be resumed."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastenc._files import write_atomically


class PartsFile:
    """Appends finished parts to ``output``.part and counts them in ``output``.part.json. A context manager.

    When the context ends without an error, .part is renamed to ``output``.

    Args:
        settings: JSON values that must be the same in a resumed run.
        resume: continue a killed run after its last finished part; if there is none, start.
    Attributes:
        parts: number of finished parts.
    Raises: ValueError if there is an unfinished run and ``resume`` is False, or if it had other settings.
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
        # A killed run may have appended a part that it did not count: that part is written again.
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

    def append(self, part: Iterable[bytes]) -> None:
        """Add a part, given in pieces. It is on the disk when this returns."""
        for piece in part:
            self._file.write(piece)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._done = {**self._done, "parts": self.parts + 1, "bytes": self._file.tell()}
        text = json.dumps(self._done)
        write_atomically(self._progress, lambda path: path.write_text(text))

    def _read_progress(self, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
        """The progress of an earlier run: {"settings", "parts", "bytes"}; no parts if there is none."""
        if not (self._written.exists() and self._progress.exists()):
            self._progress.unlink(missing_ok=True)
            return {"settings": settings, "parts": 0, "bytes": 0}
        done = json.loads(self._progress.read_text())
        if not resume:
            raise ValueError(
                f"{self._written} belongs to a run that did not finish: resume it (--resume), or delete the file"
            )
        for name, value in settings.items():
            if done["settings"].get(name) != value:
                raise ValueError(
                    f"{self._written} was begun with {name}={done['settings'].get(name)}, got {value}: use the same "
                    "value, or delete the file"
                )
        return done


def file_stamp(path: Path, output: str) -> list[list[Any]]:
    """[name, size in bytes, time of change] of a file, or of the files in a folder except ``output`` and its parts.

    It is [] for a name on the hub. A resumed run compares it to see whether a file has changed.
    """
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    left_out = (output, f"{output}.part", f"{output}.part.json")
    return [
        [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.name not in left_out
    ]
