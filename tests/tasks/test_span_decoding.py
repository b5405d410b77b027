import random
from itertools import combinations

import pytest

from fastenc.tasks.metrics import entity_metrics
from fastenc.tasks.span_decoding import FoundEntity, best_null_offset, select_entities
from fastenc.text.tags import Span, convert, spans

flat_and_nested = pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])


def random_candidates(draw, words, count, levels=10**6):
    every = [(i, j) for i in range(words) for j in range(i + 1, words + 1)]
    return [
        FoundEntity(Span(draw.choice("XY"), i, j), 0.5, draw.randint(-levels, levels) / levels)
        for i, j in draw.sample(every, min(count, len(every)))
    ]


def compatible(one, two, nested):
    a, b = (set(range(e.entity.first, e.entity.stop)) for e in (one, two))
    return not a & b or (nested and (a <= b or b <= a))


@flat_and_nested
def test_decoding_is_the_best_of_all_that_are_allowed(nested):
    """Of all sets without a clash: the set with the greatest highest margin, then second highest margin, and so on."""
    draw = random.Random(0)
    sizes = set()
    for _ in range(60):
        candidates = random_candidates(draw, 6, 8)
        allowed = [
            chosen
            for size in range(9)
            for chosen in combinations(candidates, size)
            if all(compatible(a, b, nested) for a, b in combinations(chosen, 2))
        ]
        best = max(allowed, key=lambda c: sorted((e.margin for e in c), reverse=True))
        selected = select_entities(candidates, nested=nested)
        assert set(selected) == set(best)
        assert selected == sorted(selected, key=lambda e: (e.entity.first, -e.entity.stop))
        sizes.add(len(selected))
    assert len(sizes) > 2


def test_containment_is_allowed_and_crossing_is_not():
    entity = lambda first, stop, margin: FoundEntity(Span("X", first, stop), 0.9, margin)
    outer, inner, crossing, apart = (
        entity(0, 4, 3),
        entity(1, 3, 2),
        entity(2, 6, 1),
        entity(4, 6, 0.5),
    )
    everything = [apart, crossing, inner, outer]
    assert select_entities(everything, nested=True) == [outer, inner, apart]
    assert select_entities(everything, nested=False) == [outer, apart]
    same_start, same_end = entity(0, 2, 1), entity(3, 4, 1)
    assert select_entities([outer, same_start, same_end], nested=True) == [
        outer,
        same_start,
        same_end,
    ]
    assert select_entities([], nested=True) == []


def test_the_first_of_equals_is_taken():
    one, two = (FoundEntity(Span(label, 0, 2), 0.5, 1.0) for label in "XY")
    assert select_entities([one, two._replace(entity=Span("Y", 1, 3))], nested=False) == [one]


def f1_at(candidates, gold, offset, nested):
    """From the definition: candidates with a margin above the offset, decoded and scored."""
    rows = [[c for c in row if c.margin > offset] for row in candidates]
    predicted = [{e.entity for e in select_entities(row, nested=nested)} for row in rows]
    right = sum(len(f & set(g)) for f, g in zip(predicted, gold, strict=True))
    both = sum(map(len, predicted)) + sum(map(len, gold))
    return 2 * right / both if both else 0.0


@flat_and_nested
@pytest.mark.parametrize("levels", [4, 10**6], ids=["many ties", "no ties"])
def test_the_offset_gives_the_best_f1_of_all_offsets(nested, levels):
    draw = random.Random(levels)
    moved = 0
    for _ in range(40):
        candidates = [random_candidates(draw, 6, 12, levels) for _ in range(4)]
        gold = [[e.entity for e in draw.sample(row, 3)] for row in candidates]
        everything = [select_entities(row, nested=nested) for row in candidates]
        offset = best_null_offset(everything, gold)
        edges = sorted({-3.0, 2.0, *(c.margin for row in candidates for c in row)})
        tried = [0.0, *((a + b) / 2 for a, b in zip(edges, edges[1:], strict=False))]
        best = max(f1_at(candidates, gold, o, nested) for o in tried)
        assert f1_at(candidates, gold, offset, nested) == pytest.approx(best)
        if f1_at(candidates, gold, 0.0, nested) == pytest.approx(best):
            assert offset == 0
        else:
            moved += 1
    assert moved > 20


def test_the_offset_stays_where_nothing_is_right():
    wrong = FoundEntity(Span("X", 0, 1), 0.5, 3.0)
    assert best_null_offset([[wrong]], [[Span("Y", 0, 1)]]) == 0.0
    assert best_null_offset([[]], [[]]) == 0.0
    assert best_null_offset([[wrong]], [[wrong.entity]]) == 0.0
    hidden = wrong._replace(margin=-3.0)
    assert best_null_offset([[hidden]], [[wrong.entity]]) < -3.0


def test_flat_metrics_are_seqevals():
    seqeval = pytest.importorskip("seqeval.metrics")
    draw = random.Random(0)
    names = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    gold, predicted = (
        [convert(draw.choices(names, k=9), "iob2") for _ in range(30)] for _ in range(2)
    )
    metrics = entity_metrics([spans(tags) for tags in predicted], [spans(tags) for tags in gold])
    assert metrics["f1"] == pytest.approx(seqeval.f1_score(gold, predicted)) and metrics["f1"] > 0
    assert metrics["precision"] == pytest.approx(seqeval.precision_score(gold, predicted))
    assert metrics["recall"] == pytest.approx(seqeval.recall_score(gold, predicted))
    assert metrics["nested"] == metrics["nested_found"] == 0


def test_nested_entities_are_counted():
    gold = [[Span("X", 0, 4), Span("Y", 1, 2), Span("X", 1, 3), Span("Y", 0, 4)], [Span("X", 0, 1)]]
    predicted = [[Span("X", 1, 3), Span("X", 1, 2), Span("X", 0, 4)], []]
    assert entity_metrics(predicted, gold) == {
        "f1": 4 / 8,
        "precision": 2 / 3,
        "recall": 2 / 5,
        "nested": 2,
        "nested_found": 1,
    }
    empty = entity_metrics([[]], [[]])
    assert empty["f1"] == empty["precision"] == empty["recall"] == 0
