"""torch's own gated activations."""

import torch.nn.functional as F

TORCHS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
}


def plain(x, bias, activation):
    a, b = (x if bias is None else x + bias).chunk(2, dim=-1)
    return TORCHS[activation](a) * b
