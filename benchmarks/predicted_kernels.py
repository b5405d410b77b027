"""Writes docs/benchmarks-predicted.md: what the machine code of the GPU's kernels predicts. Nothing in it is measured.

    python -m benchmarks.predicted_kernels

Every op is called at the sizes of BERT-base on a driver that starts nothing (_fake_gpu.py), so the launches are those
of a GPU, with their grids. For each launch, from its cubin:

    executed = programs * warps * (instructions outside of loops + trips * instructions of the main loop)
    issue    = executed / (132 multiprocessors * 4 a cycle * 1.755 GHz)
    special  = executed special functions (exponentials, ...) * 8 cycles, at the same rate
    memory   = least bytes / (0.9 * rate of a copy)
    matrix   = FLOPs / rate of a large product
    L2       = bytes of atomic sums / 5 TB/s
    time     = largest + (sum of the others) / overlap + 2 us

The first three are multiplied by ceil(waves) / waves, a wave being the programs that all multiprocessors hold.
``overlap`` is how much runs beside a warp that waits: at best the warps of a scheduler, at worst the programs of a
multiprocessor, whose warps wait together. Both are given. The rates of copies and products are those of torch on the
two GPUs. What is taken for granted: 0.9, 2 us, 5 TB/s, that other loops (of masked tails) make no trip, and that a
branch which is not taken costs as much as one that is.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from fastenc.kernels import run

from benchmarks import _dry_run, _fake_gpu, gpu_quick
from benchmarks._harness import Work
from benchmarks.gpu_quick import problems
from fastenc._base.files import write_atomically
from tests.helpers.triton_binaries import usage_of

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks-predicted.md"
LENGTH, SEQUENCES, SHORT, LAYERS = 512, 16, 128, 12
SIZE = gpu_quick.REAL._replace(tokens=LENGTH * SEQUENCES, lengths=(SHORT, LENGTH))
MULTIPROCESSORS, SCHEDULERS, CLOCK = 132, 4, 1.755e9
REGISTERS, SHARED, WARPS = 65536, 228 * 1024, 64  # of a multiprocessor
SPECIAL_CYCLES, OF_COPY, L2_SUMS, LAUNCH = 8, 0.9, 5e12, 2e-6
OF_PRODUCT = 0.77  # what products of these sizes reach of a large one's rate


class Gpu(NamedTuple):
    """Rates that torch reaches: bytes a second of a copy, FLOPs a second of a product of 8,192 x 8,192 in bfloat16."""

    name: str
    copy: float
    product: float


GPUS = (Gpu("H100", 3.0e12, 798e12), Gpu("H200", 4.3e12, 788e12))
# FlashAttention 3 on an H100, head_dim 64, sequences of 512, no dropout (Shah et al. 2024, arXiv:2407.08608): FLOPs/s.
PUBLISHED = {"forward": 333e12, "backward": 272e12}
# Elements or scores of one trip through a kernel's main loop, or of a program without one, from its constants.
TILES = {
    "_attention_fwd_kernel": ("BLOCK_M", "BLOCK_N"),
    "_attention_bwd_kv_kernel": ("BLOCK_M", "BLOCK_N"),
    "_attention_short_fwd_kernel": ("ROWS", "BLOCK"),
    "_attention_short_bwd_kernel": ("ROWS", "BLOCK"),
    "_layer_norm_fwd_kernel": ("ROWS", "WIDTH"),
    "_layer_norm_bwd_kernel": ("ROWS", "WIDTH"),
    "_bias_gelu_fwd_kernel": ("ROWS", "BLOCK"),
    "_bias_gelu_bwd_kernel": ("ROWS", "BLOCK"),
}
INTRODUCTION = """# Predicted from the compiled code, not measured

**No kernel has run on a GPU yet.** `python -m benchmarks.predicted_kernels` writes this page from the machine code for
sm_90 (Triton {triton}); its first lines have the formula and what it takes for granted. Expect errors of a third. The
page goes when the first measured table of a GPU is in [the benchmarks](benchmarks.md).

