"""The optimiser's state on disk: one safetensors file, or one a process where FSDP shards the tensors.

torch.distributed.checkpoint writes the shards and reads them into any number of processes. Its HuggingFace format keeps
the shards' positions in the safetensors headers; its default index is a pickle, which runs code when it is read.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    load,
    save,
)
from torch.distributed.tensor import DTensor

from fastenc._extras import require
from fastenc.train.parallel import rows_of

STEM = "optimizer"  # of the file, or the name of the folder of shards


def write_optimizer(folder: Path, tensors: dict[str, Tensor], is_main_process: bool) -> None:
    """Write tensors to ``folder``. All processes call it together.

    Raises: OSError on every process if one could not write its shards.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        writer = HuggingFaceStorageWriter(str(folder / STEM), save_distributed=True)
        try:
            save(tensors, storage_writer=writer)
        except CheckpointException as error:
            raise OSError(str(next(iter(error.failures.values()))[0])) from error
    elif is_main_process:
        save_file = require("safetensors.torch", extra="train").save_file
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / f"{STEM}.safetensors")


def read_optimizer(
    folder: Path, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, entry, tensor) of what ``write_optimizer`` wrote, whatever the number of its processes.

    A tensor is sharded as its parameter is, on the same device; a single number is whole.
    Raises: ValueError when rows are missing.
    """
    shards = folder / STEM
    state = _read_shards(shards, parameters) if shards.is_dir() else _read_files(folder, parameters)
    for key, tensor in state:
        name, entry = key.split("|")
        yield name, entry, tensor


def _read_shards(folder: Path, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    reader = HuggingFaceStorageReader(str(folder))
    stored_tensors: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    state: dict[str, Any] = {}
    for key, stored in stored_tensors.items():
        parameter = parameters[key.split("|")[0]].detach()
        dtype, shape = stored.properties.dtype, stored.size
        if shape and sum(chunk.sizes.numel() for chunk in stored.chunks) != parameter.numel():
            raise ValueError(f"{folder.name} holds {list(shape)} of {key}: a file is missing")
        state[key] = (
            torch.empty_like(parameter, dtype=dtype) if shape else torch.empty((), dtype=dtype)
        )
    with warnings.catch_warnings():  # that this process is the only one
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, storage_reader=reader)
    return iter(state.items())


def _read_files(folder: Path, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Of one file with whole tensors, or, as earlier versions wrote shards, of one a process with some rows each."""
    safe_open = require("safetensors", extra="train").safe_open
    pattern = re.compile(rf"{STEM}(-\d{{5}}-of-(\d{{5}}))?\.safetensors")
    found = [match for path in sorted(folder.iterdir()) if (match := pattern.fullmatch(path.name))]
    expected = int(found[0][2] or 1) if found else 1
    if len(found) != expected:
        raise ValueError(f"it has {len(found)} of {expected} files {STEM}*.safetensors")
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(folder / match[0], "pt")) for match in found]
        for key in {key: None for file in files for key in file.keys()}:  # noqa: SIM118, no dictionary
            rows = [file.get_tensor(key) for file in files if key in file.keys()]  # noqa: SIM118
            parameter = parameters[key.split("|")[0]]
            whole = torch.cat(rows) if rows[0].shape else rows[0]
            yield (
                key,
                _sharded_like(parameter, whole) if whole.shape else whole.to(parameter.device),
            )


def _sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    start, stop = rows_of(parameter)
    return DTensor.from_local(
        whole[start:stop].to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
