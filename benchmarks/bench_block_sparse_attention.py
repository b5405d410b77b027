"""Block-sparse attention by BigBird's plan against transformers', and PyTorch's with a mask of it, both directions."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._compare import compiled, peer
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import run_shapes
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.nn.block_plan import block_plan, longest_full
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.ops import block_sparse_attention
from fastenc.ops.block_sparse_attention import BlockPlan
from fastenc.profiling import Work

TABLES = {"block_sparse_attention": "Attention of blocks (BigBird)"}
SMALLEST = ([20, 1, 7], 2, 16, 1, torch.float32)  # the shape that the tests measure
# Lengths of a batch, heads, head_dim, block size: those of BigBird-base.
SHAPES = {
    "1 sequence of 4096": ([4096], 12, 64, 64),
    "4 sequences of 1024": ([1024] * 4, 12, 64, 64),
    **({"16 sequences of 4096": ([4096] * 16, 12, 64, 64)} if ON_GPU else {}),
}


def spec_of(heads: int, dim: int, block_size: int) -> AttentionSpec:
    return AttentionSpec(heads, dim, dim**-0.5, block_size=block_size, random_blocks=3)


def pairs(lengths: list[int], block_size: int) -> int:
    """The number of pairs of a query and a key that it sees."""
    total, limit = 0, longest_full(spec_of(1, 1, block_size))
    for length in lengths:
        blocks = -(-length // block_size)
        seen = blocks**2 if length <= limit else 2 * blocks + 5 * (blocks - 2) - 2
        total += min(length**2, seen * block_size**2)
    return total


def work(
    lengths: list[int], heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Work, Work]:
    """Products of the pairs that are seen. Forward: q k^T and p v. Backward: q k^T again, dout v^T, dq, dk and dv."""
    product = 2 * heads * dim * pairs(lengths, block_size)
    token = sum(lengths) * heads * dim * dtype.itemsize
    return Work(4 * token, 2 * product, dtype), Work(7 * token, 5 * product, dtype)


def measure(
    name: str, lengths: list[int], heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> dict[str, dict]:
    spec, longest, total = spec_of(heads, dim, block_size), max(lengths), sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    plan = block_plan(spec, cu_seqlens, total, longest)
    assert plan is not None  # the longest sequence is too long to see all tokens
    new = lambda *shape: torch.randn(total, *shape, heads, dim, device=DEVICE).to(dtype)
    masks = [mask_of(*part, block_size) for part in parts(plan, cu_seqlens, block_size)]

    def ours(qkv: Tensor) -> Tensor:
        return block_sparse_attention(qkv, cu_seqlens, longest, plan, block_size)

    def plain(qkv: Tensor) -> Tensor:
        """A sequence at a time, all pairs of tokens."""
        outputs = []
        for part, mask in zip(qkv.split(lengths), masks, strict=True):
            q, k, v = part.permute(1, 2, 0, 3).unbind(0)
            mask = mask.to(qkv.dtype)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    providers = {"fastenc": ours, "eager": plain, "torch.compile": compiled(plain)}
    if len({*lengths}) == 1 and longest % block_size == 0:
        shape = (len(lengths), longest, heads, dim)
        providers["transformers"] = peer(
            "transformers.models.big_bird.modeling_big_bird",
            lambda module: theirs(module, shape, block_size, dtype),
        )
    forward, backward = work(lengths, heads, dim, block_size, dtype)
    return compare_functions(
        name,
        providers,
        (new(3).requires_grad_(),),
        new(),
        forward=forward,
        backward=backward,
    )


def theirs(
    module: Any, shape: tuple[int, int, int, int], block_size: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """transformers' attention, in evaluation."""
    batch, length, heads, dim = shape
    config = module.BigBirdConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        block_size=block_size,
        max_position_embeddings=length,
    )
    attention = module.BigBirdBlockSparseAttention(config).eval()
    ones = torch.ones(batch, length, device=DEVICE, dtype=dtype)
    blocked, band, *masks = module.BigBirdModel.create_masks_for_block_sparse_attn(ones, block_size)
    sizes = (heads, 3, dim, block_size, block_size, batch, length, length)
    plan = {"seed": 0, "plan_from_length": None, "plan_num_rand_blocks": None}

    def run(qkv: Tensor) -> Tensor:
        heads_first = (x.view(shape).transpose(1, 2) for x in qkv.unbind(1))
        out, _ = attention.bigbird_block_sparse_attention(
            *heads_first, band, *masks, blocked, blocked, *sizes, **plan
        )
        return out.reshape(-1, heads, dim)

    return run


def parts(
    plan: BlockPlan, cu_seqlens: Tensor, block_size: int
) -> Iterator[tuple[int, list[dict[int, int]]]]:
    """(length, for each block {block of keys: count}) of every sequence."""
    starts, columns, counts = (x.tolist() for x in plan)
    offsets = cu_seqlens.tolist()
    for s, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        rows = range(first // block_size + s, first // block_size + s - (first - end) // block_size)
        entries = [range(starts[row], starts[row + 1]) for row in rows]
        yield end - first, [{columns[e]: counts[e] for e in row} for row in entries]


def mask_of(length: int, rows: list[dict[int, int]], block_size: int) -> Tensor:
    """(length, length): the logarithms of the counts."""
    mask = torch.zeros(-(-length // block_size), -(-length // block_size))
    for i, row in enumerate(rows):
        for j, count in row.items():
            mask[i, j] = count
    wide = mask.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    return wide[:length, :length].log().to(DEVICE)


def main() -> None:
    run_shapes("block_sparse_attention", measure, SHAPES)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    for length in size.lengths:
        lengths = [length] * (size.tokens // length)
        yield f"block_sparse_attention {length}", partial(visited_problem, size, lengths)


def visited_problem(size: problems.Size, lengths: list[int]) -> problems.Problem:
    return problems.problem(
        "block_sparse_attention",
        size.of(lengths),
        *work(lengths, size.heads, 64, 64, problems.DTYPE),
    )


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    for length in (4096, 1024):
        lengths = [min(length, TOKENS)] * max(1, TOKENS // length)
        yield partial(tuned_problem, lengths, dtype)


def tuned_problem(lengths: list[int], dtype: torch.dtype) -> Problem:
    longest, total, block_size = max(lengths), sum(lengths), 64 if max(lengths) > 704 else 16
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    plan = block_plan(spec_of(12, 64, block_size), cu_seqlens, total, longest)
    assert plan is not None  # every sequence is too long to see all tokens

    def run(qkv: Tensor, impl: str) -> Tensor:
        return block_sparse_attention(qkv, cu_seqlens, longest, plan, block_size, impl=impl)

    return Problem("block_sparse_attention", run, random_inputs(dtype, (total, 3, 12, 64)))


if __name__ == "__main__":
    main()
