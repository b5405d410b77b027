"""All figures that a model and a folder of data allow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastenc._extras import require
from fastenc.analysis.figures import Figure, bars, by_layer, heat_maps, scatter
from fastenc.analysis.heads import summarize_heads
from fastenc.analysis.mix import learn_mix
from fastenc.analysis.probes import LabelledWords, majority_accuracy, probe_by_layer
from fastenc.analysis.relations import DIRECTIONS, Tree, read_trees, score_relations
from fastenc.analysis.similarity import (
    ScoredPairs,
    correlation_by_layer,
    isotropy_by_layer,
    read_scored_pairs,
    similarity_by_frequency,
)
from fastenc.analysis.static_vectors import (
    StaticVectors,
    read_static_vectors,
    static_correlation,
)
from fastenc.data.readers import kind_of, numbered_lines
from fastenc.data.senses import SenseData, read_senses
from fastenc.models.word_vectors import resolve_layers

WORD_PAIRS, TEXT_PAIRS = ("word1", "word2", "score"), ("sentence1", "sentence2", "score")
SENSES = ("word", "index", "sense", "sentence")
MAPS = ("pca", "umap")
Pairs = dict[tuple[Path, tuple[str, ...]], str]  # (file, columns): name


@dataclass
class AnalysisData:
    """Files of a folder by what they hold, as :func:`find_data` tells them."""

    senses: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    word_pairs: list[Path] = field(default_factory=list)
    text_pairs: list[Path] = field(default_factory=list)


def find_data(folder: str | Path) -> AnalysisData:
    """What a folder, its subfolders too, holds for an analysis.

    Trees are .conllu files. Tables (.tsv) are told by their columns: word, index, sense, sentence (senses of words);
    word1, word2, score (similarity of words); sentence1, sentence2, score (similarity of texts).
    Raises: ValueError for a path that is no folder, or a folder without any of them.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder: give one with the data to analyse")
    found = AnalysisData()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        if kind_of(path) == ".conllu":
            found.trees.append(path)
        elif kind_of(path) == ".tsv":
            columns = set(next(numbered_lines(path), (0, ""))[1].split("\t"))
            for kind, own in (
                (SENSES, found.senses),
                (WORD_PAIRS, found.word_pairs),
                (TEXT_PAIRS, found.text_pairs),
            ):
                if set(kind) <= columns:
                    own.append(path)
    if not (found.senses or found.trees or found.word_pairs or found.text_pairs):
        raise ValueError(
            f"{folder} holds nothing to analyse: give .conllu files, or tables (.tsv) with the columns "
            f"{', '.join(SENSES)}; {', '.join(WORD_PAIRS)}; or {', '.join(TEXT_PAIRS)}"
        )
    return found


def analyze(
    encoder: Any,
    folder: str | Path,
    *,
    word: str | None = None,
    layer: int = -1,
    sentences: int = 1000,
    map_method: str = "pca",
    static: str | Path | None = None,
) -> list[Figure]:
    """The figures that the data allow, in the order of a report.

    Args:
        word: of the map of uses; None: the one with the most uses.
        layer: whose vectors the map shows.
        sentences: most of them that a figure reads.
        map_method: "pca", or "umap" (extra: umap).
        static: file of static vectors to compare with on the sets of word pairs.
    Raises: ValueError as :func:`find_data`, for a layer that does not exist, an unknown map, or a word that the senses
        do not have.
    """
    if map_method not in MAPS:
        raise ValueError(f"map_method must be one of {', '.join(MAPS)}, got {map_method!r}")
    resolve_layers((layer,), encoder.config.num_layers)
    data = find_data(folder)
    vectors = None if static is None else read_static_vectors(static)
    if vectors is not None and not data.word_pairs:
        raise ValueError(
            f"static vectors are compared on tables with the columns {', '.join(WORD_PAIRS)}, and {folder} has none"
        )
    figures = []
    words: list[list[str]] = []
    if data.senses:
        senses = read_senses(_training(data.senses)[0])
        figures.append(map_of_uses(encoder, senses, word, layer, sentences, map_method))
        words = senses.sentences[:sentences]
    elif word is not None:
        raise ValueError(f"a map of {word!r} needs a table with the columns {', '.join(SENSES)}")
    sets = [read_trees(path)[:sentences] for path in _training(data.trees)]
    if sets:
        words = [tree.words for tree in sets[0]]
    if words:
        figures += isotropy_figures(encoder, words)
    pairs: Pairs = {(path, WORD_PAIRS): _name(path) for path in data.word_pairs}
    pairs |= {(path, TEXT_PAIRS): _name(path) for path in data.text_pairs}
    if pairs:
        figures.append(similarity_figure(encoder, pairs))
    if vectors is not None:
        figures.append(static_figure(encoder, vectors, data.word_pairs))
    if words:
        figures.append(heads_figure(encoder, words))
    if sets:
        figures.append(relations_figure(encoder, sets[-1]))
        figures += knowledge_figures(encoder, sets)
    return figures


