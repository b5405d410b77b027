"""The corruptions of encoder-decoders, beside implementations in numpy that compute them in other ways."""

from collections import Counter
from math import comb, exp, factorial
from random import Random

import numpy
import pytest

from fastenc.data.corruption import (
    PREFIX,
    delete_tokens,
    infill,
    longest_text,
    mask_tokens,
    noise_spans,
    permute_sentences,
    poisson,
    replace_spans,
    rotate,
)

MASK = -1


def their_mask(length, density, mean, draw):
    """T5's mask, as its code computes it: shuffled indicators of the segments' first tokens, and parities."""
    size = max(length, 2)
    noise = min(max(int(numpy.round(size * density)), 1), size - 1)
    spans = max(int(numpy.round(noise / mean)), 1)

    def segments(items):
        first = numpy.arange(items - 1) < spans - 1
        draw.shuffle(first)
        return numpy.bincount(numpy.concatenate([[0], first]).cumsum(), minlength=spans)

    lengths = numpy.stack([segments(size - noise), segments(noise)], axis=1).reshape(-1)
    starts = numpy.zeros(size, int)
    starts[lengths.cumsum()[:-1]] = 1
    return (starts.cumsum() % 2 == 1)[:length]


def their_sides(tokens, mask, sentinels):
    """(source, target) of T5's code: each run of dropped tokens becomes the next sentinel."""

    def with_sentinels(dropped):
        first = dropped & ~numpy.concatenate([[False], dropped[:-1]])
        numbers = numpy.asarray(sentinels)[numpy.maximum(first.cumsum() - 1, 0)]
        return numpy.where(first, numbers, tokens)[first | ~dropped].tolist()

    return with_sentinels(mask), with_sentinels(~mask)


SETTINGS = [(0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 64.0), (0.25, PREFIX)]


@pytest.mark.parametrize(("density", "mean"), SETTINGS)
def test_source_and_target_are_those_of_t5(density, mean):
    sentinels, rng, draw = range(2000, 1000, -1), Random(0), numpy.random.default_rng(0)
    for length in (2, 3, 7, 10, 63, 568):
        tokens = numpy.arange(5, 5 + length)
        spans = noise_spans(length, density, mean, rng)
        mask = numpy.zeros(length, bool)
        for start, stop in spans:
            mask[start:stop] = True
        expected = their_mask(length, density, mean, draw)
        assert mask.sum() == expected.sum() and not mask[0] and mask[-1]
        count = lambda flags: int((numpy.diff(flags.astype(int)) == 1).sum())
        assert len(spans) == count(mask) == count(expected)
        assert replace_spans(tokens.tolist(), spans, sentinels) == their_sides(
            tokens, mask, sentinels
        )


def test_every_mask_is_equally_likely():
    """4 noise tokens in 2 spans among 10: comb(5, 1) * comb(3, 1) masks, as often as numpy's draws of T5's code."""
    rng, draw, tries = Random(1), numpy.random.default_rng(1), 6000
    ours = Counter(tuple(noise_spans(10, 0.4, 2.0, rng)) for _ in range(tries))
    theirs = Counter(their_mask(10, 0.4, 2.0, draw).tobytes() for _ in range(tries))
    masks = comb(5, 1) * comb(3, 1)
    assert len(ours) == len(theirs) == masks
    for counts in (ours, theirs):  # 6 standard deviations
        assert all(abs(n - tries / masks) < 6 * (tries / masks) ** 0.5 for n in counts.values())


def test_the_length_of_the_text_is_t5s():
    """Raffel et al.: 512 tokens of source; 114 of target."""
    assert longest_text(511, 0.15, 3.0) == 568
    source, target = replace_spans(
        range(568), noise_spans(568, 0.15, 3.0, Random(0)), range(1000, 1100)
    )
    assert (len(source) + 1, len(target) + 1) == (512, 114)
    for density, mean in SETTINGS:
        for room in (8, 30, 127):
            longest = longest_text(room, density, mean)
            for length, fits in ((longest, True), (longest + 1, False)):
                spans = noise_spans(length, density, mean, Random(0))
                sides = replace_spans(range(length), spans, range(1000, 2000))
                assert (max(map(len, sides)) <= room) is fits


