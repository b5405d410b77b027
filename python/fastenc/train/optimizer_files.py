"""The optimiser's state on disk: one safetensors file, or one for each process if FSDP shards the tensors.

torch.distributed.checkpoint writes the shards and reads them into any number of processes. Its Hugging Face format
stores the shards' positions in the safetensors headers. Its default format has a pickle as index, and reading a pickle
can run code. torch.distributed's parts are imported where they are needed, because they take over a second.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc.train.parallel import rows_of

STEM = "optimizer"  # of the file's name; also the name of the folder of shards


def write_optimizer(folder: Path, tensors: dict[str, Tensor], is_main_process: bool) -> None:
    """Write tensors to ``folder``. All processes must call it.

    Raises: OSError on every process if one of them cannot write its shards.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        from torch.distributed.checkpoint import (
            CheckpointException,
            HuggingFaceStorageWriter,
            save,
        )

        writer = HuggingFaceStorageWriter(str(folder / STEM), save_distributed=True)
        try:
            save(tensors, storage_writer=writer)
        except CheckpointException as error:
            raise OSError(str(next(iter(error.failures.values()))[0])) from error
    elif is_main_process:
        save_file = require("safetensors.torch", extra="train").save_file
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomically(folder / f"{STEM}.safetensors", lambda path: save_file(whole, path))


def read_optimizer(
    folder: Path, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, entry, tensor) of what ``write_optimizer`` wrote with any number of processes.

    A tensor is sharded like its parameter and on the same device. Scalars are not sharded.
    Raises: ValueError if rows are missing.
    """
    shards = folder / STEM
    state = _read_shards(shards, parameters) if shards.is_dir() else _read_files(folder, parameters)
    for key, tensor in state:
        name, entry = key.split("|")
        yield name, entry, tensor


def _read_shards(folder: Path, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(str(folder))
    stored_tensors: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    state: dict[str, Any] = {}
    for key, stored in stored_tensors.items():
        parameter = parameters[key.split("|")[0]].detach()
        dtype, shape = stored.properties.dtype, stored.size
        if shape and sum(chunk.sizes.numel() for chunk in stored.chunks) != parameter.numel():
            raise ValueError(
                f"{folder.name} must hold {list(parameter.shape)} of {key}, got {list(shape)}: a file is missing"
            )
        state[key] = (
            torch.empty_like(parameter, dtype=dtype) if shape else torch.empty((), dtype=dtype)
        )
    with warnings.catch_warnings():  # of a run with a single process
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, storage_reader=reader)
    return iter(state.items())


def _read_files(folder: Path, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Read one file with whole tensors, or the shards of earlier versions: a file with some rows for each process."""
    safe_open = require("safetensors", extra="train").safe_open
    pattern = re.compile(rf"{STEM}(-\d{{5}}-of-(\d{{5}}))?\.safetensors")
    matches = [
        match for path in sorted(folder.iterdir()) if (match := pattern.fullmatch(path.name))
    ]
    expected = int(matches[0][2] or 1) if matches else 1
    if len(matches) != expected:
        raise ValueError(f"it has {len(matches)} of {expected} files {STEM}*.safetensors")
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(folder / match[0], "pt")) for match in matches]
        for key in {key: None for file in files for key in file.keys()}:  # noqa: SIM118, no dictionary
            rows = [file.get_tensor(key) for file in files if key in file.keys()]  # noqa: SIM118
            parameter = parameters[key.split("|")[0]]
            whole = torch.cat(rows) if rows[0].shape else rows[0]
            yield (
                key,
                _sharded_like(parameter, whole) if whole.shape else whole.to(parameter.device),
            )


def _sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A tensor sharded like the parameter, and on its device."""
    from torch.distributed.tensor import DTensor

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
