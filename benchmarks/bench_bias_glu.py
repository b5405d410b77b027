"""GeGLU and SwiGLU of x + bias, forward and forward + backward, at encoders' widths."""

import torch
import torch.nn.functional as F

from benchmarks._harness import forward_and_backward, write
from fastenc.ops import bias_glu

SHAPES = {"ModernBERT-base 4,096 x 1,152": (4096, 1152), "BERT-base's 4,096 x 3,072": (4096, 3072)}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}


def bytes_moved(rows: int, width: int, element: int) -> int:
    """Forward: both halves of x read, y written."""
    return 3 * rows * width * element


def main() -> None:
    cases = {}
    for shape, (rows, width) in SHAPES.items():
        for activation, function in ACTIVATIONS.items():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(rows, 2 * width).to(dtype).requires_grad_()
                bias = torch.randn(2 * width).to(dtype).requires_grad_()

                def eager(x, bias):
                    gate, value = (x + bias).chunk(2, dim=-1)
                    return function(gate) * value

                cases |= forward_and_backward(
                    f"{shape} {activation} {str(dtype).removeprefix('torch.')}",
                    {
                        "fastenc": lambda: bias_glu(x, bias, activation=activation),
                        "eager": lambda: eager(x, bias),
                    },
                    (x, bias),
                    torch.randn(rows, width).to(dtype),
                    truth=eager,
                    tolerance=1e-4 if dtype == torch.float32 else 0.3,
                    bytes_moved=bytes_moved(rows, width, x.element_size()),
                )
    write("bias_glu", cases)


if __name__ == "__main__":
    main()
