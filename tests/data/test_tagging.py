from itertools import chain

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, RobertaTokenizerFast

from fastenc.data import TaggedData, collate_tagging, encode_tagged, sentence, train_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer, save_tokenizer
from fastenc.text.tokenizers import tokenizer_for_words

NAMES = ["O", "B-X", "I-X"]
SENTENCES = [
    ["unbelievably", ",", "Ada", "Lovelace's", "engine"],
    ["Ada"],
    ["20 000", "naïvetés", "日本", "#tag"],
    [
        "the",
        "engine",
        "weaves",
        "algebraical",
        "patterns",
        "as",
        "the",
        "loom",
        "weaves",
        "flowers",
    ],
]


def tagged(sentences=SENTENCES):
    tags = lambda words: [NAMES[(len(word) + i) % 3] for i, word in enumerate(words)]
    return TaggedData([sentence(words, tags(words)) for words in sentences], NAMES)


@pytest.fixture(scope="module", params=["minilm", "bpe", "unigram"])
def tokenizers(request, tmp_path_factory):
    """Our tokenizer, and transformers' tokenizer that reads words."""
    if request.param == "minilm":
        return load_tokenizer(minilm_folder()), AutoTokenizer.from_pretrained(minilm_folder())
    texts = [" ".join(words) for words in SENTENCES]
    ours = train_tokenizer(texts, model_type=request.param, vocab_size=300)
    folder = tmp_path_factory.mktemp(request.param)
    save_tokenizer(ours, folder)
    if request.param == "bpe":
        return ours, RobertaTokenizerFast.from_pretrained(folder, add_prefix_space=True)
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("label_scheme", ["first", "all"])
def test_words_are_aligned_as_by_transformers(tokenizers, label_scheme):
    ours, theirs = tokenizers
    before = ours.to_str()
    data = tagged()
    examples = encode_tagged(data, ours, 128, NAMES, label_scheme)
    expected = theirs(SENTENCES, is_split_into_words=True)
    for position, (example, each) in enumerate(zip(examples, data.sentences, strict=True)):
        assert example.input_ids == expected["input_ids"][position]
        labels, last = [], None
        for word in expected.word_ids(position):
            counts = word is not None and (label_scheme == "all" or word != last)
            labels.append(NAMES.index(each.tags[word]) if counts else -100)
            last = word
        assert example.labels == labels
        real = [word for word in expected.word_ids(position) if word is not None]
        assert example.word_ids == real and example.first == 1
    assert ours.to_str() == before, "the caller's tokenizer was changed"


WORDS = Regex(r"'t|'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")


@pytest.mark.parametrize(
    ("normalizer", "steps"),
    [
        pytest.param(
            normalizers.NFC(),
            [
                pre_tokenizers.Split(WORDS, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ],
            id="as Qwen's and EuroBERT's",
        ),
        pytest.param(
            normalizers.Replace(" ", "▁"),
            [pre_tokenizers.Split(" ", "merged_with_previous")],
            id="as Gemma's",
        ),
    ],
)
def test_words_are_those_of_running_text(normalizer, steps):
    """A space belongs before a word, and not before each part of it."""
    words = ["I", "don't", "say", "3.5", "times,", "mother-in-law's"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.Sequence(steps)
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f" {word}" for word in words] * 9, trainer)
    of_words = tokenizer_for_words(tokenizer).encode(words, is_pretokenized=True)
    assert of_words.tokens == tokenizer.encode("".join(f" {word}" for word in words)).tokens


@pytest.mark.parametrize("max_length", [3, 5, 8])
def test_windows_give_every_token_and_label_once(tokenizers, max_length):
    ours, _ = tokenizers
    whole = encode_tagged(tagged(), ours, 512, NAMES, "all")
    parts = encode_tagged(tagged(), ours, max_length, NAMES, "all")
    assert all(len(part.input_ids) <= max_length for part in parts)
    for position, one in enumerate(whole):
        own = [part for part in parts if part.sentence == position]
        for name in ("input_ids", "labels"):
            taken = [getattr(e, name)[e.first : e.first + len(e.word_ids)] for e in own]
            assert [*chain(*taken)] == getattr(one, name)[1:-1]
        assert [w for e in own for w in e.word_ids] == one.word_ids
        assert sum(label != -100 for e in own for label in e.labels) == len(one.word_ids)
        assert sum(len(e.word_starts) for e in own) == len(one.word_starts)
        framed = {(e.input_ids[0], e.input_ids[-1]) for e in own}
        assert framed == {(one.input_ids[0], one.input_ids[-1])}


def test_batches_are_packed_with_the_rows_of_words():
    ours = load_tokenizer(minilm_folder())
    data = tagged([*SENTENCES, []])
    examples = encode_tagged(data, ours, 8, NAMES, "all")
    arguments = collate_tagging(examples)
    batch, labels = arguments["batch"], arguments["labels"]
    assert labels.shape == batch.input_ids.shape and labels.dtype == torch.int64
    words = sum(map(len, SENTENCES))
    assert arguments["word_rows"].shape == (words,) and arguments["cu_words"].dtype == torch.int32
    counts = arguments["cu_words"].diff().tolist()
    assert counts == [len(e.word_starts) for e in examples] and counts[-1] == 0
    gold = [NAMES.index(tag) for each in data.sentences for tag in each.tags]
    assert labels[arguments["word_rows"]].tolist() == gold
    unlabelled = TaggedData([sentence(words) for words in SENTENCES], [])
    assert collate_tagging(encode_tagged(unlabelled, ours, 8, NAMES)).keys() == {"batch"}


def test_words_that_leave_no_token_are_read_as_unknown():
    ours = load_tokenizer(minilm_folder())
    data = tagged([["a", "\u200b", "unbelievableness"], ["\x96", "\u200d"]])
    message = (
        r"data, line 2: the word '\\u200b' has no tokens, and neither have 2 others. It is read"
    )
    with pytest.warns(UserWarning, match=message):
        one, two = encode_tagged(data, ours, 64, NAMES)
    unknown = ours.token_to_id("[UNK]")
    assert one.word_ids[:2] == [0, 1] and set(one.word_ids[2:]) == {2}
    assert one.input_ids[2] == unknown and two.input_ids[1:3] == [unknown] * 2
    gold = [[NAMES.index(tag) for tag in each.tags] for each in data.sentences]
    for example, classes in zip((one, two), gold, strict=True):
        assert [label for label in example.labels if label != -100] == classes


def test_bad_input_is_named():
    ours = load_tokenizer(minilm_folder())
    for change, message in (
        (dict(max_length=2), "max_length must leave room beside 2 special tokens, got 2"),
        (dict(label_scheme="last"), "label_scheme must be one of .* got 'last'"),
        (dict(label_names=["O"]), r"data, line 2: the tag 'I-X' of the word ','"),
    ):
        options = dict(max_length=64, label_names=NAMES) | change
        with pytest.raises(ValueError, match=message):
            encode_tagged(tagged(), ours, **options)
    short = TaggedData([sentence(["a", "b"], ["O"], [7, 8])], NAMES, "x.conll")
    with pytest.raises(ValueError, match=r"x.conll, line 7: 1 tags for the 2 words 'a b'"):
        encode_tagged(short, ours, 64, NAMES)
