"""The figures of a report, each from an encoder and its data.

Every title names the data, every caption the number of items and where an interval comes from.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc.analysis.analogies import read_analogies
from fastenc.analysis.data_files import TEXT_PAIRS, Split, names_of, spread
from fastenc.analysis.errors import TooFewData
from fastenc.analysis.figures import (
    COLOURS,
    Figure,
    Panel,
    bars,
    by_layer,
    heat_maps,
    scatter,
    table,
)
from fastenc.analysis.heads import summarize_heads
from fastenc.analysis.intervals import DRAWS, exact_interval
from fastenc.analysis.mix import learn_mix
from fastenc.analysis.neighbours import (
    compare_neighbours,
    in_brackets,
    isolated_vectors,
    listed,
)
from fastenc.analysis.probes import LabelledWords, majority_accuracy, probe_by_layer
from fastenc.analysis.relations import DIRECTIONS, Tree, score_relations
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
from fastenc.analysis.static_vectors import StaticVectors
from fastenc.data.senses import SenseData, Target
from fastenc.models.encoder import Encoder

SEED = 0  # of probes, mixes of layers, bootstraps and UMAP
RELATIONS = 15  # number of relations that are shown
BOOTSTRAP = (
    f"95 % interval by a percentile bootstrap over the {{}} ({DRAWS:,} resamples, seed {SEED})"
)


def map_of_uses(
    encoder: Encoder,
    sentences: Sequence[Sequence[str]],
    targets: Sequence[Target],
    layer: int,
    method: str,
    title: str,
) -> Figure:
    """The uses of one word as points in a plane, coloured by sense."""
    if len(targets) < 3:
        raise TooFewData(
            f"a map needs a word with at least three labelled uses, got {len(targets)} of {targets[0].lemma!r}: give "
            "more labelled sentences"
        )
    embedded = encoder.embed_words(
        [sentences[target.sentence] for target in targets], layers=(layer,), show_progress=False
    )
    vectors = torch.stack([embedded[i][t.word] for i, t in enumerate(targets)]).float()
    if torch.equal(vectors, vectors[:1].expand_as(vectors)):
        raise TooFewData(
            f"a map needs uses with different vectors, got {len(targets)} equal ones: give different sentences"
        )
    plane, axes, how = _projected(vectors, method)
    points = [
        (float(x), float(y), target.senses[0], " ".join(sentences[target.sentence]))
        for (x, y), target in zip(plane, targets, strict=True)
    ]
    caption = (
        f"One point for each of {len(targets):,} uses of {targets[0].lemma!r} in layer {layer}; its colour is the "
        f"sense. The position is {how} of its vector. Senses that the model distinguishes form separate clouds. A "
        "point under the pointer shows its sentence."
    )
    return scatter("map", title, caption, points, axes)


def _projected(vectors: Tensor, method: str) -> tuple[Any, tuple[str, str], str]:
    """The vectors in a plane: an array (vectors, 2), the names of its axes, and what a caption says of it."""
    if method == "umap":
        umap = require("umap", extra="umap")
        # Fewer points than UMAP's 15 neighbours have no spectral layout to begin with.
        small = {"n_neighbors": len(vectors) - 1, "init": "random"} if len(vectors) <= 16 else {}
        projection = umap.UMAP(random_state=SEED, n_jobs=1, metric="cosine", **small)
        plane = projection.fit_transform(vectors.numpy())
        how = f"a UMAP projection (cosine distances, seed {SEED}), whose distances between clouds mean nothing,"
        return plane, ("UMAP 1 (no unit)", "UMAP 2 (no unit)"), how
    projection = require("sklearn.decomposition", extra="train").PCA(2, random_state=SEED)
    plane = projection.fit_transform(vectors.numpy())
    shares = projection.explained_variance_ratio_
    one, other = (f"PC {i + 1} ({share:.0%} of variance)" for i, share in enumerate(shares))
    return (
        plane,
        (one, other),
        f"the two principal components with {shares.sum():.0%} of the variance",
    )


def neighbours_figure(
    encoder: Encoder,
    data: SenseData,
    targets: Sequence[Target],
    layer: int,
    most: int,
    static: StaticVectors | None,
    title: str,
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
    compared = compare_neighbours(encoder, occurrences, pool, vectors, layers=(layer,))
    rows = [
        (in_brackets(each), target.senses[0], *listed(each))
        for each, target in zip(compared, uses, strict=True)
    ]
    origin = "the word alone" if static is None else static.name
    caption = (
        f"The nearest words of {targets[0].lemma!r} in the first two sentences of each sense by layer {layer}, among "
        f"the words of {len(pool):,} sentences, and those of its static vector ({origin}). Only the former can depend "
        "on the sense."
    )
    columns = ("sentence", "sense", "neighbours in the sentence", "neighbours of the static vector")
    return table("neighbours", title, caption, columns, rows)


def anisotropy_figure(encoder: Encoder, words: Sequence[Sequence[str]], title: str) -> Figure:
    """The mean cosine of two tokens by layer, and how much of it comes from one dimension."""
    layers = isotropy_by_layer(encoder, [" ".join(sentence) for sentence in words])
    shares = [float(layer.raw.shares.max()) for layer in layers]
    panels = [
        Panel(
            "anisotropy",
            "mean cosine",
            {
                "as they are": [layer.raw.anisotropy for layer in layers],
                "standardised": [layer.standardized.anisotropy for layer in layers],
            },
        ),
        Panel("largest dimension", "share of anisotropy", {"as they are": shares}),
    ]
    caption = (
        f"The anisotropy is the mean cosine of two different tokens of {len(words):,} sentences, exactly over all "
        f"pairs of their {layers[0].raw.count:,} tokens, before and after each dimension is standardised. If it is "
        "high, all vectors have similar directions. The second panel is the largest share of it that comes from one "
        "dimension."
    )
    return by_layer("anisotropy", title, caption, panels)


def frequency_figure(encoder: Encoder, words: Sequence[Sequence[str]], title: str) -> Figure:
    """The mean cosine of a word's occurrences by its frequency."""
    bins = similarity_by_frequency(encoder, words)
    if not bins:
        raise TooFewData(
            f"self-similarity needs words that occur twice, got none in {len(words):,} sentences: give more sentences"
        )
    caption = (
        "The mean cosine of different occurrences of a word in the last layer, by the word's frequency in "
        f"{len(words):,} sentences; n is the number of words. The lower it is, the more a word's vector depends on its "
        f"sentence. Lines: {BOOTSTRAP.format('words')}."
    )
    return bars(
        "frequency",
        title,
        caption,
        [f"{each.low} to {each.high - 1} times" for each in bins],
        {"mean cosine": [each.similarity for each in bins]},
        "mean cosine",
        [f"n = {each.words:,}" for each in bins],
        {"mean cosine": [each.interval for each in bins]},
        {"words": [each.words for each in bins]},
    )


