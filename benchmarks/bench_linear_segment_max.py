"""The maxima, and the sums of log(1 + ReLU), of the masked-LM head's logits over each text (SPLADE): values and
gradients, time and memory."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._harness import (
    DEVICE,
    ON_GPU,
    Work,
    compare_functions,
    compiled,
    dtype_name,
    run_groups,
)
from benchmarks.gpu_quick import problems
from fastenc.ops import linear_segment_log_sum, linear_segment_max

TABLES = {
    "linear_segment_max": "Largest logit of each text and vocabulary entry, and sums of their logarithms"
}
# Lengths of a batch, hidden size, vocabulary.
SHAPES = (
    {
        "BERT-base, 64 texts of 65 to 191": ([65 + 2 * i for i in range(64)], 768, 30522),
        "XLM-R-base, 64 texts of 65 to 191": ([65 + 2 * i for i in range(64)], 768, 250002),
    }
    if ON_GPU
    else {"MiniLM, 16 texts of 33 to 63": ([33 + 2 * i for i in range(16)], 384, 30522)}
)


def maximum(logits: torch.Tensor) -> torch.Tensor:
    return logits.max(0).values


def log_sum(logits: torch.Tensor) -> torch.Tensor:
    return logits.relu().log1p().sum(0)


SMALLEST = ([3, 1, 5], 8, 30, torch.float32, maximum)  # the shape that the tests measure


def measure(
    name: str,
    lengths: list[int],
    width: int,
    vocabulary: int,
    dtype: torch.dtype,
    pool: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, dict]:
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
    if pool is maximum:
        ours = lambda *given: linear_segment_max(*given, cu_seqlens)[0]
        gradients = 4 * int(dvalues.count_nonzero()) * width
    else:
        ours = lambda *given: linear_segment_log_sum(*given, cu_seqlens)
        gradients = 3 * product  # it computes the logits again
    return compare_functions(
        name,
        {
            "fastenc": ours,
            "all logits": eager,
            "torch.compile of all logits": compiled(eager),
        },
        inputs,
        dvalues,
        baseline="all logits",
        forward=Work(read + 3 * dvalues.nbytes, product, dtype),
        backward=Work(2 * read + 3 * dvalues.nbytes, gradients, dtype),
    )


def main() -> None:
    groups = {}
    for shape, given in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for pool in (maximum, log_sum):
                name = f"{shape}, {dtype_name(dtype)}" + (", log sums" if pool is log_sum else "")
                groups[name] = partial(measure, name, *given, dtype, pool)
    run_groups("linear_segment_max", groups)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    lengths = size.short()
    moved = (size.tokens + size.vocabulary) * size.width
    maxima = len(lengths) * size.vocabulary
    forward = problems.work(moved + 3 * maxima, 2 * size.tokens * size.vocabulary * size.width)
    backward = problems.work(2 * moved + 3 * maxima, 4 * maxima * size.width)
    yield (
        "linear_segment_max",
        partial(
            problems.problem,
            "linear_segment_max",
            size.of(lengths),
            forward,
            backward,
        ),
    )


if __name__ == "__main__":
    main()
