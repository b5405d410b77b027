"""Stores the outputs of a frozen encoder on disk. The encoder runs once, and each epoch computes the head only."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_folder
from fastenc._base.progress import progress_bar
from fastenc.models.adapters.adaptations import encoder_of
from fastenc.models.encoder import Encoder
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.nn.pooling import pool
from fastenc.packing import ModelArguments, PackedBatch, length_sorted_batches

MANIFEST, VECTORS = "manifest.json", "vectors"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARD_BYTES = 2**26


class FeatureCache:
    """The frozen encoder's outputs for the examples of a data set, in their order. The files are memory-mapped.

    Args:
        folder: folder of one data set, written by :func:`cache_features`.
        rows: number of vectors of each example.
        per_token: True: there is a vector for every token. False: one for the first token of each sequence.
    Raises: ValueError if files are missing or corrupt, or hold another number of vectors than ``rows``.
    """

    def __init__(self, folder: Path, rows: Sequence[int], per_token: bool):
        self.per_token = per_token
        load_file = require("safetensors.torch", extra="models").load_file
        error_class = require("safetensors", extra="models").SafetensorError
        try:
            shards = json.loads((folder / MANIFEST).read_text())["shards"]
            self.shards = [load_file(folder / _shard(i))[VECTORS] for i in range(len(shards))]
        except (OSError, ValueError, KeyError, error_class) as error:
            raise ValueError(
                f"{folder} is corrupt ({error}): remove it, and it is written again"
            ) from error
        self.rows: list[tuple[int, int, int]] = []  # shard, first row, row after the last
        for number, (shard, examples) in enumerate(zip(self.shards, shards, strict=True)):
            in_shard = rows[len(self.rows) : len(self.rows) + examples]
            offsets = [0, *accumulate(in_shard)]
            if offsets[-1] != shard.shape[0]:
                raise ValueError(
                    f"{folder / _shard(number)} must hold {offsets[-1]} vectors, got {shard.shape[0]}: remove the "
                    "folder, and it is written again"
                )
            self.rows += [(number, a, b) for a, b in zip(offsets, offsets[1:], strict=False)]

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, batch: PackedBatch, indices: Sequence[int]) -> PackedBatch:
        """The batch with the encoder's stored output in ``hidden``: float32 (vectors, hidden_size).

        Args:
            batch: a batch of some examples.
            indices: the indices of these examples.
        Returns: without ``per_token``, a batch in which each sequence consists of its first token.
        """
        vectors = [
            self.shards[shard][start:stop]
            for shard, start, stop in map(self.rows.__getitem__, indices)
        ]
        hidden = torch.cat(vectors).float()
        if self.per_token:
            return replace(batch, hidden=hidden)
        # The head reads first tokens only, so the other tokens are left out.
        count = hidden.shape[0]
        return PackedBatch(
            input_ids=batch.input_ids[batch.cu_seqlens[:-1].long()],
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
            max_seqlen=1,
            position_ids=torch.zeros(count, dtype=torch.int64),
            hidden=hidden,
        )


def cache_features(
    model: PretrainedModel,
    examples: Sequence[Any],
    collate: Callable[[Sequence[Any]], ModelArguments],
    folder: str | Path,
    *,
    per_token: bool,
    dtype: torch.dtype = torch.float32,
    autocast_dtype: torch.dtype | None = None,
    batch_size: int = 32,
    show_progress: bool | None = None,
) -> FeatureCache:
    """Compute a frozen encoder's outputs for examples, unless they are in ``folder`` already.

    The encoder's dropout is off, also during training. BERT's pooler counts as part of the head and is trained.

    The vectors are stored in a subfolder, which gets its name when it is complete. The name is a fingerprint of the
    encoder's weights, the token ids and the options below. The token ids depend on the texts, the tokenizer and
    max_length. Vectors are written in shards of 64 MiB, so that only one shard is in memory.

    Args:
        model: its encoder must be frozen (:func:`fastenc.adapt.freeze_encoder`).
        examples: a data set.
        collate: function of examples that returns {"batch": PackedBatch, ...}, with the sequences in the examples'
            order.
        folder: folder of all cached data sets.
        per_token: True: store the vectors of all tokens, for a head that reads every token. False: store those of the
            first token of each sequence.
        dtype: dtype on disk: torch.float32, torch.float16 or torch.bfloat16.
        autocast_dtype: dtype of the encoder's matrix products under autocast; None: no autocast.
        batch_size: number of examples that the encoder takes at a time.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError for an encoder that is not frozen, a model without a head, another dtype, or a corrupt folder.
    """
    encoder = encoder_of(model)
    if any(p.requires_grad for name, p in encoder.named_parameters() if "pooler" not in name):
        raise ValueError(
            "features can be cached for a frozen encoder only, got one that is trained: call freeze_encoder(model)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"the model must have a head to train on its encoder's outputs, got {type(model).__name__} without one: "
            "train the encoder, or call add_adaptation"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}: give one of them")
    encoded = lambda chosen: model.encoder_batch(collate(chosen)["batch"])
    inputs = _Inputs(examples, encoded)
    rows = inputs.tokens if per_token else inputs.sequences
    values: dict[str, Any] = {
        "encoder": _digest_encoder(encoder),
        "inputs": inputs.digest,
        "vectors": "every token" if per_token else "first token",
        "dtype": str(dtype),
        "autocast": str(autocast_dtype),
    }
    target = Path(folder) / hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
    if not target.exists():
        shards = _shards(rows, SHARD_BYTES // (encoder.config.output_size * dtype.itemsize))
        batches = [
            (shard, [shard[index] for index in chosen])
            for shard in shards
            for chosen in length_sorted_batches([inputs.tokens[i] for i in shard], batch_size)
        ]
        bar = progress_bar(batches, "features", "batch", show_progress)

        def compute(chosen: list[int]) -> Tensor:
            batch = encoded([examples[index] for index in chosen])
            return _outputs(encoder, batch, per_token, autocast_dtype).to(dtype)

        with evaluation_mode(encoder):
            values["shards"] = [len(shard) for shard in shards]
            _write(target, json.dumps(values, indent=1), bar, rows, compute)
    return FeatureCache(target, rows, per_token)


class _Inputs:
    """The numbers of tokens and sequences of each example, and a SHA-256 digest of all inputs of the encoder."""

    def __init__(self, examples: Sequence[Any], encoded: Callable[[Sequence[Any]], PackedBatch]):
        self.tokens: list[int] = []
        self.sequences: list[int] = []
        digest = hashlib.sha256()
        for example in examples:
            batch = encoded([example])
            self.tokens.append(batch.total_tokens)
            self.sequences.append(batch.num_sequences)
            given = (batch.cu_seqlens, batch.input_ids, batch.token_type_ids, batch.global_tokens)
            for tensor in given:
                if tensor is not None:
                    digest.update(_bytes(tensor))
        self.digest = digest.hexdigest()


def _digest_encoder(encoder: Encoder) -> str:
    """SHA-256 of the encoder's configuration, adaptation and weights, without the pooler."""
    digest = hashlib.sha256(f"{encoder.config!r} {encoder.adapted.current}".encode())
    for name, tensor in encoder.state_dict().items():
        if not name.startswith("pooler."):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def _shards(rows: Sequence[int], limit: int) -> list[range]:
    """Ranges of consecutive examples with at most ``limit`` rows each, or of a single example."""
    shards, first, held = [], 0, 0
    for index, count in enumerate(rows):
        if held and held + count > limit:
            shards.append(range(first, index))
            first, held = index, 0
        held += count
    return [*shards, range(first, len(rows))]


