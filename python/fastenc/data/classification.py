"""Labelled texts as token ids, and their batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastenc.data.progress import progress_bar
from fastenc.data.readers import LabelledData
from fastenc.packing import pack_sequences

CHUNK = 1000  # texts encoded at once


class ClassificationExample(NamedTuple):
    """One text or pair, ready for the model; ``label`` is None where it is to be predicted."""

    input_ids: list[int]
    token_type_ids: list[int]
    label: int | float | list[float] | None


def encode_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    tokenizer: Any,
    max_length: int,
    labels: Sequence[int] | Sequence[float] | Sequence[list[float]] | None = None,
    *,
    show_progress: bool | None = None,
) -> list[ClassificationExample]:
    """Token ids of texts or pairs; longer ones are cut, a pair at its longer text first.

    Raises: ValueError when ``max_length`` leaves no room beside the special tokens.
    """
    pairs = bool(texts) and isinstance(texts[0], tuple)
    added = tokenizer.num_special_tokens_to_add(pairs)
    if max_length <= added:
        raise ValueError(
            f"max_length must leave room beside {added} special tokens, got {max_length}: give more"
        )
    # A copy, so that the caller's tokenizer keeps its settings.
    own = type(tokenizer).from_str(tokenizer.to_str())
    own.no_padding()
    own.enable_truncation(max_length, strategy="longest_first")
    known: Sequence[Any] = [None] * len(texts) if labels is None else labels
    examples: list[ClassificationExample] = []
    for start in progress_bar(range(0, len(texts), CHUNK), "encoding", "chunk", show_progress):
        chunk = slice(start, start + CHUNK)
        examples += [
            ClassificationExample(encoding.ids, encoding.type_ids, label)
            for encoding, label in zip(
                own.encode_batch_fast(list(texts[chunk])), known[chunk], strict=True
            )
        ]
    return examples


def encode_labelled(
    data: LabelledData, tokenizer: Any, max_length: int
) -> list[ClassificationExample]:
    """The examples of a set, labelled or not."""
    return encode_texts(data.texts, tokenizer, max_length, data.labels or None)


def collate_classification(examples: Sequence[ClassificationExample]) -> dict[str, Any]:
    """Pack examples: {"batch": PackedBatch, "labels": int64 or float32 (batch,), or float32 (batch, num_labels) where
    an example has several}; no labels if they have none."""
    batch = pack_sequences(
        [example.input_ids for example in examples],
        [example.token_type_ids for example in examples],
    )
    labels = [example.label for example in examples]
    if not labels or labels[0] is None:
        return {"batch": batch}
    dtype = torch.int64 if isinstance(labels[0], int) else torch.float32
    return {"batch": batch, "labels": torch.tensor(labels, dtype=dtype)}
