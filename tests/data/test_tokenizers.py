import json
import sys

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import Unigram
from transformers import (
    AutoTokenizer,
    BertTokenizerFast,
    DebertaTokenizerFast,
    RobertaTokenizerFast,
)

from fastenc.data import train_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.text import load_tokenizer, save_tokenizer, special_tokens
from fastenc.text.special_tokens import BERT_TOKENS, ROBERTA_TOKENS, sentinel_ids
from tests.helpers.byte_tokenizers import KINDS, byte_tokenizer
from tests.helpers.families import model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Füchse springen: schnell!",
    "unrelated words\non two lines",
] * 20


@pytest.mark.parametrize("lowercase", [None, True, False])
@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_trained_tokenizers_load_in_transformers_with_the_same_ids(tmp_path, algorithm, lowercase):
    tokenizer = train_tokenizer(TEXTS, model_type=algorithm, vocab_size=320, lowercase=lowercase)
    assert tokenizer.get_vocab_size() <= 320
    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["The lazy fox", "Füchse, unrelated!", "日本 \n <mask>[MASK] x", ""]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert ids == theirs(texts)["input_ids"]
    pair = tokenizer.encode("The fox", "the dog")
    assert pair.ids == theirs("The fox", "the dog")["input_ids"]
    special = special_tokens(tokenizer)
    assert pair.ids[0] == special.cls == theirs.cls_token_id
    assert pair.ids[-1] == special.sep == theirs.sep_token_id
    assert (special.pad, special.mask) == (theirs.pad_token_id, theirs.mask_token_id)
    assert special.unk == theirs.unk_token_id
    assert special.all == set(theirs.all_special_ids)
    assert tokenizer.decode(tokenizer.encode("the lazy dog").ids) == "the lazy dog"
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    # The families' own classes, which rebuild everything except the vocabulary.
    if algorithm == "wordpiece":
        own = BertTokenizerFast.from_pretrained(tmp_path)
    elif algorithm == "bpe" and not lowercase:
        own = RobertaTokenizerFast.from_pretrained(tmp_path)
    else:
        return
    assert own(texts)["input_ids"] == ids
    assert own("The fox", "the dog")["input_ids"] == pair.ids


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_lowercase_also_strips_accents(algorithm):
    tokenizer = train_tokenizer(TEXTS, model_type=algorithm, vocab_size=320, lowercase=True)
    assert tokenizer.encode("FÜCHSE Springen").ids == tokenizer.encode("fuchse springen").ids
    cased = train_tokenizer(TEXTS, model_type=algorithm, vocab_size=320, lowercase=False)
    assert cased.encode("Füchse").ids != cased.encode("fuchse").ids


@pytest.mark.parametrize("family", KINDS)
def test_special_tokens_of_other_names_keep_their_ids(tmp_path, family):
    tokenizer = byte_tokenizer(family, TEXTS)
    save_tokenizer(tokenizer, tmp_path)
    theirs, special = AutoTokenizer.from_pretrained(tmp_path), special_tokens(tokenizer)
    assert len(theirs) == tokenizer.get_vocab_size()  # transformers adds none
    padded = theirs(["The lazy fox", "dogs"], padding=True)["input_ids"]
    for ids, text in zip(padded, ("The lazy fox", "dogs"), strict=True):
        own = tokenizer.encode(text).ids
        assert ids == own + [special.pad] * (len(ids) - len(own))
    assert special.pad == theirs.pad_token_id and special.sep == theirs.eos_token_id
    begin = theirs.cls_token_id if family == "esm" else theirs.bos_token_id
    assert special.begin == (() if begin is None else (begin,))
    assert special.masks == (() if theirs.mask_token_id is None else (theirs.mask_token_id,))
    assert special.unk == (special.pad if theirs.unk_token_id is None else theirs.unk_token_id)


@pytest.mark.parametrize("kind", ["vocab.txt", "vocab.json"])
def test_files_of_older_checkpoints_are_read(tmp_path, kind):
    """DeBERTa's first version has vocab.json and merges.txt, BERT vocab.txt."""
    name, tokenizer_class = (
        ("bert", BertTokenizerFast) if kind == "vocab.txt" else ("deberta", DebertaTokenizerFast)
    )
    algorithm = "wordpiece" if kind == "vocab.txt" else "bpe"
    trained = train_tokenizer(TEXTS, model_type=algorithm, vocab_size=320)
    family = model(name, vocab_size=400)
    family.save_pretrained(tmp_path)
    vocabulary = trained.get_vocab()
    if kind == "vocab.txt":
        lines = sorted(vocabulary, key=vocabulary.__getitem__)
        (tmp_path / kind).write_text("\n".join(lines) + "\n")
    else:
        values = json.loads(trained.to_str())["model"]
        merges = [each if isinstance(each, str) else " ".join(each) for each in values["merges"]]
        names = dict(zip(ROBERTA_TOKENS, BERT_TOKENS, strict=True))
        renamed = {names.get(token, token): number for token, number in values["vocab"].items()}
        (tmp_path / kind).write_text(json.dumps(renamed))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    encoder = Encoder.from_pretrained(tmp_path)
    theirs = tokenizer_class.from_pretrained(tmp_path)
    for text in TEXTS[:3]:
        assert encoder.tokenizer.encode(text).ids == theirs(text)["input_ids"]
    assert encoder.encode(TEXTS[:2]).isfinite().all()