@torch.inference_mode()
def _outputs(
    encoder: Encoder, batch: PackedBatch, per_token: bool, autocast_dtype: torch.dtype | None
) -> Tensor:
    """The vectors of a batch that are stored: (vectors, hidden_size)."""
    device = next(encoder.parameters()).device
    batch = batch.to(device)
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        hidden = encoder(batch, pooled=False).last_hidden_state
    return hidden if per_token else pool(hidden, batch.cu_seqlens, "cls")


def _write(
    target: Path,
    manifest: str,
    batches: Iterable[tuple[range, list[int]]],
    rows: Sequence[int],
    compute: Callable[[list[int]], Tensor],
) -> None:
    """Write a file for every shard and the manifest, then rename the folder into place."""
    save_file = require("safetensors.torch", extra="models").save_file

    def write(folder: Path) -> None:
        held: dict[int, Tensor] = {}
        number = 0
        for shard, chosen in batches:
            vectors = compute(chosen).cpu().split([rows[index] for index in chosen])
            held.update(zip(chosen, vectors, strict=True))
            if len(held) == len(shard):
                tensors = {VECTORS: torch.cat([held[index] for index in shard])}
                save_file(tensors, folder / _shard(number))
                held, number = {}, number + 1
        (folder / MANIFEST).write_text(manifest)

    write_folder(target, write)


def _shard(number: int) -> str:
    return f"vectors-{number:05d}.safetensors"
