import random
import warnings

import pytest
import torch

from fastenc.data import EntityData, collate_spans, encode_spans, sentence
from fastenc.data.span_examples import spans_of
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer
from fastenc.text.tags import Span
from fastenc.text.windows import cut_windows

WORDS = ["the", "unbelievably", "Lovelace's", "engine", "naïvetés", "a", "algebraical", "loom"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(minilm_folder())


def some_data(lengths, labelled=True, seed=0):
    draw = random.Random(seed)
    sentences = [sentence(draw.choices(WORDS, k=length)) for length in lengths]
    if not labelled:
        return EntityData(sentences, [], [])
    entities = []
    for length in lengths:
        spans = {}
        for _ in range(length // 2):
            first = draw.randrange(length)
            stop = min(length, first + draw.randint(1, 3))
            spans[first, stop] = Span(draw.choice("XY"), first, stop)
        entities.append(list(spans.values()))
    return EntityData(sentences, entities, ["X", "Y"])


def every_span(length, longest):
    return [(i, j) for i in range(length) for j in range(i, min(length, i + longest))]


@pytest.mark.parametrize("longest", [1, 3, 50])
@pytest.mark.parametrize("max_length", [14, 40, 512])
def test_every_span_is_learnt_once_with_its_class(tokenizer, longest, max_length):
    data = some_data([7, 1, 30, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        examples = encode_spans(data, tokenizer, max_length, ["X", "Y"], longest)
    assert all(len(e.input_ids) <= max_length for e in examples)
    arguments = collate_spans(examples)
    labels = iter(arguments["labels"].tolist())
    learnt = [{} for _ in data.sentences]
    for example in examples:
        for span in zip(*(indices.tolist() for indices in spans_of(example)), strict=True):
            assert span not in learnt[example.sentence]
            learnt[example.sentence][span] = next(labels)
    assert next(labels, None) is None
    for each, entities, spans in zip(data.sentences, data.entities, learnt, strict=True):
        expected = dict.fromkeys(every_span(len(each.words), longest), 0)
        if max_length == 512:
            assert spans.keys() == expected.keys()
        gold = {(e.first, e.stop - 1): "XY".index(e.type) + 1 for e in entities}
        assert spans == {s: gold.get(s, 0) for s in expected if s in spans}


def test_a_span_belongs_to_the_window_where_it_is_most_central(tokenizer):
    """Compared with all windows of every span."""
    data, room, longest = some_data([40], labelled=False), 11, 6
    examples = encode_spans(data, tokenizer, room + 2, [], longest)
    (whole,) = encode_spans(data, tokenizer, 512, [], longest)
    begins = [row - 1 for row in whole.word_tokens]
    windows = cut_windows(len(whole.input_ids) - 2, room)
    assert len(windows) == len(examples) > 8
    owner = {}
    for number, example in enumerate(examples):
        for span in zip(*(indices.tolist() for indices in spans_of(example)), strict=True):
            owner[span] = number
    outside = 0
    for first, last in every_span(40, longest):
        a, b = begins[first], begins[last]
        margins = [min(a - w.start, w.stop - 1 - b) for w in windows]
        if max(margins) < 0:
            outside += 1
            assert (first, last) not in owner
        else:
            assert margins[owner[first, last]] == max(margins)
    assert 0 < outside < 100, "of no window: longer than two of them share"


def test_arguments_point_at_words(tokenizer):
    data = some_data([5, 0, 12, 1])
    examples = encode_spans(data, tokenizer, 20, ["X", "Y"], 4)
    arguments = collate_spans(examples)
    ids, rows, windows = arguments["batch"].input_ids, arguments["word_rows"], arguments["windows"]
    words = iter(rows.tolist())
    position = 0
    for example, offset in zip(examples, arguments["batch"].cu_seqlens.tolist(), strict=False):
        count = len(example.word_tokens)
        for k in range(count):
            row = next(words)
            word = data.sentences[example.sentence].words[example.first_word + k]
            assert ids[row] == tokenizer.encode(word, add_special_tokens=False).ids[0]
            assert offset < row < offset + len(example.input_ids) - 1
            last = position + count - 1
            assert windows[position + k].tolist() == [min(position + k + i, last) for i in range(4)]
        position += count
    assert next(words, None) is None and windows.shape == (position, 4)
    lengths = arguments["ends"] - arguments["starts"]
    assert lengths.min() == 0 and lengths.max() == 3


def test_windows_are_no_wider_than_the_longest_span(tokenizer):
    arguments = collate_spans(encode_spans(some_data([2, 1]), tokenizer, 64, ["X", "Y"], 10))
    assert arguments["windows"].tolist() == [[0, 1], [1, 1], [2, 2]]
    assert arguments["starts"].tolist() == [0, 0, 1, 2]
    assert arguments["ends"].tolist() == [0, 1, 1, 2]


def test_sentences_without_words_and_labels(tokenizer):
    unlabelled = collate_spans(encode_spans(some_data([3, 0], False), tokenizer, 64, ["X"], 2))
    assert "labels" not in unlabelled and unlabelled["batch"].num_sequences == 2
    empty = collate_spans(encode_spans(some_data([0], False), tokenizer, 64, ["X"], 2))
    assert empty["starts"].shape == (0,) and empty["windows"].shape == (0, 1)
    assert collate_spans([])["batch"].num_sequences == 0
    none = EntityData([sentence(["a"])], [[]], ["X"])
    assert collate_spans(encode_spans(none, tokenizer, 64, ["X"], 2))["labels"].tolist() == [0]


def test_entities_that_no_span_can_be_are_counted_once(tokenizer):
    words = ["a"] * 12
    entities = [Span("X", 0, 9), Span("X", 2, 4), Span("Y", 2, 4), Span("Y", 5, 6)]
    data = EntityData(
        [sentence(["b"], lines=[1]), sentence(words, lines=range(3, 15))],
        [[], entities],
        ["X", "Y"],
        "a.conll",
    )
    message = (
        r"a.conll: 2 of 4 entities cannot be predicted .* in line 3: 'a a a a a a a a a'. They"
    )
    with pytest.warns(UserWarning, match=message) as warned:
        (_, example) = encode_spans(data, tokenizer, 64, ["X", "Y"], 8)
    assert len(warned) == 1 and example.labels == [(2, 3, 1), (5, 5, 2)]
    with pytest.warns(UserWarning, match="1 of 4"):
        encode_spans(data, tokenizer, 64, ["X", "Y"], 9)
    # Windows have four tokens: three words are in none.
    data = EntityData([sentence(words)], [[Span("X", 1, 7)]], ["X"])
    with pytest.warns(UserWarning, match="1 of 1 entities cannot be predicted"):
        encode_spans(data, tokenizer, 6, ["X"], 9)


def test_words_that_leave_no_token_are_read_as_unknown(tokenizer):
    data = EntityData([sentence(["a", "\u200b", "b"])], [[Span("X", 1, 2)]], ["X"])
    with pytest.warns(
        UserWarning, match=r"line 2: the word '\\u200b' has no tokens. It is read as"
    ):
        (example,) = encode_spans(data, tokenizer, 64, ["X"], 3)
    assert example.labels == [(1, 1, 1)] and len(example.word_tokens) == 3


def test_bad_input_is_named(tokenizer):
    with pytest.raises(ValueError, match="max_length must leave room beside 2 special tokens"):
        encode_spans(some_data([3]), tokenizer, 2, ["X", "Y"], 3)
    with pytest.raises(ValueError, match=r"the type 'Y' is not one of the model's \['X'\]"):
        encode_spans(some_data([3]), tokenizer, 64, ["X"], 3)
    assert torch.is_tensor(
        collate_spans(encode_spans(some_data([3]), tokenizer, 64, ["X", "Y"], 3))["labels"]
    )
