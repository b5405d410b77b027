"""Writes docs/predicted-kernels.md: what the machine code of the GPU's kernels predicts. Nothing in it was measured.

    python -m benchmarks.predicted_kernels

Reads the records of compiled kernels (tests/triton/binaries): today's, and that of the first design, commit 7ff92ad,
compiled with the same Triton for sm_90. For T = 16,384 tokens of 12 heads of 64, in half precision:

    floor = max(bytes / 4.3 TB/s, FLOPs / 790 TFLOP/s), an H200's ceilings
    issue = elements / 32 * instructions an element / (132 multiprocessors * 4 a cycle * 1.755 GHz)
    predicted = max(floor / 0.9, issue / 0.6)

The loop's instructions stand for the kernel's: what comes before and behind it is left out, and so are launches and
passes beside it. Expect errors of a third; ratios of the two designs are safer.
"""

import json
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

Instructions are those of the loop that takes the time, for each score or element that a thread has in it. CTAs are
programs that a multiprocessor holds at a time. Times are in µs, for 16,384 tokens of width 768. "Before" is the first
design, commit 7ff92ad.
"""
COLUMNS = ("kernel", "floor", "instructions before", "now", "matrix instruction before", "now")
COLUMNS += ("registers, CTAs before", "now", "predicted before", "now")


class Kernel(NamedTuple):
    """A row of the table.

    Fields:
        names: in the records, the first design's and today's.
        each: elements or scores a thread has in its loop, in either design.
        elements: of them in all.
        elements_moved: read and written, of 2 bytes.
        products: matrix products of (elements, 64).
    """

    title: str
    names: tuple[str, str]
    each: tuple[int, int]
    elements: int
    elements_moved: float
    products: int


def kernels() -> list[Kernel]:
    one = TOKENS * WIDTH
    rows = []
    half = "head_dim=64 precision=half biased=False"
    for length, op, forward, backward in (
        (512, f"attention kernel={{}} {half}", "forward", "backward_kv"),
        (128, "attention_short max_seqlen=128 backward={} head_dim=64", "False", "True"),
    ):
        for direction, moved, products in ((forward, 4, 2), (backward, 7, 5)):
            for dropout in (False, True):
                name = f"{op.format(direction)} dropout={dropout} dtype=float16"
                back = direction == backward
                title = f"attention {'backward' if back else 'forward'}, {length} tokens"
                rows.append(
                    Kernel(
                        title + ", dropout" * dropout,
                        (name, f"{name} warp_groups=True"),
                        loop_elements(length, back),
                        TOKENS * length * HEADS,
                        moved * one,
                        products,
                    )
                )
    for op, moved in (("layer_norm", 4), ("embedding_layer_norm", 3)):
        name = f"{op} width=768 {{}}backward=True dropout=True dtype=bfloat16"
        names = (name.format(""), name.format("itemsize=2 "))
        rows.append(Kernel(f"{op} backward, dropout", names, (6, 24), one, moved * one, 0))
    return rows


def loop_elements(length: int, back: bool) -> tuple[int, int]:
    """Scores that a thread has in the loop, in the first design's tiles and in today's."""
    if back:
        return 16, 32
    return 32 if length == 512 else 16, 64


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
    instructions = usage["loop"] / each
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


def page() -> str:
    before, now = read("first-design"), read("triton-3.9")
    lines = [INTRODUCTION, "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for kernel in kernels():
        flops = 2 * 64 * kernel.elements * kernel.products
        floor = max(2 * kernel.elements_moved / BANDWIDTH, flops / MATRIX)
        sides = [
            cells(kernel, record[name], each, floor)
            for record, name, each in zip((before, now), kernel.names, kernel.each, strict=True)
        ]
        pairs = [cell for pair in zip(*sides, strict=True) for cell in pair]
        lines.append("| " + " | ".join([kernel.title, f"{floor * 1e6:.0f}", *pairs]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    write_atomically(PAGE, lambda to: to.write_text(page(), encoding="utf-8"))


if __name__ == "__main__":
    main()
