import pytest
import torch
from transformers import AutoTokenizer

from fastenc.data import (
    collate_classification,
    encode_labelled,
    encode_texts,
    load_tokenizer,
    read_labelled,
    save_tokenizer,
    train_tokenizer,
)
from fastenc.demo.checkpoint import minilm_folder

PAIRS = [
    ("one short text", "and a much longer second text of many, many words"),
    ("a b c d e f g h i j k l m n o p q r s", "x"),
    ("as long as the other text of this pair", "as long as the first text of this pair"),
    ("", "nothing before this"),
]


@pytest.fixture(params=["minilm", "bpe", "unigram"])
def folder(request, tmp_path):
    if request.param == "minilm":
        return minilm_folder()
    texts = [text for pair in PAIRS for text in pair]
    save_tokenizer(train_tokenizer(texts, kind=request.param, vocab_size=280), tmp_path)
    return tmp_path


@pytest.mark.parametrize("max_length", [5, 8, 13, 128])
def test_encoding_of_texts_and_pairs_is_transformers(folder, max_length):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    before = ours.to_str()
    for texts in ([first for first, _ in PAIRS], PAIRS):
        columns = (
            [texts] if isinstance(texts[0], str) else [list(c) for c in zip(*texts, strict=True)]
        )
        expected = theirs(
            *columns, truncation="longest_first", max_length=max_length, return_token_type_ids=True
        )
        examples = encode_texts(texts, ours, max_length)
        assert [e.input_ids for e in examples] == expected["input_ids"]
        assert [e.token_type_ids for e in examples] == expected["token_type_ids"]
    assert ours.to_str() == before, "the caller's tokenizer was changed"


def test_the_callers_padding_is_not_applied():
    tokenizer = load_tokenizer(minilm_folder())
    expected = encode_texts(["a", "a b c"], tokenizer, 16)
    tokenizer.enable_padding(length=16)
    assert encode_texts(["a", "a b c"], tokenizer, 16) == expected


def test_more_texts_than_one_chunk():
    tokenizer = load_tokenizer(minilm_folder())
    texts = [f"text number {i}" for i in range(2005)]
    examples = encode_texts(texts, tokenizer, 16, list(range(2005)))
    assert [e.input_ids for e in examples] == [e.ids for e in tokenizer.encode_batch(texts)]
    assert [e.label for e in examples] == list(range(2005))


def test_batches_are_packed_with_labels_of_their_kind():
    tokenizer = load_tokenizer(minilm_folder())
    example = collate_classification(encode_texts(PAIRS, tokenizer, 64, [2, 0, 1, 1]))
    padded = AutoTokenizer.from_pretrained(minilm_folder())(
        *[list(c) for c in zip(*PAIRS, strict=True)], padding=True, return_tensors="pt"
    )
    real = padded["attention_mask"].bool()
    batch = example["batch"]
    assert torch.equal(batch.input_ids, padded["input_ids"][real])
    assert torch.equal(batch.token_type_ids, padded["token_type_ids"][real])
    assert batch.cu_seqlens.diff().tolist() == real.sum(1).tolist()
    assert batch.max_seqlen == int(real.sum(1).max())
    assert example["labels"].dtype == torch.int64 and example["labels"].tolist() == [2, 0, 1, 1]
    scores = collate_classification(encode_texts(PAIRS[:2], tokenizer, 64, [0.5, 4.0]))["labels"]
    assert scores.dtype == torch.float32 and scores.tolist() == [0.5, 4.0]
    assert "labels" not in collate_classification(encode_texts(PAIRS, tokenizer, 64))


def test_bad_input_is_named():
    tokenizer = load_tokenizer(minilm_folder())
    for texts, added in ((["a"], 2), (PAIRS, 3)):
        with pytest.raises(ValueError, match=f"beside {added} special tokens, got {added}"):
            encode_texts(texts, tokenizer, added)


def test_real_pairs_are_encoded_as_by_transformers(data_dir):
    data = read_labelled(data_dir / "mrpc" / "dev.tsv.gz", text=["sentence1", "sentence2"])
    theirs = AutoTokenizer.from_pretrained(minilm_folder())
    expected = theirs(
        *[list(c) for c in zip(*data.texts, strict=True)],
        truncation="longest_first",
        max_length=48,
    )
    examples = encode_labelled(data, load_tokenizer(minilm_folder()), 48)
    assert [e.input_ids for e in examples] == expected["input_ids"]
    assert [e.token_type_ids for e in examples] == expected["token_type_ids"]
    assert [e.label for e in examples] == data.labels
