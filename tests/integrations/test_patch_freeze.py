"""A call with gradients ends fastenc.freeze, whichever forward it takes: the next step may change the weights."""

import copy
import warnings

import pytest
import torch
from torch.func import functional_call

import fastenc
from fastenc.models import Encoder
from tests.helpers.checkpoints import packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import ENCODERS, FAMILIES, model, padded_batch
from tests.helpers.patching import assert_same_outputs

pytestmark = needs_cpp


def loss_of(output):
    return output[0].square().mean()


def stepped(parameters, gradients=None):
    gradients = [p.grad for p in parameters] if gradients is None else gradients
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient, alpha=0.5)


def step(forward):
    """An SGD step in evaluation mode, after ``call(model, batch)``."""

    def take(m, batch):
        m.zero_grad()
        loss_of(forward(m, batch)).backward()
        stepped(list(m.parameters()))

    return take


def left_padded(m, batch):
    return m(**{name: value.flip(1) for name, value in batch.items()})


def with_attentions(m, batch):
    m.set_attn_implementation("eager")
    return m(**batch, output_attentions=True)


def with_a_mask_of_four_dimensions(m, batch):
    mask = batch["attention_mask"].bool()
    return m(**batch | {"attention_mask": mask[:, None, None].expand(-1, 1, mask.shape[1], -1)})


def compiled(m, batch):
    torch.compiler.reset()  # after too many graphs PyTorch compiles none, and the call is fused
    return torch.compile(m, backend="eager")(**batch)


def by_function(m, batch):
    trained = {name: p for name, p in m.named_parameters() if p.requires_grad}
    loss = lambda parameters: loss_of(functional_call(m, parameters, (), batch))
    gradients = torch.func.grad(loss)({name: p.detach() for name, p in trained.items()})
    stepped(list(trained.values()), gradients.values())


STEPS = {
    "left padding": step(left_padded),
    "attentions": step(with_attentions),
    "torch.func": by_function,
}
BERTS_STEPS = STEPS | {
    "a 4-D mask": step(with_a_mask_of_four_dimensions),
    "torch.compile": step(compiled),
}
LEFT_PADDED = ("qwen3", "gemma3", "embedding_gemma2")
# The loss reads padding, which they compute neither on the left nor on the right.
PACKED_ON_THE_LEFT = [(family, "Model", "left padding") for family in LEFT_PADDED]
CASES = [
    *((family, "Model", name) for family in ENCODERS if family != "bert" for name in STEPS),
    *((family, "ForMaskedLM", "left padding") for family in FAMILIES),
    *(("bert", "Model", name) for name in BERTS_STEPS),
]


@pytest.mark.parametrize("family, task, name", [c for c in CASES if c not in PACKED_ON_THE_LEFT])
def test_a_step_by_the_own_forward_shows_in_a_frozen_model(family, task, name):
    theirs = model(family, task)
    ours = fastenc.freeze(fastenc.patch(copy.deepcopy(theirs)))
    batch = padded_batch(family, (12, 30, 7))
    with torch.no_grad():
        before = ours(**batch)[0]
    for m in (theirs, ours):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            BERTS_STEPS[name](m, batch)
    with torch.no_grad():
        outputs, expected = ours(**batch), theirs(**batch)
    assert (outputs[0] - before).abs().max() > 0.01
    assert_same_outputs(outputs, expected, batch["attention_mask"])


def test_a_compiled_step_shows_in_a_frozen_encoder(tmp_path):
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path))
    batch = packed(padded_batch("bert"))
    with torch.no_grad():
        encoder(batch)
        fastenc.freeze(encoder)
    hidden = torch.compile(encoder, backend="eager")(batch).last_hidden_state
    hidden.square().mean().backward()
    stepped(list(encoder.parameters()))
    with torch.no_grad():
        changed = encoder(batch).last_hidden_state
        fastenc.unfreeze(encoder)
        assert torch.equal(changed, encoder(batch).last_hidden_state)
        assert (changed - hidden).abs().max() > 0.01


def test_inference_by_the_own_forward_does_not_end_it():
    ours = fastenc.freeze(fastenc.patch(model("bert")))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left_padded(ours, padded_batch("bert"))
        compiled(ours, padded_batch("bert"))
    assert ours.fastenc_frozen._copies is not None


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda weight: weight.to_sparse(), "a weight is torch.sparse_coo"),
        (lambda weight: weight[:, :16], r"a weight has shape \(48, 16\), not \(48, 32\)"),
    ],
)
def test_weights_that_the_kernels_do_not_take_are_refused(change, reason, dtype):
    ours = fastenc.patch(model("bert"))
    linear = ours.encoder.layer[1].intermediate.dense
    linear.weight = torch.nn.Parameter(change(linear.weight.detach()))
    message = f"got BertModel, which runs its own forward, because {reason}: undo that, or leave out freeze"
    with pytest.raises(ValueError, match=message):
        fastenc.freeze(ours, dtype=dtype)


def test_what_is_not_patched_is_not_frozen():
    """Whatever the mode: a new module is in training mode."""
    with pytest.raises(ValueError, match=r"got Linear: call fastenc\.patch\(model\) first"):
        fastenc.freeze(torch.nn.Linear(2, 2))
