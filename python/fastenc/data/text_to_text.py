"""Source and target texts as token ids, and their batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastenc._base.progress import progress_bar
from fastenc.data.classification import TEXTS_AT_ONCE, check_tokens
from fastenc.data.readers import iterate_inputs, text_of
from fastenc.data.rows import Row, numbered_rows
from fastenc.packing import ModelArguments, pack_sequences, pack_targets
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits


@dataclass(frozen=True)
class TextToTextData:
    """Source texts with their target texts.

    Fields:
        targets: one for each source; empty if they are to be predicted.
        where: file and line of each source, for error messages; may be empty.
    """

    sources: list[str]
    targets: list[str]
    where: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.sources)


class TextToTextExample(NamedTuple):
    """Token ids of a source and of its target.

    Fields:
        labels: ids of the target with the end token; None if they are to be predicted.
        start_id: first token of the decoder's input, as in :func:`fastenc.packing.pack_targets`.
    """

    input_ids: list[int]
    labels: list[int] | None
    start_id: int | None


def read_text_to_text(
    path: str | Path,
    source: Sequence[str] = ("source",),
    target: str = "target",
    quoting: str | None = None,
) -> TextToTextData:
    """Sources and targets from a table, as :func:`fastenc.data.read_labelled` reads it.

    Args:
        source: names of the source's columns. The texts of several columns are joined as T5 does it: "sentence1: a
            sentence2: b" for the columns sentence1 and sentence2.
        target: name of the target's column, which may also hold numbers.
        quoting: of a TSV file, see :func:`fastenc.data.rows.numbered_rows`.
    Raises: ValueError with file and line for a missing column, an empty target and a malformed table.
    """
    sources, targets, lines = [], [], []
    for where, row in numbered_rows(path, [*source, target], quoting):
        sources.append(joined([text_of(row, name, where) for name in source], source))
        targets.append(_target(row, target, where))
        lines.append(where)
    return TextToTextData(sources, targets, lines)


def iterate_sources(
    path: str | Path, source: Sequence[str] = ("source",), quoting: str | None = None
) -> Iterator[str]:
    """The sources of :func:`read_text_to_text`, one at a time; the lines of a ``.txt`` file are sources."""
    for texts in iterate_inputs(path, source, quoting):
        yield joined([texts] if isinstance(texts, str) else texts, source)


def joined(texts: Sequence[str], names: Sequence[str]) -> str:
    """One text as it is; several with the names of their columns.

    Source: Raffel et al. 2019, arXiv:1910.10683, appendix D.
    """
    if len(texts) == 1:
        return texts[0]
    return " ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))


def encode_text_to_text(
    data: TextToTextData,
    tokenizer: TokenizerLike,
    max_length: int,
    max_target_length: int,
    start_id: int | None,
    *,
    prefix: str = "",
    show_progress: bool | None = None,
) -> list[TextToTextExample]:
    """Token ids of sources and targets, with the special tokens that the tokenizer adds. Longer texts are cut.

    Args:
        max_length, max_target_length: largest number of tokens of a source and a target, special tokens included.
        start_id: first token of the decoder's input.
        prefix: text before each source.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError if a length leaves no room beside the special tokens, and with file and line for a text without
        tokens.
    """
    added = tokenizer.num_special_tokens_to_add(False)
    for name, value in (("max_length", max_length), ("max_target_length", max_target_length)):
        if value <= added:
            raise ValueError(
                f"{name} must leave room beside {added} special tokens, got {value}: give more"
            )
    encode = lambda texts, length: _encoded(texts, tokenizer, length, show_progress)
    sources = encode([f"{prefix}{text}" for text in data.sources], max_length)
    if not data.targets:
        return [TextToTextExample(ids, None, start_id) for ids in sources]
    check_tokens(sources, added, data.sources, data.where)
    targets = encode(data.targets, max_target_length)
    check_tokens(targets, added, data.targets, data.where)
    return [TextToTextExample(*pair, start_id) for pair in zip(sources, targets, strict=True)]


def _encoded(
    texts: Sequence[str], tokenizer: TokenizerLike, length: int, show_progress: bool | None
) -> list[list[int]]:
    copy = without_limits(tokenizer)
    copy.enable_truncation(length)
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    return [
        encoding.ids
        for start in progress_bar(starts, "encoding", "batch", show_progress)
        for encoding in copy.encode_batch_fast(list(texts[start : start + TEXTS_AT_ONCE]))
    ]


def collate_text_to_text(examples: Sequence[TextToTextExample]) -> ModelArguments:
    """The arguments of a :class:`fastenc.models.Seq2Seq`.

    Returns: {"batch": PackedBatch of the sources,
        "target": PackedBatch of the decoder's inputs, and "labels": int64 (target tokens,); both absent if the examples
            have no labels}.
    """
    arguments: ModelArguments = {"batch": pack_sequences([each.input_ids for each in examples])}
    labels = [each.labels for each in examples if each.labels is not None]
    if labels:
        arguments["target"], arguments["labels"] = pack_targets(labels, examples[0].start_id)
    return arguments


def _target(row: Row, name: str, where: str) -> str:
    value = row[name]
    text = str(value) if isinstance(value, str | int | float) else ""
    if not text.strip():
        raise ValueError(
            f"{where}: column {name!r} must hold a target text, got {value!r}: leave out rows without one"
        )
    return text