def similarity_figure(
    encoder: Encoder, word_pairs: Sequence[Path], text_pairs: Sequence[Path], title: str
) -> Figure:
    """Correlation with human scores by layer, for each data set before and after standardising."""
    scored = [read_scored_pairs(path) for path in word_pairs]
    scored += [read_scored_pairs(path, TEXT_PAIRS[:2], TEXT_PAIRS[2]) for path in text_pairs]
    sets = dict(zip(names_of([*word_pairs, *text_pairs]), scored, strict=True))
    raw: dict[str, list[float]] = {}
    scaled: dict[str, list[float]] = {}
    intervals = {}
    problems = []
    # The largest sets come first, because a figure shows a limited number of lines.
    for name, data in sorted(sets.items(), key=lambda item: -len(item[1].pairs)):
        try:
            correlation = correlation_by_layer(encoder, data)
        except TooFewData as problem:
            problems.append(f"{name} is left out: {problem}.")
            continue
        label = f"{name} (n = {len(data.pairs):,})"
        raw[label] = [each.raw for each in correlation]
        scaled[label] = [each.standardized for each in correlation]
        intervals[label] = [each.interval for each in correlation]
    if not raw:
        raise TooFewData(" ".join(problems))
    caption = (
        "Spearman's correlation of the cosine similarities of n pairs with human scores, before and after each "
        f"dimension is standardised. Bands: {BOOTSTRAP.format('pairs')}."
    )
    if len(raw) > len(COLOURS):
        caption += (
            f" The plot shows the {len(COLOURS)} largest of {len(raw)} data sets, the CSV file all."
        )
    panels = [
        Panel("as they are", "Spearman's correlation", raw, intervals=intervals),
        Panel("standardised", "Spearman's correlation", scaled),
    ]
    return by_layer("similarity", title, " ".join([caption, *problems]), panels)