bfloat16, {tokens:,} tokens, 12 heads of 64, width 768 (3,072 in GELU). Times are in µs, from the best to the worst
overlap of a kernel's own work; those of H100 and H200 differ by the bandwidth. Instructions are executed ones, for 32
elements (a warp's) or scores. Programs are those that a multiprocessor holds, times their warps. Beside are the
launches that the op needs besides its kernel, whose time is included. FlashAttention 3 is what its authors published
for an H100, head_dim 64, sequences of 512.
"""
HEAD = ("kernel", "instructions", "registers", "programs × warps", "beside", "H100", "H200")


class Kernel(NamedTuple):
    """A launch: its binary's usage and constants, and the number of its programs."""

    name: str
    usage: dict
    constants: dict[str, int]
    programs: int

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        registers = -(-self.usage["registers"] // 8) * 8 * 32 * self.usage["warps"]
        held = min(
            REGISTERS // registers,
            SHARED // (self.usage["shared"] + 1024),
            WARPS // self.usage["warps"],
        )
        return max(1, min(held, -(-self.programs // MULTIPROCESSORS)))

    def executed(self, elements: float, instruction: str = "") -> float:
        """Instructions of all warps, or those of one name. Programs without work, as of short attention, cost none."""
        count = lambda part: self.usage[f"{part} {instruction}".strip()]
        if self.name not in TILES:
            return self.programs * self.usage["warps"] * count("straight")
        trips = elements / math.prod(self.constants[name] for name in TILES[self.name])
        once = min(self.programs, trips) * count("straight")
        return self.usage["warps"] * (once + trips * count("loop"))


class Row(NamedTuple):
    """A direction of an op.

    Fields:
        launches: the kernel, and what is launched beside it.
        elements: elements or scores.
        least: bytes and FLOPs.
        sums: bytes that are added atomically.
        filled: bytes that torch sets to zero before.
    """

    title: str
    launches: list[Kernel]
    elements: float
    least: Work
    sums: float = 0.0
    filled: float = 0.0
    published: float | None = None

    @property
    def kernel(self) -> Kernel:
        return next(each for each in self.launches if each.name in TILES)

    def seconds(self, gpu: Gpu) -> tuple[float, float]:
        """(with the best overlap, with the worst)."""
        kernel = self.kernel
        beside = sum(
            LAUNCH + kernel_issue(each, 0.0) for each in self.launches if each is not kernel
        )
        if self.filled:
            beside += LAUNCH + self.filled / (OF_COPY * gpu.copy)
        wave = kernel.resident * MULTIPROCESSORS
        tail = math.ceil(kernel.programs / wave) * wave / kernel.programs
        tail = tail if kernel.programs > wave else 1.0
        special = kernel.executed(self.elements, "special functions") * SPECIAL_CYCLES
        parts = [
            tail * kernel_issue(kernel, self.elements),
            tail * special / (MULTIPROCESSORS * SCHEDULERS * CLOCK),
            tail * self.least.flops / gpu.product,
            self.least.bytes / (OF_COPY * gpu.copy),
            self.sums / L2_SUMS,
        ]
        others = sum(parts) - max(parts)
        warps = max(1.0, kernel.resident * kernel.usage["warps"] / SCHEDULERS)
        best, worst = (max(parts) + others / n for n in (warps, kernel.resident))
        return best + LAUNCH + beside, max(best, worst) + LAUNCH + beside

    def cells(self) -> list[str]:
        kernel = self.kernel
        executed = kernel.executed(self.elements) * 32 / self.elements
        return [
            self.title,
            f"{executed:.1f}",
            str(kernel.usage["registers"]),
            f"{kernel.resident} × {kernel.usage['warps']}",
            str(len(self.launches) - 1 + (self.filled > 0)),
            *(span(*self.seconds(gpu)) for gpu in GPUS),
        ]


def kernel_issue(kernel: Kernel, elements: float) -> float:
    executed = kernel.executed(elements)
    return executed / (MULTIPROCESSORS * SCHEDULERS * CLOCK)


def span(low: float, high: float, unit: float = 1e6, digits: int = 0) -> str:
    texts = [f"{value * unit:.{digits}f}" for value in (low, high)]
    return " to ".join(dict.fromkeys(texts))


@cache
def usage_of_function(function: int) -> tuple[dict, dict[str, int]]:
    """(usage, constants) of the binary that the driver has under this handle."""
    compiled = next(
        each
        for signature in run.signatures()
        for each in signature.compiled.values()
        if each.function == function
    )
    names = compiled.src.fn.arg_names
    return usage_of(compiled), {names[at]: value for (at,), value in compiled.src.constants.items()}


def launched(since: int) -> list[Kernel]:
    return [
        Kernel(each["kernel"], *usage_of_function(each["function"]), math.prod(each["grid"]))
        for each in _fake_gpu.launches(since)
    ]


def both_ways(name: str) -> tuple[list[Kernel], list[Kernel], problems.Problem]:
    """Launches of the second forward and of its backward: the first also makes what later ones find made."""
    problem = dict(problems.problems(SIZE))[name]()
    run_op = lambda: problem.run(*problem.inputs, impl="auto")
    run_op()
    before = len(_fake_gpu.launches())
    out = run_op()
    between = len(_fake_gpu.launches())
    forward = launched(before)[: between - before]
    torch.autograd.grad(out, problem.inputs, problems.random_like(out))
    return forward, launched(between), problem


def rows() -> Iterator[Row]:
    one = SIZE.tokens * SIZE.width
    for length in SIZE.lengths:
        for p in (0.0, 0.1):
            forward, backward, problem = both_ways(f"attention {length}, dropout {p}")
            title = f"attention {{}}, {length} tokens" + (f", dropout {p}" if p else "")
            scores = SIZE.tokens * length * SIZE.heads
            sums = sum(
                4.0 * one * length / each.constants["BLOCK_N"]
                for each in backward
                if each.name == "_attention_bwd_kv_kernel"
            )
            published = {
                way: None if p or length != LENGTH else rate for way, rate in PUBLISHED.items()
            }
            yield Row(
                title.format("forward"),
                forward,
                scores,
                problem.forward,
                published=published["forward"],
            )
            yield Row(
                title.format("backward"),
                backward,
                scores,
                problem.backward,
                sums,
                4.0 * one if sums else 0.0,
                published["backward"],
            )
    for name, elements in (("layer_norm, dropout 0.1", one), ("bias_gelu", 4 * one)):
        forward, backward, problem = both_ways(name)
        op, _, more = name.partition(",")
        for way, launches, least in (
            ("forward", forward, problem.forward),
            ("backward", backward, problem.backward),
        ):
            yield Row(f"{op} {way}" + ("," + more) * bool(more), launches, elements, least)


def step(by_title: dict[str, Row]) -> list[str]:
    """Forward and backward of BERT-base's layers, 16 sequences of 512."""
    names = ("attention {}, 512 tokens, dropout 0.1", "layer_norm {}, dropout 0.1", "bias_gelu {}")
    chosen = [
        (by_title[name.format(way)], times)
        for name, times in zip(names, (1, 2, 1), strict=True)
        for way in PUBLISHED
    ]
    flops = 3 * 2 * SIZE.tokens * 12 * SIZE.width**2
    lines = []
    for gpu in GPUS:
        products = LAYERS * flops / (OF_PRODUCT * gpu.product)
        best, worst = (
            products + LAYERS * sum(row.seconds(gpu)[which] * times for row, times in chosen)
            for which in (0, 1)
        )
        lines.append(
            f"- {gpu.name}: {span(best, worst, 1e3, 1)} ms, of which the matrix products take "
            f"{products * 1e3:.1f} ms; {span(SIZE.tokens / worst, SIZE.tokens / best, 1e-6, 2)} million tokens a "
            "second."
        )
    return lines


def loss() -> list[str]:
    """Masked cross entropy is CUDA C++, whose memory bound is all that is said of it."""
    problem = dict(problems.problems(SIZE))["masked_cross_entropy"]()
    cells = [f"{(problem.forward.bytes / (OF_COPY * gpu.copy) + LAUNCH) * 1e6:.0f}" for gpu in GPUS]
    title = f"masked_cross_entropy, {SIZE.tokens // 8:,} rows, loss and gradient (CUDA C++, bytes)"
    return [title, "–", "–", "–", "0", *cells]


def page() -> str:
    by_title = {row.title: row for row in rows()}
    lines = [f"| {' | '.join((*HEAD, 'FlashAttention 3'))} |", "|---" + "|---:" * len(HEAD) + "|"]
    for row in by_title.values():
        flops = row.least.flops
        peer = f"{flops / row.published * 1e6:.0f}" if row.published else "–"
        lines.append(f"| {' | '.join((*row.cells(), peer))} |")
    lines.append(f"| {' | '.join((*loss(), '–'))} |")
    heading = (
        f"## The layers of BERT-base, forward and backward, {SEQUENCES} sequences of {LENGTH}, dropout 0.1\n\n"
        "Without embeddings, head and optimizer, and as if the host kept ahead. Products are taken to reach "
        f"{OF_PRODUCT * 100:.0f} % of a large product's rate.\n"
    )
    introduction = INTRODUCTION.format(triton=triton.__version__, tokens=SIZE.tokens)
    return "\n".join([introduction, *lines, "", heading, *step(by_title)]) + "\n"


def main() -> None:
    _dry_run.as_on_a_gpu()
    text = page()
    write_atomically(PAGE, lambda to: to.write_text(text, encoding="utf-8"))
    print(text)


if __name__ == "__main__":
    main()
