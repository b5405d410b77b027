import random
from itertools import product

import pytest

from fastenc.text.tags import convert, every_tag, may_follow, scheme_of, spans

IOB2 = ["O", "B-LOC", "I-LOC", "B-ORG-X", "I-ORG-X"]
BIOES = [*IOB2, "E-LOC", "S-LOC", "E-ORG-X", "S-ORG-X"]


@pytest.mark.parametrize("tags", [IOB2, BIOES])
def test_entities_of_any_tags_are_seqevals(tags):
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling")
    draw = random.Random(0)
    for _ in range(2000):
        sequence = draw.choices(tags, k=draw.randint(0, 8))
        expected = [
            (label, first, last + 1) for label, first, last in seqeval.get_entities(sequence)
        ]
        assert spans(sequence) == expected, sequence


def test_conversion_keeps_the_entities_and_obeys_the_scheme():
    draw = random.Random(0)
    for _ in range(500):
        sequence = draw.choices(BIOES, k=draw.randint(0, 8))
        for scheme in ("iob2", "bioes"):
            converted = convert(sequence, scheme)
            assert spans(converted) == spans(sequence)
            edges = [None, *converted, None]
            assert all(may_follow(a, b, scheme) for a, b in zip(edges, edges[1:], strict=False))
    tags = ["B-A", "I-A", "O", "B-A", "B-A", "I-A", "I-A"]
    assert convert(tags, "bioes") == ["B-A", "E-A", "O", "S-A", "B-A", "I-A", "E-A"]
    assert convert(convert(tags, "bioes"), "iob2") == tags


@pytest.mark.parametrize("scheme, tags", [("iob2", IOB2), ("bioes", BIOES)])
def test_allowed_sequences_are_those_that_conversion_leaves(scheme, tags):
    for sequence in product(tags, repeat=3):
        edges = [None, *sequence, None]
        allowed = all(may_follow(a, b, scheme) for a, b in zip(edges, edges[1:], strict=False))
        assert allowed == (convert(sequence, scheme) == list(sequence)), sequence


def test_schemes_and_their_tags():
    assert scheme_of(IOB2) == "iob2" and scheme_of(BIOES) == "bioes"
    for others in (["NOUN", "X"], ["O"], [], ["O", "B-LOC", "NOUN"], ["B-"]):
        assert scheme_of(others) is None
    assert every_tag(["I-LOC", "O", "B-ART"]) == ["O", "B-ART", "I-ART", "B-LOC", "I-LOC"]
    assert every_tag(["S-A"]) == ["O", "B-A", "I-A", "E-A", "S-A"]
    assert every_tag(["VERB", "ADJ", "VERB"]) == ["ADJ", "VERB"]
