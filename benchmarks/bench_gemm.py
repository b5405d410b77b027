"""Products of an encoder's layers on a CPU: y = x W^T + b in float32 and bfloat16, and in float32 both gradients.

"fastenc" is our kernel on any processor; the layers use it where it is faster (`fastenc info`). "fastenc, packed" reads
a weight that was packed before, as a frozen model does. "oneDNN" is the op that PyTorch has for its own compiler, with
unpacked weights; in bfloat16 PyTorch takes oneDNN by itself.
"""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import NOT_INSTALLED, compare
from benchmarks._device import ON_GPU
from benchmarks._results import run_groups
from fastenc.ops import library
from fastenc.ops.gemm import gemm_packed, multiplies_pairs, pack_weight
from fastenc.profiling import Work

TABLES = {"gemm": "Products, and in float32 their gradients"}
SIZES = {"MiniLM, q k v": (384, 1152), "MiniLM, down": (1536, 384), "BERT-base, up": (768, 3072)}
ROWS = (20, 96, 400, 4096)


def by_onednn(a, b, bias):
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


def measure_bfloat16(name: str, rows: int, inner: int, columns: int) -> dict[str, dict]:
    draw = lambda *shape: torch.randn(shape).bfloat16()
    x, weight, bias = draw(rows, inner), draw(columns, inner), draw(columns)
    truth = x.double() @ weight.double().t() + bias.double()

    def check(_, result):
        error = float((result.double() - truth).norm() / truth.norm())
        return None if error < 3e-3 else f"off by {error:.1g}"

    calls = {"PyTorch": partial(F.linear, x, weight, bias)}
    if library.HAS_CPP:
        packed, wide = pack_weight(weight), bias.float()
        calls["fastenc"] = partial(torch.ops.fastenc.gemm, x, weight.t(), bias)
        calls["fastenc, packed"] = partial(gemm_packed, x, packed, wide, columns)
    numbers = x.numel() + weight.numel() + truth.numel()
    work = Work(2 * numbers, 2 * rows * inner * columns)
    case = f"{name}: {rows:,} x {inner:,} x {columns:,}, y in bfloat16"
    return {case: compare(calls, baseline="PyTorch", check=check, work=work)}


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
    groups = {}
    for name, rows, *size in sizes:
        groups[f"{name}, {rows}"] = partial(measure, name, rows, *size)
        if multiplies_pairs():
            groups[f"{name}, {rows}, bf16"] = partial(measure_bfloat16, name, rows, *size)
    with torch.inference_mode():
        run_groups("gemm", groups)


if __name__ == "__main__":
    main()
