"""Runs an encoder over texts and passes each layer's output to a function, without keeping it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from fastenc._base.progress import progress_bar
from fastenc.models.embedding.states import resolve_layers, visit_states
from fastenc.models.encoder import Encoder
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.packing import PackedBatch, length_sorted_batches, pack_sequences
from fastenc.text.special_tokens import tokens_around_text
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits

TEXTS_AT_ONCE = 4096  # number of texts that are tokenised and sorted by length together
Visit = Callable[[int, Tensor, PackedBatch, list[int]], None]


def visit_texts(
    encoder: Encoder,
    texts: Iterable[str],
    visit: Visit,
    *,
    layers: Sequence[int] | None = None,
    batch_size: int = 32,
    show_progress: bool | None = False,
) -> None:
    """Run the encoder over texts and call ``visit(layer, state, batch, indices)`` with each layer's output.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        texts: longer ones are cut at the encoder's number of positions.
        visit: a function of ``layer``: 0 for the embeddings' output, 1 for the first layer's; ``state``:
            (total_tokens, hidden_size), the output; ``batch``; ``indices``: indices of the batch's texts.
        layers: layers to visit; None: all.
    Raises: ValueError for an encoder without a tokenizer, or a layer that does not exist.
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
    encoder: Encoder, texts: Iterable[str], batch_size: int, show_progress: bool | None
) -> Iterator[tuple[PackedBatch, list[int]]]:
    """(batch on the encoder's device, indices of its texts). A batch has texts of similar lengths.

    Raises: ValueError for an encoder without a tokenizer.
    """
    if encoder.tokenizer is None:
        raise ValueError(
            "the encoder must have a tokenizer, got none: load it from a folder with a tokenizer.json"
        )
    device = encoder.embeddings.word.weight.device
    batches = _token_batches(encoder.tokenizer, encoder.positions, texts, batch_size)
    for indices, ids in progress_bar(batches, "encode", "batch", show_progress):
        yield pack_sequences(ids).to(device), indices


def _token_batches(
    tokenizer: TokenizerLike, positions: int, texts: Iterable[str], batch_size: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(indices of the texts, their token ids) of each batch."""
    copy = without_limits(tokenizer)
    copy.enable_truncation(positions)
    rest, first = iter(texts), 0
    while together := list(islice(rest, TEXTS_AT_ONCE)):
        ids = [encoding.ids for encoding in copy.encode_batch_fast(together)]
        for chosen in length_sorted_batches([len(each) for each in ids], batch_size):
            yield [first + index for index in chosen], [ids[index] for index in chosen]
        first += len(together)


def inner_tokens(batch: PackedBatch, tokenizer: TokenizerLike) -> Tensor:
    """True for the tokens of the texts, False for the special tokens around them: bool (total_tokens,).

    Args:
        tokenizer: the tokenizer of the texts. T5's, for example, adds a special token at the end only.
    """
    before, after = map(len, tokens_around_text(tokenizer))
    cu_seqlens = batch.cu_seqlens.long()
    lengths = cu_seqlens.diff()
    edges = torch.stack((cu_seqlens[:-1] + before, cu_seqlens[1:] - after))
    begin, stop = edges.repeat_interleave(lengths, 1, output_size=batch.total_tokens)
    places = torch.arange(batch.total_tokens, device=cu_seqlens.device)
    return (places >= begin) & (places < stop)
