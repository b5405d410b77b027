"""Weights, inputs and a plain-torch version of one encoder layer."""

import torch
import torch.nn.functional as F

from fastenc.nn.encoder_layer import LayerOptions, LayerWeights
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of

WIDTH, INNER, HEADS = 64, 96, 2
NAMES = (
    *("query", "key", "value", "query_bias", "key_bias", "value_bias"),
    *("attention_out", "attention_out_bias", "attention_norm", "attention_norm_bias"),
    *("up", "up_bias", "down", "down_bias", "out_norm", "out_norm_bias"),
)


def shapes_of(inner):
    return (
        *((WIDTH, WIDTH),) * 3,
        *((WIDTH,),) * 3,
        *((WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)),
        *((inner, WIDTH), (inner,), (WIDTH, inner), (WIDTH,), (WIDTH,), (WIDTH,)),
    )


def inputs(lengths=EDGE_LENGTHS, dtype=torch.float32, inner=INNER):
    """(named tensors, x first; offsets; longest)."""
    torch.manual_seed(3)
    values = {"x": torch.randn(sum(lengths), WIDTH)}
    for name, shape in zip(NAMES, shapes_of(inner), strict=True):
        spread = 0.3 if len(shape) == 1 else shape[1] ** -0.5
        values[name] = (1.0 if name.endswith("norm") else 0.0) + spread * torch.randn(shape)
    values = {name: v.to(dtype).requires_grad_() for name, v in values.items()}
    return values, offsets_of(lengths), max(lengths, default=0)


def weights_of(values) -> LayerWeights:
    rest = [values[name] for name in NAMES[6:]]
    return LayerWeights(
        tuple(values[name] for name in NAMES[:3]), tuple(values[name] for name in NAMES[3:6]), *rest
    )


def options(p=0.0, activation="gelu"):
    return LayerOptions(HEADS, activation, 1e-6, p, p, p)


def plain_layer(values, lengths, approximate="none"):
    """The layer in torch's own functions, a sequence at a time."""
    v = values
    linear = lambda x, name: F.linear(x, v[name], v[f"{name}_bias"])
    norm = lambda x, name: F.layer_norm(x, (WIDTH,), v[name], v[f"{name}_bias"], 1e-6)
    mixed = []
    for x in v["x"].split(list(lengths)):
        q, k, u = (linear(x, n).view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for n in NAMES[:3])
        mixed.append(F.scaled_dot_product_attention(q, k, u).transpose(0, 1).flatten(1))
    h = norm(v["x"] + linear(torch.cat(mixed), "attention_out"), "attention_norm")
    inner = F.gelu(linear(h, "up"), approximate=approximate)
    return norm(h + linear(inner, "down"), "out_norm")
