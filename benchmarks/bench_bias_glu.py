"""GeGLU and SwiGLU of x + bias, forward and backward, at encoders' widths."""

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
from fastenc.ops import bias_glu

ROWS = 16384 if ON_GPU else 4096
WIDTHS = {"ModernBERT-base": 1152, "BERT-base's": 3072}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}


def main() -> None:
    cases = {}
    for model, width in WIDTHS.items():
        for activation, function in ACTIVATIONS.items():
            for dtype in (torch.float32, torch.bfloat16):

                def eager(x, bias):
                    gate, value = (x + bias).chunk(2, dim=-1)
                    return function(gate) * value

                def liger(module):
                    # Its GeGLU has the tanh form only, another function.
                    swiglu = module.liger_swiglu
                    return lambda x, bias: swiglu(*(x + bias).chunk(2, dim=-1))

                functions = {
                    "fastenc": lambda x, bias: bias_glu(x, bias, activation=activation),
                    "eager": eager,
                    "torch.compile": compiled(eager),
                }
                if ON_GPU and activation == "silu":
                    functions["liger-kernel"] = peer("liger_kernel.transformers.functional", liger)
                new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
                one = ROWS * width * dtype.itemsize
                cases |= compare_functions(
                    f"{model} {ROWS:,} x {width:,} {activation} {dtype_name(dtype)}",
                    functions,
                    (new(ROWS, 2 * width).requires_grad_(), new(2 * width).requires_grad_()),
                    new(ROWS, width),
                    forward=Work(3 * one, dtype=dtype),  # both halves of x read, y written
                    backward=Work(5 * one, dtype=dtype),  # dy and x read, dx written
                )
    write("bias_glu", cases)


if __name__ == "__main__":
    main()
