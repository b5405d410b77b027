"""Finds the data for an analysis in a folder, and the labelled words for probes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from fastenc.analysis.probes import LabelledWords
from fastenc.analysis.relations import Tree, read_trees
from fastenc.data.columns import read_tagged
from fastenc.data.rows import file_type_of, numbered_lines
from fastenc.data.senses import SenseData, read_senses

WORD_PAIRS, TEXT_PAIRS = ("word1", "word2", "score"), ("sentence1", "sentence2", "score")
SENSES = ("word", "index", "sense", "sentence")
Item = TypeVar("Item")


@dataclass
class AnalysisData:
    """The files of a folder by their kind of data, as :func:`find_data` finds them."""

    senses: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    entities: list[Path] = field(default_factory=list)
    word_pairs: list[Path] = field(default_factory=list)
    text_pairs: list[Path] = field(default_factory=list)
    analogies: list[Path] = field(default_factory=list)


def find_data(folder: str | Path) -> AnalysisData:
    """The data for an analysis in a folder and its subfolders.

    - A .conllu file holds dependency trees.
    - A .conll file holds entities, with the tag in the last column.
    - The columns of a table (.tsv) decide what it holds: word, index, sense, sentence (senses of words); word1, word2,
      score (similarity of words); sentence1, sentence2, score (similarity of texts).
    - A .txt file that begins with ": " holds analogies, as word2vec's questions-words.txt.

    Raises: ValueError if the path is no folder, or if the folder has none of these files.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder: give one with the data to analyse")
    data = AnalysisData()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        file_type = file_type_of(path)
        if file_type in (".conllu", ".conll"):
            (data.trees if file_type == ".conllu" else data.entities).append(path)
        elif file_type == ".txt" and _first_line(path).startswith(": "):
            data.analogies.append(path)
        elif file_type == ".tsv":
            columns = set(_first_line(path).split("\t"))
            for wanted, paths in (
                (SENSES, data.senses),
                (WORD_PAIRS, data.word_pairs),
                (TEXT_PAIRS, data.text_pairs),
            ):
                if set(wanted) <= columns:
                    paths.append(path)
    if not any(vars(data).values()):
        raise ValueError(
            f"{folder} holds no data to analyse: give .conllu or .conll files, analogies (.txt), or tables (.tsv) with "
            f"the columns {', '.join(SENSES)}; {', '.join(WORD_PAIRS)}; or {', '.join(TEXT_PAIRS)}"
        )
    return data


def _first_line(path: Path) -> str:
    return next(numbered_lines(path), (0, ""))[1]


def train_and_test(paths: Sequence[Path]) -> list[Path]:
    """A training file and, if there is one in its folder, a dev or test file. Without a training file, the first."""
    ordered = sorted(paths, key=lambda path: ("train" not in path.name, "dev" not in path.name))
    of_folder = lambda path: path.parent == ordered[0].parent and "train" not in path.name
    return [*ordered[:1], *list(filter(of_folder, ordered[1:]))[:1]]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names of files without suffixes; with the folder's name if several files have the same name."""
    stems = [path.name.split(".")[0] for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{path.parent.name}/{stem}"
        for stem, path in zip(stems, paths, strict=True)
    ]


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` items at equal distances, because files are often sorted by word or genre."""
    return list(items[:: max(1, -(-len(items) // most))])


Split = tuple[LabelledWords, LabelledWords]  # training, test


def labelled_words(
    data: AnalysisData, sentences: int, words: int | None = None
) -> dict[str, Split]:
    """The labelled words for probes: {kind of label: (training, test)}, with at most ``sentences`` sentences each.

    ``words``: the first sentences are taken until they have this many labelled words; None: all of them.

    The kinds are parts of speech and dependency relations of trees, types of entities for the words in one, and senses.
    If there is only one file of a kind, every second sentence is the test set. Labels that do not occur in training are
    removed from the test set. A kind with fewer than two labels is left out.
    """
    readers: list[tuple[str, list[Path], Callable[[Path], LabelledWords]]] = [
        ("part of speech", data.trees, lambda path: _of_trees(read_trees(path), "upos")),
        ("relation", data.trees, lambda path: _of_trees(read_trees(path), "relations")),
        ("entity", data.entities, _entities),
        ("sense", data.senses, lambda path: _senses(read_senses(path))),
    ]
    splits = {}
    for name, paths, read in readers:
        sets = [_sample(read(path), sentences, words) for path in train_and_test(paths)]
        if len(sets) == 1:
            sets = [_subset(sets[0], slice(None, None, 2)), _subset(sets[0], slice(1, None, 2))]
        if not sets:
            continue
        known = {label for row in sets[0].labels for label in row} - {None}
        labels = [[each if each in known else None for each in row] for row in sets[1].labels]
        if len(known) > 1 and any(map(any, labels)):
            splits[name] = (sets[0], sets[1]._replace(labels=labels))
    return splits


def _of_trees(trees: Sequence[Tree], attribute: str) -> LabelledWords:
    labels = [list(getattr(tree, attribute)) for tree in trees]
    return LabelledWords([tree.words for tree in trees], labels)


def _entities(path: Path) -> LabelledWords:
    sentences = read_tagged(path).sentences
    types = [[None if tag == "O" else tag[2:] for tag in each.tags] for each in sentences]
    return LabelledWords([each.words for each in sentences], types)


def _senses(data: SenseData) -> LabelledWords:
    """Labelled words of senses.

    There are few different words with senses, so a probe would easily learn a random label for each. Therefore the
    control task's random labels belong to the word and the word before it.
    """
    labels: list[list[str | None]] = [[None] * len(words) for words in data.sentences]
    keys = [list(words) for words in data.sentences]
    for target in data.targets:
        words, index = data.sentences[target.sentence], target.word
        labels[target.sentence][index] = f"{target.lemma}: {target.senses[0]}"
        keys[target.sentence][index] = " ".join(words[max(index - 1, 0) : index + 1])
    return LabelledWords(data.sentences, labels, keys)


def _sample(data: LabelledWords, sentences: int, words: int | None) -> LabelledWords:
    """At most this number of sentences that have a label, until they have this number of labelled words."""
    chosen = spread([i for i, row in enumerate(data.labels) if any(row)], sentences)
    if words is not None:
        counts = accumulate(sum(label is not None for label in data.labels[i]) for i in chosen)
        chosen = chosen[: 1 + sum(count < words for count in counts)]
    pick = lambda rows: [rows[i] for i in chosen]
    keys = None if data.control_keys is None else pick(data.control_keys)
    return LabelledWords(pick(data.sentences), pick(data.labels), keys)


def _subset(data: LabelledWords, rows: slice) -> LabelledWords:
    keys = None if data.control_keys is None else data.control_keys[rows]
    return LabelledWords(data.sentences[rows], data.labels[rows], keys)
