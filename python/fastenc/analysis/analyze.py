"""Makes all figures that are possible for a model and a folder of data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastenc._extras import require
from fastenc.analysis.analogies import read_analogies
from fastenc.analysis.data_files import (
    SENSES,
    TEXT_PAIRS,
    WORD_PAIRS,
    Split,
    find_data,
    labelled_words,
    names_of,
    spread,
    train_and_test,
)
from fastenc.analysis.figures import COLOURS, Figure, bars, by_layer, heat_maps, scatter, table
from fastenc.analysis.heads import summarize_heads
from fastenc.analysis.mix import learn_mix
from fastenc.analysis.neighbours import (
    compare_neighbours,
    in_brackets,
    isolated_vectors,
    listed,
)
from fastenc.analysis.probes import majority_accuracy, probe_by_layer
from fastenc.analysis.relations import DIRECTIONS, Tree, read_trees, score_relations
from fastenc.analysis.similarity import (
    correlation_by_layer,
    isotropy_by_layer,
    read_scored_pairs,
    similarity_by_frequency,
)
from fastenc.analysis.static_comparison import (
    StaticComparison,
    compare_analogies,
    compare_pairs,
)
from fastenc.analysis.static_vectors import StaticVectors, read_static_vectors
from fastenc.data.senses import SenseData, Target, read_senses
from fastenc.models.word_vectors import resolve_layers

MAPS = ("pca", "umap")
PROBED_WORDS = 8000


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
    """The figures that are possible with the data, in the order of a report.

    Args:
        encoder: a :class:`fastenc.Encoder`.
        folder: folder of the data, see :func:`find_data`.
        word: the word whose uses are shown as points in a plane; None: the one with the most labelled uses.
        layer: layer of the vectors in this plane.
        sentences: largest number of sentences that a figure uses.
        map_method: projection to the plane, "pca" or "umap" (extra: umap).
        static: file of static vectors to compare with, on word pairs, analogies and neighbours.
    Raises: ValueError as :func:`find_data`, for a layer that does not exist, an unknown ``map_method``, ``sentences``
        below 1, or a word without labelled uses.
    """
    if map_method not in MAPS:
        raise ValueError(
            f"map_method must be one of {', '.join(MAPS)}, got {map_method!r}: give one of them"
        )
    if sentences < 1:
        raise ValueError(f"sentences must be at least 1, got {sentences}: give more")
    resolve_layers((layer,), encoder.config.num_layers)
    data = find_data(folder)
    vectors = None if static is None else read_static_vectors(static)
    if vectors is not None and not (data.word_pairs or data.analogies):
        raise ValueError(
            f"static vectors are compared on tables with the columns {', '.join(WORD_PAIRS)} and on analogies, and "
            f"{folder} has none"
        )
    figures = []
    words: list[list[str]] = []
    if data.senses:
        senses = read_senses(train_and_test(data.senses)[0])
        targets = uses_of(senses, word, sentences)
        figures.append(map_of_uses(encoder, senses, targets, layer, map_method))
        figures.append(neighbours_figure(encoder, senses, targets, layer, sentences, vectors))
        words = spread(senses.sentences, sentences)
    elif word is not None:
        raise ValueError(f"a map of {word!r} needs a table with the columns {', '.join(SENSES)}")
    sets = [spread(read_trees(path), sentences) for path in train_and_test(data.trees)]
    if sets:
        words = [tree.words for tree in sets[0]]
    if words:
        figures += isotropy_figures(encoder, words)
    if data.word_pairs or data.text_pairs:
        figures.append(similarity_figure(encoder, data.word_pairs, data.text_pairs))
    if vectors is not None:
        figures.append(static_figure(encoder, vectors, data.word_pairs, data.analogies))
    if words:
        figures.append(heads_figure(encoder, words))
    if sets:
        figures.append(relations_figure(encoder, sets[-1]))
    labelled = labelled_words(data, sentences)
    if labelled:
        figures.append(probes_figure(encoder, labelled))
    if labelled or encoder.mix is not None:
        figures.append(mix_figure(encoder, labelled))
    return figures


def uses_of(data: SenseData, word: str | None, most: int) -> list[Target]:
    """At most ``most`` labelled uses of a word; None: of the word with the most uses.

    Raises: ValueError if there are fewer than three.
    """
    lemmas = [target.lemma for target in data.targets]
    if word is None:
        word = max(sorted(set(lemmas)), key=lemmas.count)
    targets = spread([target for target in data.targets if target.lemma == word], most)
    if len(targets) < 3:
        raise ValueError(
            f"{data.path}: there must be at least three uses of {word!r}, got {len(targets)}: choose another word, "
            f"such as {', '.join(sorted(set(lemmas))[:20])}"
        )
    return targets


def map_of_uses(
    encoder: Any, data: SenseData, targets: Sequence[Target], layer: int, method: str
) -> Figure:
    """The uses of one word as points in a plane, coloured by sense."""
    word = targets[0].lemma
    found = encoder.embed_words(
        [data.sentences[target.sentence] for target in targets],
        layers=(layer,),
        show_progress=False,
    )
    vectors = torch.stack([found[i][t.word] for i, t in enumerate(targets)]).float().numpy()
    if method == "umap":
        umap = require("umap", extra="umap")
        plane = umap.UMAP(random_state=0, n_jobs=1, metric="cosine").fit_transform(vectors)
    else:
        plane = require("sklearn.decomposition", extra="train").PCA(2).fit_transform(vectors)
    points = [
        (float(x), float(y), target.senses[0], " ".join(data.sentences[target.sentence]))
        for (x, y), target in zip(plane, targets, strict=True)
    ]
    caption = (
        f"Each point is one of {len(targets)} uses of {word!r}. Its position is a {method.upper()} projection of its "
        f"vector in layer {layer}, its colour is its sense. Senses that the model distinguishes form separate clouds."
    )
    return scatter("map", f"Uses of {word!r}", caption, points)


def neighbours_figure(
    encoder: Any,
    data: SenseData,
    targets: Sequence[Target],
    layer: int,
    most: int,
    static: StaticVectors | None,
) -> Figure:
    """The nearest words of a word in two sentences of each sense, and the nearest words of its static vector."""
    chosen: dict[str, list[Target]] = {}
    for target in targets:
        chosen.setdefault(target.senses[0], []).append(target)
    uses = [target for sense in sorted(chosen) for target in chosen[sense][:2]]
    others = spread(data.sentences, most)
    pool = [data.sentences[target.sentence] for target in targets] + others
    vectors = isolated_vectors(encoder, pool, (layer,)) if static is None else static
    occurrences = [(data.sentences[target.sentence], target.word) for target in uses]
    found = compare_neighbours(encoder, occurrences, pool, vectors, layers=(layer,))
    rows = [
        (in_brackets(each), target.senses[0], *listed(each))
        for each, target in zip(found, uses, strict=True)
    ]
    kind = "the word alone" if static is None else static.name
    caption = (
        f"The nearest words of {targets[0].lemma!r} in different sentences by layer {layer}, and those of its static "
        f"vector ({kind}). Only the former can depend on the sense."
    )
    columns = ("sentence", "sense", "neighbours in the sentence", "neighbours of the static vector")
    return table("neighbours", f"Neighbours of {targets[0].lemma}", caption, columns, rows)


def isotropy_figures(encoder: Any, words: Sequence[Sequence[str]]) -> list[Figure]:
    """Two figures: anisotropy by layer, and self-similarity by frequency."""
    layers = isotropy_by_layer(encoder, [" ".join(sentence) for sentence in words])
    lines = {
        "as they are": [layer.raw.anisotropy for layer in layers],
        "standardised": [layer.standardized.anisotropy for layer in layers],
        "largest share of one dimension": [float(layer.raw.shares.max()) for layer in layers],
    }
    caption = (
        "The anisotropy is the mean cosine of two different tokens of the texts, before and after each dimension is "
        "standardised. If it is high, all vectors have similar directions. The third line is the largest share of it "
        "that comes from a single dimension."
    )
    first = by_layer("anisotropy", "Anisotropy by layer", caption, lines, "mean cosine; share")
    bins = similarity_by_frequency(encoder, words)
    labels = [f"{low} to {high - 1}" for low, high, _, _ in bins]
    caption = (
        "The mean cosine of different occurrences of a word in the last layer, by the word's frequency in the texts. "
        "The lower it is, the more a word's vector depends on its sentence."
    )
    values = {"mean cosine": [each.similarity for each in bins]}
    counts = {"words": [each.words for each in bins]}
    title = "Self-similarity by frequency"
    return [first, bars("frequency", title, caption, labels, values, "mean cosine", counts)]


def similarity_figure(
    encoder: Any, word_pairs: Sequence[Path], text_pairs: Sequence[Path]
) -> Figure:
    """Correlation with human scores by layer, for each data set before and after standardising."""
    lines: dict[str, list[float]] = {}
    scored = [read_scored_pairs(path) for path in word_pairs]
    scored += [read_scored_pairs(path, TEXT_PAIRS[:2], TEXT_PAIRS[2]) for path in text_pairs]
    sets = dict(zip(names_of([*word_pairs, *text_pairs]), scored, strict=True))
    # The largest sets come first, because a figure shows a limited number of lines.
    for name, data in sorted(sets.items(), key=lambda item: -len(item[1].pairs)):
        found = correlation_by_layer(encoder, data)
        lines[name] = [each.raw for each in found]
        lines[f"{name}, standardised"] = [each.standardized for each in found]
    caption = (
        "Spearman's correlation of the cosine similarities of pairs with human scores. Dashed: after each dimension is "
        "standardised."
    )
    if len(sets) > len(COLOURS):
        caption += f" The plot shows the {len(COLOURS)} largest of {len(sets)} data sets, the CSV file all."
    return by_layer("similarity", "Similarity by layer", caption, lines, "Spearman", pairs=True)


def static_figure(
    encoder: Any, vectors: StaticVectors, pairs: Sequence[Path], analogies: Sequence[Path]
) -> Figure:
    """Static vectors compared with the encoder's, on the pairs and questions whose words have a static vector."""
    rows: dict[str, StaticComparison] = {}
    for name, path in zip(names_of(pairs), pairs, strict=True):
        compared = compare_pairs(encoder, vectors, read_scored_pairs(path))
        if compared is not None:
            rows[name] = compared
    for path in analogies:
        found = compare_analogies(encoder, vectors, read_analogies(path))
        rows |= {f"analogies, {section}": each for section, each in found.items()}
    if not rows:
        raise ValueError(
            f"{vectors.name} must have the words of some pairs or questions, got none of them: give vectors of this "
            "language"
        )
    results = rows.values()
    groups = {
        "static": [each.static for each in results],
        "last layer": [each.layers[-1] for each in results],
        "best layer": [max(each.layers) for each in results],
    }
    extra: dict[str, list[Any]] = {
        "best": [each.layers.index(max(each.layers)) for each in results],
        "items": [each.asked for each in results],
        "covered": [each.asked / each.items for each in results],
    }
    caption = (
        "Static vectors compared with the encoder's vectors of single words, on the items whose words have both. For "
        "pairs: Spearman's correlation with human scores. For analogies: the share of correct answers, with the words "
        "of all questions as candidates."
    )
    title = "Static and contextual vectors"
    return bars("static", title, caption, list(rows), groups, "Spearman; share correct", extra)


