"""GELU(x + bias), forward and backward, at encoders' widths."""

import torch
import torch.nn.functional as F

from benchmarks._harness import (
    DEVICE,
    ON_GPU,
    Work,
    compare_functions,
    compiled,
    dtype_name,
    write,
)
from fastenc.ops import bias_gelu

ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"MiniLM": 1536, "BERT-base": 3072, **({"BERT-large": 4096} if ON_GPU else {})}


def eager(x, bias):
    return F.gelu(x + bias)


def main() -> None:
    cases = {}
    for model, width in WIDTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
            one = ROWS * width * dtype.itemsize
            cases |= compare_functions(
                f"{model} {ROWS:,} x {width:,} {dtype_name(dtype)}",
                {"fastenc": bias_gelu, "eager": eager, "torch.compile": compiled(eager)},
                (new(ROWS, width).requires_grad_(), new(width).requires_grad_()),
                new(ROWS, width),
                forward=Work(2 * one, dtype=dtype),  # x read, y written
                backward=Work(3 * one, dtype=dtype),  # dy and x read, dx written
            )
    write("bias_gelu", cases)


if __name__ == "__main__":
    main()
