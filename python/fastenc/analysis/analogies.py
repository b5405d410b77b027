"""Analogies: a is to b as c is to d, by static vectors and by each layer of an encoder."""

from pathlib import Path
from typing import Any, NamedTuple

from fastenc.analysis.similarity import vectors_by_layer
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


class AnalogyComparison(NamedTuple):
    """Of one section: shares answered rightly, of the questions asked.

    Fields:
        static: by the static vectors; layers: by each layer of the encoder, from the embeddings' output.
        asked, questions: those whose words all have a static vector, and all.
    """

    static: float
    layers: list[float]
    asked: int
    questions: int


def compare_analogies(
    encoder: Any, vectors: StaticVectors, sections: Sections
) -> dict[str, AnalogyComparison]:
    """Both kinds of vectors on the same questions with the same candidates: the words of all questions asked.

    A word that has no static vector as it is written is looked up in lower case. The encoder's vector of a word is that
    of the word alone. Sections of which nothing can be asked are left out.
    """
    known: Sections = {}
    for name, questions in sections.items():
        every = [tuple(_spelling(vectors, word) for word in question) for question in questions]
        if asked := [question for question in every if None not in question]:
            known[name] = asked  # type: ignore[assignment]
    words = sorted({word for questions in known.values() for each in questions for word in each})
    if not words:
        return {}
    static = score_analogies(StaticVectors.of(words, vectors[words]), known)
    layers = [
        score_analogies(StaticVectors.of(words, of_layer), known)
        for of_layer in vectors_by_layer(encoder, words)
    ]
    share = lambda score: score.right / score.asked
    return {
        name: AnalogyComparison(
            share(static[name]),
            [share(each[name]) for each in layers],
            len(known[name]),
            len(sections[name]),
        )
        for name in known
    }


def _spelling(vectors: StaticVectors, word: str) -> str | None:
    return next((each for each in (word, word.lower()) if each in vectors), None)
