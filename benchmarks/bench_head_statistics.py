"""Statistics of attention heads, compared with the same statistics of stored probabilities."""

import torch

from benchmarks._compare import compare, compiled
from benchmarks._compare_ops import TOLERANCES
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import run_shapes
from fastenc.ops import head_statistics
from fastenc.profiling import Work

TABLES = {"head_statistics": "Statistics of attention heads"}
SMALLEST = ([3, 1, 5], 2, 16, 1, torch.float32)  # the shape that the tests measure
MIXED = [10 + 8 * i for i in range(32)]
# Lengths of a batch, heads, head_dim, window on each side: MiniLM's, BERT-base's, ModernBERT-base's.
SHAPES = {
    "32 sequences of 10 to 258, 12 heads of 32": (MIXED, 12, 32, -1),
    "32 sequences of 10 to 258, 12 heads of 64": (MIXED, 12, 64, -1),
    **(
        {"8 sequences of 2048, 12 heads of 64, window 64": ([2048] * 8, 12, 64, 64)}
        if ON_GPU
        else {}
    ),
}


def measure(
    name: str, lengths: list[int], heads: int, dim: int, window: int, dtype: torch.dtype
) -> dict[str, dict]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    longest, total = max(lengths), sum(lengths)
    q, k = (torch.randn(total, heads, dim, device=DEVICE).to(dtype) for _ in range(2))
    inside = torch.arange(longest, device=DEVICE) < cu_seqlens.diff()[:, None]
    index = torch.arange(longest, device=DEVICE)
    away = index - index[:, None]
    visible = inside[:, None, None, :]
    if window >= 0:
        visible = visible & (away.abs() <= window)
    last = (cu_seqlens.diff().long() - 1)[:, None, None, None].expand(-1, heads, longest, 1)

    def padded(x):
        rows = x.new_zeros(len(lengths), longest, heads, dim)
        rows[inside] = x
        return rows.transpose(1, 2)

    def plain(q, k):
        """(entropy, distance, p at first, last, own, previous and next key) from all probabilities."""
        scores = (padded(q) @ padded(k).transpose(2, 3)).float() * dim**-0.5
        p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        around = torch.nn.functional.pad(p, (1, 1))
        at = lambda offset: around.gather(
            -1, (index + 1 + offset)[:, None].expand(*p.shape[:3], 1)
        )[..., 0]
        columns = (
            torch.special.entr(p).sum(-1),
            (p * away.abs()).sum(-1),
            p[..., 0],
            p.gather(-1, last)[..., 0],
            at(0),
            at(-1),
            at(1),
        )
        return torch.stack(columns, -1).transpose(1, 2)[inside], p.argmax(-1)

    def ours():
        statistics = head_statistics(q, k, cu_seqlens, longest, window_size=(window, window))
        return torch.stack(statistics[:7], -1), statistics.strongest

    exact, _ = plain(q.double(), k.double())

    def check(_, result):
        error = ((result[0] - exact).norm() / exact.norm()).item()
        return None if error < TOLERANCES[dtype] else f"off by {error:.1e}"

    seen = [n * min(n, 2 * window + 1) if window >= 0 else n * n for n in lengths]
    fused = compiled(plain)
    rows = compare(
        {"fastenc": ours, "eager": lambda: plain(q, k), "torch.compile": lambda: fused(q, k)},
        baseline="eager",
        check=check,
        # q and k read, 36 bytes written for each query and head.
        work=Work(2 * q.nbytes + 36 * total * heads, 2 * sum(seen) * heads * dim, dtype),
    )
    return {name: rows}


def main() -> None:
    run_shapes("head_statistics", measure, SHAPES)


if __name__ == "__main__":
    main()
