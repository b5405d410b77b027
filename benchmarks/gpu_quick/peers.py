"""PyTorch's and cuDNN's attention, F.layer_norm and F.cross_entropy on the same sizes."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _compare
from benchmarks._cases import Case
from benchmarks._compare import peer
from benchmarks._device import DEVICE
from benchmarks.gpu_quick.problems import Size, new, offsets_of
from benchmarks.gpu_quick.timing import line
from fastenc import ops

LIMIT = 60
SECONDS = 0.3  # of timing for each provider
DIRECTIONS = ("forward", "forward + backward")
Comparison = tuple[dict[str, Any], tuple[Tensor, ...]]  # providers and their inputs


def cases(size: Size) -> Iterator[Case]:
    comparisons: dict[str, Callable[[], Comparison]] = {
        f"attention {length}": partial(attention, size, length) for length in size.lengths[1:]
    }
    comparisons["layer_norm"] = partial(layer_norm, size)
    comparisons["masked_cross_entropy"] = partial(cross_entropy, size)
    for name, make in comparisons.items():
        for direction in DIRECTIONS:
            yield f"{name}, {direction}", partial(against, name, direction, make)


def against(name: str, direction: str, make: Callable[[], Comparison]) -> dict:
    """{provider: row}; a failing peer does not fail the case."""
    providers, inputs = make()
    calls: dict[str, Any] = {}
    for provider, run_peer in providers.items():
        if isinstance(run_peer, str):
            calls[provider] = run_peer
        elif direction == "forward":
            calls[provider] = partial(run_peer, *inputs)
        else:
            calls[provider] = partial(both, run_peer, inputs)
    with torch.no_grad() if direction == "forward" else nullcontext():
        rows = _compare.compare(calls, baseline="fastenc", seconds=SECONDS * len(calls))
    for provider, row in rows.items():
        print(line(f"{name}, {direction}, {provider}", row), flush=True)
    own = rows["fastenc"]
    return rows | ({"failed": own["failed"]} if "failed" in own else {})


def both(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = forward(*inputs)
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def attention(size: Size, length: int) -> Comparison:
    batch = size.tokens // length
    offsets = offsets_of([length] * batch)
    ours = lambda qkv: ops.attention(qkv, offsets, length)
    padded = {
        backend: partial(padded_attention, batch, backend)
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION")
    }
    cudnn = lambda qkv: ops.attention(qkv, offsets, length, impl="cudnn")
    varlen = peer("torch.nn.attention.varlen", partial(varlen_attention, offsets, length))
    providers = {"fastenc": ours, **padded, "cuDNN, packed": cudnn, "varlen_attn": varlen}
    return providers, (new(size.tokens, 3, size.heads, 64),)


def padded_attention(batch: int, backend: str, qkv: Tensor) -> Tensor:
    """All sequences have the same length, so there is no padding."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv.unflatten(0, (batch, -1)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def varlen_attention(offsets: Tensor, length: int, module) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        return module.varlen_attn(*qkv.unbind(1), offsets, offsets, length, length)

    return run


def layer_norm(size: Size) -> Comparison:
    providers = {
        "fastenc": lambda x, weight, bias: ops.layer_norm(x, weight, bias),
        "F.layer_norm": lambda x, weight, bias: F.layer_norm(x, (size.width,), weight, bias),
    }
    return providers, (new(size.tokens, size.width), new(size.width), new(size.width))


def cross_entropy(size: Size) -> Comparison:
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    providers = {
        "fastenc": lambda logits: ops.masked_cross_entropy(logits, labels),
        "F.cross_entropy": lambda logits: F.cross_entropy(logits, labels),
    }
    return providers, (new(rows, size.vocabulary),)
