"""An encoder's states of texts, batch by batch; none is kept."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastenc._progress import progress_bar
from fastenc.models.word_vectors import resolve_layers, visit_states
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.packing import PackedBatch, pack_sequences

CHUNK = 4096  # texts that are tokenised, and sorted by length, together
Visit = Callable[[int, Tensor, PackedBatch, list[int]], None]


def visit_texts(
    encoder: Any,
    texts: Iterable[str],
    visit: Visit,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    show_progress: bool | None = False,
) -> None:
    """Run the encoder over texts and call ``visit(layer, state, batch, indices)`` with each state when it is there.

    Args:
        texts: cut at the encoder's positions.
        visit: layer: number of the state, 0 for the embeddings' output; state: (total_tokens, hidden_size); indices: of
            the batch's texts among all.
        layers: states to visit; None: all.
    Raises: ValueError without a tokenizer, or for a layer that does not exist.
    """
    depth = encoder.config.num_layers
    wanted = resolve_layers(range(depth + 1) if layers is None else layers, depth)
    with evaluation_mode(encoder), torch.inference_mode():
        for batch, indices in batches_of(encoder, texts, batch_size, show_progress):
            with_batch = partial(_visit_batch, visit, batch, indices)
            visit_states(encoder, batch, wanted, with_batch)


def _visit_batch(
    visit: Visit, batch: PackedBatch, indices: list[int], layer: int, state: Tensor
) -> None:
    visit(layer, state, batch, indices)


def batches_of(
    encoder: Any, texts: Iterable[str], batch_size: int, show_progress: bool | None
) -> Iterator[tuple[PackedBatch, list[int]]]:
    """Batches of similar lengths on the encoder's device, and the indices of their texts among all.

    Raises: ValueError without a tokenizer.
    """
    if encoder.tokenizer is None:
        raise ValueError(
            "texts need the checkpoint's tokenizer.json: load the model from a folder that has one"
        )
    device = encoder.embeddings.word.weight.device
    batches = _token_batches(encoder, texts, batch_size)
    for indices, ids in progress_bar(batches, "encode", "batch", show_progress):
        yield pack_sequences(ids).to(device), indices


def _token_batches(
    encoder: Any, texts: Iterable[str], batch_size: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    own = type(encoder.tokenizer).from_str(encoder.tokenizer.to_str())
    own.no_padding()
    own.enable_truncation(encoder.positions)
    rest, first = iter(texts), 0
    while chunk := list(islice(rest, CHUNK)):
        ids = [encoding.ids for encoding in own.encode_batch_fast(chunk)]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            yield [first + index for index in chosen], [ids[index] for index in chosen]
        first += len(chunk)


def inner_tokens(batch: PackedBatch) -> Tensor:
    """bool (total_tokens,): not the first or the last token of a sequence, which are special."""
    inside = torch.ones(batch.total_tokens, dtype=torch.bool, device=batch.cu_seqlens.device)
    inside[batch.cu_seqlens[:-1].long()] = False
    inside[batch.cu_seqlens[1:].long() - 1] = False
    return inside
