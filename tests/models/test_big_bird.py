"""BigBird's block-sparse attention: the numbers of transformers for a text alone, in evaluation and training."""

import copy

import numpy
import pytest
import torch
import transformers
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.nn.block_plan import draw_random_blocks, longest_full
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.ops import int8_products
from fastenc.packing import pack_sequences
from fastenc.text import load_tokenizer, special_tokens
from fastenc.text.tokenizer_files import save_tokenizer
from tests.helpers.checkpoints import save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import config, in_float64, model
from tests.helpers.family_examples import gradients, within

SPARSE = dict(attention_type="block_sparse", block_size=16, num_random_blocks=1)
SIZES = [
    SPARSE | dict(max_position_embeddings=400),
    SPARSE | dict(max_position_embeddings=396, block_size=12, num_random_blocks=2),
    # The random blocks of these lengths are drawn by a rule of their own.
    SPARSE | dict(max_position_embeddings=1024, block_size=64, num_random_blocks=3),
]
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def limit_of(changes):
    spec = AttentionSpec(
        2, 16, 0.25, block_size=changes["block_size"], random_blocks=changes["num_random_blocks"]
    )
    return longest_full(spec)


def lengths_of(changes):
    limit, most = limit_of(changes), changes["max_position_embeddings"]
    return (3, limit, limit + 1, most - 3)


def texts_of(lengths):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(5, 97, (length,), generator=draw) for length in lengths]


def compare(models, states_of, dtype=torch.float32):
    """The states of real tokens and the gradient of every parameter.

    ``models``: ours, transformers', and transformers' in float64. ``states_of``: the function of each.
    """
    states, grads = [], []
    for each, compute in zip(models, states_of, strict=True):
        result = compute(each)
        weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        (result * weight.to(result)).sum().backward()
        states.append(result.detach())
        grads.append(gradients(each))
    within(*states, 0.0, "states", dtype)
    with torch.no_grad():  # another way of running the layers
        within(states_of[0](models[0]), *states[1:], 0.0, "states of inference", dtype)
    ours, plain, exact = grads
    assert ours.keys() == plain.keys() == exact.keys()
    floor = (0.1 if dtype == torch.float32 else 1e-3) * max(float(g.norm()) for g in exact.values())
    for name in exact:
        within(ours[name], plain[name], exact[name], floor, name, dtype)


@needs_cpp
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", SIZES, ids=["16", "12", "paper"])
def test_a_packed_text_is_computed_as_alone(changes, dtype, training, tmp_path):
    theirs = model("big_bird", **changes, **NO_DROPOUT).to(dtype)
    ours = Encoder.from_pretrained(save(theirs, tmp_path), dtype=dtype)
    models = [each.train(training) for each in (ours, theirs, in_float64(theirs))]
    texts = texts_of(lengths_of(changes))
    # The longest first: a short one changes the model's attention for good.
    alone = lambda m: torch.cat(
        [m(input_ids=text[None]).last_hidden_state[0] for text in texts[::-1]][::-1]
    )
    state = lambda: numpy.random.get_state()[1].tolist()  # noqa: NPY002  (transformers' generator)

    def together(encoder):
        before = state()
        states = encoder(pack_sequences([text.tolist() for text in texts])).last_hidden_state
        assert state() == before
        return states

    compare(models, (together, alone, alone), dtype)


@needs_cpp
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_patched_model_counts_blocks_up_to_the_end_of_the_padded_batch(dtype, training):
    theirs = model("big_bird", **SIZES[0], **NO_DROPOUT).to(dtype).train(training)
    patched = fastenc.patch(copy.deepcopy(theirs))
    ids = torch.nn.utils.rnn.pad_sequence(texts_of((250, 10, 113, 240, 199)), batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    real = batch["attention_mask"].bool()
    states = lambda m: m(**batch).last_hidden_state[real]
    compare((patched, theirs, in_float64(theirs)), (states,) * 3, dtype)


@needs_cpp
def test_a_short_batch_ends_block_sparse_attention_as_in_transformers():
    theirs = model("big_bird", **SIZES[0])
    patched = fastenc.patch(copy.deepcopy(theirs))
    long, short = (text[None] for text in texts_of((300, 60)))
    with torch.no_grad():
        sparse = patched(input_ids=long).last_hidden_state
        states = patched(input_ids=short).last_hidden_state
        torch.testing.assert_close(states, theirs(input_ids=short).last_hidden_state)
        again, wanted = (each(input_ids=long).last_hidden_state for each in (patched, theirs))
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=2e-5)
    assert not torch.allclose(again, sparse, atol=1e-3)
    encoder = fastenc.encoder_of(patched)
    assert not any(spec.attention.block_size for spec in encoder.stack.layers)


