import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from fastenc.data import read_texts, segment_pairs, train_tokenizer
from fastenc.data.segments import segment_pair_extents
from fastenc.data.sentences import SentenceTokens, split_sentences
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.texts import TEXT


def check_pairs(pairs, documents, tokenizer, block_size):
    """Compare with the definition, pair by pair: contiguous whole sentences, in order, from one document."""
    special = special_tokens(tokenizer)
    half = (block_size - 3) // 2
    for number, document in enumerate(filter(split_sentences, documents)):
        pieces = []
        for sentence in split_sentences(document):
            ids = tokenizer.encode(sentence, add_special_tokens=False).ids
            pieces += [ids[start : start + half] for start in range(0, len(ids), half)]
        for pair in (pair for pair in pairs if pair.document == number):
            ids = list(pair.ids)
            assert ids[0] == special.cls and ids[-1] == ids[pair.split] == special.sep
            assert len(ids) <= block_size
            assert [*pair.first, special.sep, *pair.second] == ids[1:-1]
            for segment in (list(pair.first), list(pair.second)):
                assert segment, "a segment is empty"
                while segment:
                    assert segment[: len(pieces[0])] == pieces[0], "not the next whole sentence"
                    del segment[: len(pieces.pop(0))]
        assert len(pieces) < 2, "text is missing"


@pytest.mark.parametrize("block_size", [8, 20, 64, 500])
def test_pairs_follow_the_definition(block_size):
    tokenizer = train_tokenizer([TEXT], vocab_size=200)
    documents = [TEXT, "", "Alone.", TEXT * 9, "One. Two. Three.", " \n"]
    pairs = segment_pairs(documents, tokenizer, block_size)
    check_pairs(pairs, documents, tokenizer, block_size)
    assert {pair.document for pair in pairs} == {0, 2, 3}
    assert pairs == segment_pairs(documents, tokenizer, block_size)
    assert documents[2] == "Alone."


def test_nine_pairs_in_ten_are_full():
    """The next sentence would not fit."""
    tokenizer = train_tokenizer([TEXT], vocab_size=200)
    sentences = [tokenizer.encode(s, add_special_tokens=False).ids for s in split_sentences(TEXT)]
    pairs = segment_pairs([TEXT * 400], tokenizer, 64)
    starts = {tuple(ids): len(ids) for ids in sentences}
    full = 0
    for pair, following in pairwise(pairs):
        longest = next(n for ids, n in starts.items() if tuple(following.first[:n]) == ids)
        full += len(pair.ids) + longest > 64
    assert len(pairs) > 300 and 0.88 < full / len(pairs) < 0.96


def assert_uniform(values, expected):
    """Each of the values occurs about equally often."""
    counts, share = Counter(values), 1 / len(expected)
    assert counts.keys() <= set(expected)
    bound = 4 * math.sqrt(len(values) * share * (1 - share))
    assert all(abs(counts[each] - len(values) * share) < bound for each in expected)


def test_lengths_and_divisions_have_berts_probabilities():
    """Of sentences of one token: 90 % of the pairs have all 10 tokens, the others 2 to 10, divided anywhere."""
    ends = range(1, 50_001)
    text = SentenceTokens(range(50_001), ends, ends[-1:])
    pairs = [each[:3] for each in segment_pair_extents(text, 10, Random(0))]
    assert all(stop == start for (_, _, stop), (start, _, _) in pairwise(pairs))
    lengths = [stop - start for start, _, stop in pairs]
    assert_uniform(
        [split - start for start, split, stop in pairs if stop - start == 10], range(1, 10)
    )
    short, expected = sum(n < 10 for n in lengths) / len(pairs), 0.1 * 8 / 9
    assert abs(short - expected) < 4 * math.sqrt(expected * (1 - expected) / len(pairs))
    assert_uniform([n for n in lengths if n < 10], range(2, 10))


def test_the_rest_of_a_document_is_divided_anywhere():
    """Documents of four sentences of one token, each with a separator behind it."""
    tokens = range(5 * 2000)
    ends = [token for token in tokens if token % 5]
    text = SentenceTokens(tokens, ends, range(4, len(tokens), 5))
    pairs = list(segment_pair_extents(text, 20, Random(0)))
    assert {start % 5 for start, *_ in pairs} <= {0, 2}
    assert_uniform(
        [split - start for start, split, stop, _ in pairs if stop - start == 4], [1, 2, 3]
    )
    assert all(number == start // 5 for start, _, _, number in pairs)


def test_pairs_depend_on_the_seed():
    tokenizer = train_tokenizer([TEXT], vocab_size=200)
    first, again, other = (segment_pairs([TEXT * 9], tokenizer, 64, seed=n) for n in (0, 0, 1))
    assert first == again != other


def test_bad_input_is_named():
    tokenizer = load_tokenizer(minilm_folder())
    with pytest.raises(ValueError, match="block_size must be at least 8 tokens, got 4"):
        segment_pairs(["A b. C d."], tokenizer, block_size=4)
    for documents in (["", " "], ["One sentence only.", "Another one."], []):
        with pytest.raises(ValueError, match="needs a document of at least two sentences"):
            segment_pairs(documents, tokenizer)


def test_real_articles(data_dir):
    tokenizer = load_tokenizer(minilm_folder())
    documents = read_texts(data_dir / "wikipedia_en/test.txt.gz")[:60]
    pairs = segment_pairs(documents, tokenizer, 128)
    check_pairs(pairs, documents, tokenizer, 128)
    lengths = [len(pair.ids) for pair in pairs]
    short = sum(length < 64 for length in lengths) / len(pairs)
    assert max(lengths) <= 128 and 0.02 < short < 0.25, "one in ten is short, and documents end"
