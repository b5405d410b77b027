"""From scored spans to the entities of a sentence."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastenc.models.tags import Span


class FoundEntity(NamedTuple):
    """An entity, its probability, and how far its score is above that of no entity."""

    entity: Span
    probability: float
    margin: float


def select_entities(candidates: Iterable[FoundEntity], *, nested: bool) -> list[FoundEntity]:
    """The entities of one sentence: the highest margin first, each unless it clashes with one already taken.

    Two of them clash if they share words; with ``nested``, if they share words and neither lies inside the other. Of
    equal margins the first one's wins. What is taken above a margin does not depend on what is below it.

    Returns: in the order of their words, an outer entity before those inside it.
    Source: Yu et al. 2020, arXiv:2005.07150, section 3, who order by the logit alone.
    """
    taken: list[FoundEntity] = []
    # An entity taken is known by its first word, and can clash only with what begins before its end.
    stops: dict[int, list[int]] = defaultdict(list)
    longest = 0
    for candidate in sorted(candidates, key=lambda c: -c.margin):
        _, first, stop = candidate.entity
        near = (
            (begin, end)
            for begin in range(first - longest + 1, stop)
            for end in stops.get(begin, ())
            if end > first
        )
        clashes = (
            not nested or begin < first < end < stop or first < begin < stop < end
            for begin, end in near
        )
        if not any(clashes):
            taken.append(candidate)
            stops[first].append(stop)
            longest = max(longest, stop - first)
    return sorted(taken, key=lambda c: (c.entity.first, -c.entity.stop))


def best_null_offset(
    selected: Sequence[Sequence[FoundEntity]], gold: Sequence[Iterable[Span]]
) -> float:
    """The offset to no entity's score with the highest F1.

    An offset takes away the entities whose margin is not above it, so that every F1 there can be is found in one pass
    over the margins. It lies half-way between two of them; of equal F1 the nearest to 0 is taken, and 0 itself where
    it is as good.

    Args:
        selected: of each sentence what :func:`select_entities` makes of all its spans, whatever their margin.
    """
    truth = [set(row) for row in gold]
    expected = sum(map(len, truth))
    margins = sorted(
        (
            (found.margin, found.entity in row)
            for sentence, row in zip(selected, truth, strict=True)
            for found in sentence
        ),
        reverse=True,
    )
    best = (0.0, 0.0)  # F1, and minus the distance from 0
    offset, right = 0.0, 0
    for count, (margin, is_right) in enumerate(margins, start=1):
        right += is_right
        below = margins[count][0] if count < len(margins) else min(margin, 0.0) - 1.0
        if below == margin:
            continue
        here = 0.0 if below <= 0.0 < margin else (margin + below) / 2
        score = (2 * right / (count + expected), -abs(here))
        if score > best:
            best, offset = score, here
    return offset