@pytest.mark.parametrize("length", [4096, 1024, 2048])
def test_the_random_blocks_are_those_that_transformers_draws(length):
    """Of a checkpoint's sizes, for both of its rules."""
    layer, settings = 3, config("big_bird", max_position_embeddings=4096, num_attention_heads=2)
    theirs = BigBirdBlockSparseAttention(settings, seed=layer).train()
    spec = AttentionSpec(2, 16, 0.25, block_size=64, random_blocks=3)
    drawn = draw_random_blocks(layer, spec, 4096, torch.device("cpu"))
    numpy.random.seed(layer)  # noqa: NPY002  (transformers' generator)
    rows = length // 64 - 2
    if length == 2048:
        plan = theirs._get_rand_attn_plan(length, 64, 3)
        wanted = theirs._bigbird_block_rand_mask_with_head(length, length, 64, 64, 2, *plan)
    else:
        draw = lambda: theirs._bigbird_block_rand_mask(4096, 4096, 64, 64, 3, last_idx=1024)
        wanted = [draw()[:rows] for _ in range(2)]
    ours = drawn[0 if length == 2048 else 1, :, 1 : rows + 1]
    assert torch.equal(ours, torch.tensor(numpy.stack(wanted)).long())


@pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
def test_blocks_in_int8_are_near_those_in_float32(tmp_path):
    ours = Encoder.from_pretrained(save(model("big_bird", **SIZES[0]), tmp_path))
    batch = pack_sequences([text.tolist() for text in texts_of((300, 40))])
    with torch.no_grad():
        exact = ours(batch).last_hidden_state
        rounded = fastenc.freeze(ours, dtype="int8")(batch).last_hidden_state
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_the_tokenizer_of_its_files(tmp_path):
    """A SentencePiece model whose special tokens are in part BERT's and in part RoBERTa's."""
    pieces = ["<pad>", "</s>", "<s>", "<unk>", "[SEP]", "[MASK]", "[CLS]", "▁", "▁the", "▁cat", "s"]
    vocab = [(piece, 0.0 if piece[0] in "<[" else -2.0) for piece in pieces]
    theirs = transformers.BigBirdTokenizer(vocab=vocab)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_tokenizer(tmp_path / "theirs")
    ids = theirs("the cats", "the cat")
    encoding = ours.encode("the cats", "the cat")
    assert encoding.ids == ids["input_ids"] == [6, 8, 9, 10, 4, 8, 9, 4]
    special = special_tokens(ours)
    assert special[:5] == (0, 3, (6,), 4, (5,))
    save_tokenizer(ours, tmp_path / "ours")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again("the cats", "the cat")["input_ids"] == ids["input_ids"]
    assert (again.pad_token, again.mask_token) == ("<pad>", "[MASK]")


@needs_cpp
def test_a_compiled_graph_has_the_blocks_that_training_draws():
    sizes = dict(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    settings = EncoderConfig(
        **sizes, max_positions=400, hidden_dropout_p=0.0, family="big_bird", extra=SPARSE
    )
    ours = Encoder(settings).train()
    batch = pack_sequences([text.tolist() for text in texts_of((300, 40))])
    torch.compiler.reset()  # otherwise it would give up after some recompilations
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        states = [each(batch).last_hidden_state for each in (compiled, ours)]
        in_evaluation = ours.eval()(batch).last_hidden_state
    torch.testing.assert_close(*states)
    assert not torch.allclose(states[0][:300], in_evaluation[:300], atol=1e-4)