def map_of_uses(
    encoder: Any, data: SenseData, word: str | None, layer: int, most: int, method: str
) -> Figure:
    """The uses of one word in a plane, coloured by sense."""
    lemmas = [target.lemma for target in data.targets]
    if word is None:
        word = max(sorted(set(lemmas)), key=lemmas.count)
    targets = [target for target in data.targets if target.lemma == word][:most]
    if len(targets) < 3:
        raise ValueError(
            f"{data.path}: a map needs three uses or more of {word!r}, got {len(targets)}: choose another of "
            f"{', '.join(sorted(set(lemmas))[:20])}"
        )
    found = encoder.embed_words(
        [data.sentences[target.sentence] for target in targets],
        layers=(layer,),
        show_progress=False,
    )
    vectors = torch.stack([found[i][t.word] for i, t in enumerate(targets)]).float().numpy()
    if method == "umap":
        umap = require("umap", extra="umap")
        plane = umap.UMAP(random_state=0, metric="cosine").fit_transform(vectors)
    else:
        plane = require("sklearn.decomposition", extra="train").PCA(2).fit_transform(vectors)
    points = [
        (float(x), float(y), target.senses[0], " ".join(data.sentences[target.sentence]))
        for (x, y), target in zip(plane, targets, strict=True)
    ]
    says = (
        f"Each point is one of {len(targets)} uses of {word!r}, placed by its vector of layer {layer} in its sentence "
        f"({method.upper()}) and coloured by its sense: senses that the model tells apart form clouds of their own."
    )
    return scatter("map", f"Uses of {word!r}", says, points)


def isotropy_figures(encoder: Any, words: Sequence[Sequence[str]]) -> list[Figure]:
    """Anisotropy by layer, and similarity by frequency."""
    layers = isotropy_by_layer(encoder, [" ".join(sentence) for sentence in words])
    lines = {
        "as they are": [layer.raw.anisotropy for layer in layers],
        "standardised": [layer.standardized.anisotropy for layer in layers],
        "largest share of one dimension": [float(layer.raw.shares.max()) for layer in layers],
    }
    says = (
        "The mean cosine of two different tokens of the texts, before and after each dimension is standardised, and "
        "the share of it that one dimension makes: where it is high, all vectors point the same way."
    )
    first = by_layer("anisotropy", "Anisotropy by layer", says, lines, "mean cosine; share")
    bins = similarity_by_frequency(encoder, words)
    labels = [f"{low} to {high - 1}" for low, high, _, _ in bins]
    says = (
        "The mean cosine of different occurrences of a word at the last layer, for words of each frequency in the "
        "texts: the lower, the more a word's vector depends on its sentence."
    )
    values = {"mean cosine": [each.similarity for each in bins]}
    counts = {"words": [each.words for each in bins]}
    title = "Self-similarity by frequency"
    return [first, bars("frequency", title, says, labels, values, "mean cosine", counts)]


def similarity_figure(encoder: Any, pairs: Pairs) -> Figure:
    """Correlation with people's scores by layer, for each set before and after standardising."""
    lines: dict[str, list[float]] = {}
    for (path, columns), name in pairs.items():
        found = correlation_by_layer(encoder, read_scored_pairs(path, columns[:2], columns[2]))
        lines[name] = [each.raw for each in found]
        lines[f"{name}, standardised"] = [each.standardized for each in found]
    says = (
        "Spearman's correlation of the cosines of pairs with people's scores; dashed, after each dimension is "
        "standardised."
    )
    return by_layer("similarity", "Similarity by layer", says, lines, "Spearman", pairs=True)


def static_figure(encoder: Any, vectors: StaticVectors, files: Sequence[Path]) -> Figure:
    """Static vectors against the encoder's on the pairs whose words have a static vector."""
    groups: dict[str, list[float]] = {"static": [], "last layer": [], "best layer": []}
    extra: dict[str, list[Any]] = {"best": [], "pairs": [], "covered": []}
    labels = []
    for path in files:
        every = read_scored_pairs(path)
        known = [i for i, pair in enumerate(every.pairs) if all(w in vectors for w in pair)]
        if len(known) < 2:
            continue
        data = ScoredPairs([every.pairs[i] for i in known], [every.scores[i] for i in known])
        layers = [each.raw for each in correlation_by_layer(encoder, data)]
        labels.append(_name(path))
        groups["static"].append(static_correlation(vectors, data).spearman)
        groups["last layer"].append(layers[-1])
        groups["best layer"].append(max(layers))
        extra["best"].append(layers.index(max(layers)))
        extra["pairs"].append(len(known))
        extra["covered"].append(len(known) / len(every.pairs))
    if not labels:
        raise ValueError(f"{vectors.name} has the words of no pair: give vectors of this language")
    says = (
        "Spearman's correlation with people's scores of word pairs: static vectors beside the encoder's of words "
        "alone, on the pairs that both have."
    )
    title = "Static against contextual vectors"
    return bars("static", title, says, labels, groups, "Spearman", extra)


