"""Contextual vectors of words, from one or several layers of an encoder."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.progress import progress_bar
from fastenc._base.transfer import send
from fastenc.models.embedding.encoder_like import EncoderLike
from fastenc.nn import ScalarMix
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.ops import segment_pool
from fastenc.packing import PackedBatch, length_sorted_batches, pack_sequences
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import ids_and_starts, tokenizer_for_words
from fastenc.text.windows import cut_windows

LAYERS = (-4, -3, -2, -1)
COMBINATIONS = ("mean", "sum", "concat", "last")
SUBWORDS = ("first", "mean", "last")
CHUNK = 4096  # number of sentences that are tokenized together and sorted by length


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


class _Window(NamedTuple):
    """One sequence for the encoder, and the words whose vectors are taken from it.

    Fields:
        input_ids: the tokens, with special tokens.
        bounds: position of each word's first token, and the end of the last word.
        first_row: index of the first word among the words of all sentences.
    """

    input_ids: list[int]
    bounds: list[int]
    first_row: int


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
        show_progress: show a progress bar on stderr; None: on a terminal.
    Returns: vectors (total_words, hidden_size), or with "concat" (total_words, len(layers) * hidden_size), in the
        encoder's dtype on the CPU.
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
    offsets = torch.tensor([0, *accumulate(len(_words(each)) for each in sentences)])
    width = encoder.config.hidden_size * (len(taken) if combine == "concat" else 1)
    dtype = next(encoder.parameters()).dtype if out is None else torch.float32
    shape = (int(offsets[-1]), width)
    check_space(shape, dtype, out)

    def fill(vectors: Tensor) -> None:
        pool = _pooling(combine, taken, subwords)
        batches = _batches(encoder, sentences, taken, pool, batch_size, show_progress)
        calls = -(-(len(offsets) - 1) // batch_size)
        with encoder.frozen.during_call(encoder, calls):
            for rows, values in batches:
                vectors.index_copy_(0, rows, values.to("cpu", dtype))

    if out is None:
        vectors = torch.empty(shape, dtype=dtype)
        fill(vectors)
        return WordVectors(vectors, offsets)
    numpy = require("numpy", extra="train")

    def write(path: Path) -> None:
        file = numpy.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=shape)
        if shape[0]:
            fill(torch.from_numpy(file))
        file.flush()

    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), write)
    if not shape[0]:  # an empty file cannot be mapped
        return WordVectors(torch.empty(shape), offsets)
    # Copy on write, because torch has no read-only tensors.
    return WordVectors(torch.from_numpy(numpy.load(out, mmap_mode="c")), offsets)


def resolve_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """The numbers of the states, from 0 (the embeddings' output) to num_layers.

    Args: layers: numbers of states; negative ones count from the last.
    Raises: ValueError for an empty list, a state that does not exist, or one that is given twice.
    """
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ValueError(
                f"layers must be from 0 (the embeddings' output) to the model's {num_layers}, or -1 to "
                f"{-num_layers - 1} from the last, got {layer}"
            )
    taken = [layer % (num_layers + 1) for layer in layers]
    if not taken or len(set(taken)) < len(taken):
        raise ValueError(
            f"layers must be at least one number, and each layer only once, got {list(layers)}"
        )
    return taken


def visit_states(
    encoder: EncoderLike,
    batch: PackedBatch,
    layers: Sequence[int],
    visit: Callable[[int, Tensor], None],
) -> None:
    """Run the encoder and call ``visit(layer, state)`` with each state of ``layers`` as soon as it is computed.

    Args:
        layers: numbers of states, 0 for the embeddings' output.
        visit: takes a state's number and the state (total_tokens, hidden_size), which it must not change.
    """
    wanted = set(layers)

    def visit_wanted(layer: int, state: Tensor) -> None:
        if layer in wanted:
            visit(layer, state)

    encoder(batch, visit=visit_wanted, pooled=False)


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
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if out is not None and Path(out).suffix != ".npy":
        raise ValueError(f"out must be a file name that ends in .npy, got {out}")


def check_space(shape: tuple[int, int], dtype: torch.dtype, out: str | Path | None = None) -> None:
    """Raise ValueError if vectors of this shape and dtype do not fit into memory or, with ``out``, on the disk."""
    needed = shape[0] * shape[1] * dtype.itemsize
    if out is None:
        free, remedy = (
            _free_memory(),
            "give fewer texts, stream to a file (out=, fastenc embed --words)",
        )
    else:
        folder = next(parent for parent in Path(out).absolute().parents if parent.exists())
        free, remedy = shutil.disk_usage(folder).free, "free some, or take another disk"
    if free is not None and needed > free:
        raise ValueError(
            f"{shape[0]:,} vectors of {shape[1]} numbers need {needed / 2**30:.1f} GB, "
            f"{'the memory' if out is None else folder} has {free / 2**30:.1f} GB free: {remedy}, or take fewer layers"
        )


def _free_memory() -> int | None:
    """Bytes of memory that are available without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def _words(sentence: Sequence[str] | str) -> Sequence[str]:
    return sentence.split() if isinstance(sentence, str) else sentence


def _pooling(
    combine: str | ScalarMix, layers: Sequence[int], subwords: str
) -> Callable[[EncoderLike, PackedBatch, list[_Window]], Tensor]:
    """A function that computes the vectors (words, width) of a batch's words."""

    def run(encoder: EncoderLike, batch: PackedBatch, windows: list[_Window]) -> Tensor:
        select = _selector(windows, subwords, batch)
        kept: dict[int, Tensor] = {}
        total: Tensor | None = None
        if isinstance(combine, ScalarMix):
            factors = dict(zip(layers, combine.weights.detach(), strict=True))
        else:
            factors = dict.fromkeys(layers, 1.0 if combine == "sum" else 1.0 / len(layers))
        wanted = layers[-1:] if combine == "last" else layers

        def visit(layer: int, state: Tensor) -> None:
            nonlocal total
            vectors = select(state)
            if combine in ("concat", "last"):
                kept[layer] = vectors
            else:
                vectors = vectors * factors[layer]
                total = vectors if total is None else total.add_(vectors)

        visit_states(encoder, batch, wanted, visit)
        return total if total is not None else torch.cat([kept[each] for each in wanted], dim=1)

    return run


def _selector(
    windows: list[_Window], subwords: str, batch: PackedBatch
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
    layers: Sequence[int],
    pool: Callable[[EncoderLike, PackedBatch, list[_Window]], Tensor],
    batch_size: int,
    show_progress: bool | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch (indices of its words among the words of all sentences, their vectors)."""
    device = encoder.embeddings.word.weight.device
    with evaluation_mode(encoder):
        windows = _windows(sentences, encoder.own_tokenizer(), encoder.positions)
        for chunk in progress_bar(windows, "embed words", "chunk", show_progress):
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


def _windows(
    sentences: Iterable[Sequence[str] | str], tokenizer: TokenizerLike, positions: int
) -> Iterator[list[_Window]]:
    """Lists of windows, one for every ``CHUNK`` sentences."""
    special = special_tokens(tokenizer)
    splitter = tokenizer_for_words(tokenizer)
    before = len(special.begin)
    room = positions - before - 1
    row = 0
    rest = iter(sentences)
    while chunk := [list(_words(each)) for each in islice(rest, CHUNK)]:
        windows: list[_Window] = []
        encodings = splitter.encode_batch(chunk, is_pretokenized=True, add_special_tokens=False)
        for words, encoding in zip(chunk, encodings, strict=True):
            ids, starts = ids_and_starts(encoding, len(words), special.unk)
            for first, stop, own_start, own_stop in _spans(starts, room):
                inside = [*special.begin, *ids[first:stop], special.sep]
                bounds = [start - first + before for start in starts[own_start:own_stop]]
                bounds.append(min(starts[own_stop], stop) - first + before)
                windows.append(_Window(inside, bounds, row + own_start))
            row += len(words)
        yield windows


def _spans(starts: list[int], room: int) -> Iterator[tuple[int, int, int, int]]:
    """(first token, end of the tokens, first word, end of the words) of each window.

    Args:
        starts: index of each word's first token, and the number of tokens.
        room: largest number of tokens in a window.
    """
    words = len(starts) - 1
    if starts[-1] <= room:
        if words:
            yield 0, starts[-1], 0, words
        return
    spans = [(window.start, window.stop) for window in cut_windows(starts[-1], room)]
    owner: list[tuple[int, int]] = []
    for start, stop in zip(starts, starts[1:], strict=False):
        holders = [span for span in spans if span[0] <= start and stop <= span[1]]
        # A word that is longer than the overlap of the windows may lie in none of them. It gets a separate window.
        central = lambda span, start=start, stop=stop: min(start - span[0], span[1] - stop)
        owner.append(max(holders, key=central) if holders else (start, min(stop, start + room)))
    begin = 0
    for index in range(1, words + 1):
        if index == words or owner[index] != owner[begin]:
            yield *owner[begin], begin, index
            begin = index
