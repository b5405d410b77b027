"""Patched models under torch.compile, tracing, function transforms, fake tensors and the FLOP counter."""

import copy
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from fastenc import DataCollatorWithSeqlens
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch, whole
from tests.helpers.patching import assert_same_outputs

pytestmark = needs_cpp
COMPILED = (
    "xlm-roberta-xl",
    "distilbert",
    "electra",
    "mpnet",
    "t5",
    "albert",
    "bart",
    "modernbert",
    "gte",
)


def pair(task="Model", **changes):
    theirs = model("bert", task, **changes)
    return fastenc.patch(copy.deepcopy(theirs)), theirs


@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_compile_of_one_graph_says_nothing(task):
    ours, theirs = pair(task)
    batch = padded_batch("bert")
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        for inputs in (batch, DataCollatorWithSeqlens(dict)(batch)):
            output = compiled(**inputs)
        assert_same_outputs(output, theirs(**batch), batch["attention_mask"])


# Families whose code in transformers differs from BERT's and from each other's.
@pytest.mark.parametrize("family", COMPILED)
def test_every_family_can_be_compiled(family):
    theirs, batch = model(family), padded_batch(family)
    ours = fastenc.patch(copy.deepcopy(theirs))
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        assert_same_outputs(compiled(**batch), theirs(**batch), batch["attention_mask"])
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def loss_of(m, batch):
    return lambda parameters: functional_call(m, parameters, (), batch)[0].square().mean()


def test_gradients_of_functions():
    ours, theirs = pair("ForSequenceClassification")
    batch = padded_batch("bert")
    detached = lambda m: {name: p.detach() for name, p in m.named_parameters()}
    with pytest.warns(UserWarning, match="inside a function transform"):
        gradients = torch.func.grad(loss_of(ours, batch))(detached(ours))
    expected = torch.func.grad(loss_of(theirs, batch))(detached(theirs))
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6)


def test_directional_derivatives():
    ours, theirs = (
        m.set_attn_implementation("eager") or m for m in pair("ForSequenceClassification")
    )
    batch = padded_batch("bert")
    results = []
    for m in (ours, theirs):
        parameters = {name: p.detach() for name, p in m.named_parameters()}
        tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(torch.func.jvp(loss_of(m, batch), (parameters,), (tangents,)))
            with torch.autograd.forward_ad.dual_level():
                dual = {
                    name: torch.autograd.forward_ad.make_dual(p, tangents[name])
                    for name, p in parameters.items()
                }
                loss = loss_of(m, batch)(dual)
                results.append(torch.autograd.forward_ad.unpack_dual(loss))
    for derivatives, expected in zip(results[:2], results[2:], strict=True):
        for a, b in zip(derivatives, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_second_derivatives(family):
    """They are an error, and with the remedy that it names they are those of the model's own forward."""
    theirs = model(family, "ForSequenceClassification")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    batch["labels"] = torch.zeros(len(batch["input_ids"])).long()

    def product_of_hessian_and_ones(m):
        parameters = [p for p in m.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(m(**batch).loss, parameters, create_graph=True)
        return torch.autograd.grad(sum(each.sum() for each in gradients), parameters)

    with pytest.raises(RuntimeError, match="got a backward with create_graph=True"):
        product_of_hessian_and_ones(ours)
    fastenc.unpatch(ours)
    for m in (ours, theirs):
        m.set_attn_implementation("eager")
    products = map(product_of_hessian_and_ones, (ours, theirs))
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other)


def test_vmap_over_models():
    """An ensemble: one call computes two models with stacked weights."""
    ours, theirs = (
        m.set_attn_implementation("eager") or m for m in pair("ForSequenceClassification")
    )
    batch = padded_batch("bert", (12, 12))
    del batch["attention_mask"]
    results = []
    for m in (ours, theirs):
        stacked = {
            name: torch.stack([p.detach(), 0.5 * p.detach()]) for name, p in m.named_parameters()
        }
        forward = lambda parameters, m=m: functional_call(m, parameters, (), batch)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(torch.vmap(forward)(stacked))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_fake_tensors(task):
    ours, theirs = pair(task)
    batch = padded_batch("bert")
    shapes = []
    for m in (ours, theirs):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fake = {name: mode.from_tensor(value) for name, value in batch.items()}
            shapes.append(m(**fake)[0].shape)
    assert shapes[0] == shapes[1]


def test_tracing():
    ours, theirs = pair(attn_implementation="eager")
    batch = padded_batch("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ours, (batch["input_ids"], batch["attention_mask"]), strict=False)
    with torch.no_grad():
        hidden = traced(batch["input_ids"], batch["attention_mask"])["last_hidden_state"]
        expected = theirs(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(hidden[real], expected[real], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_tracing_an_encoder_decoder():
    """Without cache, as for an exported model that decodes anew for every token."""
    theirs = whole("bart").eval().requires_grad_(False)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch, targets = padded_batch("bart"), torch.randint(5, 97, (4, 6))
    inputs = (batch["input_ids"], batch["attention_mask"])
    call = lambda ids, mask, target: ours(ids, mask, target, use_cache=False, return_dict=False)[0]
    traced = torch.jit.trace(call, (*inputs, targets), check_trace=False)
    expected = theirs(*inputs, targets.flip(0), use_cache=False).logits
    torch.testing.assert_close(traced(*inputs, targets.flip(0)), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", [(30,) * 12, (7,)])
def test_flops_are_those_of_the_products(training, lengths):
    """Without padding the products are those of the model itself, which the counter knows."""
    ours, theirs = pair("ForMaskedLM", hidden_size=64, num_attention_heads=4)
    theirs.set_attn_implementation("eager")
    batch = padded_batch("bert", lengths)
    batch["labels"] = batch["input_ids"]
    counts = []
    for m in (ours, theirs):
        with torch.set_grad_enabled(training), FlopCounterMode(display=False) as counter:
            loss = m(**batch).loss
            if training:
                loss.backward()
        counts.append(counter.get_total_flops())
    # Our backward computes the scores again, in each of the two layers.
    again = 2 * 2 * 64 * sum(length**2 for length in lengths) if training else 0
    assert counts[0] == counts[1] + again
