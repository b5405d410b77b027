"""Sharded tensors on disk: every process writes the rows it has, and any number of processes reads them again.

The files are safetensors, whose headers say where the rows belong, and not those of torch.distributed.checkpoint: the
index of those is a pickle, which runs code when it is read.
"""

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastenc._extras import require
from fastenc.train.parallel import rows_of


class _Piece(NamedTuple):
    """Rows of a tensor from ``start`` on, in an open file."""

    start: int
    file: Any


def write_rows(folder: Path, stem: str, tensors: dict[str, Tensor], process: int, processes: int):
    """Write this process's rows of sharded tensors; whole ones are written by the first process alone.

    The file is stem.safetensors where all tensors are whole, stem-00000-of-00002.safetensors otherwise.
    """
    save_file = require("safetensors.torch", extra="train").save_file
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    held, starts = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            starts[name] = rows_of(tensor)[0]
            held[name] = tensor.to_local().detach().cpu().contiguous()
        elif process == 0:
            held[name] = tensor.detach().cpu().contiguous()
    if sharded:
        name = f"{stem}-{process:05d}-of-{processes:05d}.safetensors"
        save_file(held, folder / name, metadata={"first rows": json.dumps(starts)})
    elif process == 0:
        save_file(held, folder / f"{stem}.safetensors")


class RowReader:
    """Reads what ``write_rows`` wrote, whatever the number of its writers; a context manager.

    Raises: ValueError when a file is missing.
    """

    def __init__(self, folder: Path, stem: str):
        pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-(\d{{5}}))?\.safetensors")
        found = [
            match for path in sorted(folder.iterdir()) if (match := pattern.fullmatch(path.name))
        ]
        expected = int(found[0][2] or 1) if found else 1
        if len(found) != expected:
            raise ValueError(f"it has {len(found)} of {expected} files {stem}*.safetensors")
        self._paths = [folder / match[0] for match in found]
        self._stack = ExitStack()
        self._pieces: dict[str, list[_Piece]] = {}

    def __enter__(self) -> "RowReader":
        safe_open = require("safetensors", extra="train").safe_open
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            starts = json.loads((file.metadata() or {}).get("first rows", "{}"))
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                self._pieces.setdefault(name, []).append(_Piece(starts.get(name, 0), file))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> Iterable[str]:
        return self._pieces

    def read(self, name: str, like: Tensor) -> Tensor:
        """A tensor as ``like`` is: sharded in the same way, on the same device; a single number is never sharded."""
        pieces = self._pieces[name]
        if not pieces[0].file.get_slice(name).get_shape():
            return pieces[0].file.get_tensor(name).to(like.device)
        if not isinstance(like, DTensor):
            return self._rows(name, 0, like.shape[0]).to(like.device)
        local = self._rows(name, *rows_of(like)).to(like.device)
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        rows: list[Tensor] = []
        for piece in self._pieces[name]:
            stored = piece.file.get_slice(name)
            first, last = (
                max(start - piece.start, 0),
                min(stop - piece.start, stored.get_shape()[0]),
            )
            if first < last or not rows:
                rows.append(stored[first : max(first, last)])
        return torch.cat(rows)
