"""Writes docs/predicted-kernels.md: what the machine code of the GPU's kernels predicts. Nothing in it was measured.

    python -m benchmarks.predicted_kernels

Reads the records of compiled kernels (tests/triton/binaries): today's by two versions of Triton, and that of the first
design, commit 7ff92ad, by the newer of them; all for sm_90. For T = 16,384 tokens of 12 heads of 64, in half precision:

    floor = max(bytes / 4.3 TB/s, FLOPs / 790 TFLOP/s), an H200's ceilings
    issue = elements / 32 * instructions an element / (132 multiprocessors * 4 a cycle * 1.755 GHz)
    predicted = max(floor / 0.9, issue / 0.6)

Where there is a loop its instructions stand for the kernel's: what comes before and behind it is left out, and so are
launches and passes beside it. Expect errors of a third; ratios of the two designs are safer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastenc._files import write_atomically

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "triton" / "binaries"
PAGE = ROOT / "docs" / "predicted-kernels.md"
TOKENS, WIDTH, HEADS = 16384, 768, 12
BANDWIDTH, MATRIX, ISSUE = 4.3e12, 790e12, 132 * 4 * 1.755e9
OF_FLOOR, OF_ISSUE = 0.9, 0.6  # what kernels reach of either
REGISTERS, SHARED, WARPS = 65536, 228 * 1024, 64  # of a multiprocessor


INTRODUCTION = """# What the kernels' machine code predicts

**Predicted, not measured.** The kernels were compiled ahead of time for sm_90 with Triton 3.9, and have not run on any
GPU. `python -m benchmarks.predicted_kernels` writes this page; its first lines say how. The records that it reads come
from `python -m tests.helpers.triton_record`.

Instructions are those of the loop that takes the time, or of the whole kernel where it has none, for each score or
element that a thread has. CTAs are programs that a multiprocessor holds at a time. Times are in µs, for 16,384 tokens
of width 768. The backward of k and v alone and that of q alone make the deterministic one. A gradient of 512 positions
is four sums of 128 rows, and its floor the time of its products. "Before" is the first design, commit 7ff92ad, which
sorted for those gradients.
"""
VERSIONS = """
## The same with Triton 3.6

The launch parameters were chosen with Triton 3.9.
"""
COLUMNS = ("instructions", "matrix instruction", "registers, CTAs", "predicted")


class Kernel(NamedTuple):
    """A row of the table.

    Fields:
        names: in the records, the first design's, or None where it had no such kernel, and today's.
        each: elements or scores a thread has in its loop, in either design.
        elements: of them in all.
        elements_moved: read and written, of 2 bytes.
        products: matrix products of (elements, 64).
    """

    title: str
    names: tuple[str | None, str]
    each: tuple[int, int]
    elements: int
    elements_moved: float
    products: int


def kernels() -> list[Kernel]:
    return [*attentions(), *norms(), *activations(), *index_sums()]


def attentions() -> Iterator[Kernel]:
    one = TOKENS * WIDTH
    general = "attention kernel={} head_dim=64 precision=half biased=False"
    forward, kv, q = map(general.format, ("forward", "backward_kv", "backward_q"))
    short = "attention_short max_seqlen=128 backward={} head_dim=64"
    for length, what, name, alone, each, moved, products in (
        (512, "forward", forward, "", (32, 64), 4, 2),
        (512, "backward", kv, "", (16, 32), 7, 5),
        (512, "backward of k and v alone", kv, " alone", (16, 32), 6, 4),
        (512, "backward of q alone", q, "", (32, 32), 5, 3),
        (128, "forward", short.format(False), "", (16, 64), 4, 2),
        (128, "backward", short.format(True), "", (16, 32), 7, 5),
    ):
        for dropout in (False, True):
            key = f"{name} dropout={dropout} dtype=float16"
            yield Kernel(
                f"attention {what}, {length} tokens" + ", dropout" * dropout,
                (key + alone, f"{key} warp_groups=True{alone}"),
                each,
                TOKENS * length * HEADS,
                moved * one,
                products,
            )


def norms() -> Iterator[Kernel]:
    one = TOKENS * WIDTH
    for op, backward, moved in (
        ("layer_norm", False, 4),
        ("layer_norm", True, 4),
        ("embedding_layer_norm", False, 2),
        ("embedding_layer_norm", True, 3),
    ):
        name = f"{op} width=768 {{}}backward={backward} dropout=True dtype=bfloat16"
        title = f"{op} {'backward' if backward else 'forward'}, dropout"
        names = (name.format(""), name.format("itemsize=2 "))
        yield Kernel(title, names, (6 if backward else 12, 24), one, moved * one, 0)


def activations() -> Iterator[Kernel]:
    """Of 3,072 columns."""
    wide = 4 * TOKENS * WIDTH
    for op, width, backward, each, elements, moved in (
        ("bias_gelu", 3072, False, 16, wide, 2),
        ("bias_gelu", 3072, True, 16, wide, 3),
        ("bias_glu", 1536, False, 8, wide // 2, 3),
        ("bias_glu", 1536, True, 8, wide // 2, 5),
    ):
        name = f"{op} width={width} backward={backward} dtype=bfloat16 erf"
        title = f"{op} {'backward' if backward else 'forward'}"
        yield Kernel(title, (name, name), (each, each), elements, moved * elements, 0)


def index_sums() -> Iterator[Kernel]:
    """Blocks of the table's rows, each of which reads all gradients, out of the cache but for the first."""
    one = TOKENS * WIDTH
    for rows, blocks, products in ((512, 4, 2), (2, 1, 1)):
        name = f"index sum {rows} bf16"
        title = f"gradient of {rows} {'positions' if rows > 2 else 'token types'}"
        yield Kernel(title, (None, name), (0, 32), blocks * one, one, products)


