"""Analogies: a is to b as c is to d, answered by static vectors."""

from pathlib import Path
from typing import NamedTuple

from fastenc.analysis.static_vectors import StaticVectors
from fastenc.data.readers import numbered_lines

Question = tuple[str, str, str, str]
Sections = dict[str, list[Question]]


class AnalogyScore(NamedTuple):
    """Of one section: questions whose words are all there, those answered rightly, and all questions."""

    right: int
    asked: int
    questions: int


def read_analogies(path: str | Path) -> Sections:
    """Questions by section, as word2vec's questions-words.txt: ": section", then four words a line.

    Raises: ValueError with file and line for another number of words.
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
                    f"{path}, line {number}: a question is four words, got {len(words)}: {line!r}"
                )
            sections.setdefault(section, []).append((words[0], words[1], words[2], words[3]))
    if not sections:
        raise ValueError(f"{path} holds no questions: give four words a line")
    return sections


def score_analogies(vectors: StaticVectors, sections: Sections) -> dict[str, AnalogyScore]:
    """Answers by :meth:`StaticVectors.analogies`; a question with a word that is missing is not asked."""
    found = {}
    for name, questions in sections.items():
        asked = [question for question in questions if all(word in vectors for word in question)]
        answers = vectors.analogies([question[:3] for question in asked]) if asked else []
        right = sum(
            answer[0].word == question[3]
            for answer, question in zip(answers, asked, strict=True)
            if answer
        )
        found[name] = AnalogyScore(right, len(asked), len(questions))
    return found
