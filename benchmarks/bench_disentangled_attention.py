"""Disentangled attention over packed sequences against DeBERTa's own way on padded ones, forward and backward."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks._compare import compiled, peer
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.nn.relative_positions import RelativePositionSpec, distance_slots
from fastenc.ops import disentangled_attention
from fastenc.profiling import Work

TABLES = {"disentangled_attention": "Attention with scores of relative positions (DeBERTa)"}
SMALLEST = ([3, 1, 5], 2, 16, torch.float32)  # the shape that the tests measure
SPEC = RelativePositionSpec(num_buckets=256, max_distance=512)  # DeBERTa-v3's
# Lengths of a batch, heads, head_dim: DeBERTa-v3-base's.
SHAPES = {
    "32 sequences of 10 to 258": ([10 + 8 * i for i in range(32)], 12, 64),
    "4 sequences of 512": ([512] * 4, 12, 64),
    **({"64 sequences of 512": ([512] * 64, 12, 64)} if ON_GPU else {}),
}


def work(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> tuple[Work, Work]:
    """Products of all pairs of tokens. Forward: q k^T, that of queries with their distances, that of keys, and p v.
    Backward: the first three again, dout v^T, dv, and two for each of the three. Tables: 2 x 512 rows."""
    product = 2 * heads * dim * sum(length**2 for length in lengths)
    token, tables = sum(lengths) * heads * dim, 2 * SPEC.rows * heads * dim
    forward = (4 * token + tables) * dtype.itemsize
    backward = (7 * token + 2 * tables) * dtype.itemsize
    return Work(forward, 4 * product, dtype), Work(backward, 11 * product, dtype)


def measure(
    name: str, lengths: list[int], heads: int, dim: int, dtype: torch.dtype
) -> dict[str, dict]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    longest, total = max(lengths), sum(lengths)
    new = lambda rows, *shape: torch.randn(rows, *shape, heads, dim, device=DEVICE).to(dtype)
    qkv, dout = new(total, 3), new(total)
    keys, queries = new(SPEC.rows), new(SPEC.rows)
    slots = distance_slots(SPEC, longest - 1).to(DEVICE)
    index = torch.arange(longest, device=DEVICE)
    inside = index < cu_seqlens.diff()[:, None]
    slot = slots[index - index[:, None] + longest - 1].long()  # (query, key)

    def padded(x: Tensor) -> Tensor:
        rows = x.new_zeros(len(lengths), longest, heads, dim)
        rows[inside] = x
        return rows.transpose(1, 2)

    def ours(qkv, keys, queries):
        return disentangled_attention(
            qkv, cu_seqlens, longest, slots, position_keys=keys, position_queries=queries
        )

    def plain(qkv, keys, queries):
        """Products with all rows of the tables, from which the scores are gathered."""
        q, k, v = map(padded, qkv.unbind(1))
        rows = slot.expand(len(lengths), heads, -1, -1)
        scores = q @ k.mT
        scores = scores + (q @ keys.permute(1, 2, 0)).gather(3, rows)
        scores = scores + (k @ queries.permute(1, 2, 0)).gather(3, rows.mT).mT
        scores = scores * (3 * dim) ** -0.5
        p = scores.masked_fill(~inside[:, None, None], float("-inf")).softmax(3)
        return (p @ v).transpose(1, 2)[inside]

    def flashdeberta(module):
        def attend(qkv, keys, queries):
            tables = (x.transpose(0, 1)[None].contiguous() for x in (keys, queries))
            return module.flash_attention_with_disentangled_varlen(
                *(x.contiguous() for x in qkv.unbind(1)),
                *tables,
                *(cu_seqlens, cu_seqlens, longest, longest),
                False,  # causal
                (3 * dim) ** -0.5,
                *(SPEC.num_buckets, SPEC.max_distance),
            )

        return attend

    forward, backward = work(lengths, heads, dim, dtype)
    functions = {"fastenc": ours, "eager": plain, "torch.compile": compiled(plain)}
    if ON_GPU:
        functions["flashdeberta"] = peer("flashdeberta.ops.flash_attention_varlen", flashdeberta)
    return compare_functions(
        name,
        functions,
        tuple(x.requires_grad_() for x in (qkv, keys, queries)),
        dout,
        forward=forward,
        backward=backward,
    )


def main() -> None:
    groups = {}
    for shape, case in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape}, {dtype_name(dtype)}"
            groups[name] = partial(measure, name, *case, dtype)
    run_groups("disentangled_attention", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    for length in size.lengths:
        lengths = [length] * (size.tokens // length)
        yield f"disentangled_attention {length}", partial(visited_problem, size, lengths)


def visited_problem(size: problems.Size, lengths: list[int]) -> problems.Problem:
    least = work(lengths, size.heads, 64, problems.DTYPE)
    names = ("position_keys", "position_queries")
    more = {name: problems.new(SPEC.rows, size.heads, 64) for name in names}
    more["slots"] = distance_slots(SPEC, max(lengths)).to(DEVICE)
    return problems.problem("disentangled_attention", size.of(lengths), *least, **more)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    for length in (512, 256, 128):
        yield partial(tuned_problem, [length] * (TOKENS // length), dtype)


def tuned_problem(lengths: list[int], dtype: torch.dtype) -> Problem:
    longest = max(lengths)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    slots = distance_slots(SPEC, longest - 1).to(DEVICE)
    rows = (SPEC.rows, 12, 64)
    inputs = random_inputs(dtype, (sum(lengths), 3, 12, 64), rows, rows)

    def run(qkv, keys, queries, impl):
        tables = {"position_keys": keys, "position_queries": queries}
        options = {"dropout_p": 0.1, "impl": impl}
        return disentangled_attention(qkv, cu_seqlens, longest, slots, **tables, **options)

    return Problem("disentangled_attention", run, inputs)


if __name__ == "__main__":
    main()
