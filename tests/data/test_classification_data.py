import pytest
import torch
from transformers import AutoTokenizer

from fastenc.data import (
    LabelledData,
    collate_classification,
    encode_labelled,
    encode_texts,
    read_labelled,
    train_tokenizer,
)
from fastenc.demo.checkpoint import minilm_folder
from fastenc.text import LongTexts, load_tokenizer, save_tokenizer

PAIRS = [
    ("one short text", "and a much longer second text of many, many words"),
    ("a b c d e f g h i j k l m n o p q r s", "x"),
    ("as long as the other text of this pair", "as long as the first text of this pair"),
    ("", "nothing before this"),
]


@pytest.fixture(params=["minilm", "bpe", "unigram", "t5"])
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


@pytest.mark.parametrize("long_texts", [None, LongTexts(chunks="mean", stride=1)])
@pytest.mark.parametrize("text", ["", " ", "\u200d"])
def test_labelled_texts_have_tokens(text, long_texts, tmp_path):
    tokenizer = load_tokenizer(minilm_folder())
    path = tmp_path / "x.tsv"
    path.write_text(f"sentence\tlabel\na text\t1\n\n{text}\t0\n", encoding="utf-8")
    data = read_labelled(path)
    with pytest.raises(ValueError, match=r"x.tsv, line 4 has no tokens, got '.*': leave out"):
        encode_labelled(data, tokenizer, 16, long_texts)
    own = LabelledData(data.texts, [0.5, 1.0], [])
    with pytest.raises(ValueError, match=r"text 2 of 2 has no tokens"):
        encode_labelled(own, tokenizer, 16, long_texts)
    inputs = LabelledData(data.texts, [], [])
    assert len(encode_labelled(inputs, tokenizer, 16, long_texts)) == 2


def test_labelled_pairs_have_a_text_with_tokens():
    tokenizer = load_tokenizer(minilm_folder())
    data = LabelledData([("a", ""), ("", "b")], [0, 1], ["no", "yes"])
    assert len(encode_labelled(data, tokenizer, 16)) == 2
    data.texts.append(("\u200d", ""))
    data.labels.append(1)
    with pytest.raises(ValueError, match=r"text 3 of 3 has no tokens, got \('\\u200d', ''\)"):
        encode_labelled(data, tokenizer, 16)


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