def heads_figure(encoder: Any, words: Sequence[Sequence[str]]) -> Figure:
    """What each head attends to on average."""
    means = summarize_heads(encoder, [" ".join(sentence) for sentence in words]).means
    maps = {
        "entropy (nats)": means["entropy"].tolist(),
        "distance (tokens)": means["distance"].tolist(),
        "on [SEP]": means["last"].tolist(),
        "on neighbours": (means["previous"] + means["next"]).tolist(),
    }
    caption = (
        "Means over the tokens for each head: the entropy of its attention, the distance of the attended tokens, and "
        "the attention on [SEP] and on the two neighbouring tokens."
    )
    return heat_maps("heads", "What heads attend to", caption, maps)


def relations_figure(encoder: Any, trees: Sequence[Tree], most: int = 15) -> Figure:
    """The best head of each frequent relation, compared with the best fixed distance."""
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
    caption = (
        "For each frequent dependency relation, the share of words whose related word gets the most attention of the "
        "best single head. The baseline is the word at the best fixed distance."
    )
    title = "Heads that find dependency relations"
    return bars("relations", title, caption, labels, groups, "share of pairs found", extra)


def probes_figure(encoder: Any, labelled: dict[str, Split]) -> Figure:
    """The accuracy and selectivity of linear probes on each layer."""
    lines: dict[str, list[float]] = {}
    for name, (train, test) in labelled.items():
        scores = probe_by_layer(encoder, train, test, max_words=PROBED_WORDS)
        label = f"{name} (majority {majority_accuracy(train, test):.2f})"
        lines[label] = [score.accuracy for score in scores]
        lines[f"{name}, selectivity"] = [score.selectivity for score in scores]
    caption = (
        "Test accuracy of a linear probe on each layer's word vectors. Dashed: its selectivity, the accuracy minus the "
        "accuracy of a probe that learns random labels of words."
    )
    title = "What each layer encodes"
    return by_layer("probes", title, caption, lines, "accuracy; selectivity", pairs=True)


def mix_figure(encoder: Any, labelled: dict[str, Split]) -> Figure:
    """The weights of learned mixes of layers, for labels of words, and those of the model's mix."""
    shares = {
        name: learn_mix(encoder, train, max_words=PROBED_WORDS).shares.tolist()
        for name, (train, _) in labelled.items()
    }
    if encoder.mix is not None:
        shares["this model's mix"] = encoder.mix.shares.tolist()
    caption = (
        "The weight of each layer in a learned weighted sum of all layers (ScalarMix) below a linear classifier: the "
        "layers that are useful for a task have large weights."
    )
    labels = ["embeddings", *(f"layer {i + 1}" for i in range(encoder.config.num_layers))]
    return bars("mix", "Weights of the layers by task", caption, labels, shares, "share")
