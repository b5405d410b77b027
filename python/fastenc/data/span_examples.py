"""Sentences for span classification: token ids, and all spans of words up to a maximum length."""

import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.data.entities import EntityData, shown
from fastenc.data.words import Tokens, check_room, tokens_of_words
from fastenc.packing import ModelArguments, pack_sequences
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.windows import cut_windows


class SpanExample(NamedTuple):
    """A window of a sentence, ready for the model.

    A word is represented by its first subword. A span belongs to the window that owns its middle token, or the second
    of its two middle tokens (:func:`fastenc.text.windows.cut_windows`). So every span belongs to exactly one window,
    the one in which it is most central.

    Fields:
        sentence: index of the sentence in the data.
        first_word: index in the sentence of the first word that begins in the window.
        word_tokens: indices in ``input_ids`` of the first subwords of ``first_word`` and of each word after it.
        own_start, own_stop: the window owns the tokens [own_start, own_stop) of ``input_ids``.
        max_span_words: largest number of words of a span.
        labels: the entities as (first word, last word, class), with words as indices into ``word_tokens``; None if they
            are to be predicted.
    """

    input_ids: list[int]
    sentence: int
    first_word: int
    word_tokens: list[int]
    own_start: int
    own_stop: int
    max_span_words: int
    labels: list[tuple[int, int, int]] | None


def encode_spans(
    data: EntityData,
    tokenizer: TokenizerLike,
    max_length: int,
    label_names: Sequence[str],
    max_span_words: int,
    *,
    show_progress: bool | None = None,
) -> list[SpanExample]:
    """Token ids of words; a sentence longer than ``max_length`` is cut into overlapping windows.

    Some entities cannot be predicted: those longer than ``max_span_words`` or than the overlap of two windows, and
    those with the same words as another entity. One warning says how many there are.

    Args:
        max_length: largest number of tokens of a window, special tokens included.
        label_names: the entity types; type i has the class i + 1, and class 0 means no entity.
        max_span_words: largest number of words of a span.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError if ``max_length`` leaves no room for a token, or for a type that is not in ``label_names``.
    """
    check_room(max_length)
    special = special_tokens(tokenizer)
    index = {name: number for number, name in enumerate(label_names, start=1)}
    if unknown := set(data.label_names) - index.keys():
        raise ValueError(
            f"{data.path}: the type {min(unknown)!r} is not one of the model's {list(label_names)}: read the data with "
            "the training set's types"
        )
    examples: list[SpanExample] = []
    lost: list[str] = []
    encoded = tokens_of_words(data.sentences, data.path, tokenizer, show_progress)
    for number, (each, tokens) in enumerate(zip(data.sentences, encoded, strict=True)):
        gold: dict[tuple[int, int], int] | None = {} if data.label_names else None
        if gold is not None:
            for entity_type, first, stop in data.entities[number]:
                gold.setdefault((first, stop - 1), index[entity_type])
        windows = list(_windows(tokens, gold, number, max_length, special, max_span_words))
        examples += windows
        if gold is not None:
            learnt = {
                (e.first_word + first, e.first_word + last, label)
                for e in windows
                for first, last, label in e.labels or ()
            }
            for entity in data.entities[number]:
                if (entity.first, entity.stop - 1, index[entity.type]) not in learnt:
                    lost.append(f"line {each.lines[entity.first]}: {shown(each, entity)}")
    if lost:
        total = sum(map(len, data.entities))
        warnings.warn(
            f"{data.path}: {len(lost)} of {total} entities cannot be predicted and count as missed, the first in "
            f"{lost[0]}. They are longer than max_span_words={max_span_words} or a window, or have the same words as "
            "another entity",
            stacklevel=2,
        )
    return examples


def _windows(
    tokens: Tokens,
    gold: dict[tuple[int, int], int] | None,
    sentence: int,
    max_length: int,
    special: SpecialTokens,
    max_span_words: int,
) -> Iterator[SpanExample]:
    """The examples of one sentence. ``gold`` maps spans (first word, last word) to classes."""
    begins = [i for i, (word, _) in enumerate(tokens) if i == 0 or tokens[i - 1][0] != word]
    for start, stop, own_start, own_stop in cut_windows(len(tokens), max_length - 2):
        offset = len(special.begin) - start
        first_word, stop_word = bisect_left(begins, start), bisect_left(begins, stop)
        example = SpanExample(
            [*special.begin, *(token for _, token in tokens[start:stop]), special.sep],
            sentence,
            first_word,
            [begin + offset for begin in begins[first_word:stop_word]],
            own_start + offset,
            own_stop + offset,
            max_span_words,
            None,
        )
        if gold is not None:
            local = [(i - first_word, j - first_word, label) for (i, j), label in gold.items()]
            labels = [(i, j, label) for i, j, label in local if _holds(example, i, j)]
            example = example._replace(labels=labels)
        yield example


