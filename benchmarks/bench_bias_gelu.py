"""GELU(x + bias), forward and forward + backward, at encoders' widths."""

import torch
import torch.nn.functional as F

from benchmarks._harness import forward_and_backward, write
from fastenc.ops import bias_gelu

SHAPES = {"MiniLM 4,096 x 1,536": (4096, 1536), "BERT-base 4,096 x 3,072": (4096, 3072)}


def bytes_moved(rows: int, width: int, element: int) -> int:
    """Forward: x read, y written."""
    return 2 * rows * width * element


def main() -> None:
    cases = {}
    for shape, (rows, width) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, width).to(dtype).requires_grad_()
            bias = torch.randn(width).to(dtype).requires_grad_()
            cases |= forward_and_backward(
                f"{shape} {str(dtype).removeprefix('torch.')}",
                {"fastenc": lambda: bias_gelu(x, bias), "eager": lambda: F.gelu(x + bias)},
                (x, bias),
                torch.randn(rows, width).to(dtype),
                truth=lambda x, bias: F.gelu(x + bias),
                tolerance=1e-5 if dtype == torch.float32 else 0.1,
                bytes_moved=bytes_moved(rows, width, x.element_size()),
            )
    write("bias_gelu", cases)


if __name__ == "__main__":
    main()
