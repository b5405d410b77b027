import pytest
from transformers import AutoTokenizer

from fastenc.data import (
    collate_classification,
    encode_texts,
    full_sentence_blocks,
    load_tokenizer,
    save_tokenizer,
    special_tokens,
    train_tokenizer,
)
from fastenc.demo.checkpoint import minilm_folder

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Füchse springen: schnell!",
    "unrelated words",
] * 20


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_trained_tokenizers_load_in_transformers_with_the_same_ids(tmp_path, kind):
    tokenizer = train_tokenizer(TEXTS, kind=kind, vocab_size=320)
    assert tokenizer.get_vocab_size() <= 320
    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the lazy fox", "Füchse, unrelated!", ""]
    assert [e.ids for e in tokenizer.encode_batch(texts)] == theirs(texts)["input_ids"]
    pair = tokenizer.encode("the fox", "the dog")
    assert pair.ids == theirs("the fox", "the dog")["input_ids"]
    special = special_tokens(tokenizer)
    assert pair.ids[0] == special.cls == theirs.cls_token_id and pair.ids[-1] == theirs.sep_token_id
    assert (special.pad, special.mask) == (theirs.pad_token_id, theirs.mask_token_id)
    assert special.all >= set(theirs.all_special_ids)
    assert tokenizer.decode(tokenizer.encode("the lazy dog").ids) == "the lazy dog"
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_bad_input_is_named(tmp_path):
    for options, message in (
        (dict(kind="char"), "kind must be one of .* got 'char'"),
        (dict(kind="bpe", vocab_size=100), "vocab_size of at least 300 .* got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            train_tokenizer(TEXTS, **options)
    with pytest.raises(ValueError, match="needs texts to learn from"):
        train_tokenizer([" "])
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer of the tokenizers library"):
        load_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match="max_length must leave room beside 2 special tokens, got 2"
    ):
        encode_texts(["a"], load_tokenizer(minilm_folder()), 2)


@pytest.mark.parametrize("max_length", [8, 128])
def test_encoding_of_texts_and_pairs_is_transformers(max_length):
    ours, theirs = load_tokenizer(minilm_folder()), AutoTokenizer.from_pretrained(minilm_folder())
    pairs = [
        ("one short text", "and a much longer second text of many words"),
        ("a b c d e f", "x"),
    ]
    for texts in (["short", "a longer text of more words than eight in all"], pairs):
        expected = theirs(
            [t if isinstance(t, str) else t[0] for t in texts],
            None if isinstance(texts[0], str) else [t[1] for t in texts],
            truncation="longest_first",
            max_length=max_length,
        )
        examples = encode_texts(texts, ours, max_length, [0, 1])
        assert [e.input_ids for e in examples] == expected["input_ids"]
        assert [e.token_type_ids for e in examples] == expected["token_type_ids"]
        batch = collate_classification(examples)
        assert batch["labels"].tolist() == [0, 1]
        assert batch["batch"].cu_seqlens.tolist()[-1] == sum(map(len, expected["input_ids"]))
    assert ours.truncation is None, "the caller's tokenizer was changed"


def test_full_sentence_blocks():
    tokenizer = train_tokenizer(TEXTS, vocab_size=200)
    special = special_tokens(tokenizer)
    documents = ["\n".join(TEXTS[:7]), TEXTS[0], " ".join(TEXTS[:9])]
    blocks = full_sentence_blocks(documents, tokenizer, block_size=40)
    assert all(
        len(block) <= 40 and block[0] == special.cls and block[-1] == special.sep
        for block in blocks
    )
    # Nothing is lost and nothing is out of order; separators stand between documents only.
    flat = [token for block in blocks for token in block if token not in (special.cls, special.sep)]
    expected = [
        token
        for document in documents
        for line in document.splitlines()
        for token in tokenizer.encode(line, add_special_tokens=False).ids
    ]
    assert flat == expected
    lines = {tuple(tokenizer.encode(t, add_special_tokens=False).ids) for t in TEXTS}
    first = [token for token in blocks[0][1:-1]]
    while first:  # the first document's blocks hold whole lines
        line = next(line for line in lines if tuple(first[: len(line)]) == line)
        first = first[len(line) :]
    with pytest.raises(ValueError, match="block_size must be at least 8 tokens, got 4"):
        full_sentence_blocks(documents, tokenizer, block_size=4)
    with pytest.raises(ValueError, match="there is no text to pack"):
        full_sentence_blocks(["", "  "], tokenizer)
