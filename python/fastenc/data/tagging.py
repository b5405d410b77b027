"""Tagged words as token ids and batches."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from fastenc.data.columns import TaggedData, check_tags
from fastenc.data.words import Tokens, check_room, tokens_of_words
from fastenc.packing import ModelArguments, pack_sequences
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.windows import cut_windows

LABEL_SCHEMES = ("first", "all")


class TaggingExample(NamedTuple):
    """A window of a sentence, ready for the model.

    Each token is predicted from the window that owns it (:func:`fastenc.text.windows.cut_windows`).

    Fields:
        labels: a class for each token, -100 for tokens without a label; None if tags are to be predicted.
        sentence: index of the sentence in the data.
        first: index in ``input_ids`` of the first token that the window owns.
        word_ids: for each token that the window owns, the index of its word in the sentence.
        word_starts: indices in ``input_ids`` of the owned tokens that begin a word.
    """

    input_ids: list[int]
    labels: list[int] | None
    sentence: int
    first: int
    word_ids: list[int]
    word_starts: list[int]


def encode_tagged(
    data: TaggedData,
    tokenizer: TokenizerLike,
    max_length: int,
    label_names: Sequence[str],
    label_scheme: str = "first",
    *,
    show_progress: bool | None = None,
) -> list[TaggingExample]:
    """Token ids of words; a sentence longer than ``max_length`` is cut into overlapping windows.

    A word without any token (a single joiner or variation selector) is read as the unknown token. A warning names the
    first such word.

    Args:
        max_length: largest number of tokens of a window, special tokens included.
        label_names: the tags in the order of their class indices.
        label_scheme: "first" labels the first subword of each word, "all" labels all subwords. The others get -100.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError if ``max_length`` leaves no room for a token, for another label_scheme, and with file and line
        for a word whose tag is missing or not in ``label_names``.
    """
    if label_scheme not in LABEL_SCHEMES:
        raise ValueError(
            f"label_scheme must be one of {LABEL_SCHEMES}, got {label_scheme!r}: give one of them"
        )
    check_room(max_length)
    labelled = bool(data.label_names)
    if labelled:
        check_tags(data, label_names)
    index = {name: number for number, name in enumerate(label_names)}
    special = special_tokens(tokenizer)
    examples: list[TaggingExample] = []
    encoded = tokens_of_words(data.sentences, data.path, tokenizer, show_progress)
    for number, (each, tokens) in enumerate(zip(data.sentences, encoded, strict=True)):
        classes = [index[tag] for tag in each.tags] if labelled else None
        examples += _windows(tokens, classes, number, max_length, special, label_scheme)
    return examples


def _windows(
    tokens: Tokens,
    classes: list[int] | None,
    sentence: int,
    max_length: int,
    special: SpecialTokens,
    label_scheme: str,
) -> Iterator[TaggingExample]:
    """The examples of one sentence.

    ``tokens``: (index of the word, token id) of each token. ``classes``: the class of each word.
    """
    words = [word for word, _ in tokens]
    begins = [i == 0 or words[i - 1] != word for i, word in enumerate(words)]
    for start, stop, own_start, own_stop in cut_windows(len(tokens), max_length - 2):
        ids = [*special.begin, *(token for _, token in tokens[start:stop]), special.sep]
        offset = len(special.begin) - start
        labels = None
        if classes is not None:
            labels = [-100] * len(ids)
            for i in range(own_start, own_stop):
                if begins[i] or label_scheme == "all":
                    labels[i + offset] = classes[words[i]]
        yield TaggingExample(
            ids,
            labels,
            sentence,
            own_start + offset,
            words[own_start:own_stop],
            [i + offset for i in range(own_start, own_stop) if begins[i]],
        )


def collate_tagging(examples: Sequence[TaggingExample]) -> ModelArguments:
    """The model's arguments.

    Returns: {"batch": PackedBatch, "labels": int64 (total_tokens,),
        "word_rows": int64 (total_words,), indices of the packed rows of the words' first subwords,
        "cu_words": int32 (batch+1,), the offsets of the sequences in word_rows}; only "batch" without labels.
    """
    batch = pack_sequences([example.input_ids for example in examples])
    if not examples or any(example.labels is None for example in examples):
        return {"batch": batch}
    offsets = batch.cu_seqlens.tolist()
    rows = [
        offset + start
        for offset, example in zip(offsets, examples, strict=False)
        for start in example.word_starts
    ]
    counts = [len(example.word_starts) for example in examples]
    labels = [label for example in examples for label in example.labels or ()]
    return {
        "batch": batch,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "word_rows": torch.tensor(rows, dtype=torch.int64),
        "cu_words": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
    }
