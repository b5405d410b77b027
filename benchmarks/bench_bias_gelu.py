"""GELU(x + bias), forward and forward + backward, at encoders' widths."""

import torch
import torch.nn.functional as F

from benchmarks._harness import compare, write
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
            dy = torch.randn(rows, width).to(dtype)
            ours = lambda: bias_gelu(x, bias)
            eager = lambda: F.gelu(x + bias)
            tolerance = 1e-5 if dtype == torch.float32 else 0.1

            def check(_, result):
                error = (result.double() - F.gelu(x.double() + bias.double())).abs().max().item()
                return f"error {error:.2g}" if not error < tolerance else None

            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            with torch.no_grad():
                rows_ = compare({"fastenc": ours, "eager": eager}, baseline="eager", check=check)
            moved = bytes_moved(rows, width, x.element_size())
            for row in rows_.values():
                if "median_ms" in row:
                    row["GB_per_s"] = moved / row["median_ms"] / 1e6
            cases[f"{name}, forward"] = rows_
            train = lambda f: lambda: torch.autograd.grad(f(), (x, bias), dy)
            cases[f"{name}, forward + backward"] = compare(
                {"fastenc": train(ours), "eager": train(eager)}, baseline="eager"
            )
    write("bias_gelu", cases)


if __name__ == "__main__":
    main()
