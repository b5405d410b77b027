"""LayerNorm(residual + dropout(x + bias)) and RMSNorm(x), forward and backward, at encoders' widths."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compiled, peer
from benchmarks._compare_ops import compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.ops import layer_norm, rms_norm
from fastenc.profiling import Work

TABLES = {"layer_norm": "LayerNorm(residual + x + bias) and RMSNorm(x)"}
SMALLEST = (8, torch.float32)  # the shape that the tests measure
ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"MiniLM": 384, "BERT-base": 768, **({"BERT-large": 1024} if ON_GPU else {})}
DROPOUTS = (0.0, 0.1) if ON_GPU else (0.0,)
EPS = 1e-5
LIGER = "liger_kernel.transformers.functional"


def eager(x, residual, weight, bias, x_bias, p=0.0):
    h = residual + F.dropout(x + x_bias, p)
    return F.layer_norm(h, x.shape[-1:], weight, bias, EPS)


def layer_norm_cases(name: str, width: int, dtype: torch.dtype) -> dict[str, dict]:
    new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
    shapes = ((ROWS, width), (ROWS, width), (width,), (width,), (width,))
    inputs = tuple(new(*shape).requires_grad_() for shape in shapes)
    dy = new(ROWS, width)
    one = ROWS * width * dtype.itemsize
    cases = {}
    for p in DROPOUTS:

        def liger(module, p=p):
            norm = module.liger_layer_norm
            return lambda x, residual, weight, bias, x_bias: norm(
                residual + F.dropout(x + x_bias, p), weight, bias, EPS
            )

        def ours(x, residual, weight, bias, x_bias, p=p):
            fused = {"residual": residual, "x_bias": x_bias, "dropout_p": p}
            return layer_norm(x, weight, bias, eps=EPS, **fused)

        plain = partial(eager, p=p)
        functions = {"fastenc": ours, "eager": plain, "torch.compile": compiled(plain)}
        if ON_GPU:
            functions["liger-kernel"] = peer(LIGER, liger)
        cases |= compare_functions(
            name + (f", dropout {p}" if p else ""),
            functions,
            inputs,
            dy,
            forward=Work(3 * one, dtype=dtype),  # x and residual read, y written
            # dy and h read, dh written; with dropout also dx, which then differs from dh
            backward=Work((4 if p else 3) * one, dtype=dtype),
            checked=not p,
        )
    return cases


def rms_norm_cases(name: str, width: int, dtype: torch.dtype) -> dict[str, dict]:
    """RMSNorm of x alone, as encoders have it before a sublayer; the residual goes past it unchanged."""
    x, dy = (torch.randn(ROWS, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    one = ROWS * width * dtype.itemsize

    def plain(x, weight):  # what torch.nn.RMSNorm calls
        return F.rms_norm(x, weight.shape, weight, EPS)

    def liger(module):  # not in place: that would overwrite dy
        return lambda x, weight: module.liger_rms_norm(x, weight, EPS, in_place=False)

    functions = {
        "fastenc": lambda x, weight: rms_norm(x, weight, eps=EPS),
        "eager": plain,
        "torch.compile": compiled(plain),
    }
    if ON_GPU:
        functions["liger-kernel"] = peer(LIGER, liger)
    return compare_functions(
        name,
        functions,
        (x.requires_grad_(), weight.requires_grad_()),
        dy,
        forward=Work(2 * one, dtype=dtype),
        backward=Work(3 * one, dtype=dtype),  # dy and x read, dx written
    )


def pre_norm_cases(name: str, width: int, dtype: torch.dtype) -> dict[str, dict]:
    """The norms of two pre-norm sublayers with nothing between them; the residual sum goes past the first norm."""
    x, residual, dy = (torch.randn(ROWS, width, device=DEVICE).to(dtype) for _ in range(3))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    one = ROWS * width * dtype.itemsize

    def plain(x, residual, weight):
        h = residual + x
        return F.layer_norm(
            h + F.layer_norm(h, weight.shape, weight, None, EPS), weight.shape, weight, None, EPS
        )

    def ours(x, residual, weight):
        y, h = layer_norm(x, weight, residual=residual, eps=EPS, return_residual_sum=True)
        return layer_norm(y, weight, residual=h, eps=EPS)

    return compare_functions(
        name,
        {"fastenc": ours, "eager": plain, "torch.compile": compiled(plain)},
        tuple(value.requires_grad_() for value in (x, residual, weight)),
        dy,
        forward=Work(3 * one, dtype=dtype),  # x and residual read, the last norm written
        backward=Work(3 * one, dtype=dtype),  # dy and one residual sum read, dx written
    )


def main() -> None:
    groups = {}
    kinds = (("", layer_norm_cases), ("RMSNorm, ", rms_norm_cases), ("pre-norm, ", pre_norm_cases))
    for prefix, make in kinds:
        for model, width in WIDTHS.items():
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{prefix}{model} {ROWS:,} x {width:,} {dtype_name(dtype)}"
                groups[name] = partial(make, name, width, dtype)
    run_groups("layer_norm", groups)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    for width in (768, 384, 1024):
        for p in (0.1, 0.0):
            yield partial(norm_problem, TOKENS, width, dtype, p)


def norm_problem(rows: int, width: int, dtype: torch.dtype, p: float) -> Problem:
    def run(x, residual, weight, bias, x_bias, impl):
        return layer_norm(x, weight, bias, residual=residual, x_bias=x_bias, dropout_p=p, impl=impl)

    matrix, vector = (rows, width), (width,)
    inputs = random_inputs(dtype, matrix, matrix, vector, vector, vector)
    return Problem("layer_norm", run, inputs)


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    one = size.tokens * size.width
    for p in (0.0, 0.1):
        least = problems.work(4 * one), problems.work((4 if p else 3) * one)
        make = partial(problems.problem, "layer_norm", size.of(size.short()), *least, dropout_p=p)
        yield f"layer_norm, dropout {p}", make


if __name__ == "__main__":
    main()
