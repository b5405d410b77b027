"""Extractive question answering: reads SQuAD's files and cuts contexts into windows of tokens."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fastenc._base.progress import progress_bar
from fastenc.data.rows import (
    check_whole_characters,
    file_type_of,
    numbered_lines,
    numbered_rows,
)
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits
from fastenc.text.windows import owned

QUESTIONS_AT_ONCE = 256  # number of questions in a call of the tokenizer


class Answer(NamedTuple):
    """A span of the context: the index of its first character, and its text."""

    start: int
    text: str


class Question(NamedTuple):
    """A question about a context. ``answers`` is empty if there is no answer, or if it is to be predicted."""

    id: str
    question: str
    context: str
    answers: list[Answer]


class QuestionWindow(NamedTuple):
    """Tokens of a question and a window of its context, such as `[CLS] question [SEP] window [SEP]`.

    Fields:
        question: index of the question in the list that was encoded.
        first, last: indices in ``input_ids`` of the window's first and last context token; last < first if it has none.
        offsets: (start, end) character indices in the context of each token from ``first`` to ``last``.
        central: for the same tokens, whether this window owns the token: no other has more context around it.
        start, end: indices in ``input_ids`` of the answer's first and last token; 0, 0 if the window does not hold all
            of the answer.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    question: int
    first: int
    last: int
    offsets: list[tuple[int, int]]
    central: list[bool]
    start: int
    end: int


def read_questions(path: str | Path, *, answers: bool = True) -> list[Question]:
    """Questions from SQuAD's JSON (v1.1 or v2.0), or from a table or data set.

    A table has the columns ``id``, ``question``, ``context`` and ``answers``, an object
    {"text": [...], "answer_start": [...]}.

    Args:
        answers: False: the answers are not read, because they are to be predicted.
    Raises: ValueError for a file of another format or without questions, and with the question's id for a question or
        context without text, an answer that is not in its context, and an id that occurs twice.
    """
    path = Path(path)
    rows_of = _squad_rows if file_type_of(path) == ".json" else _table_rows
    rows = rows_of(path, answers)
    questions, seen = [], set()
    for where, question in rows:
        if question.id in seen:
            raise ValueError(f"{where}: two questions have the id {question.id!r}: rename one")
        seen.add(question.id)
        questions.append(_checked(question, where))
    if not questions:
        raise ValueError(f"{path} holds no questions: give a file with at least one")
    return questions


def question_windows(
    questions: Sequence[Question],
    tokenizer: TokenizerLike,
    max_length: int = 384,
    stride: int = 128,
    *,
    show_progress: bool | None = None,
) -> list[QuestionWindow]:
    """Cut each context into overlapping windows that fit ``max_length`` with the question.

    A question's first answer is the label. A window that does not hold all of it has start = end = 0, the first special
    token, which stands for "no answer in this window".

    Args:
        tokenizer: a ``tokenizers.Tokenizer``; its own truncation and padding are ignored.
        max_length: largest number of tokens of a question with its window, special tokens included.
        stride: number of tokens that neighbouring windows share.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: ValueError with the question's id if the question leaves no room for its context, or if the context has no
        tokens.
    Source: Devlin et al. 2018, arXiv:1810.04805, section 4.2. ``central`` follows
        :func:`fastenc.text.windows.owned`; BERT's code slightly prefers long windows.
    """
    copy = without_limits(tokenizer)
    special = copy.num_special_tokens_to_add(True)
    for question, encoding in zip(
        questions,
        copy.encode_batch([q.question for q in questions], add_special_tokens=False),
        strict=True,
    ):
        room = max_length - special - len(encoding.ids)
        if room <= stride:
            raise ValueError(
                f"question {question.id!r} has {len(encoding.ids)} tokens and leaves {room} of max_length={max_length} "
                f"for its context, which must be more than stride={stride}: give a larger max_length, a smaller "
                "stride or a shorter question"
            )
    copy.enable_truncation(max_length, stride=stride, strategy="only_second")
    windows: list[QuestionWindow] = []
    starts = range(0, len(questions), QUESTIONS_AT_ONCE)
    for start in progress_bar(starts, "encoding", "batch", show_progress):
        batch = questions[start : start + QUESTIONS_AT_ONCE]
        encodings = copy.encode_batch([(q.question, q.context) for q in batch])
        for number, (question, encoding) in enumerate(zip(batch, encodings, strict=True), start):
            if 1 not in encoding.sequence_ids:
                raise ValueError(
                    f"question {question.id!r} has a context without tokens, {question.context!r}: leave out the row"
                )
            windows += _windows_of(question, number, [encoding, *encoding.overflowing], stride)
    return windows