def read(name: str) -> dict[str, dict]:
    record = json.loads((RECORDS / f"{name}.json").read_text())
    return {
        key: dict(zip(record["fields"], row, strict=True)) for key, row in record["sm_90"].items()
    }


def programs(usage: dict) -> int:
    """That a multiprocessor holds at a time."""
    registers = -(-usage["registers"] // 8) * 8 * 32 * usage["warps"]
    return min(REGISTERS // registers, SHARED // (usage["shared"] + 1024), WARPS // usage["warps"])


def cells(kernel: Kernel, usage: dict, each: int, floor: float) -> list[str]:
    instructions = (usage["loop"] or usage["instructions"]) / each
    issue = kernel.elements / 32 * instructions / ISSUE
    predicted = max(floor / OF_FLOOR, issue / OF_ISSUE)
    grouped = usage["warp group matrix"]
    kinds = {"wgmma": grouped, "mma.sync": usage["matrix"] - grouped}
    return [
        f"{instructions:.1f}",
        ", ".join(kind for kind, count in kinds.items() if count) or "–",
        f"{usage['registers']}, {programs(usage)}",
        f"{predicted * 1e6:.0f}",
    ]


class Side(NamedTuple):
    """Columns of a table: a record, and whether the first design's names are those in it."""

    heading: str
    record: str
    first: bool = False


def table(*sides: Side) -> list[str]:
    """The records side by side."""
    records = [read(side.record) for side in sides]
    headings = [f"{column}, {side.heading}" for column in COLUMNS for side in sides]
    lines = ["| " + " | ".join(("kernel", "floor", *headings)) + " |"]
    lines.append("|---|" + "---:|" * (1 + len(headings)))
    for kernel in kernels():
        flops = 2 * 64 * kernel.elements * kernel.products
        floor = max(2 * kernel.elements_moved / BANDWIDTH, flops / MATRIX)
        found = []
        for side, record in zip(sides, records, strict=True):
            name, each = (values[not side.first] for values in (kernel.names, kernel.each))
            known = name is not None
            found.append(cells(kernel, record[name], each, floor) if known else [""] * len(COLUMNS))
        values = [cell for column in zip(*found, strict=True) for cell in column]
        lines.append("| " + " | ".join([kernel.title, f"{floor * 1e6:.0f}", *values]) + " |")
    return lines


def page() -> str:
    now = Side("now", "triton-3.9")
    designs = table(Side("before", "first-design", first=True), now)
    versions = table(now._replace(heading="3.9"), Side("3.6", "triton-3.6"))
    return "\n".join([INTRODUCTION, *designs, VERSIONS, *versions]) + "\n"


def main() -> None:
    write_atomically(PAGE, lambda to: to.write_text(page(), encoding="utf-8"))


if __name__ == "__main__":
    main()
