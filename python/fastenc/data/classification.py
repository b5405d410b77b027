"""Labelled texts as token ids, and their batches."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from fastenc._base.progress import progress_bar
from fastenc.data.readers import LabelledData
from fastenc.packing import ModelArguments, pack_documents, pack_sequences
from fastenc.text.long_texts import LongTexts
from fastenc.text.special_tokens import tokens_around_text
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits

TEXTS_AT_ONCE = 1000  # number of texts in a call of the tokenizer


class ClassificationExample(NamedTuple):
    """One text or pair, ready for the model.

    Fields:
        label: a class index, a number (regression), or 0.0 and 1.0 for each label (multi-label); None if it is to be
            predicted.
        chunk_lengths: number of tokens of each chunk, if the text is read in chunks. ``input_ids`` then holds one chunk
            after the other.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    label: int | float | list[float] | None
    chunk_lengths: list[int] | None = None


def encode_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    tokenizer: TokenizerLike,
    max_length: int,
    labels: Sequence[int] | Sequence[float] | Sequence[list[float]] | None = None,
    *,
    long_texts: LongTexts | None = None,
    show_progress: bool | None = None,
) -> list[ClassificationExample]:
    """Token ids of texts or pairs. If a pair is too long, tokens are removed from the end of its longer text.

    Args:
        texts: single texts, or (first, second) pairs.
        tokenizer: a ``tokenizers.Tokenizer``; its own truncation and padding are ignored.
        max_length: largest number of tokens of an example or a chunk, special tokens included.
        labels: one for each text, see :class:`ClassificationExample`; None if they are to be predicted.
        long_texts: what happens to single texts that are too long (its ``max_length`` is ignored). None keeps their
            first tokens.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError if ``max_length`` leaves no room beside the special tokens, or if pairs are given with chunks or
        a truncation other than "head".
    """
    pairs = bool(texts) and isinstance(texts[0], tuple)
    long_texts = replace(long_texts or LongTexts(), max_length=max_length)
    if pairs and (long_texts.truncation != "head" or long_texts.chunks is not None):
        raise ValueError(
            "pairs of texts can only be truncated at the end of the longer text, got "
            f"truncation={long_texts.truncation} and chunks={long_texts.chunks}: leave both out, or give single texts"
        )
    room = long_texts.room(tokenizer.num_special_tokens_to_add(pairs))
    copy = without_limits(tokenizer)
    if pairs:
        copy.enable_truncation(max_length, strategy="longest_first")
    before, after = tokens_around_text(copy)
    known: Sequence[Any] = [None] * len(texts) if labels is None else labels
    examples: list[ClassificationExample] = []
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    for start in progress_bar(starts, "encoding", "batch", show_progress):
        batch = slice(start, start + TEXTS_AT_ONCE)
        encodings = copy.encode_batch_fast(list(texts[batch]), add_special_tokens=pairs)
        for encoding, label in zip(encodings, known[batch], strict=True):
            if pairs:
                examples.append(ClassificationExample(encoding.ids, encoding.type_ids, label))
                continue
            chunks = [[*before, *chunk, *after] for chunk in long_texts.cut(encoding.ids, room)]
            ids = [*chain.from_iterable(chunks)]
            lengths = None if long_texts.chunks is None else [len(chunk) for chunk in chunks]
            examples.append(ClassificationExample(ids, [0] * len(ids), label, lengths))
    return examples


def encode_labelled(
    data: LabelledData,
    tokenizer: TokenizerLike,
    max_length: int,
    long_texts: LongTexts | None = None,
) -> list[ClassificationExample]:
    """The examples of a data set with or without labels; arguments as in :func:`encode_texts`.

    Raises: ValueError as :func:`encode_texts`, and with file and line if a labelled text or pair has no tokens.
    """
    labels = data.labels or None
    examples = encode_texts(data.texts, tokenizer, max_length, labels, long_texts=long_texts)
    if data.labels:
        special = tokenizer.num_special_tokens_to_add(isinstance(data.texts[0], tuple))
        check_tokens([e.input_ids for e in examples], special, data.texts, data.where)
    return examples


def check_tokens(
    encoded: Sequence[Sequence[int]], special: int, texts: Sequence[object], where: Sequence[str]
) -> None:
    """Raises: ValueError if a text or pair has no tokens beside its ``special`` special tokens."""
    for index, ids in enumerate(encoded):
        if len(ids) <= special:
            name = where[index] if where else f"text {index + 1} of {len(texts)}"
            raise ValueError(f"{name} has no tokens, got {texts[index]!r}: leave out the row")


def collate_classification(examples: Sequence[ClassificationExample]) -> ModelArguments:
    """The model's arguments.

    Returns: {"batch": PackedBatch,
        "labels": int64 (batch,) classes, float32 (batch,) numbers, or float32 (batch, num_labels) for multi-label;
            absent if the examples have no labels,
        "documents": Documents, if texts are read in chunks; each chunk is then a sequence of the batch}.
    """
    ids, types, chunked = [], [], []
    for each in examples:
        lengths = [len(each.input_ids)] if each.chunk_lengths is None else each.chunk_lengths
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            ids.append(each.input_ids[start:stop])
            types.append(each.token_type_ids[start:stop])
        if each.chunk_lengths is not None:
            chunked.append(lengths)
    arguments: ModelArguments = {"batch": pack_sequences(ids, types)}
    if chunked:
        arguments["documents"] = pack_documents(chunked)
    labels = [example.label for example in examples]
    if labels and labels[0] is not None:
        dtype = torch.int64 if isinstance(labels[0], int) else torch.float32
        arguments["labels"] = torch.tensor(labels, dtype=dtype)
    return arguments
