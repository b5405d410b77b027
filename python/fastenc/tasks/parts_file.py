"""A file that is written part by part, so that a killed run can be resumed."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fastenc._base.files import write_atomically, write_text_atomically
from fastenc._base.locks import open_locked
from fastenc._base.resumption import check_begun_with
from fastenc.models import PretrainedModel
from fastenc.models.checkpoint import dtype_name

SECONDS = 3.0  # after which finished items are kept


class PartsFile:
    """Appends finished parts to ``output``.part and counts their items in ``output``.part.json. A context manager.

    A killed run loses what it appended in its last ``SECONDS``. A run that ends with an error or by Ctrl-C loses
    nothing. When the context ends without an error, .part is renamed to ``output``. Other
    processes cannot use the same file in the meantime.

    Args:
        items: what is counted, such as "texts".
        settings: JSON values that must be the same in a resumed run.
        resume: continue an unfinished run after its last kept part; if there is none, start.
    Attributes:
        done: number of items in the finished parts.
    Raises: ValueError if another process writes the file, if there is an unfinished run and ``resume`` is False, or if
        that run had other settings. OSError with what is kept if the disk is full.
    """

    def __init__(self, output: Path, items: str, settings: Mapping[str, object], resume: bool):
        self.output, self.done = output, 0
        self._items, self._resume = items, resume
        self._settings = json.loads(json.dumps(settings))
        self._written = output.with_name(f"{output.name}.part")
        self._progress = output.with_name(f"{output.name}.part.json")
        self._bytes = self._kept = 0
        self._converted = False

    def __enter__(self) -> "PartsFile":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open_locked(self._written)
        except BlockingIOError:
            raise ValueError(
                f"{self.output} is being written by another run: wait for it, or give another output"
            ) from None
        try:
            self._read_progress()
            # A killed run may have appended a part that it did not count: that part is written again.
            self._file.truncate(self._bytes)
            self._file.seek(self._bytes)
        except BaseException:
            self._file.close()
            raise
        self._kept_at = time.monotonic()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._finish()
                return
            with suppress(OSError):  # then what was kept before is kept
                self._keep()
            if not self._kept:
                self._written.unlink(missing_ok=True)
        finally:
            self._file.close()
        if isinstance(error, KeyboardInterrupt) and not error.args:
            raise KeyboardInterrupt(f"interrupted; {self._what_is_kept()}") from error

    def append(self, part: Iterable[bytes | memoryview], items: int) -> None:
        """Add a part, given in pieces, with this number of items."""
        try:
            for piece in part:
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._file.write(rest) :]
            self._bytes, self.done = self._file.tell(), self.done + items
            if time.monotonic() - self._kept_at >= SECONDS:
                self._keep()
        except OSError as error:
            with suppress(OSError):
                self._keep()
            raise OSError(
                f"{self._written} could not be written ({error}); {self._what_is_kept()}"
            ) from error

    def check_total(self, total: int, inputs: str | Path) -> None:
        """Raises: ValueError if another number of items is finished than ``inputs`` had when the run began."""
        if self.done != total:
            raise ValueError(
                f"{inputs} must not change while it is read, got {self.done:,} {self._items} in place of {total:,}: "
                f"delete {self._written} and run again"
            )

    def convert(self, write: Callable[[Path, Path], object]) -> None:
        """Write ``output`` from the finished parts by ``write(parts, output)``, instead of renaming them."""
        self._keep()
        try:
            write_atomically(self.output, lambda path: write(self._written, path))
        except OSError as error:
            raise OSError(
                f"{self.output} could not be written ({error}); {self._what_is_kept()}"
            ) from error
        self._converted = True

    def _finish(self) -> None:
        os.fsync(self._file.fileno())
        self._progress.unlink(missing_ok=True)
        if self._converted:
            self._written.unlink()
        else:
            os.replace(self._written, self.output)

    def _keep(self) -> None:
        """Flush the finished parts to the disk, and then their number."""
        if self.done == self._kept:
            return
        os.fsync(self._file.fileno())
        values = {"settings": self._settings, "items": self.done, "bytes": self._bytes}
        write_text_atomically(self._progress, json.dumps(values))
        self._kept, self._kept_at = self.done, time.monotonic()

    def _what_is_kept(self) -> str:
        if not self._kept:
            return f"no {self._items} were finished, so nothing is kept"
        return (
            f"{self._kept:,} finished {self._items} are kept in {self._written}: run the same again with resume=True "
            "to continue after them"
        )

    def _read_progress(self) -> None:
        """Take over the progress of an unfinished run, if there is one."""
        if not self._progress.exists():
            return
        kept = json.loads(self._progress.read_text())
        if os.fstat(self._file.fileno()).st_size < kept["bytes"]:  # .part was deleted
            self._progress.unlink()
            return
        if not self._resume:
            raise ValueError(
                f"{self._written} belongs to a run that did not finish, with {kept['items']:,} {self._items}: continue "
                "it with resume=True, or delete the file"
            )
        check_begun_with(kept["settings"], self._settings, self._written, "delete the file")
        self.done = self._kept = kept["items"]
        self._bytes = kept["bytes"]


def file_stamp(path: Path, output: str) -> list[list[str | int]]:
    """[name, size in bytes, time of change] of a file, or of the files in a folder except ``output`` and its parts.

    It is [] for a name on the hub. A resumed run compares it to see whether a file has changed.
    """
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    left_out = (output, f"{output}.part", f"{output}.part.json")
    return [
        [f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.name not in left_out
    ]


def run_settings(
    model: PretrainedModel, model_name: str, inputs: str | Path, output: Path
) -> dict[str, object]:
    """What a resumed run must have again: the model's files and its weights' format, and the input file."""
    weights = "int8" if model.in_8_bits else dtype_name(next(model.parameters()).dtype)
    files = file_stamp(Path(model_name), output.name) if model_name else []
    return {
        "dtype": weights,
        "model": [model_name, files],
        "inputs": [str(inputs), file_stamp(Path(inputs), output.name)],
    }