def _windows_of(
    question: Question, number: int, encodings: list, stride: int
) -> list[QuestionWindow]:
    """The windows of one question. ``spans`` below are tokens [start, stop) of the context."""
    parts, spans, begin = [], [], 0
    all_offsets: list[tuple[int, int]] = []
    for encoding in encodings:
        # A tokenizer without a post-processor gives sequence ids in the first window alone, and None in the others.
        tokens = zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)
        context = [i for i, (text, special) in enumerate(tokens) if text != 0 and not special]
        first, last = (context[0], context[-1]) if context else (0, -1)
        offsets = encoding.offsets[first : last + 1]
        parts.append((encoding, first, last, offsets))
        spans.append((begin, begin + last + 1 - first))
        all_offsets += offsets[len(all_offsets) - begin :]
        begin = spans[-1][1] - stride
    answer = _answer_tokens(question, all_offsets)
    windows = []
    for (encoding, first, last, offsets), (begin, end), (own_begin, own_end) in zip(
        parts, spans, owned(spans), strict=True
    ):
        central = [own_begin <= token < own_end for token in range(begin, end)]
        labels = _labels(answer, begin, end, first)
        windows.append(
            QuestionWindow(
                encoding.ids, encoding.type_ids, number, first, last, offsets, central, *labels
            )
        )
    return windows


def _answer_tokens(
    question: Question, offsets: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """The first and the last of the context's tokens that have characters of the answer, or None.

    Characters without a token, such as a combining mark that the tokenizer drops, do not count.
    """
    if not question.answers:
        return None
    begin, text = question.answers[0]
    stop = begin + len(text)
    covering = [i for i, (a, b) in enumerate(offsets) if b > begin and a < stop]
    return (covering[0], covering[-1]) if covering else None


def _labels(answer: tuple[int, int] | None, begin: int, stop: int, first: int) -> tuple[int, int]:
    """Indices in a window's ``input_ids`` of the answer's first and last token; 0, 0 unless it holds all of the answer.

    Args:
        answer: indices of these tokens in the context, or None.
        begin, stop: the window has the tokens [begin, stop) of the context.
        first: index in ``input_ids`` of the token ``begin``.
    """
    if answer is None or answer[0] < begin or answer[1] >= stop:
        return 0, 0
    return first + answer[0] - begin, first + answer[1] - begin


def _squad_rows(path: Path, answers: bool) -> Iterator[tuple[str, Question]]:
    text = "\n".join(line for _, line in numbered_lines(path))
    try:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                for row in paragraph["qas"]:
                    spans = row["answers"] if answers else []
                    known = [Answer(span["answer_start"], span["text"]) for span in spans]
                    name = str(row["id"])
                    yield (
                        f"{path}, question {name!r}",
                        Question(name, row["question"], paragraph["context"], known),
                    )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not SQuAD's JSON, data / paragraphs / qas ({type(error).__name__}: {error}): "
            "give that format, or JSONL with the columns id, question, context, answers"
        ) from error


def _table_rows(path: Path, answers: bool) -> Iterator[tuple[str, Question]]:
    columns = ["id", "question", "context"]
    for where, row in numbered_rows(path, [*columns, "answers"] if answers else columns, "none"):
        try:
            spans = row["answers"] if answers else {"answer_start": [], "text": []}
            pairs = zip(spans["answer_start"], spans["text"], strict=True)
            known = [Answer(*pair) for pair in pairs]
            yield where, Question(str(row["id"]), row["question"], row["context"], known)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: answers must be an object with two lists of equal length, text and answer_start, got "
                f"{row['answers']!r}: correct it"
            ) from error


def _checked(question: Question, where: str) -> Question:
    check_whole_characters(question, where)
    for name, value in (("question", question.question), ("context", question.context)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: the {name} must be text, got {value!r}: leave out the row")
    for start, text in question.answers:
        if type(start) is not int or not isinstance(text, str):
            raise ValueError(
                f"{where}: an answer must be a text, and answer_start the number of its first character, got {text!r} "
                f"and {start!r}: correct them"
            )
        passage = question.context[start : start + len(text)] if start >= 0 else ""
        if passage != text or not text:
            raise ValueError(
                f"{where}: the answer {text!r} must be in its context at character {start}, got {passage!r} there: "
                "correct answer_start (which counts characters from 0) or the answer"
            )
    return question
