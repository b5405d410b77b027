"""Scores static vectors on analogies: a is to b as c is to d."""

from pathlib import Path
from typing import NamedTuple

from fastenc.analysis.static_vectors import StaticVectors
from fastenc.data.rows import numbered_lines

Question = tuple[str, str, str, str]
Sections = dict[str, list[Question]]


class AnalogyScore(NamedTuple):
    """The score of one section.

    Fields:
        right: number of questions that were answered correctly.
        asked: number of questions whose four words all have a vector.
        questions: number of all questions.
    """

    right: int
    asked: int
    questions: int


def read_analogies(path: str | Path) -> Sections:
    """{section: questions} of a file like word2vec's questions-words.txt.

    A line ": section" begins a section. Each other line has four words.
    Raises: ValueError with file and line for another number of words, and for a file without questions.
    """
    sections: Sections = {}
    section = "all"
    for number, line in numbered_lines(Path(path)):
        words = line.split()
        if words[:1] == [":"]:
            section = " ".join(words[1:])
        elif words:
            if len(words) != 4:
                raise ValueError(
                    f"{path}, line {number}: a question must have four words, got {len(words)}, {line!r}: correct it"
                )
            sections.setdefault(section, []).append((words[0], words[1], words[2], words[3]))
    if not sections:
        raise ValueError(f"{path} must hold questions, got none: give four words on each line")
    return sections


def score_analogies(vectors: StaticVectors, sections: Sections) -> dict[str, AnalogyScore]:
    """{section: score} of the answers of :meth:`StaticVectors.analogies`.

    A question is left out if one of its words has no vector.
    """
    scores = {}
    for name, questions in sections.items():
        asked = [question for question in questions if all(word in vectors for word in question)]
        answers = vectors.analogies([question[:3] for question in asked]) if asked else []
        right = sum(
            answer[0].word == question[3]
            for answer, question in zip(answers, asked, strict=True)
            if answer
        )
        scores[name] = AnalogyScore(right, len(asked), len(questions))
    return scores
