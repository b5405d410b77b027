"""The ways of running a layer are closed: a way refuses every feature that it does not name."""

from collections import namedtuple
from dataclasses import dataclass, fields, replace

import pytest
import torch

from fastenc.nn.layer_spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
)
from fastenc.nn.ways import WAYS, run_layer
from tests.helpers.layers import KINDS, Layer


@dataclass(frozen=True)
class InventedAttention(AttentionSpec):
    sinks: bool = False


@dataclass(frozen=True)
class InventedFeedForward(FeedForwardSpec):
    routing: str = "dense"


@dataclass(frozen=True)
class InventedNorm(NormSpec):
    shift: float = 0.0


@dataclass(frozen=True)
class InventedLayer(LayerSpec):
    convolution: int = 0


CALL = Layer(KINDS["bert"]).layer_call()
SPEC = CALL.spec


def values_of(description):
    return {
        field.name: getattr(description, field.name) for field in fields(description) if field.init
    }


def described(part, spec_class, **value):
    """The layer call in which this part of the description (None: the whole) is of another class, with one more
    field."""
    if part is None:
        return CALL._replace(spec=spec_class(**values_of(SPEC), **value))
    changed = spec_class(**values_of(getattr(SPEC, part)), **value)
    return CALL._replace(spec=replace(SPEC, **{part: changed}))


def extended(field, name, value):
    """The layer call in which a NamedTuple has one more field, with the default None."""
    values = getattr(CALL, field)
    tuple_class = type(values)
    methods = {
        each: vars(tuple_class)[each]
        for each in ("tensors", "probabilities")
        if each in vars(tuple_class)
    }
    base = namedtuple(tuple_class.__name__, (*tuple_class._fields, name), defaults=(None,))
    return CALL._replace(**{field: type(tuple_class.__name__, (base,), methods)(*values, value)})


ONE = torch.ones(1)
# Feature → (a layer call that uses it, a layer call whose types have it but that does not use it).
INVENTED = {
    "sinks": [described("attention", InventedAttention, sinks=used) for used in (True, False)],
    "routing=experts": [
        described("feed_forward", InventedFeedForward, routing=used)
        for used in ("experts", "dense")
    ],
    "shift": [described("out_norm", InventedNorm, shift=used) for used in (1.0, 0.0)],
    "convolution": [described(None, InventedLayer, convolution=used) for used in (3, 0)],
    "memory_tokens": [extended("inputs", "memory_tokens", used) for used in (ONE, None)],
    "q_norm_weight": [extended("weights", "q_norm_weight", used) for used in (ONE, None)],
    "sink_dropout": [extended("dropout", "sink", used) for used in (0.1, None)],
}
for part, value in (("out_norm", {"norm_type": "power"}), ("feed_forward", {"activation": "mish"})):
    changed = replace(SPEC, **{part: replace(getattr(SPEC, part), **value)})
    INVENTED["=".join(*value.items())] = [CALL._replace(spec=changed), CALL]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", INVENTED)
def test_every_way_refuses_a_feature_that_it_does_not_name(name, grad):
    layer_call, _ = INVENTED[name]
    with torch.set_grad_enabled(grad):
        for way in WAYS:
            reason = way.unsupported_reason(layer_call)
            assert reason == way.reason(layer_call) or reason == f"it does not compute {name}"
            assert reason is not None
        with pytest.raises(ValueError, match=f"it does not compute {name}"):
            run_layer(layer_call)


@pytest.mark.parametrize("name", INVENTED)
def test_a_field_that_is_not_used_is_no_feature(name):
    _, layer_call = INVENTED[name]
    assert torch.equal(run_layer(layer_call).x, run_layer(CALL).x)


def test_own_norms_beside_a_source_are_refused():
    spec = Layer(KINDS["gemma3"]).spec
    with pytest.raises(
        ValueError, match="with own_norms cannot attend to a source, got cross_norm"
    ):
        replace(spec, cross_norm=spec.out_norm)


@pytest.mark.parametrize("name", ["sinks", "memory_tokens"])
def test_compiled_layers_refuse_it_too(name):
    compiled = torch.compile(lambda layer_call: run_layer(layer_call).x, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match=f"it does not compute {name}"):
        compiled(INVENTED[name][0])