def test_short_texts_have_no_noise():
    assert noise_spans(0, 0.15, 3.0, Random(0)) == noise_spans(1, 0.15, 3.0, Random(0)) == []
    assert replace_spans([7], [], [9]) == ([7], [])


def read_infilled(filled):
    """(length of what each mask stands for) of an infilled text 0, 1, 2, … whose last token is kept."""
    lengths, expected, masks = [], 0, 0
    for token in [*filled]:
        if token == MASK:
            masks += 1
            continue
        assert masks or token == expected, "a token was lost without a mask"
        lengths.append((masks, token - expected))
        expected, masks = token + 1, 0
    return [each for each in lengths if each[0]]


def test_infilling_replaces_its_share_by_poisson_spans():
    rng, lengths, places = Random(0), Counter(), numpy.zeros(10)
    for _ in range(300):
        filled = infill(range(400), 0.3, 3.0, MASK, rng)
        kept = [token for token in filled if token != MASK]
        assert len(kept) == 280 and kept == sorted(kept)
        lengths.update(
            number for masks, number in read_infilled([*filled, 400]) if masks == 1
        )  # neighbouring spans cannot be told apart
        spots = numpy.flatnonzero(numpy.asarray(filled) == MASK)
        places += numpy.histogram(spots / len(filled), 10, (0, 1))[0]
    assert abs(places / places.mean() - 1).max() < 0.1, "spans are not uniform"
    # Without the spans that have a neighbour, which the length does not affect, the distribution is Poisson's.
    total = sum(lengths.values())
    for number in range(8):
        expected = exp(-3) * 3**number / factorial(number)
        assert abs(lengths[number] / total - expected) < 0.015, number


def test_infilling_keeps_within_the_text():
    rng = Random(0)
    assert infill([], 0.3, 3.0, MASK, rng) == [] and infill([4], 0.3, 3.0, MASK, rng) == [4]
    for share in (0.1, 0.5, 1.0):
        for mean in (0.2, 3.0, 900.0):  # short spans: mostly insertions; long ones: one span
            filled = infill(range(20), share, mean, MASK, rng)
            assert len(filled) <= 20 and MASK in filled
    draws = numpy.array([poisson(3.0, rng) for _ in range(20000)])
    assert abs(draws.mean() - 3) < 0.06 and abs(draws.var() - 3) < 0.15


def test_masking_deletion_permutation_and_rotation():
    rng, tokens = Random(0), list(range(40))
    masked = mask_tokens(tokens, 0.15, MASK, rng)
    assert masked.count(MASK) == 6 and all(
        m in (t, MASK) for m, t in zip(masked, tokens, strict=True)
    )
    deleted = delete_tokens(tokens, 0.15, rng)
    assert len(deleted) == 34 and deleted == sorted({*deleted})
    rotations = {tuple(rotate([1, 2, 3], rng)) for _ in range(60)}
    assert rotations == {(1, 2, 3), (2, 3, 1), (3, 1, 2)}
    # Three sentences, the last one without an end.
    orders = Counter(tuple(permute_sentences(range(6), [2, 3], rng)) for _ in range(600))
    first, second, third = (0, 1), (2,), (3, 4, 5)
    every = [a + b + c for a in (first, second, third) for b in (first, second, third) if b != a
             for c in (first, second, third) if c not in (a, b)]  # fmt: skip
    assert orders.keys() == {*every} and min(orders.values()) > 60
    for noise in (rotate, lambda t, r: permute_sentences(t, [], r)):
        assert noise([], rng) == [] and noise([5], rng) == [5]


def test_the_same_generator_gives_the_same_noise():
    functions = [
        lambda r: noise_spans(99, 0.15, 3.0, r),
        lambda r: infill(range(99), 0.3, 3.0, MASK, r),
        lambda r: mask_tokens(range(99), 0.3, MASK, r),
        lambda r: delete_tokens(range(99), 0.3, r),
        lambda r: permute_sentences(range(99), range(3, 99, 3), r),
        lambda r: rotate(range(99), r),
    ]
    for function in functions:
        assert function(Random(3)) == function(Random(3))
        assert any(function(Random(3)) != function(Random(seed)) for seed in (4, 5))
