import subprocess
import sys
from collections import Counter

import pytest
import regex

from fastenc.data import (
    count_words,
    language_files,
    measure_fertility,
    read_languages,
    sample_lines,
    smoothed_shares,
    train_tokenizer,
)
from fastenc.data.fertility import UNSPACED
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import load_tokenizer
from tests.helpers import ROOT
from tests.helpers.languages import DOCUMENTS


def test_shares_are_those_of_the_formula():
    """By hand: 900^0.5 = 30 and 100^0.5 = 10; with 0.3, Conneau et al.'s p^0.3 for 0.9 and 0.1."""
    assert smoothed_shares({"a": 900, "b": 100}, 0.5) == pytest.approx({"a": 0.75, "b": 0.25})
    first, second = 0.9**0.3, 0.1**0.3
    assert smoothed_shares({"a": 9, "b": 1})["b"] == pytest.approx(second / (first + second))
    assert smoothed_shares({"a": 9, "b": 1}, 1) == pytest.approx({"a": 0.9, "b": 0.1})
    assert smoothed_shares({"a": 9, "b": 1}, 0) == pytest.approx({"a": 0.5, "b": 0.5})


def test_lines_come_in_smoothed_shares_each_before_any_again():
    drawn = sample_lines(DOCUMENTS, alpha=0.3, seed=3)
    lines = {name: "\n".join(texts).split("\n") for name, texts in DOCUMENTS.items()}
    sizes = {name: sum(map(len, own)) for name, own in lines.items()}
    shares = smoothed_shares(sizes, 0.3)
    for name, own in drawn.items():
        expected = shares[name] * sum(sizes.values())
        assert own.sampled_characters == sum(map(len, own)) and own.characters == sizes[name]
        assert expected <= own.sampled_characters < expected + max(map(len, lines[name]))
        seen, whole = Counter(own), Counter(lines[name])
        rounds = [seen[line] / whole[line] for line in whole]
        assert max(rounds) - min(rounds) <= 1 and set(seen) <= set(whole)
    listed = lambda seed: {
        name: list(own) for name, own in sample_lines(DOCUMENTS, alpha=0.3, seed=seed).items()
    }
    assert listed(3) == {name: list(own) for name, own in drawn.items()}
    assert listed(4)["en"] != listed(3)["en"]


def test_a_language_alone_has_each_line_once():
    assert list(sample_lines({"en": ["one\ntwo", "three"]})["en"]) == ["one", "two", "three"]


def test_lines_of_translations_are_drawn_one_by_one():
    """Two languages with equal texts do not get the same lines."""
    small = ["\n".join(map(str, range(1000, 1100)))]
    documents = {"a": small, "b": small, "large": small * 5}
    drawn = {name: list(own) for name, own in sample_lines(documents).items()}
    assert len(drawn["a"]) == len(drawn["b"]) > 100 and drawn["a"] != drawn["b"]


def test_a_seed_gives_one_vocabulary_in_every_process():
    code = (
        "from fastenc.data import sample_lines, train_tokenizer\n"
        "from tests.helpers.languages import DOCUMENTS\n"
        "lines = [line for own in sample_lines(DOCUMENTS, seed=1).values() for line in own]\n"
        "for algorithm in ('wordpiece', 'bpe'):\n"
        "    options = dict(model_type=algorithm, vocab_size=290, lowercase=False)\n"
        "    print(train_tokenizer(lines, **options).to_str())"
    )
    # Not forks of one process, which would have its hashes of strings.
    command = [sys.executable, "-c", code]
    texts = {
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It isn't 3.14, or 1,000 - is it?", 7),
        ("हिन्दी में शब्द", 3),  # vowel signs are marks
        ("l’homme d'État, e.g. ça_va", 4),
        ("می\u200cخواهم کتاب\u200cها", 2),  # joiners
        ("ශ්\u200dරී ලංකා", 2),
        ("Donau\u00addampf schiff", 2),  # a soft hyphen
        ("... !", 0),
        ("", 0),
        ("ภาษาไทยไม่มีช่องว่าง", None),
        ("日本語のテキスト", None),
        ("日本 and a few more words", 6),
        ("ที่นี่ abc", 2),  # two letters, with marks that are none, and three
    ],
)
def test_words_of_unicodes_rule(text, words):
    assert count_words(text) == words
    # The library regex makes each character of the scripts without spaces a word.
    if words is not None and not UNSPACED.search(text):
        between = regex.split(r"(?w)\b", text, flags=regex.V1)
        assert words == sum(any(map(str.isalnum, part)) for part in between)