def heads_figure(encoder: Any, words: Sequence[Sequence[str]]) -> Figure:
    """What each head looks at on average."""
    means = summarize_heads(encoder, [" ".join(sentence) for sentence in words]).means
    maps = {
        "entropy (nats)": means["entropy"].tolist(),
        "distance (tokens)": means["distance"].tolist(),
        "on [SEP]": means["last"].tolist(),
        "on neighbours": (means["previous"] + means["next"]).tolist(),
    }
    says = (
        "For each head the mean over tokens: how spread its attention is, how far it looks, and how much of it falls "
        "on the closing token and on the neighbours."
    )
    return heat_maps("heads", "What heads look at", says, maps)


def relations_figure(encoder: Any, trees: Sequence[Tree], most: int = 15) -> Figure:
    """The best head of each frequent relation against the best fixed distance."""
    found = score_relations(encoder, trees)
    frequent = sorted(found, key=lambda key: (-found[key].count, key))[: 2 * most]
    best: dict[str, tuple[str, str]] = {}
    for key in frequent:
        relation = key[0]
        if relation not in best or found[key].best_head[2] > found[best[relation]].best_head[2]:
            best[relation] = key
    keys = list(best.values())
    heads = [found[key].best_head for key in keys]
    labels = [
        f"{relation}, {'to head' if direction == DIRECTIONS[0] else 'to dependent'}"
        for relation, direction in keys
    ]
    groups = {
        "best head": [share for _, _, share in heads],
        "best fixed distance": [found[key].best_offset[1] for key in keys],
    }
    extra = {
        "layer": [layer + 1 for layer, _, _ in heads],
        "head": [head for _, head, _ in heads],
        "distance": [found[key].best_offset[0] for key in keys],
        "pairs": [found[key].count for key in keys],
    }
    says = (
        "For each frequent relation the share of words whose other word the best single head looks at most, beside "
        "always taking the word at the best fixed distance."
    )
    title = "Heads that find grammatical relations"
    return bars("relations", title, says, labels, groups, "share of pairs found", extra)


def knowledge_figures(encoder: Any, sets: Sequence[Sequence[Tree]]) -> list[Figure]:
    """Probes for parts of speech and relations by layer, and what a learned mix of layers weighs."""
    train, test = sets[0], sets[-1]
    if len(sets) == 1:
        half = len(sets[0]) // 2
        train, test = sets[0][:half], sets[0][half:]
    lines: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for name, attribute in (("part of speech", "upos"), ("relation", "relations")):
        known = {label for tree in train for label in getattr(tree, attribute)}
        data = [
            LabelledWords(
                [tree.words for tree in part],
                [
                    [label if label in known else None for label in getattr(tree, attribute)]
                    for tree in part
                ],
            )
            for part in (train, test)
        ]
        scores = probe_by_layer(encoder, *data, max_words=8000)
        lines[f"{name}, accuracy"] = [score.accuracy for score in scores]
        lines[f"{name}, selectivity"] = [score.selectivity for score in scores]
        weights[f"{name} (majority {majority_accuracy(*data):.2f})"] = learn_mix(
            encoder, data[0], max_words=8000
        ).weights.tolist()
    says = (
        "Test accuracy of a linear probe on each layer's word vectors; dashed, its selectivity: the accuracy less that "
        "of a probe that learns random labels of words."
    )
    title = "What each layer knows"
    first = by_layer("probes", title, says, lines, "accuracy; selectivity", pairs=True)
    says = (
        "The weights of the layers in a learned mix (ScalarMix) below a linear classifier: where a task finds what it "
        "needs."
    )
    labels = [f"layer {i}" for i in range(encoder.config.num_layers + 1)]
    return [first, bars("mix", "Layers that tasks mix", says, labels, weights, "weight")]


def _training(paths: Sequence[Path]) -> list[Path]:
    """The training file first, and one other, where there are such."""
    ordered = sorted(paths, key=lambda path: ("train" not in path.name, "dev" not in path.name))
    return ordered[:2]


def _name(path: Path) -> str:
    return path.name.split(".")[0]
