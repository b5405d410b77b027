"""LayerNorm(residual + x + bias), forward and forward + backward, at encoders' widths."""

import torch
import torch.nn.functional as F

from benchmarks._harness import compare, write
from fastenc.ops import layer_norm

SHAPES = {"MiniLM 4,096 x 384": (4096, 384), "BERT-base 4,096 x 768": (4096, 768)}


def bytes_moved(rows: int, width: int, element: int) -> int:
    """Forward: x and residual read, y written."""
    return 3 * rows * width * element


def main() -> None:
    cases = {}
    for shape, (rows, width) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            x, residual = (torch.randn(rows, width).to(dtype).requires_grad_() for _ in range(2))
            weight, bias, x_bias = (torch.randn(width).to(dtype).requires_grad_() for _ in range(3))
            dy = torch.randn(rows, width).to(dtype)
            inputs = (x, residual, weight, bias, x_bias)

            def ours():
                return layer_norm(x, weight, bias, residual=residual, x_bias=x_bias)

            def eager():
                return F.layer_norm(residual + (x + x_bias), (width,), weight, bias)

            tolerance = 1e-4 if dtype == torch.float32 else 0.1

            def check(_, result):
                wide = [v.detach().double() for v in inputs]
                truth = F.layer_norm(wide[1] + wide[0] + wide[4], (width,), wide[2], wide[3])
                error = (
                    (result.double() - truth).abs().max().item() if torch.is_tensor(result) else 0
                )
                return f"error {error:.2g}" if not error < tolerance else None

            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            with torch.no_grad():
                rows_ = compare({"fastenc": ours, "eager": eager}, baseline="eager", check=check)
            moved = bytes_moved(rows, width, x.element_size())
            for row in rows_.values():
                if "median_ms" in row:
                    row["GB_per_s"] = moved / row["median_ms"] / 1e6
            cases[f"{name}, forward"] = rows_
            train = lambda f: lambda: torch.autograd.grad(f(), inputs, dy)
            cases[f"{name}, forward + backward"] = compare(
                {"fastenc": train(ours), "eager": train(eager)}, baseline="eager"
            )
    write("layer_norm", cases)


if __name__ == "__main__":
    main()
