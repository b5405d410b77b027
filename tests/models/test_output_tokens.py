"""Only some tokens' last states: the last layer computes its feed-forward sublayer for these tokens alone."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from fastenc.adapt import PromptTuning, add_adaptation
from fastenc.models import Encoder, EncoderConfig
from fastenc.ops import flops  # noqa: F401  (registers the formulas)
from fastenc.packing import PackedBatch, first_tokens, last_tokens, pack_sequences
from tests.helpers.checkpoints import close, save
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.families import ENCODERS, model
from tests.helpers.family_examples import Example, assert_same_results

EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)


class ExampleOfSomeTokens(Example):
    """The states of three texts' first tokens, and of others, of which one is read twice and none of the third text."""

    def __init__(self, family: str):
        super().__init__(family, "Model")
        self.tokens = torch.tensor([0, 5, 23, 9, 4, 9, 50])
        self.weight = self.weight[: len(self.tokens)]

    def theirs(self, model):
        hidden = model(**self.padded).last_hidden_state[self.mask][self.tokens]
        return hidden, (hidden * self.weight.to(hidden)).sum()

    def ours(self, model):
        hidden = model(self.packed, output_tokens=self.tokens).last_hidden_state
        return hidden, (hidden * self.weight.to(hidden)).sum()


@EVERY_ENCODER
@needs_cpp
def test_states_and_every_gradient(family, tmp_path):
    theirs = model(family)
    assert_same_results(theirs, ExampleOfSomeTokens(family), folder=save(theirs, tmp_path))


@EVERY_ENCODER
@torch.no_grad()
def test_states_without_gradients(family, tmp_path):
    """Of a loaded encoder, and frozen."""
    theirs, example = model(family), ExampleOfSomeTokens(family)
    wanted, _ = example.theirs(theirs)
    encoder = Encoder.from_pretrained(save(theirs, tmp_path)).eval()
    close(example.ours(encoder)[0], wanted)
    close(example.ours(fastenc.freeze(encoder))[0], wanted)


def test_compiled(tmp_path):
    theirs, example = model("bert"), ExampleOfSomeTokens("bert")
    encoder = Encoder.from_pretrained(save(theirs, tmp_path)).eval()
    compiled = compiled_once(lambda: example.ours(encoder)[0])
    close(compiled(), example.theirs(theirs)[0])


def long_batch() -> PackedBatch:
    """More rows than threads share the columns of."""
    return pack_sequences([torch.randint(5, 97, (40,)).tolist() for _ in range(20)])


def multiplications(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


@needs_cpp
@pytest.mark.parametrize("way", ["as it is", "frozen", "with gradients"])
def test_the_last_layer_computes_no_other_tokens(way):
    torch.manual_seed(0)
    width, inner = 64, 96
    encoder = Encoder(EncoderConfig(97, width, 2, 2, inner, 40, pooler=False)).eval()
    batch = long_batch()
    tokens = first_tokens(batch)
    if way == "frozen":
        fastenc.freeze(encoder)
    with torch.set_grad_enabled(way == "with gradients"):
        every = multiplications(lambda: encoder(batch))
        some = multiplications(lambda: encoder(batch, output_tokens=tokens))
    # With gradients the projection after attention is one op with it.
    of_each = 2 * inner * width + (0 if way == "with gradients" else width * width)
    assert every - some == (batch.total_tokens - len(tokens)) * of_each


@needs_cpp
@torch.no_grad()
def test_the_states_have_the_same_bits():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 64, 2, 2, 96, 40)).eval()
    batch = long_batch()
    tokens = last_tokens(batch, pad_token_id=0)
    for each in (encoder, fastenc.freeze(encoder)):
        whole = each(batch).last_hidden_state
        assert torch.equal(each(batch, output_tokens=tokens).last_hidden_state, whole[tokens])


@pytest.mark.parametrize("mix", [False, True])
@torch.no_grad()
def test_with_a_prompt_states_of_every_layer_and_stored_states(mix):
    """A prompt's rows are not counted. Where other states of the last layer are read, it computes all tokens."""
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 64, 2, 2, 96, 60, layer_mix=mix)).eval()
    batch = long_batch()
    tokens = first_tokens(batch) + 1
    for prepare in (
        lambda: None,
        lambda: add_adaptation(encoder, PromptTuning(length=3)),
    ):
        prepare()
        whole = encoder(batch, output_hidden_states=True)
        some = encoder(batch, output_hidden_states=True, output_tokens=tokens)
        close(some.last_hidden_state, whole.last_hidden_state[tokens])
        close(some.hidden_states[-1], whole.hidden_states[-1])
        assert some.pooled is None
        alone = encoder(batch, output_tokens=tokens).last_hidden_state
        close(alone, whole.last_hidden_state[tokens])
    stored = replace(batch, hidden=whole.last_hidden_state)
    assert torch.equal(
        encoder(stored, output_tokens=tokens).last_hidden_state, whole.last_hidden_state[tokens]
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([0, 800]), r"in \[0, 800\), got 800"),
        (torch.tensor([-1]), "got -1"),
        (torch.tensor([0], dtype=torch.int32), r"must be int64 \(tokens,\), got torch.int32"),
        (torch.zeros(2, 1, dtype=torch.int64), r"of shape \(2, 1\)"),
    ],
)
def test_other_tokens_are_an_error(tokens, message):
    encoder = Encoder(EncoderConfig(97, 64, 1, 2, 96, 40))
    with pytest.raises(ValueError, match=message):
        encoder(long_batch(), output_tokens=tokens)