@pytest.mark.parametrize("tokenizer_class", ["BertTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("option", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_options_of_berts_tokenizer_count_for_more_than_its_file(tmp_path, option, tokenizer_class):
    trained = train_tokenizer([*TEXTS, "日本 é É e E"], vocab_size=320, lowercase=False)
    vocabulary = trained.get_vocab() | {"日本": 320}
    BertTokenizerFast(vocab=vocabulary, do_lower_case=True).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    changes = {option: False, "tokenizer_class": tokenizer_class}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    as_written = BertTokenizerFast(vocab=vocabulary, do_lower_case=True)
    text = "The Lazy Füchse é É, 日本"
    assert ours.encode(text).ids == theirs(text)["input_ids"]
    is_plain = tokenizer_class == "PreTrainedTokenizerFast"
    assert is_plain == (ours.encode(text).ids == as_written(text)["input_ids"])


@pytest.mark.parametrize("tokenizer_class", ["BertTokenizer", "TokenizersBackend"])
@pytest.mark.parametrize("names", [None, ["input_ids"], ["input_ids", "token_type_ids"]])
@pytest.mark.parametrize("processor", ["template", "bert"])
def test_types_of_a_pair_are_those_that_transformers_gives(
    tmp_path, tokenizer_class, names, processor
):
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    cls, sep = ((name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]"))
    if processor == "bert":
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = {"tokenizer_class": tokenizer_class, "cls_token": "[CLS]", "sep_token": "[SEP]"}
    values |= {"pad_token": "[PAD]"} | ({} if names is None else {"model_input_names": names})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)("The fox", "the lazy dog")
    ours = load_tokenizer(tmp_path).encode("The fox", "the lazy dog")
    assert ours.ids == theirs["input_ids"]
    assert ours.type_ids == theirs.get("token_type_ids", [0] * len(ours.ids))


@pytest.mark.parametrize("given", [{}, {"strip_accents": None}])
@pytest.mark.parametrize("written", [True, False])
def test_options_that_berts_tokenizer_does_not_have_are_its_defaults(tmp_path, given, written):
    trained = train_tokenizer([*TEXTS, "日本 é É e E"], vocab_size=320, lowercase=False)
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    BertTokenizerFast(vocab=trained.get_vocab() | {"日本": 320}).save_pretrained(tmp_path)
    values = json.loads(file.read_text())
    for attribute in ("lowercase", "strip_accents", "handle_chinese_chars"):
        values["normalizer"][attribute] = written
    file.write_text(json.dumps(values))
    options = {"do_lower_case", "strip_accents", "tokenize_chinese_chars"}
    values = json.loads(config.read_text())
    values = {name: value for name, value in values.items() if name not in options} | given
    config.write_text(json.dumps(values))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    normalized = ours.normalizer.normalize_str("The Füchse é É, 日本")
    assert normalized == theirs.backend_tokenizer.normalizer.normalize_str("The Füchse é É, 日本")


@pytest.mark.parametrize(("declared", "saved"), [(None, 40), (25, 25), (int(1e30), 40)])
def test_a_saved_models_tokenizer_truncates_in_transformers(tmp_path, declared, saved):
    model("bert").save_pretrained(tmp_path / "given")  # of 40 positions
    save_tokenizer(train_tokenizer(TEXTS, vocab_size=90), tmp_path / "given", max_length=declared)
    Encoder.from_pretrained(tmp_path / "given").save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.model_max_length == saved
    assert len(tokenizer("fox " * 100, truncation=True)["input_ids"]) == saved


def test_debertas_sentencepiece_model(tmp_path, monkeypatch):
    """microsoft/deberta-v3-base has spm.model and no tokenizer.json."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **dict(pad_id=0, bos_id=1, eos_id=2, unk_id=3),
        **dict(pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]"),
    )
    model("deberta-v2").save_pretrained(tmp_path)
    read = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    tokenizer = Encoder.from_pretrained(tmp_path).tokenizer
    for text in TEXTS[:3]:
        assert tokenizer.encode(text).ids == [1, *read.encode(text), 2]

    for library in ("sentencepiece", "google.protobuf"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, library, None)
            match = rf"'{library}'.*pip install 'fastenc\[transformers\]'"
            with pytest.warns(UserWarning, match=match):
                assert Encoder.from_pretrained(tmp_path).tokenizer is None


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    model("deberta-v2").save_pretrained(tmp_path)
    (tmp_path / "spm.model").write_bytes(b"no model")
    with pytest.warns(UserWarning, match=r"transformers cannot make one from spm.model \("):
        assert Encoder.from_pretrained(tmp_path).tokenizer is None


def test_t5s_tokenizer_loads_in_transformers(tmp_path):
    tokenizer = train_tokenizer(TEXTS, model_type="t5", vocab_size=220)
    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["The lazy fox", "a <extra_id_0> dog<extra_id_99> [X]", ""]
    assert [each.ids for each in tokenizer.encode_batch(texts)] == theirs(texts)["input_ids"]
    assert tokenizer.encode("The fox", "dog").ids == theirs("The fox", "dog")["input_ids"]
    special, size = special_tokens(load_tokenizer(tmp_path)), tokenizer.get_vocab_size()
    # As in T5's own vocabulary.
    assert (special.pad, special.sep, special.unk) == (0, 1, 2) and special.begin == ()
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 1, 2)
    assert sentinel_ids(tokenizer) == list(range(size - 1, size - 101, -1))
    with pytest.raises(ValueError, match="no token '<mask>'"):
        _ = special.mask
    # In mT5's vocabulary a sentinel is a piece that begins a word.
    pieces = [("<unk>", 0.0), ("▁<extra_id_1>", -1.0), ("▁<extra_id_0>", -1.0)]
    assert sentinel_ids(Tokenizer(Unigram(pieces, 0))) == [2, 1]
    with pytest.raises(ValueError, match=r"must have T5's sentinels <extra_id_0>, .* got none"):
        sentinel_ids(load_tokenizer(minilm_folder()))
    with pytest.raises(ValueError, match="vocab_size must hold the 106 special tokens"):
        train_tokenizer(TEXTS, model_type="t5", vocab_size=100)


def test_line_breaks_separate_words():
    for algorithm in ("wordpiece", "unigram"):
        tokenizer = train_tokenizer(TEXTS, model_type=algorithm, vocab_size=320)
        assert tokenizer.encode("the\nlazy  dog\n").ids == tokenizer.encode("the lazy dog").ids


def test_rare_characters_do_not_crowd_out_words():
    # 3000 characters, each seen once, and one frequent word.
    texts = ["".join(chr(0x4E00 + i) for i in range(3000)), *["encyclopedia"] * 100]
    tokenizer = train_tokenizer(texts, vocab_size=1100)
    assert tokenizer.get_vocab_size() <= 1100
    assert "encyclopedia" in tokenizer.get_vocab()


def test_an_eighth_of_the_vocabulary_is_for_the_characters_of_most_occurrences():
    """200 characters in two words each, once; 1,100 in one word each, three times."""
    characters = [chr(0xAC00 + i) for i in range(1300)]
    rare, frequent = characters[:200], characters[200:]
    texts = [" ".join(frequent)] * 3 + [" ".join(rare), " ".join(f"a{each}" for each in rare)]
    vocabulary = train_tokenizer(texts, vocab_size=8800, lowercase=False).get_vocab()
    assert not vocabulary.keys() & set(rare)
    assert len(vocabulary.keys() & set(frequent)) == 8800 / 8 - 1, "the other one is a"


class Watched(str):
    """A text that counts how many instances are in memory."""

    alive = most = 0

    def __new__(cls, text):
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, text)

    def __del__(self):
        Watched.alive -= 1


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_texts_that_can_be_read_again_are_never_held_together(algorithm):
    class Texts:
        def __iter__(self):
            return map(Watched, TEXTS * 50)

    Watched.most = 0
    trained = train_tokenizer(Texts(), model_type=algorithm, vocab_size=320)
    assert 0 < Watched.most < 1000 < len(TEXTS * 50)
    listed = train_tokenizer(iter(TEXTS * 50), model_type=algorithm, vocab_size=320)
    assert algorithm == "unigram" or trained.to_str() == listed.to_str()


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_errors_of_the_texts_are_their_own(algorithm):
    class Texts:
        def __iter__(self):
            yield from TEXTS
            raise ValueError("x.txt, line 9: not UTF-8")

    with pytest.raises(ValueError, match=r"^x\.txt, line 9"):
        train_tokenizer(Texts(), model_type=algorithm, vocab_size=320)


def test_real_tokenizer_keeps_its_ids(tmp_path):
    save_tokenizer(load_tokenizer(minilm_folder()), tmp_path)
    texts = ["Déjà vu, isn't it?", "日本 unbelievable"]
    expected = AutoTokenizer.from_pretrained(minilm_folder())(texts)["input_ids"]
    for loader in (AutoTokenizer, BertTokenizerFast):
        assert loader.from_pretrained(tmp_path)(texts)["input_ids"] == expected


def test_bad_input_is_named(tmp_path):
    for options, message in (
        (dict(model_type="char"), "model_type must be one of .* got 'char'"),
        (dict(model_type="bpe", vocab_size=100), r"vocab_size must hold .* got 100.*at least 261"),
        (
            dict(model_type="wordpiece", vocab_size=20),
            "vocab_size must hold the 5 special tokens and every character .* got 20",
        ),
        (
            dict(model_type="unigram", vocab_size=10),
            "vocab_size must hold the 5 special tokens and every character .* got 10",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train_tokenizer(TEXTS, **options)
    with pytest.raises(ValueError, match="learns from texts"):
        train_tokenizer([" "])
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer of the tokenizers library"):
        load_tokenizer(tmp_path)