def _holds(example: SpanExample, first: int, last: int) -> bool:
    """Whether a span of words, as indices into ``word_tokens``, belongs to the example."""
    rows = example.word_tokens
    if first < 0 or last >= len(rows) or last - first >= example.max_span_words:
        return False
    return example.own_start <= (rows[first] + rows[last] + 1) // 2 < example.own_stop


class Spans(NamedTuple):
    """The spans of several examples, one example after the other.

    Fields (W words, S spans):
        word_rows: int64 (W,), indices of the packed rows of the words' first subwords.
        last_words: int64 (W,), index of the last word of each word's example.
        starts, ends: int64 (S,), first and last word of each span as indices into ``word_rows``; starts ascend.
        owned: bool (S,), whether the span belongs to its example's window.
    """

    word_rows: Tensor
    last_words: Tensor
    starts: Tensor
    ends: Tensor
    owned: Tensor


def enumerate_spans(examples: Sequence[SpanExample]) -> Spans:
    """Every span of at most ``max_span_words`` words in each example."""
    int64 = lambda values: torch.tensor(list(values), dtype=torch.int64)
    counts = int64(len(e.word_tokens) for e in examples)
    of_words = lambda values: torch.repeat_interleave(values, counts)
    lengths = int64(len(e.input_ids) for e in examples)
    offsets = of_words(lengths.cumsum(0) - lengths)
    rows = int64(chain.from_iterable(e.word_tokens for e in examples)) + offsets
    last_words = of_words(counts.cumsum(0) - 1)
    words = torch.arange(rows.shape[0])
    longest = of_words(int64(e.max_span_words for e in examples))
    numbers = torch.minimum(last_words - words + 1, longest)
    starts = torch.repeat_interleave(words, numbers)
    ends = starts + torch.arange(starts.shape[0]) - (numbers.cumsum(0) - numbers)[starts]
    middles = (rows[starts] + rows[ends] + 1) // 2 - offsets[starts]
    own_start = of_words(int64(e.own_start for e in examples))
    own_stop = of_words(int64(e.own_stop for e in examples))
    owned = (own_start[starts] <= middles) & (middles < own_stop[starts])
    return Spans(rows, last_words, starts, ends, owned)


def spans_of(example: SpanExample) -> tuple[Tensor, Tensor]:
    """(first words, last words) of the spans that belong to the example, int64 (spans,) each, as word indices of the
    sentence. The order is that of a batch.
    """
    spans = enumerate_spans([example])
    starts, ends = spans.starts[spans.owned], spans.ends[spans.owned]
    return starts + example.first_word, ends + example.first_word


def collate_spans(examples: Sequence[SpanExample]) -> ModelArguments:
    """The model's arguments.

    Returns, for W words, S spans and K words of the longest span:
        "batch": PackedBatch.
        "word_rows": int64 (W,), indices of the packed rows of the words' first subwords.
        "windows": int64 (W, K), indices of each word and the K - 1 words after it; the example's last word is repeated.
        "starts", "ends": int64 (S,), first and last word of each span as indices into "word_rows".
        "labels": int64 (S,), the class of each span, 0 for none; absent if an example has no labels.
    """
    batch = pack_sequences([example.input_ids for example in examples])
    spans = enumerate_spans(examples)
    words = torch.arange(spans.word_rows.shape[0])
    longest = int((spans.ends - spans.starts).max()) + 1 if len(spans.starts) else 1
    arguments: ModelArguments = {
        "batch": batch,
        "word_rows": spans.word_rows,
        "windows": torch.minimum(words[:, None] + torch.arange(longest), spans.last_words[:, None]),
        "starts": spans.starts[spans.owned],
        "ends": spans.ends[spans.owned],
    }
    if not examples or any(example.labels is None for example in examples):
        return arguments
    labels = torch.zeros_like(spans.starts)
    before = accumulate((len(e.word_tokens) for e in examples), initial=0)
    gold = [
        (first + offset, last - first, label)
        for example, offset in zip(examples, before, strict=False)
        for first, last, label in example.labels or ()
    ]
    if gold:
        firsts, lengths, classes = map(torch.tensor, zip(*gold, strict=True))
        # The spans with the same first word are consecutive, shortest first.
        labels[torch.searchsorted(spans.starts, firsts) + lengths] = classes
    return {**arguments, "labels": labels[spans.owned]}
