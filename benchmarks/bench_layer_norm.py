"""LayerNorm(residual + dropout(x + bias)), forward and backward, at encoders' widths."""

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
    peer,
    write,
)
from fastenc.ops import layer_norm

ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"MiniLM": 384, "BERT-base": 768, **({"BERT-large": 1024} if ON_GPU else {})}
DROPOUTS = (0.0, 0.1) if ON_GPU else (0.0,)
EPS = 1e-5


def eager(x, residual, weight, bias, x_bias, p=0.0):
    h = residual + F.dropout(x + x_bias, p)
    return F.layer_norm(h, x.shape[-1:], weight, bias, EPS)


def main() -> None:
    cases = {}
    for model, width in WIDTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
            shapes = ((ROWS, width), (ROWS, width), (width,), (width,), (width,))
            inputs = tuple(new(*shape).requires_grad_() for shape in shapes)
            dy = new(ROWS, width)
            one = ROWS * width * dtype.itemsize
            for p in DROPOUTS:

                def liger(module):
                    norm = module.liger_layer_norm
                    return lambda x, residual, weight, bias, x_bias: norm(
                        residual + F.dropout(x + x_bias, p), weight, bias, EPS
                    )

                def ours(x, residual, weight, bias, x_bias):
                    fused = {"residual": residual, "x_bias": x_bias, "dropout_p": p}
                    return layer_norm(x, weight, bias, eps=EPS, **fused)

                plain = partial(eager, p=p)
                functions = {"fastenc": ours, "eager": plain, "torch.compile": compiled(plain)}
                if ON_GPU:
                    module = "liger_kernel.transformers.functional"
                    functions["liger-kernel"] = peer(module, liger)
                cases |= compare_functions(
                    f"{model} {ROWS:,} x {width:,} {dtype_name(dtype)}"
                    + (f", dropout {p}" if p else ""),
                    functions,
                    inputs,
                    dy,
                    forward=Work(3 * one, dtype=dtype),  # x and residual read, y written
                    # dy and h read, dh written; with dropout also dx, which is another one then
                    backward=Work((4 if p else 3) * one, dtype=dtype),
                    checked=not p,
                )
    write("layer_norm", cases)


if __name__ == "__main__":
    main()
