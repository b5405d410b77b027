"""Attention over a window and global tokens against transformers' Longformer ("eager"), forward and backward."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks.gpu_quick import problems
from fastenc.ops import global_window_attention
from fastenc.ops.flops import visible_pairs
from fastenc.profiling import Work

TABLES = {"global_window_attention": "Attention over a window and global tokens (Longformer)"}
SMALLEST = ([8, 8], 4, 2, 16, torch.float32)  # the shape that the tests measure
# Lengths of a batch, window on both sides together, heads, head_dim: Longformer-base's. The first token is global.
SHAPES = {
    "1 sequence of 4,096, window 512": ([4096], 512, 12, 64),
    "1 sequence of 4,096, window 64": ([4096], 64, 12, 64),
    **({"16 sequences of 4,096, window 512": ([4096] * 16, 512, 12, 64)} if ON_GPU else {}),
}


def work(
    lengths: list[int], window: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Work, Work]:
    """Two products of pairs forward and five backward. A global token is one more key and sees every token."""
    side = (window // 2, window // 2)
    pairs = sum(visible_pairs(length, side) + 2 * length for length in lengths)
    product, token = 2 * heads * dim * pairs, sum(lengths) * heads * dim * dtype.itemsize
    return Work(6 * token, 2 * product, dtype), Work(12 * token, 5 * product, dtype)


def measure(
    name: str, lengths: list[int], window: int, heads: int, dim: int, dtype: torch.dtype
) -> dict[str, dict]:
    # The lengths are equal, so that the peer has nothing to pad.
    batch, length = len(lengths), lengths[0]
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    first = cu_seqlens[:-1].long()
    new = lambda *shape: torch.randn(*shape, heads, dim, device=DEVICE).to(dtype).requires_grad_()
    inputs = new(batch * length, 3), new(batch), new(batch * length, 2)

    def ours(qkv, global_q, global_kv):
        side = (window // 2, window // 2)
        return global_window_attention(
            qkv, global_q, global_kv, cu_seqlens, length, first, window_size=side
        )

    theirs = longformer_attention(batch, length, window, heads, dim)
    functions = {"fastenc": ours, "eager": theirs}
    forward, backward = work(lengths, window, heads, dim, dtype)
    dout = torch.randn(batch * length, heads, dim, device=DEVICE).to(dtype)
    return compare_functions(name, functions, inputs, dout, forward=forward, backward=backward)


def longformer_attention(
    batch: int, length: int, window: int, heads: int, dim: int
) -> Callable[..., Tensor]:
    """transformers' LongformerSelfAttention after its projections."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    width = heads * dim
    config = LongformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        attention_window=[window],
        attention_probs_dropout_prob=0.0,
    )
    module = LongformerSelfAttention(config, 0).to(DEVICE).eval()
    mask = torch.zeros(batch, length, device=DEVICE)
    mask[:, 0] = 1.0
    names = ("query", "key", "value", "query_global", "key_global", "value_global")

    def attend(qkv, global_q, global_kv):
        rows = lambda x: x.reshape(batch, -1, width).transpose(0, 1)
        given = (*map(rows, qkv.unbind(1)), rows(global_q), *map(rows, global_kv.unbind(1)))
        for name, value in zip(names, given, strict=True):
            # Its forward divides the result in place.
            setattr(module, name, lambda x, value=value: value.clone())
        hidden = qkv.new_zeros(batch, length, width)
        is_global = mask > 0
        out = module(hidden, mask.to(qkv.dtype), mask < 0, is_global, True)[0]
        return out.reshape(batch * length, heads, dim)

    for name in names:
        delattr(module, name)
    return attend


def main() -> None:
    groups = {}
    for shape, case in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape}, {dtype_name(dtype)}"
            groups[name] = partial(measure, name, *case, dtype)
    run_groups("global_window_attention", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    for length in size.lengths:
        lengths = [length] * (size.tokens // length)
        yield f"global_window_attention {length}", partial(visited_problem, size, lengths)


def visited_problem(size: problems.Size, lengths: list[int]) -> problems.Problem:
    least = work(lengths, 64, size.heads, 64, problems.DTYPE)
    first = problems.offsets_of(lengths)[:-1]
    chosen = {"global_tokens": first.long(), "global_q": problems.new(len(lengths), size.heads, 64)}
    return problems.problem("global_window_attention", size.of(lengths), *least, **chosen)


if __name__ == "__main__":
    main()
