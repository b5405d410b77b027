"""Corruptions of running text from which an encoder-decoder learns: T5's noise spans and BART's five kinds of noise.

Each function takes token ids without special tokens and a random generator. The same generator state gives the same
result.
"""

from collections.abc import Sequence
from math import inf
from random import Random

Span = tuple[int, int]  # tokens [start, stop)
PREFIX = inf  # mean length of noise spans that makes one span of all noise: the text's end


def noise_counts(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """(number of noise tokens, number of noise spans) of a text with ``length`` tokens.

        tokens = round(length * density), at least 1, and at most length - 1
        spans = round(tokens / mean_length), at least 1, and at most the tokens that are not noise

    Halves are rounded to even. A text of fewer than two tokens has no noise.
    """
    if length < 2:
        return 0, 0
    tokens = min(max(round(length * density), 1), length - 1)
    spans = min(max(round(tokens / mean_length), 1), length - tokens)
    return tokens, spans


def noise_spans(length: int, density: float, mean_length: float, rng: Random) -> list[Span]:
    """Random noise spans of a text. Text and noise alternate; the text begins, and noise ends the sequence.

    All masks with the numbers of :func:`noise_counts` are equally likely.

    Args:
        length: number of tokens of the text.
        density: share of noise tokens, in (0, 1).
        mean_length: mean length of a span, at least 1; ``PREFIX``: one span.
    Source: Raffel et al. 2019, arXiv:1910.10683, section 3.1.4, and its code, ``random_spans_noise_mask``.
    """
    tokens, count = noise_counts(length, density, mean_length)
    spans, stop = [], 0
    for kept, noise in zip(
        _divided(length - tokens, count, rng), _divided(tokens, count, rng), strict=True
    ):
        start = stop + kept
        stop = start + noise
        spans.append((start, stop))
    return spans


def _divided(items: int, parts: int, rng: Random) -> list[int]:
    """Lengths of ``parts`` non-empty parts of ``items`` items; every division is equally likely."""
    if not parts:
        return []
    ends = [*sorted(rng.sample(range(1, items), parts - 1)), items]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def replace_spans(
    tokens: Sequence[int], spans: Sequence[Span], sentinels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(source, target): in the source, sentinel i replaces span i; the target is sentinel 0, span 0, sentinel 1, …

    Args:
        tokens: ids of the text.
        spans: ascending spans that do not touch.
        sentinels: ids, at least as many as spans.
    Source: the formats of T5's code, which has no sentinel at the end of the target, unlike the paper's figure 2.
    """
    source: list[int] = []
    target: list[int] = []
    begin = 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        source += [*tokens[begin:start], sentinel]
        target += [sentinel, *tokens[start:stop]]
        begin = stop
    return [*source, *tokens[begin:]], target


def longest_text(room: int, density: float, mean_length: float) -> int:
    """Largest number of tokens whose source and target, by :func:`replace_spans`, have at most ``room`` tokens each.

    For 511, 0.15 and 3 it is 568, with a target of 113 tokens. With an end token, these are T5's 512 and 114.
    """

    def fits(length: int) -> bool:
        tokens, spans = noise_counts(length, density, mean_length)
        return max(length - tokens, tokens) + spans <= room

    length = room
    while not fits(length):
        length -= 1
    while fits(length + 1):
        length += 1
    return length


def mask_tokens(tokens: Sequence[int], share: float, mask: int, rng: Random) -> list[int]:
    """Replace a share of the tokens, rounded, by the mask token (BART's token masking)."""
    masked = list(tokens)
    for index in rng.sample(range(len(masked)), round(share * len(masked))):
        masked[index] = mask
    return masked


def delete_tokens(tokens: Sequence[int], share: float, rng: Random) -> list[int]:
    """Delete a share of the tokens, rounded (BART's token deletion)."""
    kept = rng.sample(range(len(tokens)), len(tokens) - round(share * len(tokens)))
    return [tokens[index] for index in sorted(kept)]


def infill(
    tokens: Sequence[int], share: float, mean_length: float, mask: int, rng: Random
) -> list[int]:
    """Replace random spans, which hold a share of the tokens (rounded), each by one mask token (BART's text infilling).

    The lengths are Poisson-distributed with the mean ``mean_length``; the last one is shortened to the share. A span of
    length 0 inserts a mask token. The places of the spans are independent and uniform. There are at most as many spans
    as replaced tokens, so that the text does not become longer; the last possible span replaces what is left.
    """
    budget = round(share * len(tokens))
    lengths: list[int] = []
    replaced = 0
    while replaced < budget:
        left = budget - replaced
        last = len(lengths) + 1 == budget
        lengths.append(left if last else min(poisson(mean_length, rng), left))
        replaced += lengths[-1]
    kept = len(tokens) - replaced
    filled: list[int] = []
    begin = before = 0  # next token; number of kept tokens before it
    for place, length in sorted((rng.randrange(kept + 1), length) for length in lengths):
        filled += [*tokens[begin : begin + place - before], mask]
        begin += place - before + length
        before = place
    return [*filled, *tokens[begin:]]


def poisson(mean: float, rng: Random) -> int:
    """A Poisson-distributed number: how many events of a process with rate 1 happen before the time ``mean``."""
    number, time = 0, rng.expovariate(1.0)
    while time <= mean:
        number, time = number + 1, time + rng.expovariate(1.0)
    return number


def permute_sentences(tokens: Sequence[int], ends: Sequence[int], rng: Random) -> list[int]:
    """Put the sentences in random order (BART's sentence permutation).

    Args:
        ends: index after each sentence's last token, ascending; tokens after the last one are a sentence too.
    """
    starts = [0, *(end for end in ends if 0 < end < len(tokens))]
    sentences = [
        tokens[start:stop] for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]
    rng.shuffle(sentences)
    return [token for sentence in sentences for token in sentence]


def rotate(tokens: Sequence[int], rng: Random) -> list[int]:
    """Let the text begin with a random token; what was before it follows the end (BART's document rotation)."""
    begin = rng.randrange(max(len(tokens), 1))
    return [*tokens[begin:], *tokens[:begin]]
