"""A text's vector on a CPU has the same bits alone, in any batch, in any order, by any number of threads."""

import random

import pytest
import torch

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
from fastenc.ops import gemm
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model

WORDS = ["a", "small", "dog", "runs", "two", "men", "play", "chess", "in", "rain"]


def texts():
    """Short and long ones, so that batches have few rows and many, and threads share out sequences or columns."""
    choose = random.Random(0)
    return [" ".join(choose.choices(WORDS, k=count)) for count in (1, 4, 17, 9, 30, 28, 3, 33, 12)]


def encoder_of(name, folder):
    torch.manual_seed(0)
    if name == "more terms than one pass adds":
        encoder = Encoder(EncoderConfig(97, 160, 2, 2, 336, 40))
    else:
        model(name).save_pretrained(folder)
        encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = train_tokenizer(WORDS, vocab_size=90)
    return encoder.eval()


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["more terms than one pass adds", "albert", "deberta-v2", "modernbert", "gemma3", "t5-gated"],
)
def test_vectors_do_not_depend_on_batch_order_and_threads(name, dtype, tmp_path, monkeypatch):
    if not gemm.has_vectors():
        pytest.skip("needs AVX2 or AVX-512: other sets compute in PyTorch's products")
    if dtype == torch.float32:
        if not gemm.cpp_product_is_faster() and name not in (
            "more terms than one pass adds",
            "modernbert",
        ):
            pytest.skip("MKL's products round as their number of rows decides")
    elif not (gemm.emulates_bfloat16() or gemm.multiplies_pairs()):
        pytest.skip("this processor's many rows of bfloat16 are PyTorch's products")
    given, before = texts(), torch.get_num_threads()
    encoder = encoder_of(name, tmp_path).to(dtype)
    shuffled = random.Random(1).sample(range(len(given)), len(given))
    try:
        for frozen in (False, True):
            (fastenc.freeze if frozen else fastenc.unfreeze)(encoder)
            whole = None
            for threads in (1, 2):
                torch.set_num_threads(threads)
                vectors = encoder.encode(given)
                whole = vectors if whole is None else whole
                assert torch.equal(vectors, whole)
                mixed = encoder.encode([given[i] for i in shuffled], batch_size=4)
                assert torch.equal(mixed, whole[shuffled])
                for i in (0, 3, 7):
                    assert torch.equal(encoder.encode(given[i]), whole[i])
    finally:
        torch.set_num_threads(before)
