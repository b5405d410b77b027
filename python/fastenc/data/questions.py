"""Extractive question answering: SQuAD's files, and windows of tokens."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastenc._progress import progress_bar
from fastenc.data.readers import numbered_rows
from fastenc.models.windows import owned

CHUNK = 256  # questions encoded at once


class Answer(NamedTuple):
    """A span of the context: its first character and its text."""

    start: int
    text: str


class Question(NamedTuple):
    """A question about a context. ``answers`` is empty if it has none there, or if it is to be answered."""

    id: str
    question: str
    context: str
    answers: list[Answer]


class QuestionWindow(NamedTuple):
    """Tokens of a question and a piece of its context: `[CLS] question [SEP] piece [SEP]`, or the family's form.

    Fields:
        question: index of the question in the list that was encoded.
        first, last: indices in ``input_ids`` of the piece's first and last token; last < first if it has none.
        offsets: (start, end) characters in the context of each token from ``first`` to ``last``.
        central: for the same tokens, whether no other window has more context around the token.
        start, end: indices in ``input_ids`` of the answer's first and last token; 0, 0 if it is not in the piece.
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
    """Questions from SQuAD's own JSON (v1.1 or v2.0), or from a table or data set with the columns ``id``,
    ``question``, ``context`` and ``answers`` ({"text": [...], "answer_start": [...]}).

    Args:
        answers: False leaves the answers unread, for questions that are to be answered.
    Raises: ValueError naming the question: no text, an answer that is not in its context, an id that occurs twice,
        a file of another kind.
    """
    path = Path(path)
    names = [suffix for suffix in path.suffixes if suffix != ".gz"]
    is_squad = bool(names) and names[-1] == ".json"
    rows = _squad_rows(path, answers) if is_squad else _table_rows(path, answers)
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
    tokenizer: Any,
    max_length: int = 384,
    stride: int = 128,
    *,
    show_progress: bool | None = None,
) -> list[QuestionWindow]:
    """Cut each context into overlapping windows that fit ``max_length`` with the question.

    Args:
        stride: tokens that neighbouring windows share.
        show_progress: None: a bar on a terminal.
    The first answer of a question is the one to learn. A window that does not hold all of it has start = end = 0,
    the first special token, which stands for "no answer here".
    Raises: ValueError naming a question that leaves no room for its context, or whose context has no tokens.
    Source: Devlin et al. 2018, arXiv:1810.04805, section 4.2. The central window is that of
        :func:`fastenc.models.windows.owned`; BERT's code prefers long windows a little.
    """
    # A copy, so that the caller's tokenizer keeps its settings.
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
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
    for start in progress_bar(range(0, len(questions), CHUNK), "encoding", "chunk", show_progress):
        chunk = questions[start : start + CHUNK]
        encodings = copy.encode_batch([(q.question, q.context) for q in chunk])
        for number, (question, encoding) in enumerate(zip(chunk, encodings, strict=True), start):
            pieces = [encoding, *encoding.overflowing]
            if 1 not in encoding.sequence_ids:
                raise ValueError(
                    f"question {question.id!r} has a context without tokens, {question.context!r}: leave out the row"
                )
            windows += _windows_of(question, number, pieces, stride)
    return windows


def _windows_of(
    question: Question, number: int, encodings: list, stride: int
) -> list[QuestionWindow]:
    pieces, spans, begin = [], [], 0
    for encoding in encodings:
        context = [i for i, text in enumerate(encoding.sequence_ids) if text == 1]
        first, last = (context[0], context[-1]) if context else (0, -1)
        pieces.append((encoding, first, last, encoding.offsets[first : last + 1]))
        spans.append((begin, begin + last + 1 - first))
        begin = spans[-1][1] - stride
    windows = []
    for (encoding, first, last, offsets), (begin, end), (own_begin, own_end) in zip(
        pieces, spans, owned(spans), strict=True
    ):
        central = [own_begin <= token < own_end for token in range(begin, end)]
        answer = _labels(question, first, offsets)
        windows.append(
            QuestionWindow(
                encoding.ids, encoding.type_ids, number, first, last, offsets, central, *answer
            )
        )
    return windows


def _labels(question: Question, first: int, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Indices of the first and last token that cover the answer, or (0, 0)."""
    if not question.answers:
        return 0, 0
    begin, text = question.answers[0]
    stop = begin + len(text)
    covering = [i for i, (a, b) in enumerate(offsets) if b > begin and a < stop]
    if not covering or offsets[0][0] > begin or offsets[-1][1] < stop:
        return 0, 0
    return first + covering[0], first + covering[-1]


def _squad_rows(path: Path, answers: bool) -> Iterator[tuple[str, Question]]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            articles = json.load(file)["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for row in paragraph["qas"]:
                    spans = row["answers"] if answers else []
                    found = [Answer(span["answer_start"], span["text"]) for span in spans]
                    name = str(row["id"])
                    yield (
                        f"{path}, question {name!r}",
                        Question(name, row["question"], paragraph["context"], found),
                    )
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
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
            found = [Answer(*pair) for pair in pairs]
            yield where, Question(str(row["id"]), row["question"], row["context"], found)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: answers must be an object of two lists, text and answer_start, "
                f"of one length, got {row['answers']!r}"
            ) from error


def _checked(question: Question, where: str) -> Question:
    for name, value in (("question", question.question), ("context", question.context)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: the {name} must be text, got {value!r}: leave out the row")
    for start, text in question.answers:
        found = question.context[start : start + len(text)] if start >= 0 else ""
        if found != text or not text:
            raise ValueError(
                f"{where}: the answer {text!r} is not in its context at character {start}, where {found!r} stands: "
                "correct answer_start (characters from 0) or the answer"
            )
    return question
