"""Whole words and spans in scripts with and without spaces, for each type of vocabulary."""

import unicodedata
from random import Random

import pytest
import torch

from fastenc.data import full_sentence_blocks, read_texts, train_tokenizer
from fastenc.data.tokenizer_training import MODEL_TYPES
from fastenc.data.word_starts import MAX_WORD_TOKENS, UNSPACED, WordStarts
from fastenc.objectives import MlmCollator, SpanCollator
from fastenc.objectives.mlm import special_mask

# Not T5's vocabulary, which has no mask token.
EVERY_ALGORITHM = pytest.mark.parametrize(
    "algorithm", [name for name in MODEL_TYPES if name != "t5"]
)
# (first letter, letters, marks that follow a letter)
SCRIPTS = {
    "Han": (0x4E00, 400, ""),
    "Hiragana": (0x3042, 80, ""),
    "Thai": (0x0E01, 46, "\u0e31\u0e34\u0e35\u0e48\u0e49"),
    "Lao": (0x0E94, 4, "\u0eb1\u0eb4\u0eb5\u0ec8\u0ec9"),
    "Khmer": (0x1780, 35, "\u17b6\u17b7\u17b8\u17c1\u17d2"),
    "Myanmar": (0x1000, 33, "\u102c\u102d\u102f\u103a\u103b"),
}


def unspaced_texts(script, count=150):
    """Lines of consecutive words of that script, with a number and a Latin word."""
    first, letters, marks = SCRIPTS[script]
    draw = Random(0)
    letter = lambda: chr(first + draw.randrange(letters)) + draw.choice([*marks, "", ""])
    words = ["".join(letter() for _ in range(draw.randint(1, 3))) for _ in range(200)]
    words += ["2026", "Unicode"]
    line = lambda: "".join(draw.choice(words) for _ in range(draw.randint(20, 60)))
    return [line() for _ in range(count)]


def check_masks(texts, tokenizer, block_size=128):
    """Every full block is masked, at about the requested rate."""
    blocks = full_sentence_blocks(texts, tokenizer, block_size, show_progress=False)
    is_special = special_mask(tokenizer)
    blocks = [each for each in blocks if (~is_special[torch.tensor(each)]).sum() > 100]
    assert len(blocks) > 5
    words = MlmCollator(tokenizer, whole_word=True)
    collators = {"word": words, "span": SpanCollator(words)}
    masked = {
        name: [collate([each], step)["max_labels"] for step, each in enumerate(blocks)]
        for name, collate in collators.items()
    }
    tokens = [int((~is_special[torch.tensor(each)]).sum()) for each in blocks]
    shares = {name: torch.tensor(masked[name]) / torch.tensor(tokens) for name in masked}
    # The last word of a span may not fit into the budget.
    assert (shares["span"] > 0.15 - MAX_WORD_TOKENS / 100).all() and shares["span"].mean() > 0.14
    assert (shares["span"] < 0.15 + 1 / 100).all()
    # A block has a hundred words, a few of which may have several tokens.
    assert (shares["word"] > 0).all() and (shares["word"] < 0.45).all()
    assert abs(shares["word"].mean() - 0.15) < 4 * 0.06 / len(blocks) ** 0.5


@EVERY_ALGORITHM
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_block_of_unspaced_text_is_masked(script, algorithm):
    texts = unspaced_texts(script)
    if algorithm == "wordpiece":  # a word of more than 100 characters would be unknown
        texts = [" ".join(text[i : i + 90] for i in range(0, len(text), 90)) for text in texts]
    check_masks(
        texts, train_tokenizer(texts, model_type=algorithm, vocab_size=900, show_progress=False)
    )


@EVERY_ALGORITHM
@pytest.mark.parametrize("language", ["zh", "ja", "th", "en"])
def test_every_block_of_real_text_is_masked(data_dir, language, algorithm):
    part = "train" if language == "ja" else "valid"
    texts = read_texts(data_dir / f"multilingual_text/{language}.{part}.txt.gz")[:200]
    check_masks(
        texts, train_tokenizer(texts, model_type=algorithm, vocab_size=3000, show_progress=False)
    )


def word_begins(text, index):
    """By characters: a word begins after a space and at each letter of an unspaced script."""
    unspaced = lambda sign: any(first <= ord(sign) <= last for first, last in UNSPACED)
    if index == 0 or text[index].isspace() or text[index - 1].isspace():
        return True
    return unspaced(text[index]) and not is_mark(text[index])


def is_mark(sign):
    return unicodedata.category(sign).startswith("M")


@EVERY_ALGORITHM
def test_words_are_those_of_the_characters(algorithm):
    texts = [
        "我们在1998年去了北京大学读书。北京很大",
        "彼女はUnicodeの仕様を読んでいました。",
        "ประเทศไทยมีประชากรมากกว่าที่คิดในปีนี้",
        "An internationally unbelievable story; Straße, भारत में हिन्दी",
    ]
    size = {"wordpiece": 160, "bpe": 300, "unigram": 160}[algorithm]
    tokenizer = train_tokenizer(texts, model_type=algorithm, vocab_size=size, lowercase=False)
    starts, split = WordStarts(tokenizer, special_mask(tokenizer)), 0
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        begins = starts(torch.tensor(encoding.ids)).tolist()
        offsets = encoding.offsets
        for token, (start, end) in enumerate(offsets):
            # The other bytes of a character.
            inside = algorithm == "bpe" and token > 0 and offsets[token - 1][1] > start
            split += inside
            index = start + inside
            parted = token + 1 < len(offsets) and offsets[token + 1][0] < end
            if encoding.tokens[token - 1] in ("▁", "Ġ") or (parted and is_mark(text[end - 1])):
                continue  # its space is before it, or the first bytes of a mark do not yet show a mark
            expected = index < end and word_begins(text, index)
            if algorithm == "wordpiece":  # it also splits at punctuation
                expected |= not encoding.tokens[token].startswith("##")
            assert begins[token] == expected, (text[start : start + 5], encoding.tokens[token])
    assert split > 20 or algorithm != "bpe", "no character lies in several tokens"


def test_long_words_are_cut():
    tokenizer = train_tokenizer(["aa bb " * 9], vocab_size=9)
    ids = tokenizer.encode("ab " + "a" * 40 + " b").ids
    starts = WordStarts(tokenizer, special_mask(tokenizer))(torch.tensor(ids))
    assert len(ids) == 45, "a letter a token"
    assert starts.nonzero().flatten().tolist() == [
        0,
        1,
        3,
        3 + MAX_WORD_TOKENS,
        3 + 2 * MAX_WORD_TOKENS,
        43,
        44,
    ]
