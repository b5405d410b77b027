"""Float32 products of an encoder's layers on a CPU: y = x W^T + b, and both of its gradients.

"fastenc" is our kernel on any processor; the layers use it where it is faster (`fastenc info`). "fastenc, packed" reads
a weight that was packed before, as a frozen model does. "oneDNN" is the op that PyTorch has for its own compiler, with
unpacked weights.
"""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._harness import NOT_INSTALLED, ON_GPU, Work, compare, run_groups
from fastenc.ops import library
from fastenc.ops.gemm import gemm_packed, pack_weight

TABLES = {"gemm": "Float32 products and their gradients"}
SIZES = {"MiniLM, q k v": (384, 1152), "MiniLM, down": (1536, 384), "BERT-base, up": (768, 3072)}
ROWS = (20, 96, 400, 4096)


def by_onednn(a, b, bias):
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


def measure(name: str, rows: int, inner: int, columns: int) -> dict[str, dict]:
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    bias, dy = torch.randn(columns), torch.randn(rows, columns)
    cases = {"y": (x, weight.t(), bias), "dx": (dy, weight, None), "dW": (dy.t(), x, None)}
    torchs = lambda a, b, bias: F.linear(a, b.t(), bias)
    ours = torch.ops.fastenc.gemm
    results = {}
    for case, given in cases.items():
        a, b, added = given
        truth = a.double() @ b.double() + (0 if added is None else added.double())

        def check(_, result, truth=truth):
            error = float((result.double() - truth).norm() / truth.norm())
            return None if error < 1e-6 else f"off by {error:.1g}"

        calls = {
            "PyTorch": partial(torchs, *given),
            "oneDNN": partial(by_onednn, *given),
            "fastenc": partial(ours, *given) if library.HAS_CPP else NOT_INSTALLED,
        }
        if case == "y":
            calls["fastenc, packed"] = (
                partial(gemm_packed, x, pack_weight(weight), bias, columns)
                if library.HAS_CPP
                else NOT_INSTALLED
            )
        numbers = a.numel() + b.numel() + truth.numel()
        work = Work(4 * numbers, 2 * rows * inner * columns)
        results[f"{name}: {rows:,} x {inner:,} x {columns:,}, {case}"] = compare(
            calls, baseline="PyTorch", check=check, work=work
        )
    return results


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: a GPU's products are PyTorch's")
        return
    sizes = ((name, rows, *size) for name, size in SIZES.items() for rows in ROWS)
    with torch.inference_mode():
        run_groups("gemm", {f"{n}, {r}": partial(measure, n, r, *size) for n, r, *size in sizes})


if __name__ == "__main__":
    main()
