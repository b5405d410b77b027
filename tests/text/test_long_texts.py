"""Which part of a long text is kept, and where its chunks begin and end."""

import re

import pytest
import torch
from transformers import AutoTokenizer

from fastenc.data import collate_classification, encode_texts, train_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.packing import pack_documents
from fastenc.text import LongTexts, load_tokenizer, save_tokenizer
from fastenc.text.long_texts import truncated
from tests.helpers.training_run import WORDS, word_tokenizer

TEXT = " ".join(WORDS[:11])  # one token a word
IDS = [5 + index for index in range(11)]
CLS, SEP = 2, 3


def chunks_of(text, label=None, **options):
    """The chunks without their special tokens, which are checked here."""
    long_texts = LongTexts(max_length=6, chunks="mean", **options)
    labels = None if label is None else [label]
    (example,) = encode_texts([text], word_tokenizer(), 6, labels, long_texts=long_texts)
    pieces, rest = [], example.input_ids
    for length in example.chunk_lengths:
        piece, rest = rest[:length], rest[length:]
        assert piece[0] == CLS and piece[-1] == SEP
        pieces.append(piece[1:-1])
    assert not rest and len(example.token_type_ids) == len(example.input_ids)
    return pieces


def test_counts_of_kept_tokens():
    ids = list(range(600))
    assert truncated(ids, 510, "head") == ids[:510]
    assert truncated(ids, 510, "tail") == ids[90:]
    assert truncated(ids, 510, "head+tail") == ids[:128] + ids[-382:]
    assert truncated(ids, 126, "head+tail") == ids[:31] + ids[-95:]
    assert truncated(ids, 1, "head+tail") == ids[-1:]
    for truncation in ("head", "tail", "head+tail"):
        assert truncated(ids, 600, truncation) == ids and truncated([], 5, truncation) == []


@pytest.mark.parametrize("tokenizer_name", ["minilm", "bpe", "unigram"])
@pytest.mark.parametrize("truncation", ["head", "tail", "head+tail"])
def test_truncation_is_transformers(tokenizer_name, truncation, tmp_path):
    texts = ["a much longer text of many, many words that goes on", "short", ""]
    folder = minilm_folder() if tokenizer_name == "minilm" else tmp_path
    if tokenizer_name != "minilm":
        save_tokenizer(train_tokenizer(texts, model_type=tokenizer_name, vocab_size=280), folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.truncation_side = "left" if truncation == "tail" else "right"
    for max_length in (5, 9, 64):
        examples = encode_texts(
            texts, load_tokenizer(folder), max_length, long_texts=LongTexts(truncation=truncation)
        )
        ours = [example.input_ids for example in examples]
        if truncation == "head+tail":  # transformers has no such truncation
            room = max_length - 2
            for ids, whole in zip(ours, theirs(texts)["input_ids"], strict=True):
                head = room * 128 // 510
                inner = whole[1:-1]
                if len(inner) > room:
                    inner = inner[:head] + inner[len(inner) - room + head :]
                assert ids == [whole[0], *inner, whole[-1]]
        else:
            assert ours == theirs(texts, truncation=True, max_length=max_length)["input_ids"]
        assert all(example.chunk_lengths is None for example in examples)


def test_chunk_boundaries():
    assert chunks_of(TEXT, stride=0) == [IDS[0:4], IDS[4:8], IDS[7:11]]
    assert chunks_of(TEXT, stride=1) == [IDS[0:4], IDS[3:7], IDS[6:10], IDS[7:11]]
    assert chunks_of(" ".join(WORDS[:10]), stride=1) == [IDS[0:4], IDS[3:7], IDS[6:10]]
    assert chunks_of(TEXT, stride=3) == [IDS[i : i + 4] for i in range(8)]
    assert chunks_of(" ".join(WORDS[:4]), stride=1) == [IDS[0:4]]
    assert chunks_of("the", stride=1) == [IDS[:1]]
    assert chunks_of("", stride=1) == [[]], "a line to predict for keeps its place"


def test_most_chunks_are_what_the_truncation_leaves():
    cut = dict(stride=1, max_chunks=2)  # room for 4 + 3 tokens
    assert chunks_of(TEXT, **cut) == [IDS[0:4], IDS[3:7]]
    assert chunks_of(TEXT, truncation="tail", **cut) == [IDS[4:8], IDS[7:11]]
    kept = IDS[:1] + IDS[5:]  # 7 * 128 // 510 = 1
    assert chunks_of(TEXT, truncation="head+tail", **cut) == [kept[0:4], kept[3:7]]
    assert chunks_of(" ".join(WORDS[:7]), **cut) == [IDS[0:4], IDS[3:7]]
    assert chunks_of(TEXT, stride=1, max_chunks=1, truncation="tail") == [IDS[7:11]]


def test_batches_hold_the_chunks_of_all_documents():
    texts = [TEXT, "cat", " ".join(WORDS[:7])]
    long_texts = LongTexts(chunks="mean", stride=1)
    examples = encode_texts(texts, word_tokenizer(), 6, [1, 0, 1], long_texts=long_texts)
    arguments = collate_classification(examples)
    batch, documents = arguments["batch"], arguments["documents"]
    assert batch.cu_seqlens.diff().tolist() == [6, 6, 6, 6, 3, 6, 6]
    assert batch.input_ids.tolist() == [i for example in examples for i in example.input_ids]
    assert batch.max_seqlen == 6
    assert documents.cu_chunks.tolist() == [0, 4, 5, 7] and documents.cu_chunks.dtype == torch.int32
    assert documents.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 1] and documents.max_chunks == 4
    assert documents.groups == ((7, 39, 6),)
    assert arguments["labels"].tolist() == [1, 0, 1]
    assert "documents" not in collate_classification(encode_texts(texts, word_tokenizer(), 6))


