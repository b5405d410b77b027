"""fastenc info."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import torch

import fastenc
from fastenc import ops
from fastenc._base.options import option
from fastenc.cli.options import Command
from fastenc.models import Encoder
from fastenc.ops import library
from fastenc.ops.dispatch import DECLARED, choose
from fastenc.ops.gemm import cpp_product_is_faster
from fastenc.testing import NumericsRow, numerics_report, ops_without_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARIES = (
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "scikit-learn",
    "seqeval",
    "matplotlib",
)


@dataclass(frozen=True, kw_only=True)
class Info(Command):
    """Show what is installed and which implementation each op uses."""

    numerics: bool = option(
        False,
        "Also measure each op's error against float64 on this device. The exit code is 1 if an error is above its "
        "budget.",
    )

    model: Path | None = option(
        None,
        "Folder of a model: show instead how each of its layers is computed, and why not in a faster way.",
    )

    def run(self) -> None:
        if self.model is not None:
            if self.numerics:
                raise ValueError("--numerics measures ops, not a model: leave out --model")
            encoder = Encoder.from_pretrained(self.model)
            for mode, rows in ways_of_layers(encoder).items():
                print(_table(f"Layers in {mode}, 512 tokens", rows.items()))
            print(_table("Layers with --dtype int8", layers_in_8_bits(encoder).items()))
            return
        for title, rows in (
            ("Here", here()),
            ("Extension", extension()),
            ("Libraries", libraries()),
        ):
            print(_table(title, rows.items()))
        print(_table("Implementation that impl='auto' takes", implementations().items()))
        if not self.numerics:
            return
        print("measuring the error of every op ...", file=sys.stderr, flush=True)
        report = numerics_report()
        print(numerics_table(report))
        if missing := ops_without_case():
            print(f"Not measured, for lack of a case: {', '.join(missing)}")
        if not all(row.holds for row in report):
            raise SystemExit(1)


def ways_of_layers(encoder: Encoder) -> dict[str, dict[str, str]]:
    """{mode: {layers: how they are computed, and why not in each faster way}}."""
    with torch.no_grad():
        inference = encoder.eval().layer_ways()
    training = encoder.train().layer_ways()
    return {
        mode: _by_layers([_way(reasons) for reasons in layers])
        for mode, layers in (("inference", inference), ("training", training))
    }


def layers_in_8_bits(encoder: Encoder) -> dict[str, str]:
    """{layers: whether their products can be in 8 bits, or why not}."""
    reasons = encoder.int8_reasons()
    of_layers = (reasons[index] for index in encoder.stack.module_of_layer)
    return _by_layers(["in 8 bits" if each is None else f"not: {each}" for each in of_layers])


def _way(reasons: Mapping[str, str | None]) -> str:
    """How a layer is computed, and why not in each way before."""
    taken = next(way for way, reason in reasons.items() if reason is None)
    skipped = [f"not {way}: {reason}" for way, reason in reasons.items() if reason is not None]
    # The ways after the one that is taken are not checked.
    return "; ".join([taken, *skipped[: list(reasons).index(taken)]])


def _by_layers(lines: Sequence[str]) -> dict[str, str]:
    """{layers: their line}: neighbours with the same line in one row."""
    rows, first = {}, 0
    for line, group in groupby(lines):
        count = len(list(group))
        numbers = f"{first}" if count == 1 else f"{first} to {first + count - 1}"
        rows[numbers] = line
        first += count
    return rows


def numerics_table(rows: Sequence[NumericsRow]) -> str:
    """A table with a line for each case and dtype; of several gradients it shows the one nearest to its budget."""
    lines = [("op", "dtype", "takes", "forward", "gradient", "budget")]
    errors = lambda row: f"{row.error:.1e} / {row.plain_error:.1e}"
    key = lambda row: (row.op, row.detail, row.dtype, row.implementation)
    for (op, detail, dtype, implementation), group in groupby(rows, key):
        forward, *gradients = group
        worst = max(gradients, key=lambda row: row.error / row.allowed, default=None)
        exceeded = [row.quantity for row in (forward, *gradients) if not row.holds]
        lines.append(
            (
                f"{op} {detail}".strip(),
                str(dtype).removeprefix("torch."),
                implementation,
                errors(forward),
                f"{errors(worst)} ({worst.quantity})" if worst else "none",
                f"exceeded: {', '.join(exceeded)}" if exceeded else "kept",
            )
        )
    return _table(
        "Largest error against float64, relative to the largest value: fastenc / PyTorch in the same dtype",
        lines,
    )


def here() -> dict[str, str]:
    """Versions and hardware of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "fastenc": fastenc.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores, threads": f"{os.cpu_count()}, {torch.get_num_threads()}",
        "GPUs": ", ".join(gpus) or "none",
        "float32 products on the CPU": "fastenc" if cpp_product_is_faster() else "PyTorch",
        "bfloat16 matrix units": _bfloat16(),
        "int8 products": _int8(),
    }


def extension() -> dict[str, str]:
    """How the C++ extension was compiled."""
    if not library.HAS_CPP:
        return {"compiled": "no: every op takes the PyTorch reference"}
    built = library._C.build_info()
    return {
        "compiled": f"by {built['compiler']}, torch stable ABI {built['torch_stable_abi']}",
        "instruction sets here": built["usable_instruction_sets"],
        "in use": built["instruction_set"],
        "CUDA": str(built["cuda"] or "not compiled: on a GPU PyTorch computes the loss"),
    }


def libraries() -> dict[str, str]:
    """Versions of optional libraries."""
    return {name: _version(name) for name in LIBRARIES}


def implementations() -> dict[str, str]:
    """{op: the implementation that impl="auto" uses for each device and dtype}."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = {}
    for op in ops.__all__:
        taken = []
        for device in devices:
            for dtype in DECLARED[op].dtypes or DTYPES:
                x = torch.empty(1, dtype=dtype, device=device)
                taken.append(
                    f"{device} {str(dtype).removeprefix('torch.')}: {choose(op, 'auto', x)}"
                )
        rows[op] = "   ".join(taken)
    return rows


def _bfloat16() -> str:
    if not torch.backends.mkldnn.is_available():
        return "unknown"
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        slow = not library.HAS_CPP or library._C.build_info()["intel_processor"]
        speed = "as fast as float32 or slower: prefer" if slow else "twice as fast as"
        return f"AVX-512 BF16 (products about {speed} float32)"
    return "none: prefer float32"


def _int8() -> str:
    if not library.HAS_CPP:
        return "none: the extension is not compiled"
    return (
        library._C.build_info()["int8_products"]
        or "none: --dtype int8 needs AVX2, and VNNI if there is AVX-512"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Columns of text under a title. It takes no library, so that a bare installation can be looked at."""
    lines = [*rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n  ".join((title, *padded)) + "\n"
