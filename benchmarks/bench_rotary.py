"""Rotary position embedding of packed queries or keys against transformers' formula, forward and backward; and
attention that rotates while it reads against a rotation before attention."""

from functools import partial

import torch

from benchmarks._compare import compiled
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from fastenc.ops import attention, cross_attention, rotary
from fastenc.profiling import Work

TABLES = {"rotary": "Rotary position embedding of queries or keys"}
SMALLEST = ([3, 1, 5], 2, 8, 8, torch.float32)  # the shape that the tests measure
# Lengths of a batch, heads, head_dim, rotary_dim: ModernBERT-base's.
SHAPES = {
    "32 sequences of 10 to 258": ([10 + 8 * i for i in range(32)], 12, 64, 64),
    "8 sequences of 2048": ([2048] * 8, 12, 64, 64),
}


def table_of(lengths: list[int], rotary_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    angles = torch.arange(max(lengths), device=DEVICE)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def measure_attention(
    name: str, lengths: list[int], heads: int, dim: int, rotary_dim: int, dtype: torch.dtype
) -> dict[str, dict]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    table, longest, total = table_of(lengths, rotary_dim), max(lengths), sum(lengths)
    qkv = torch.randn(total, 3, heads, dim, device=DEVICE).to(dtype)
    dout = torch.randn(total, heads, dim, device=DEVICE).to(dtype)

    def before(qkv):
        q, k, v = qkv.unbind(1)
        q, k = (rotary(x, table, cu_seqlens, longest) for x in (q, k))
        return cross_attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest)

    functions = {
        "fastenc": lambda qkv: attention(qkv, cu_seqlens, longest, rotary=table),
        "rotated before": before,
    }
    flops = 4 * heads * dim * sum(length**2 for length in lengths)
    forward = Work(qkv.nbytes + dout.nbytes, flops, dtype=dtype)
    backward = Work(2 * qkv.nbytes + 2 * dout.nbytes, 2.5 * flops, dtype=dtype)
    return compare_functions(
        name,
        functions,
        (qkv.requires_grad_(),),
        dout,
        baseline="rotated before",
        forward=forward,
        backward=backward,
    )


def measure(
    name: str, lengths: list[int], heads: int, dim: int, rotary_dim: int, dtype: torch.dtype
) -> dict[str, dict]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    table = table_of(lengths, rotary_dim)
    x, dy = (torch.randn(sum(lengths), heads, dim, device=DEVICE).to(dtype) for _ in range(2))
    # Transformers computes these once for all layers of a batch.
    of_tokens = torch.cat([table[:length] for length in lengths])[:, None]
    cosine, sine = (half.repeat(1, 1, 2) for half in of_tokens.chunk(2, -1))

    def rotate_half(x):
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * cosine.to(x.dtype) + turned * sine.to(x.dtype)

    functions = {
        "fastenc": lambda x: rotary(x, table, cu_seqlens, max(lengths)),
        "eager": rotate_half,
        "torch.compile": compiled(rotate_half),
    }
    moved = Work(2 * x.nbytes, dtype=dtype)  # x read, y written; the same in the backward
    return compare_functions(
        name, functions, (x.requires_grad_(),), dy, forward=moved, backward=moved
    )


def main() -> None:
    groups = {}
    for shape, case in SHAPES.items():
        if shape.startswith("8 ") and not ON_GPU:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape}, {dtype_name(dtype)}"
            groups[name] = partial(measure, name, *case, dtype)
            name = f"attention of {name}"
            groups[name] = partial(measure_attention, name, *case, dtype)
    run_groups("rotary", groups)


if __name__ == "__main__":
    main()