def test_fertility_counts():
    tokenizer = load_tokenizer(minilm_folder())
    texts = ["Unbelievable things\nhappen.", " \n", "Jürgen"]
    counts = measure_fertility(tokenizer, texts)
    lines = ["Unbelievable things", "happen.", "Jürgen"]
    tokens = [tokenizer.encode(line, add_special_tokens=False).tokens for line in lines]
    assert counts.tokens == sum(map(len, tokens))
    assert (counts.words, counts.characters, counts.unknown) == (4, 18 + 7 + 6, 0)
    assert counts.tokens_per_word == counts.tokens / 4
    assert counts.characters_per_token == 31 / counts.tokens
    assert measure_fertility(tokenizer, ["🦜🦜 parrot"]).unknown == 1
    assert measure_fertility(tokenizer, ["ภาษาไทย"]).tokens_per_word is None


def test_small_languages_get_more_of_the_vocabulary_with_smaller_alpha():
    per_word = {}
    for alpha in (1.0, 0.3):
        lines = [x for own in sample_lines(DOCUMENTS, alpha=alpha).values() for x in own]
        tokenizer = train_tokenizer(lines, model_type="bpe", vocab_size=310)
        per_word[alpha] = measure_fertility(tokenizer, DOCUMENTS["mt"]).tokens_per_word
    assert per_word[0.3] < per_word[1.0]


def test_files_of_languages(tmp_path):
    (tmp_path / "fr").mkdir()
    (tmp_path / "fr" / "b.txt").write_text("deux")
    (tmp_path / "fr" / "a.txt").write_text("un")
    (tmp_path / "fr" / "a.md").write_text("non")
    (tmp_path / "en.txt").write_text("one")
    (tmp_path / "fr" / "more").mkdir()
    (tmp_path / "fr" / "more" / "c.txt").write_text("trois")
    (tmp_path / "x=y.txt").write_text("two")
    named = {"fr": ["fr"], "en": ["en.txt", "x=y.txt"]}
    files = language_files([f"{name}={tmp_path / each}" for name in named for each in named[name]])
    assert read_languages(files) == {"fr": ["un", "deux", "trois"], "en": ["one", "two"]}


def test_a_saved_data_set_of_a_language_is_read(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(str(tmp_path / "saved"))
    files = language_files([f"en={tmp_path / 'saved'}"])
    assert read_languages(files) == {"en": ["one", "two"]}


def test_bad_input_is_named(tmp_path):
    for alpha in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"alpha must be in \[0, 1\], got {alpha}"):
            smoothed_shares({"a": 1}, alpha)
    with pytest.raises(ValueError, match="at least one language, got none"):
        smoothed_shares({})
    with pytest.raises(ValueError, match="the size of language 'b' must be positive, got 0"):
        sample_lines({"a": ["text"], "b": [" \n"]})
    for argument in ("en", "=x.txt", "en="):
        with pytest.raises(ValueError, match="must be name=file or name=folder, got"):
            language_files([argument])
    with pytest.raises(ValueError, match=r"must hold a file of the kinds \.txt"):
        language_files([f"en={tmp_path}"])
    with pytest.raises(ValueError, match="texts with words, got none: give other texts"):
        measure_fertility(load_tokenizer(minilm_folder()), [" "])
