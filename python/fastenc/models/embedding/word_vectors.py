"""Contextual vectors of words, from one or several layers of an encoder."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.progress import Counter
from fastenc._base.transfer import send
from fastenc.models.embedding.encoder_like import EncoderLike
from fastenc.models.embedding.space import check_space
from fastenc.models.embedding.states import resolve_layers, visit_states
from fastenc.models.embedding.word_windows import WordWindow, windows_of, words_of
from fastenc.nn import ScalarMix
from fastenc.nn.evaluation_mode import without_dropout
from fastenc.ops import segment_pool
from fastenc.packing import PackedBatch, check_batch_size, length_sorted_batches, pack_sequences

LAYERS = (-4, -3, -2, -1)
COMBINATIONS = ("mean", "sum", "concat", "last")
SUBWORDS = ("first", "mean", "last")


@dataclass(frozen=True)
class WordVectors:
    """The vectors of the words of several sentences, concatenated.

    Fields:
        vectors: (total_words, width).
        offsets: int64 (sentences+1,): sentence i has rows offsets[i] to offsets[i+1].
    """

    vectors: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sentence: int) -> Tensor:
        """(words, width) of one sentence."""
        index = range(len(self))[sentence]
        return self.vectors[self.offsets[index] : self.offsets[index + 1]]


def embed_words(
    encoder: EncoderLike,
    sentences: Iterable[Sequence[str] | str],
    *,
    layers: Sequence[int] | None = None,
    combine: str | ScalarMix = "mean",
    subwords: str = "mean",
    batch_size: int = 32,
    out: str | Path | None = None,
    show_progress: bool | None = None,
) -> WordVectors:
    """One vector for every word of every sentence.

        vector = combine_{l in layers} pool_{t in subwords of the word} h_l[t]

    Layers are summed as they are computed, so the additional memory is one vector for each word of a batch. A sentence
    that is longer than the encoder's positions is encoded in overlapping windows; a word's vector is taken from the
    window in which the word is most central. A word without tokens is replaced by the unknown token. Of a word with
    more tokens than a window, only the tokens that fit are used.

    Args:
        encoder: a :class:`fastenc.models.Encoder` with a tokenizer.
        sentences: lists of words; a str is split at white space. An iterable that is not a list is iterated twice, so
            it can stream a file of any size; an iterator is converted to a list.
        layers: numbers of the states: 0 is the embeddings' output, 1 the first layer's output; negative numbers count
            from the last. None: the last four states, or all states of a model with fewer.
        combine: "mean", "sum" or "concat" of the layers, "last" (only the last entry of ``layers``), or a
            :class:`fastenc.nn.ScalarMix` with a weight for each layer.
        subwords: pooling of a word's tokens: "first", "last" or "mean".
        batch_size: windows per batch. Batches have windows of similar length.
        out: a .npy file to which the vectors are written while they are computed, in float32. The result is a memory
            map of it.
        show_progress: show a progress bar on stderr. None shows a bar if stderr is a terminal, else a line every ten
            seconds.
    Returns: ``vectors`` (total_words, hidden_size), or with "concat" (total_words, len(layers) * hidden_size), in the
        encoder's dtype on the CPU; ``offsets`` int64 (sentences+1,): sentence i has rows offsets[i] to offsets[i+1].
        ``result[i]`` is the vectors of sentence i.
    Raises: ValueError for layers that do not exist, an unknown combination or pooling, an encoder without tokenizer,
        and if the result does not fit into memory or on the disk.
    Source: Devlin et al. 2018, arXiv:1810.04805 (section 5.3).
    """
    depth = encoder.config.num_layers
    taken = resolve_layers(LAYERS[-(depth + 1) :] if layers is None else layers, depth)
    _check_options(encoder, taken, combine, subwords, batch_size, out)
    if isinstance(sentences, Iterator):
        sentences = list(sentences)
    elif isinstance(sentences, str):
        raise ValueError("embed_words takes a list of sentences, got one str: put it in a list")
    offsets = torch.tensor([0, *accumulate(len(words_of(each)) for each in sentences)])
    width = encoder.config.hidden_size * (len(taken) if combine == "concat" else 1)
    dtype = next(encoder.parameters()).dtype if out is None else torch.float32
    shape = (int(offsets[-1]), width)
    check_space(shape, dtype, out)
    pool = partial(_pool, layers=taken, combine=combine, subwords=subwords)

    def fill(vectors: Tensor) -> None:
        calls = -(-(len(offsets) - 1) // batch_size)
        with (
            encoder.frozen.during_call(encoder, calls),
            Counter("embedding", "words", shape[0], show=show_progress) as counter,
        ):
            for rows, values in _batches(encoder, sentences, pool, batch_size):
                vectors.index_copy_(0, rows, values.to("cpu", dtype))
                counter.add(len(rows))

    if out is not None:
        return WordVectors(_write(Path(out), shape, fill), offsets)
    vectors = torch.empty(shape, dtype=dtype)
    fill(vectors)
    return WordVectors(vectors, offsets)


def _write(out: Path, shape: tuple[int, int], fill: Callable[[Tensor], None]) -> Tensor:
    """Write float32 vectors to a .npy file while ``fill`` computes them.

    Returns: a memory map of the file.
    """
    numpy = require("numpy", extra="train")

    def write(path: Path) -> None:
        file = numpy.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=shape)
        if shape[0]:
            fill(torch.from_numpy(file))
        file.flush()

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, write)
    if not shape[0]:  # an empty file cannot be mapped
        return torch.empty(shape)
    # Copy on write, because torch has no read-only tensors.
    return torch.from_numpy(numpy.load(out, mmap_mode="c"))


def _check_options(
    encoder: EncoderLike,
    layers: Sequence[int],
    combine: str | ScalarMix,
    subwords: str,
    batch_size: int,
    out: str | Path | None,
) -> None:
    if encoder.tokenizer is None:
        raise ValueError(
            "embed_words needs the checkpoint's tokenizer.json: load the model with from_pretrained from a folder "
            "that has one, or set model.tokenizer"
        )
    if isinstance(combine, ScalarMix):
        if len(combine.scalars) != len(layers):
            raise ValueError(
                f"combine must be a ScalarMix with a weight for each of the {len(layers)} layers, got one with "
                f"{len(combine.scalars)}: give as many layers"
            )
    elif combine not in COMBINATIONS:
        raise ValueError(
            f"combine must be one of {', '.join(COMBINATIONS)} or a ScalarMix, got {combine!r}"
        )
    if subwords not in SUBWORDS:
        raise ValueError(f"subwords must be one of {', '.join(SUBWORDS)}, got {subwords!r}")
    check_batch_size(batch_size)
    if out is not None and Path(out).suffix != ".npy":
        raise ValueError(f"out must be a file name that ends in .npy, got {out}")


def _pool(
    encoder: EncoderLike,
    batch: PackedBatch,
    windows: list[WordWindow],
    layers: Sequence[int],
    combine: str | ScalarMix,
    subwords: str,
) -> Tensor:
    """The vectors (words, width) of a batch's words."""
    select = _selector(windows, subwords, batch)
    if combine in ("concat", "last"):
        kept: dict[int, Tensor] = {}
        wanted = layers[-1:] if combine == "last" else layers
        visit_states(
            encoder, batch, wanted, lambda layer, state: kept.update({layer: select(state)})
        )
        return torch.cat([kept[layer] for layer in wanted], dim=1)
    if isinstance(combine, ScalarMix):
        factors = dict(zip(layers, combine.weights.detach(), strict=True))
    else:
        factors = dict.fromkeys(layers, 1.0 if combine == "sum" else 1.0 / len(layers))
    total: Tensor | None = None

    def add(layer: int, state: Tensor) -> None:
        nonlocal total
        vectors = select(state) * factors[layer]
        total = vectors if total is None else total.add_(vectors)

    visit_states(encoder, batch, layers, add)
    assert total is not None  # there is at least one layer
    return total


