"""The ways of running a layer, in the order in which they are tried."""

from collections.abc import Mapping

from fastenc.nn import layer
from fastenc.nn.layer_call import LayerCall
from fastenc.nn.layer_inputs import LayerState
from fastenc.nn.ways import cpu_inference, fused_sublayers, int8_inference
from fastenc.nn.ways.way import Way

# The functions are looked up in every call, so that a test can replace one of them.
WAYS = (
    Way(
        "int8 inference",
        int8_inference.TAKES,
        lambda layer_call: int8_inference.unsupported_reason(layer_call),
        int8_inference.run_int8_inference,
    ),
    Way(
        "fused sublayers",
        fused_sublayers.TAKES,
        lambda layer_call: fused_sublayers.unsupported_reason(layer_call),
        fused_sublayers.run_fused_sublayers,
    ),
    Way(
        "CPU inference",
        cpu_inference.TAKES,
        lambda layer_call: cpu_inference.unsupported_reason(layer_call),
        cpu_inference.run_cpu_inference,
    ),
    Way(
        "single ops",
        layer.TAKES,
        lambda layer_call: layer.unsupported_reason(layer_call),
        layer.run_single_ops,
    ),
)


def run_layer(layer_call: LayerCall) -> LayerState:
    """Run one layer in the first way that can take the call.

    Raises: ValueError if no way can.
    """
    for way in WAYS:
        if way.unsupported_reason(layer_call) is None:
            return way.run(layer_call)
    raise ValueError(f"a layer of this model cannot run here: {way.unsupported_reason(layer_call)}")


def unsupported_reasons(layer_call: LayerCall) -> Mapping[str, str | None]:
    """{way of running the layer: why it cannot take the call, or None}, in the order in which they are tried."""
    return {way.name: way.unsupported_reason(layer_call) for way in WAYS}