def static_figure(
    encoder: Encoder,
    vectors: StaticVectors,
    pairs: Sequence[Path],
    analogies: Sequence[Path],
    title: str,
) -> Figure:
    """Static vectors compared with the encoder's, on the pairs and questions whose words have a static vector."""
    rows: dict[str, StaticComparison] = {}
    for name, path in zip(names_of(pairs), pairs, strict=True):
        compared = compare_pairs(encoder, vectors, read_scored_pairs(path))
        if compared is not None:
            rows[name] = compared
    for path in analogies:
        analogy_scores = compare_analogies(encoder, vectors, read_analogies(path))
        rows |= {f"analogies, {section}": each for section, each in analogy_scores.items()}
    if not rows:
        raise ValueError(
            f"{vectors.name} must have the words of some pairs or questions, got none of them: give vectors of this "
            "language"
        )
    results = rows.values()
    best = [each.layers.index(max(each.layers)) for each in results]
    groups = {
        "static": [each.static for each in results],
        "last layer": [each.layers[-1] for each in results],
        "best layer": [max(each.layers) for each in results],
    }
    intervals = {
        "static": [each.static_interval for each in results],
        "last layer": [each.layer_intervals[-1] for each in results],
    }
    notes = [
        f"n = {each.asked:,}; best: layer {layer}"
        for each, layer in zip(results, best, strict=True)
    ]
    extra: dict[str, Sequence[object]] = {
        "best": best,
        "items": [each.asked for each in results],
        "covered": [each.asked / each.items for each in results],
    }
    caption = (
        f"{vectors.name} compared with the encoder's vectors of single words, on the n items whose words have both. "
        "For pairs: Spearman's correlation with human scores. For analogies: the share of correct answers, with the "
        f"words of all questions as candidates. Lines: for pairs the {BOOTSTRAP.format('pairs')}; for analogies the "
        "exact binomial 95 % interval. The best layer is chosen on the same items, so it has none."
    )
    axis = "correlation, or share correct"
    return bars("static", title, caption, list(rows), groups, axis, notes, intervals, extra)


def heads_figure(encoder: Encoder, words: Sequence[Sequence[str]], title: str) -> Figure:
    """What each head attends to on average."""
    summary = summarize_heads(encoder, [" ".join(sentence) for sentence in words])
    means = summary.means
    maps = {
        "entropy (nats)": means["entropy"].tolist(),
        "distance (tokens)": means["distance"].tolist(),
        "share on [SEP]": means["last"].tolist(),
        "share on neighbours": (means["previous"] + means["next"]).tolist(),
    }
    caption = (
        f"Means over {summary.tokens:,} tokens of {len(words):,} sentences for each head: the entropy of its "
        "attention, the distance of the attended tokens, and the attention on [SEP] and on the two neighbouring "
        "tokens. The head with the largest mean is framed. Layers count from 1, heads from 0."
    )
    return heat_maps("heads", title, caption, maps)


