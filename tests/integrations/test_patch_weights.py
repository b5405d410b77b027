"""Every call reads the weights: however they are changed, the next call uses the new ones."""

import copy
import threading

import pytest
import torch
from torch import nn

import fastenc
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.patching import assert_same_outputs

pytestmark = needs_cpp


def in_another_thread(change):
    thread = threading.Thread(target=change)
    thread.start(), thread.join()


def layer(m):
    return m.encoder.layer[0]


CHANGES = {
    "columns by .data": lambda m: layer(m).attention.output.dense.weight.data[:, 32:48].zero_(),
    "a row by .data": lambda m: layer(m).intermediate.dense.weight.data[7].mul_(-3),
    "one element by .data": lambda m: layer(m).output.dense.weight.data[3, 5].add_(50),
    "one element by numpy": lambda m: (
        layer(m).output.dense.weight.numpy(force=True).__setitem__((9, 11), 40.0)
    ),
    "columns by numpy": lambda m: (
        layer(m).attention.self.value.weight.detach().numpy()[:, ::2].fill(0.25)
    ),
    "an element of a bias": lambda m: layer(m).attention.self.value.bias.data[1].add_(20),
    "an element of a norm": lambda m: layer(m).output.LayerNorm.weight.data[4].mul_(-2),
    "a mask of pruning": lambda m: layer(m).intermediate.dense.weight.data.mul_(
        torch.rand_like(layer(m).intermediate.dense.weight) < 0.5
    ),
    "in place without gradients": lambda m: layer(m).attention.self.query.weight.mul_(1.5),
    "another .data": lambda m: setattr(
        layer(m).attention.self.key.weight, "data", torch.ones(64, 64)
    ),
    "another parameter": lambda m: setattr(
        layer(m).attention.self.key, "weight", nn.Parameter(torch.ones(64, 64))
    ),
    "another thread": lambda m: in_another_thread(
        lambda: layer(m).output.dense.weight.data[:, 8:16].zero_()
    ),
    "shared memory": lambda m: layer(m).share_memory().output.dense.weight.data[2:4].mul_(9),
    "an optimiser's step": lambda m: step(m),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: value * 1.25 for name, value in m.state_dict().items()}
    ),
    "no bias": lambda m: layer(m).attention.self.query.register_parameter("bias", None),
}


def step(m):
    parameters = list(layer(m).parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows_at_the_next_call(change):
    """Three calls before the change and three after it, with enough tokens for packed weights, then with one text."""
    theirs = model("bert", hidden_size=64, num_attention_heads=4)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batches = [padded_batch("bert", (30,) * 12), padded_batch("bert", (9,))]
    same = lambda batch: assert_same_outputs(
        ours(**batch), theirs(**batch), batch["attention_mask"]
    )
    with torch.no_grad():
        for batch in batches * 3:
            same(batch)
        before = theirs(**batches[1]).last_hidden_state
        for m in (ours, theirs):
            torch.manual_seed(3)
            change(m)
        for batch in batches * 3:
            same(batch)
        assert not torch.equal(theirs(**batches[1]).last_hidden_state, before)
