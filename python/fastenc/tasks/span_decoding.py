"""Selects the entities of a sentence from scored spans."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastenc.text.tags import Span


class FoundEntity(NamedTuple):
    """A predicted entity.

    Fields:
        margin: its score minus the score of "no entity".
    """

    entity: Span
    probability: float
    margin: float


def select_entities(candidates: Iterable[FoundEntity], *, nested: bool) -> list[FoundEntity]:
    """The entities of one sentence, selected greedily.

    The candidates are visited from the highest margin to the lowest. A candidate is selected unless it overlaps an
    entity that is already selected. With ``nested``, one entity may lie inside another; only partial overlaps are
    forbidden. Of candidates with equal margins, the first one is visited first. So the selection above a margin does
    not depend on the candidates below it.

    Returns: the entities in the order of their words, an outer entity before those inside it.
    Source: Yu et al. 2020, arXiv:2005.07150, section 3, where the logit alone decides the order.
    """
    selected: list[FoundEntity] = []
    # Ends of the selected entities, by first word. ``longest`` limits how far back an overlapping one can begin.
    stops: dict[int, list[int]] = defaultdict(list)
    longest = 0
    for candidate in sorted(candidates, key=lambda c: -c.margin):
        _, first, stop = candidate.entity
        overlapping = (
            (begin, end)
            for begin in range(first - longest + 1, stop)
            for end in stops.get(begin, ())
            if end > first
        )
        conflicts = (
            not nested or begin < first < end < stop or first < begin < stop < end
            for begin, end in overlapping
        )
        if not any(conflicts):
            selected.append(candidate)
            stops[first].append(stop)
            longest = max(longest, stop - first)
    return sorted(selected, key=lambda c: (c.entity.first, -c.entity.stop))


def best_null_offset(
    selected: Sequence[Sequence[FoundEntity]], gold: Sequence[Iterable[Span]]
) -> float:
    """The offset that gives the highest F1 if it is added to the score of "no entity".

    With an offset, the entities with a larger margin remain. So one pass over the sorted margins finds every possible
    F1. The offset is half-way between two margins. If several have the highest F1, the one nearest to 0 is taken; it is
    0 itself if that has the highest F1 too.

    Args:
        selected: for each sentence the result of :func:`select_entities` for all its spans, whatever their margin.
        gold: the entities of each sentence.
    """
    truth = [set(row) for row in gold]
    expected = sum(map(len, truth))
    margins = sorted(
        (
            (prediction.margin, prediction.entity in row)
            for sentence, row in zip(selected, truth, strict=True)
            for prediction in sentence
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
        candidate = 0.0 if below <= 0.0 < margin else (margin + below) / 2
        score = (2 * right / (count + expected), -abs(candidate))
        if score > best:
            best, offset = score, candidate
    return offset
