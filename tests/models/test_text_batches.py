"""Texts become batches in a thread beside the model; the vectors are in the order of the texts."""

import threading

import pytest
import torch

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
from fastenc.models.embedding import text_batches
from fastenc.models.embedding.encode import encode_parts
from fastenc.models.embedding.text_batches import TextBatches

TEXTS = ["a dog runs in the rain", "two", "men play chess", "rain", "the dog sings to two men"]


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 32, 2, 2, 48, 40)).eval()
    encoder.tokenizer = train_tokenizer(TEXTS, vocab_size=97)
    return encoder


@pytest.fixture(autouse=True)
def parts_of_one_batch(monkeypatch):
    monkeypatch.setattr(text_batches, "BATCHES_AT_ONCE", 1)


class Tokenizer:
    """Tells when it tokenises the texts after the first two, and in which thread."""

    def __init__(self, tokenizer):
        self.tokenizer, self.later, self.threads = tokenizer, threading.Event(), set()

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode_batch_fast(self, texts):
        self.threads.add(threading.get_ident())
        if texts[0] == TEXTS[2]:
            self.later.set()
        return self.tokenizer.encode_batch_fast(texts)


@pytest.mark.parametrize("parts", [False, True], ids=["encode", "encode_parts"])
def test_later_texts_are_tokenised_while_the_model_computes(parts, encoder, monkeypatch):
    expected = encoder.encode(TEXTS)
    encoder.tokenizer = tokenizer = Tokenizer(encoder.tokenizer)
    compute = encoder.pooled_vectors

    def wait_for_the_tokenizer(batch, pooling):
        assert tokenizer.later.wait(20), "the model's first batch ends before other texts are read"
        return compute(batch, pooling)

    monkeypatch.setattr(encoder, "pooled_vectors", wait_for_the_tokenizer)
    if parts:
        given = (TEXTS[start : start + 2] for start in range(0, len(TEXTS), 2))
        vectors = torch.cat([*encode_parts(encoder, given, batch_size=2)])
    else:
        vectors = encoder.encode(TEXTS, batch_size=2)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-6)
    assert len(tokenizer.threads) == 1 and threading.get_ident() not in tokenizer.threads


def test_one_part_needs_no_thread(encoder):
    encoder.tokenizer = tokenizer = Tokenizer(encoder.tokenizer)
    encoder.encode(TEXTS)
    assert tokenizer.threads == {threading.get_ident()}


def test_batches_name_each_text_once_and_hold_its_tokens(encoder):
    batches = TextBatches(encoder.tokenizer, 6, batch_size=2, prompt="rain ")
    found = {}
    for chosen, batch in batches.of(TEXTS):
        rows = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        found |= dict(zip(chosen, (row.tolist() for row in rows), strict=True))
    assert sorted(found) == [0, 1, 2, 3, 4] and batches.number(5) == 3
    for number, text in enumerate(TEXTS):
        ids = encoder.tokenizer.encode(f"rain {text}").ids
        assert found[number] == (ids if len(ids) <= 6 else [*ids[:5], ids[-1]])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TextBatches(encoder.tokenizer, 6, batch_size=0)


def test_an_array_needs_no_second_copy_of_the_vectors(encoder, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    for dtype in (torch.float32, torch.bfloat16):
        made.clear()
        array = encoder.to(dtype).encode(TEXTS, batch_size=2, convert_to_numpy=True)
        assert array.ctypes.data in [each.data_ptr() for each in made]
        assert str(array.dtype) == "float32"
