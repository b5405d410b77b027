"""What a folder holds for an analysis, and the words with labels that probes learn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastenc.analysis.probes import LabelledWords
from fastenc.analysis.relations import Tree, read_trees
from fastenc.data.columns import read_tagged
from fastenc.data.readers import kind_of, numbered_lines
from fastenc.data.senses import SenseData, read_senses

WORD_PAIRS, TEXT_PAIRS = ("word1", "word2", "score"), ("sentence1", "sentence2", "score")
SENSES = ("word", "index", "sense", "sentence")
Item = TypeVar("Item")


@dataclass
class AnalysisData:
    """Files of a folder by what they hold, as :func:`find_data` tells them."""

    senses: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    entities: list[Path] = field(default_factory=list)
    word_pairs: list[Path] = field(default_factory=list)
    text_pairs: list[Path] = field(default_factory=list)
    analogies: list[Path] = field(default_factory=list)


def find_data(folder: str | Path) -> AnalysisData:
    """What a folder, its subfolders too, holds for an analysis.

    Trees are .conllu files; files in columns (.conll) hold entities, with the tag in the last one. Tables (.tsv) are
    told by their columns: word, index, sense, sentence (senses of words); word1, word2, score (similarity of words);
    sentence1, sentence2, score (similarity of texts). A .txt file that begins with ": " holds analogies, as
    word2vec's questions-words.txt.
    Raises: ValueError for a path that is no folder, or a folder without any of them.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder: give one with the data to analyse")
    found = AnalysisData()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        kind = kind_of(path)
        if kind in (".conllu", ".conll"):
            (found.trees if kind == ".conllu" else found.entities).append(path)
        elif kind == ".txt" and _first_line(path).startswith(": "):
            found.analogies.append(path)
        elif kind == ".tsv":
            columns = set(_first_line(path).split("\t"))
            for wanted, paths in (
                (SENSES, found.senses),
                (WORD_PAIRS, found.word_pairs),
                (TEXT_PAIRS, found.text_pairs),
            ):
                if set(wanted) <= columns:
                    paths.append(path)
    if not any(vars(found).values()):
        raise ValueError(
            f"{folder} holds nothing to analyse: give .conllu or .conll files, questions of analogies (.txt), or "
            f"tables (.tsv) with the columns {', '.join(SENSES)}; {', '.join(WORD_PAIRS)}; or {', '.join(TEXT_PAIRS)}"
        )
    return found


def _first_line(path: Path) -> str:
    return next(numbered_lines(path), (0, ""))[1]


def train_and_test(paths: Sequence[Path]) -> list[Path]:
    """The first training file, or the first there is, and a dev or test file of its folder, where there is one."""
    ordered = sorted(paths, key=lambda path: ("train" not in path.name, "dev" not in path.name))
    of_folder = lambda path: path.parent == ordered[0].parent and "train" not in path.name
    return [*ordered[:1], *list(filter(of_folder, ordered[1:]))[:1]]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names of files without their endings, and with their folders where they would be the same."""
    stems = [path.name.split(".")[0] for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{path.parent.name}/{stem}"
        for stem, path in zip(stems, paths, strict=True)
    ]


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, at equal distances: files are often sorted by word or genre."""
    return list(items[:: max(1, -(-len(items) // most))])


Split = tuple[LabelledWords, LabelledWords]  # training, test


def labelled_words(data: AnalysisData, sentences: int) -> dict[str, Split]:
    """What probes learn: {name of the labels: training and test}, at most this number of sentences each.

    Parts of speech and relations of trees; the types of entities, of the words in one; senses. Of a file without
    another of its kind every second sentence is the test. Labels that training lacks are left out of the test, and
    kinds with fewer than two labels altogether.
    """
    readers: list[tuple[str, list[Path], Callable[[Path], LabelledWords]]] = [
        ("part of speech", data.trees, lambda path: _of_trees(read_trees(path), "upos")),
        ("relation", data.trees, lambda path: _of_trees(read_trees(path), "relations")),
        ("entity", data.entities, _entities),
        ("sense", data.senses, lambda path: _senses(read_senses(path))),
    ]
    found = {}
    for name, paths, read in readers:
        parts = [_sample(read(path), sentences) for path in train_and_test(paths)]
        if len(parts) == 1:
            parts = [_part(parts[0], slice(None, None, 2)), _part(parts[0], slice(1, None, 2))]
        if not parts:
            continue
        known = {label for row in parts[0].labels for label in row} - {None}
        labels = [[each if each in known else None for each in row] for row in parts[1].labels]
        if len(known) > 1 and any(map(any, labels)):
            found[name] = (parts[0], parts[1]._replace(labels=labels))
    return found


def _of_trees(trees: Sequence[Tree], attribute: str) -> LabelledWords:
    labels = [list(getattr(tree, attribute)) for tree in trees]
    return LabelledWords([tree.words for tree in trees], labels)


def _entities(path: Path) -> LabelledWords:
    sentences = read_tagged(path).sentences
    types = [[None if tag == "O" else tag[2:] for tag in each.tags] for each in sentences]
    return LabelledWords([each.words for each in sentences], types)


def _senses(data: SenseData) -> LabelledWords:
    """Of a word with senses the word itself says little more than which of them there are, so that random labels of
    words would be known at once: those of the control task belong to the word and the one before it."""
    labels: list[list[str | None]] = [[None] * len(words) for words in data.sentences]
    keys = [list(words) for words in data.sentences]
    for target in data.targets:
        words, index = data.sentences[target.sentence], target.word
        labels[target.sentence][index] = f"{target.lemma}: {target.senses[0]}"
        keys[target.sentence][index] = " ".join(words[max(index - 1, 0) : index + 1])
    return LabelledWords(data.sentences, labels, keys)


def _sample(data: LabelledWords, sentences: int) -> LabelledWords:
    """Those with a label."""
    chosen = spread([i for i, row in enumerate(data.labels) if any(row)], sentences)
    pick = lambda rows: [rows[i] for i in chosen]
    keys = None if data.control_keys is None else pick(data.control_keys)
    return LabelledWords(pick(data.sentences), pick(data.labels), keys)


def _part(data: LabelledWords, rows: slice) -> LabelledWords:
    keys = None if data.control_keys is None else data.control_keys[rows]
    return LabelledWords(data.sentences[rows], data.labels[rows], keys)
