"""Ops at real sizes, with the least work of each direction. A benchmark adds its problems with a function ``visited``:

def visited(size: Size) -> Iterator[tuple[str, Callable[[], Problem]]]: ...
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._harness import DEVICE, Work
from fastenc import ops
from fastenc.ops.attention_blocks import attention_blocks

DTYPE = torch.bfloat16


class Size(NamedTuple):
    tokens: int
    heads: int
    vocabulary: int
    lengths: tuple[int, ...]
    models: tuple[str, ...]
    batches: tuple[tuple[int, int], ...]  # (tokens, length) of a step

    @property
    def width(self) -> int:
        return 64 * self.heads


class Problem(NamedTuple):
    """An op at one size.

    Fields:
        run: the op, called with the inputs and impl.
        inputs: those of floating point get gradients.
        forward, backward: the least work of each direction; None: the backward has no work.
    """

    name: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    forward: Work
    backward: Work | None


def problems(size: Size) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """(name, function that makes the problem)."""
    for p in (0.0, 0.1):
        for length in size.lengths:
            lengths = [length] * (size.tokens // length)
            yield f"attention {length}, dropout {p}", partial(attention, size, lengths, p)
        yield f"attention mixed, dropout {p}", partial(attention, size, mixed(size), p)
        yield f"layer_norm, dropout {p}", partial(layer_norm, size, p)
        yield f"embedding_layer_norm, dropout {p}", partial(embedding, size, p)
    yield "bias_gelu", partial(bias_gelu, size)
    yield "bias_glu", partial(bias_glu, size)
    yield "masked_cross_entropy", partial(cross_entropy, size)
    yield "linear_masked_cross_entropy", partial(linear_cross_entropy, size)
    for path in sorted(Path(__file__).parents[1].glob("bench_*.py")):
        module = import_module(f"benchmarks.{path.stem}")
        if hasattr(module, "visited"):
            yield from module.visited(size)


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE).requires_grad_()


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def work(elements: float, flops: float = 0.0) -> Work:
    return Work(elements * DTYPE.itemsize, flops, DTYPE)


def mixed(size: Size) -> list[int]:
    """A quarter of the tokens is in the longest sequences, the rest in sequences of an eighth of this length."""
    long, short = size.lengths[-1], size.lengths[-1] // 8
    return [long] * -(-size.tokens // (4 * long)) + [short] * (3 * size.tokens // 4 // short)


def attention(size: Size, lengths: list[int], p: float) -> Problem:
    offsets, longest = offsets_of(lengths), max(lengths)
    inputs = (new(sum(lengths), 3, size.heads, 64),)
    blocks = attention_blocks(inputs[0], offsets, longest)

    def run(qkv, impl):
        return ops.attention(qkv, offsets, longest, dropout_p=p, blocks=blocks, impl=impl)

    one, flops = sum(lengths) * size.width, 4 * sum(n * n for n in lengths) * size.width
    return Problem("attention", run, inputs, work(4 * one, flops), work(7 * one, 2.5 * flops))


def layer_norm(size: Size, p: float) -> Problem:
    def run(x, residual, x_bias, weight, bias, impl):
        fused = {"residual": residual, "x_bias": x_bias, "dropout_p": p}
        return ops.layer_norm(x, weight, bias, impl=impl, **fused)

    one, vector = size.tokens * size.width, (size.width,)
    inputs = (
        new(size.tokens, size.width),
        new(size.tokens, size.width),
        *(new(*vector) for _ in range(3)),
    )
    return Problem("layer_norm", run, inputs, work(4 * one), work((4 if p else 3) * one))


def embedding(size: Size, p: float) -> Problem:
    ids = torch.randint(size.vocabulary, (size.tokens,), device=DEVICE)
    positions = torch.arange(size.tokens, device=DEVICE) % 128

    def run(word, position, token_type, weight, bias, impl):
        tables = {"position_ids": positions, "position": position, "token_type": token_type}
        return ops.embedding_layer_norm(ids, word, weight, bias, dropout_p=p, impl=impl, **tables)

    shapes = (
        (size.vocabulary, size.width),
        (128, size.width),
        (2, size.width),
        *[(size.width,)] * 2,
    )
    one, table = size.tokens * size.width, size.vocabulary * size.width
    inputs = tuple(new(*shape) for shape in shapes)
    return Problem("embedding", run, inputs, work(2 * one), work(7 * one + table))


def bias_gelu(size: Size) -> Problem:
    inputs = (new(size.tokens, 4 * size.width), new(4 * size.width))
    one = inputs[0].numel()
    return Problem("bias_gelu", ops.bias_gelu, inputs, work(2 * one), work(3 * one))


def bias_glu(size: Size) -> Problem:
    inputs = (new(size.tokens, 4 * size.width), new(4 * size.width))
    one = inputs[0].numel()
    run = partial(ops.bias_glu, activation="gelu")
    return Problem("bias_glu", run, inputs, work(1.5 * one), work(2.5 * one))


def cross_entropy(size: Size) -> Problem:
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)
    run = lambda logits, impl: ops.masked_cross_entropy(logits, labels, impl=impl)
    one = rows * size.vocabulary  # the forward also computes the gradient
    return Problem("cross_entropy", run, (new(rows, size.vocabulary),), work(2 * one), None)


def linear_cross_entropy(size: Size) -> Problem:
    rows = size.tokens // 8
    labels = torch.randint(size.vocabulary, (rows,), device=DEVICE)

    def run(hidden, weight, bias, impl):
        return ops.linear_masked_cross_entropy(
            hidden, weight, bias, labels, max_labels=rows, impl=impl
        )

    inputs = (new(rows, size.width), new(size.vocabulary, size.width), new(size.vocabulary))
    flops = 2 * rows * size.vocabulary * size.width
    logits = rows * size.vocabulary
    return Problem("linear", run, inputs, work(logits, flops), work(logits, 2 * flops))


def random_like(out: Tensor) -> Tensor:
    """Output gradients that are the same for every implementation and dtype."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


def results(problem: Problem, inputs: tuple[Tensor, ...], impl: str) -> list[Tensor]:
    """The output and every gradient; each call has the same dropout masks."""
    torch.manual_seed(0)
    out = problem.run(*inputs, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, inputs, random_like(out))]