def relations_figure(encoder: Encoder, trees: Sequence[Tree], title: str) -> Figure:
    """The best head of each frequent relation, compared with the best fixed distance."""
    scores = score_relations(encoder, trees)
    if not scores:
        raise TooFewData(
            f"heads need sentences with two related words, got none in {len(trees):,} sentences: give more sentences"
        )
    frequent = sorted(scores, key=lambda key: (-scores[key].count, key))[: 2 * RELATIONS]
    best: dict[str, tuple[str, str]] = {}
    for key in frequent:
        relation = key[0]
        if relation not in best or scores[key].best_head[2] > scores[best[relation]].best_head[2]:
            best[relation] = key
    keys = list(best.values())
    heads = [scores[key].best_head for key in keys]
    offsets = [scores[key].best_offset for key in keys]
    pairs = [scores[key].count for key in keys]
    labels = [
        f"{relation}, {'to head' if direction == DIRECTIONS[0] else 'to dependent'}"
        for relation, direction in keys
    ]
    shares = {
        "best head": [share for _, _, share in heads],
        "best fixed distance": [share for _, share in offsets],
    }
    intervals = {
        group: [exact_interval(round(share * n), n) for share, n in zip(values, pairs, strict=True)]
        for group, values in shares.items()
    }
    notes = [
        f"layer {layer + 1}, head {head}; {offset:+}; n = {n:,}"
        for (layer, head, _), (offset, _), n in zip(heads, offsets, pairs, strict=True)
    ]
    extra = {
        "layer": [layer + 1 for layer, _, _ in heads],
        "head": [head for _, head, _ in heads],
        "distance": [offset for offset, _ in offsets],
        "pairs": pairs,
    }
    caption = (
        f"For the {len(keys)} most frequent dependency relations of {len(trees):,} sentences, the share of n words "
        "whose related word gets the most attention of the best single head, which is named with the best fixed "
        "distance in words. Layers count from 1, heads from 0. Lines: exact binomial 95 % intervals. Head and distance "
        "are chosen on the same words, so both shares are a little too high."
    )
    return bars(
        "relations", title, caption, labels, shares, "share of pairs found", notes, intervals, extra
    )


def probes_figure(
    encoder: Encoder, labelled: Mapping[str, Split], words: int, title: str
) -> Figure:
    """The accuracy of linear probes on each layer, beside what random labels, the majority and chance give."""
    panels = []
    for name, (train, test) in labelled.items():
        scores = probe_by_layer(encoder, train, test, max_words=words, seed=SEED)
        tested = scores[0].words
        classes = len({label for row in train.labels for label in row if label is not None})
        accuracies = [score.accuracy for score in scores]
        exact = [exact_interval(round(accuracy * tested), tested) for accuracy in accuracies]
        panels.append(
            Panel(
                name,
                "accuracy (share of words)",
                {"probe": accuracies, "random labels": [score.control for score in scores]},
                f"n = {tested:,}, {classes} labels",
                {"probe": exact},
                {"majority": majority_accuracy(train, test), "chance": 1 / classes},
            )
        )
    caption = (
        "Accuracy of a linear probe on each layer's word vectors, on n words of the test set. Band: the exact binomial "
        "95 % interval, as if words were independent. Random labels: a probe that learns a random label for each word "
        "and so shows what memorising words gives; the distance between both lines is the selectivity. Majority: the "
        f"most frequent label of the training set. Chance: one of the labels at random. Seed {SEED}."
    )
    return by_layer("probes", title, caption, panels)


def mix_figure(encoder: Encoder, labelled: Mapping[str, Split], words: int, title: str) -> Figure:
    """The weights of learned mixes of layers, for labels of words, and those of the model's mix."""
    shares = {}
    for name, (train, _) in labelled.items():
        learned = learn_mix(encoder, train, max_words=words, seed=SEED)
        shares[f"{name} (n = {labels_in(train):,})"] = learned.shares.tolist()
    if encoder.mix is not None:
        shares["this model's mix"] = encoder.mix.shares.tolist()
    caption = (
        "The weight of each layer in a learned weighted sum of all layers (ScalarMix) below a linear classifier of n "
        "words: the layers that are useful for a task have large weights. The weights of a group add up to 1. "
        f"One run with seed {SEED}."
    )
    labels = ["embeddings", *(f"layer {i + 1}" for i in range(encoder.config.num_layers))]
    return bars("mix", title, caption, labels, shares, "share of the sum")


def labels_in(data: LabelledWords) -> int:
    """Number of labelled words."""
    return sum(label is not None for row in data.labels for label in row)