def _selector(
    windows: list[WordWindow], subwords: str, batch: PackedBatch
) -> Callable[[Tensor], Tensor]:
    """A function that pools a state (total_tokens, hidden_size) to the windows' words (words, hidden_size)."""
    device = batch.input_ids.device
    bounds: list[int] = []
    first: list[int] = []  # for each word the index of its begin in bounds
    offset = 0
    for window in windows:
        first += range(len(bounds), len(bounds) + len(window.bounds) - 1)
        bounds += [offset + bound for bound in window.bounds]
        offset += len(window.input_ids)
    indices = torch.tensor(first)
    edges = torch.tensor(bounds, dtype=torch.int32)
    if subwords != "mean":
        tokens = edges[indices] if subwords == "first" else edges[indices + 1] - 1
        rows = send(tokens.long(), device)
        return lambda state: state.index_select(0, rows)
    # Special tokens, and tokens of words that are taken from other windows, form segments between those of the words.
    ends = torch.tensor([batch.total_tokens], dtype=torch.int32)
    segments = send(torch.cat((torch.zeros_like(ends), edges, ends)), device)
    chosen = send(indices + 1, device)
    return lambda state: segment_pool(state, segments, "mean").index_select(0, chosen)


@torch.inference_mode()
def _batches(
    encoder: EncoderLike,
    sentences: Iterable[Sequence[str] | str],
    pool: Callable[[EncoderLike, PackedBatch, list[WordWindow]], Tensor],
    batch_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch (indices of its words among the words of all sentences, their vectors)."""
    device = encoder.embeddings.word.weight.device
    with without_dropout():
        for chunk in windows_of(sentences, encoder.own_tokenizer(), encoder.positions):
            lengths = [len(window.input_ids) for window in chunk]
            for indices in length_sorted_batches(lengths, batch_size):
                chosen = [chunk[index] for index in indices]
                batch = pack_sequences([window.input_ids for window in chosen])
                values = pool(encoder, batch.to(device), chosen)
                rows = [
                    row
                    for window in chosen
                    for row in range(window.first_row, window.first_row + len(window.bounds) - 1)
                ]
                yield torch.tensor(rows), values
