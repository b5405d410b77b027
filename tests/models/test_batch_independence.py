"""A text's vector on a CPU has the same bits alone, in any batch, in any order, by any number of threads."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
from fastenc.models.embedding import text_batches
from fastenc.models.embedding.dense import Dense
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.ops import gemm, int8_products
from fastenc.packing import pack_sequences
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
    elif name == "linear layers after the pooling":
        encoder = Encoder(EncoderConfig(97, 64, 2, 2, 128, 40))
        wider, back = (
            Dense(torch.randn(200, 64), None),
            Dense(torch.randn(64, 200), torch.randn(64)),
        )
        encoder.sentence = SentenceSettings(dense=(wider, back))
    else:
        model(name).save_pretrained(folder)
        encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = train_tokenizer(WORDS, vocab_size=90)
    return encoder.eval()


def skip_where_rows_count(dtype):
    """Skip where the products round as their number of rows decides."""
    if dtype == "int8":
        if not int8_products.has_int8_products():
            pytest.skip("this processor does not multiply 8 bits")
        return
    if not gemm.has_vectors():
        pytest.skip("needs AVX2 or AVX-512: other sets compute in PyTorch's products")
    ours = gemm.emulates_bfloat16() or gemm.multiplies_pairs()
    if dtype == torch.bfloat16 and not ours:
        pytest.skip("this processor's many rows of bfloat16 are PyTorch's products")


def forms(encoder, dtype):
    """The encoder as it is and frozen, or in 8 bits."""
    if dtype == "int8":
        yield fastenc.freeze(encoder, dtype="int8")
    else:
        yield encoder.to(dtype)
        yield fastenc.freeze(encoder)


EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int8"])


@needs_cpp
@EVERY_DTYPE
@pytest.mark.parametrize(
    "name",
    [
        "more terms than one pass adds",
        "linear layers after the pooling",
        *("albert", "deberta-v2", "modernbert", "gemma3", "embedding_gemma2", "t5-gated"),
        "esmc",
    ],
)
def test_vectors_do_not_depend_on_batch_order_and_threads(name, dtype, tmp_path, monkeypatch):
    skip_where_rows_count(dtype)
    monkeypatch.setattr(text_batches, "BATCHES_AT_ONCE", 1)  # several parts, tokenised in a thread
    given, before = texts(), torch.get_num_threads()
    shuffled = random.Random(1).sample(range(len(given)), len(given))
    try:
        for encoder in forms(encoder_of(name, tmp_path), dtype):
            whole = None
            for threads in (1, 2):
                torch.set_num_threads(threads)
                vectors = encoder.encode(given)
                whole = vectors if whole is None else whole
                assert torch.equal(vectors, whole)
                some = [given[i] for i in shuffled]
                mixed = encoder.encode(some, batch_size=4, batch_invariant=threads == 2)
                assert torch.equal(mixed, whole[shuffled])
                for i in (0, 3, 7):
                    assert torch.equal(encoder.encode(given[i]), whole[i])
    finally:
        torch.set_num_threads(before)


@needs_cpp
@EVERY_DTYPE
def test_states_with_global_tokens_do_not_depend_on_the_batch(dtype, tmp_path):
    """Of sequences with few global tokens, whose keys are not computed, with many, and with none."""
    skip_where_rows_count(dtype)
    draw = random.Random(0)
    shapes = [(5, 1), (25, 20), (30, 2), (9, 0), (17, 17), (1, 1), (36, 1), (2, 0)]
    sequences = [[draw.randrange(5, 97) for _ in range(length)] for length, _ in shapes]
    chosen = [sorted(draw.sample(range(length), count)) for length, count in shapes]

    def states(encoder, numbers):
        """A batch's states of each sequence."""
        batch = pack_sequences([sequences[number] for number in numbers])
        starts = [0, *accumulate(len(sequences[number]) for number in numbers)]
        tokens = [
            start + token
            for start, number in zip(starts, numbers, strict=False)
            for token in chosen[number]
        ]
        batch = replace(batch, global_tokens=torch.tensor(tokens, dtype=torch.int64))
        hidden = encoder(batch).last_hidden_state
        return hidden.split([len(sequences[number]) for number in numbers])

    before = torch.get_num_threads()
    try:
        for encoder in forms(encoder_of("longformer", tmp_path), dtype):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with torch.inference_mode():
                    together = states(encoder, [*range(len(shapes)), *reversed(range(len(shapes)))])
                    for number in range(len(shapes)):
                        (alone,) = states(encoder, [number])
                        assert torch.equal(together[number], alone), (number, threads)
                        assert torch.equal(together[-1 - number], alone)
    finally:
        torch.set_num_threads(before)


@needs_cpp
@EVERY_DTYPE
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("electra", dict(embedding_size=200)),  # projected to the layers' width
        # with projected distances
        ("deberta-v2", dict(hidden_size=160, position_buckets=256, conv_kernel_size=3)),
    ],
)
def test_states_beside_a_long_sequence_do_not_depend_on_it(name, changes, dtype, tmp_path):
    """The long one's tokens, and its distances, are more rows than a weight is read without packing for."""
    skip_where_rows_count(dtype)
    model(name, max_position_embeddings=300, **changes).save_pretrained(tmp_path)
    draw = random.Random(0)
    short, long = ([draw.randrange(5, 97) for _ in range(length)] for length in (20, 250))
    for encoder in forms(Encoder.from_pretrained(tmp_path).eval(), dtype):
        with torch.inference_mode():
            together = encoder(pack_sequences([short, long])).last_hidden_state[: len(short)]
            alone = encoder(pack_sequences([short])).last_hidden_state
            assert torch.equal(together, alone)


@needs_cpp
@EVERY_DTYPE
@pytest.mark.parametrize("block_size", [16, 12])  # with 12, both kinds of attention round apart
def test_states_beside_sequences_long_enough_for_blocks_do_not_depend_on_them(
    block_size, dtype, tmp_path
):
    """A short sequence sees all its tokens, in a batch whose others have a plan of blocks and in one without."""
    skip_where_rows_count(dtype)
    sizes = dict(block_size=block_size, num_random_blocks=1, max_position_embeddings=200)
    theirs = model("big_bird", attention_type="block_sparse", **sizes)
    theirs.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(5, 97, (length,), generator=generator).tolist() for length in (30, 150, 9)
    ]
    encoder = Encoder.from_pretrained(tmp_path).eval()
    for form in forms(encoder, dtype):
        with torch.inference_mode():
            together = form(pack_sequences(sequences)).last_hidden_state.split([30, 150, 9])
            for number, sequence in enumerate(sequences):
                alone = form(pack_sequences([sequence])).last_hidden_state
                assert torch.equal(together[number], alone), number
