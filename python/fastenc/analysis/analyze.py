"""Makes all figures that are possible for a model and a folder of data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastenc._base.extras import require
from fastenc._base.progress import Counter
from fastenc.analysis import sections
from fastenc.analysis.data_files import (
    SENSES,
    WORD_PAIRS,
    find_data,
    labelled_words,
    spread,
    train_and_test,
)
from fastenc.analysis.errors import NotMeasured
from fastenc.analysis.figures import Figure, left_out
from fastenc.analysis.relations import read_trees
from fastenc.analysis.static_vectors import read_static_vectors
from fastenc.data.senses import SenseData, Target, read_senses
from fastenc.models.embedding.states import resolve_layers
from fastenc.models.encoder import Encoder

MAPS = ("pca", "umap")
PROBED_WORDS = 8000


class Section(NamedTuple):
    """A figure that is to be made.

    Fields:
        make: function of the title that returns the figure.
    """

    name: str
    title: str
    make: Callable[[str], Figure]


def analyze(
    encoder: Encoder,
    folder: str | Path,
    *,
    word: str | None = None,
    layer: int = -1,
    sentences: int = 1000,
    map_method: str = "pca",
    static: str | Path | None = None,
    show_progress: bool | None = False,
) -> list[Figure]:
    """The figures that are possible with the data, in the order of a report.

    A figure for which the data are too few, or all alike, has no drawing, and its caption gives the reason.

    Args:
        encoder: a :class:`fastenc.Encoder`.
        folder: folder of the data, see :func:`find_data`.
        word: the word whose uses are shown as points in a plane; None: the one with the most labelled uses.
        layer: layer of the vectors in this plane.
        sentences: largest number of sentences that a figure uses.
        map_method: projection to the plane, "pca" or "umap" (extra: umap).
        static: file of static vectors to compare with, on word pairs, analogies and neighbours.
        show_progress: None shows a bar if stderr is a terminal, else a line now and then.
    Raises: ValueError as :func:`find_data`, for an encoder without a tokenizer, a layer that does not exist, an unknown
        ``map_method``, ``sentences`` below 1, or a ``word`` with fewer than three labelled uses.
    """
    if map_method not in MAPS:
        raise ValueError(
            f"map_method must be one of {', '.join(MAPS)}, got {map_method!r}: give one of them"
        )
    if map_method == "umap":
        require("umap", extra="umap")
    if sentences < 1:
        raise ValueError(f"sentences must be at least 1, got {sentences}: give more")
    if encoder.tokenizer is None:
        raise ValueError(
            "the encoder must have a tokenizer, got none: load it from a folder with a tokenizer.json"
        )
    (layer,) = resolve_layers((layer,), encoder.config.num_layers)
    planned = _plan(encoder, Path(folder), word, layer, sentences, map_method, static)
    figures = []
    with Counter("analysing", "figures", len(planned), show=show_progress) as counter:
        for section in planned:
            try:
                figures.append(section.make(section.title))
            except NotMeasured as problem:
                figures.append(left_out(section.name, section.title, str(problem)))
            counter.add(1)
    return figures


def _plan(
    encoder: Encoder,
    folder: Path,
    word: str | None,
    layer: int,
    most: int,
    map_method: str,
    static: str | Path | None,
) -> list[Section]:
    """Read the data, and list the figures that they allow."""
    data = find_data(folder)
    vectors = None if static is None else read_static_vectors(static)
    if vectors is not None and not (data.word_pairs or data.analogies):
        raise ValueError(
            f"static vectors are compared on tables with the columns {', '.join(WORD_PAIRS)} and on analogies, and "
            f"{folder} has none"
        )
    plan: list[Section] = []

    def add(name: str, title: str, make: Callable[..., Figure], *arguments: Any) -> None:
        plan.append(Section(name, title, lambda title: make(encoder, *arguments, title)))

    words: list[list[str]] = []
    source = ""
    if data.senses:
        path = train_and_test(data.senses)[0]
        senses, source = read_senses(path), _names(folder, [path])
        lemma, targets = uses_of(senses, word, most)
        about = f"{lemma!r} in {source}, layer {layer}"
        uses = senses.sentences, targets, layer, map_method
        add("map", f"Uses of {about}", sections.map_of_uses, *uses)
        neighbours = senses, targets, layer, most, vectors
        add("neighbours", f"Neighbours of {about}", sections.neighbours_figure, *neighbours)
        words = spread(senses.sentences, most)
    elif word is not None:
        raise ValueError(f"a map of {word!r} needs a table with the columns {', '.join(SENSES)}")
    tree_files = train_and_test(data.trees)
    trees = [spread(read_trees(path), most) for path in tree_files]
    if trees:
        words, source = [tree.words for tree in trees[0]], _names(folder, tree_files[:1])
    if words:
        add("anisotropy", f"Anisotropy by layer: {source}", sections.anisotropy_figure, words)
        add(
            "frequency", f"Self-similarity by frequency: {source}", sections.frequency_figure, words
        )
    if data.word_pairs or data.text_pairs:
        scored = _names(folder, [*data.word_pairs, *data.text_pairs])
        title = f"Similarity by layer against human scores: {scored}"
        add("similarity", title, sections.similarity_figure, data.word_pairs, data.text_pairs)
    if vectors is not None:
        compared = _names(folder, [*data.word_pairs, *data.analogies])
        title = f"Static and contextual vectors: {compared}"
        add("static", title, sections.static_figure, vectors, data.word_pairs, data.analogies)
    if words:
        add("heads", f"What heads attend to: {source}", sections.heads_figure, words)
    if trees:
        title = f"Heads that find dependency relations: {_names(folder, tree_files[-1:])}"
        add("relations", title, sections.relations_figure, trees[-1])
    labelled = labelled_words(data, most, PROBED_WORDS)
    used = [train_and_test(paths) for paths in (data.trees, data.entities, data.senses)]
    of_labels = _names(folder, [path for paths in used for path in paths])
    if labelled:
        title = f"What each layer encodes: {of_labels}"
        add("probes", title, sections.probes_figure, labelled, PROBED_WORDS)
    if labelled or encoder.mix is not None:
        title = "Weights of the layers by task" + (f": {of_labels}" if labelled else "")
        add("mix", title, sections.mix_figure, labelled, PROBED_WORDS)
    return plan


def _names(folder: Path, paths: Sequence[Path], most: int = 4) -> str:
    """The files' names inside the folder, of which the first are listed."""
    names = [str(path.relative_to(folder)) for path in paths]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def uses_of(data: SenseData, word: str | None, most: int) -> tuple[str, list[Target]]:
    """(a word, at most ``most`` of its labelled uses); None: the word with the most uses.

    Raises: ValueError if there are fewer than three of a ``word`` that is given.
    """
    lemmas = [target.lemma for target in data.targets]
    wanted = word if word is not None else max(sorted(set(lemmas)), key=lemmas.count)
    targets = spread([target for target in data.targets if target.lemma == wanted], most)
    if word is not None and len(targets) < 3:
        raise ValueError(
            f"{data.path}: there must be at least three uses of {word!r}, got {len(targets)}: choose another word, "
            f"such as {', '.join(sorted(set(lemmas))[:20])}, or let a figure use more sentences"
        )
    return wanted, targets