def test_groups_of_chunks_for_inference():
    lengths = [[6, 6, 2], [6], [9, 1]]
    assert pack_documents(lengths, 12).groups == ((2, 12, 6), (2, 8, 6), (2, 10, 9))
    assert pack_documents(lengths, 1).groups == tuple((1, n, n) for n in (6, 6, 2, 6, 9, 1))
    assert pack_documents([]).groups == ()


def test_split_batches_are_the_groups():
    examples = encode_texts(
        [TEXT, "cat"], word_tokenizer(), 6, long_texts=LongTexts(chunks="max", stride=0)
    )
    batch = collate_classification(examples)["batch"]
    parts = batch.split(((3, 18, 6), (1, 3, 3)))
    assert [part.cu_seqlens.tolist() for part in parts] == [[0, 6, 12, 18], [0, 3]]
    assert [part.max_seqlen for part in parts] == [6, 3]
    for name in ("input_ids", "position_ids", "token_type_ids"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(batch, name)), name


@pytest.mark.parametrize(
    "options,message",
    [
        (
            dict(truncation="middle"),
            "truncation must be one of head, tail, head+tail, got 'middle'",
        ),
        (dict(chunks="sum"), "chunks must be one of mean, max, attention, transformer, got 'sum'"),
        (dict(max_chunks=0), "max_chunks must be at least 1, got 0"),
        (dict(stride=-1), "stride must be at least 0, got -1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LongTexts(**options)


def test_bad_input_is_named():
    tokenizer = word_tokenizer()
    encode = lambda texts, labels=None, max_length=6, **options: encode_texts(
        texts, tokenizer, max_length, labels, long_texts=LongTexts(**options)
    )
    with pytest.raises(ValueError, match=r"stride must be less than the 4 tokens .* got 4: give a"):
        encode([TEXT], chunks="mean", stride=4)
    for options in (dict(truncation="tail"), dict(chunks="mean", stride=1)):
        with pytest.raises(ValueError, match="pairs of texts can only be truncated at the end"):
            encode([("a", "b")], **options)
    with pytest.raises(ValueError, match="beside 2 special tokens, got 2: give more"):
        encode([TEXT], max_length=2, chunks="mean", stride=0)
    with pytest.raises(ValueError, match="at least one chunk, document 1 has none: leave it out"):
        pack_documents([[3], []])
