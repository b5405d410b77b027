"""The maxima of the masked-LM head's logits over each text (SPLADE): values and gradients, time and memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._compare import compiled
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks.gpu_quick import problems
from fastenc.ops import linear_segment_max
from fastenc.profiling import Work

TABLES = {"linear_segment_max": "Largest logit of each text and vocabulary entry"}
SMALLEST = ([3, 1, 5], 8, 30, torch.float32)  # the shape that the tests measure
# Lengths of a batch, hidden size, vocabulary.
SHAPES = (
    {
        "BERT-base, 64 texts of 65 to 191": ([65 + 2 * i for i in range(64)], 768, 30522),
        "XLM-R-base, 64 texts of 65 to 191": ([65 + 2 * i for i in range(64)], 768, 250002),
    }
    if ON_GPU
    else {"MiniLM, 16 texts of 33 to 63": ([33 + 2 * i for i in range(16)], 384, 30522)}
)


def measure(
    name: str, lengths: list[int], width: int, vocabulary: int, dtype: torch.dtype
) -> dict[str, dict]:
    ours = lambda *given: linear_segment_max(*given)[0]
    largest = lambda logits: logits.max(0).values
    return beside_all_logits(name, lengths, width, vocabulary, dtype, ours, largest)


def beside_all_logits(
    name: str,
    lengths: list[int],
    width: int,
    vocabulary: int,
    dtype: torch.dtype,
    ours: Callable[..., torch.Tensor],
    pool: Callable[[torch.Tensor], torch.Tensor],
    dense: bool = False,
) -> dict[str, dict]:
    """An op that pools the logits of each text beside the same on all logits.

    Args:
        ours: the op, of hidden, weight, bias and cu_seqlens.
        pool: a text's logits (tokens, vocabulary) -> (vocabulary,).
        dense: whether all tokens have a gradient, and the backward computes the logits again.
    """
    new = lambda *shape: torch.randn(*shape, device=DEVICE)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    x, bias = new(sum(lengths), width), new(vocabulary)
    weight = new(vocabulary, width) / width**0.5
    inputs = tuple(v.to(dtype).requires_grad_() for v in (x, weight, bias))
    dvalues = new(len(lengths), vocabulary).relu().to(dtype)

    # The logits in float32: in bfloat16 many are equal, and the gradient takes another of them.
    def eager(x, weight, bias):
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), weight.to(wide), bias.to(wide))
        return torch.stack([pool(part) for part in logits.split(lengths)]).to(x.dtype)

    read = sum(v.nbytes for v in inputs)
    product = 2 * len(x) * width * vocabulary
    gradients = 3 * product if dense else 4 * int(dvalues.count_nonzero()) * width
    return compare_functions(
        name,
        {
            "fastenc": lambda *given: ours(*given, cu_seqlens),
            "all logits": eager,
            "torch.compile of all logits": compiled(eager),
        },
        inputs,
        dvalues,
        baseline="all logits",
        forward=Work(read + 3 * dvalues.nbytes, product, dtype),
        backward=Work(2 * read + 3 * dvalues.nbytes, gradients, dtype),
    )


def run_op(op: str, measure: Callable[..., dict[str, dict]]) -> None:
    groups = {}
    for shape, given in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape}, {dtype_name(dtype)}"
            groups[name] = partial(measure, name, *given, dtype)
    run_groups(op, groups)


def main() -> None:
    run_op("linear_segment_max", measure)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    lengths = size.short()
    moved = (size.tokens + size.vocabulary) * size.width
    maxima = len(lengths) * size.vocabulary
    forward = problems.work(moved + 3 * maxima, 2 * size.tokens * size.vocabulary * size.width)
    backward = problems.work(2 * moved + 3 * maxima, 4 * maxima * size.width)
    given = "linear_segment_max", size.of(lengths), forward, backward
    yield "linear_segment_max", partial(visited_problem, *given)


def visited_problem(*given: Any) -> problems.Problem:
    """Of two tokens whose outputs differ by less than rounding, either may get the gradient."""
    return problems.problem(*given)._replace(row_tolerance=0.5)


if __name__ == "__main__":
    main()
