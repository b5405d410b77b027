"""Head statistics from probabilities computed with numpy, one row at a time."""

import numpy as np
import torch

from fastenc.ops import head_statistics
from fastenc.reference.head_statistics import head_statistics as reference
from fastenc.testing import assert_within_budget

# Windows narrower and wider than a tile, one-sided windows, and tables shorter and longer than the longest distance.
SEEN = [((2, 3), None), ((0, 0), None), ((-1, 40), 5), ((70, -1), None), ((-1, -1), 200)]
NAMES = ("entropy", "distance", "first", "last", "itself", "previous", "next", "target")
LENGTHS = [[1], [2, 1, 3], [5, 17, 1, 64], [0, 130, 0, 33]]


def offsets(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def inputs(lengths, heads, head_dim, dtype, device="cpu"):
    """(q, k, targets): views of one packed qkv. Scores of a few units make probabilities that differ."""
    total = sum(lengths)
    qkv = 1.5 * torch.randn(total, 3, heads, head_dim)
    targets = torch.cat(
        [torch.randint(-1, max(n, 1), (n,), dtype=torch.int32) for n in lengths]
        or [torch.zeros(0, dtype=torch.int32)]
    )
    qkv = qkv.to(device, dtype)
    return qkv[:, 0], qkv[:, 1], targets.to(device)


def by_numpy(q, k, lengths, targets, skip_ends, window_size=(-1, -1), relative_bias=None):
    """{name: (total, heads)} in float64."""
    left, right = (10**6 if side < 0 else side for side in window_size)
    table = None if relative_bias is None else relative_bias.double().cpu().numpy()
    q, k = (x.double().cpu().numpy() for x in (q, k))
    statistics = {name: np.zeros(q.shape[:2]) for name in (*NAMES, "strongest")}
    first = 0
    for length in lengths:
        for head in range(q.shape[1]):
            for i in range(length):
                s = k[first : first + length, head] @ q[first + i, head] / np.sqrt(q.shape[2])
                away = np.arange(length) - i
                if table is not None:
                    span = table.shape[1] // 2
                    s += table[head, np.clip(away, -span, span) + span]
                s[(away < -left) | (away > right)] = -np.inf
                inner = [j for j in np.flatnonzero(s > -np.inf) if 0 < j < length - 1]
                p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
                wanted = int(targets[first + i])
                row = {
                    "entropy": -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)),
                    "distance": np.sum(p * np.abs(np.arange(length) - i)),
                    "first": p[0],
                    "last": p[-1],
                    "itself": p[i],
                    "previous": p[i - 1] if i else 0,
                    "next": p[i + 1] if i + 1 < length else 0,
                    "target": p[wanted] if wanted >= 0 else 0,
                    "strongest": max(inner, key=s.__getitem__)
                    if skip_ends and inner
                    else s.argmax(),
                }
                for name, value in row.items():
                    statistics[name][first + i, head] = value
        first += length
    return statistics


def check_against_plain(
    lengths,
    heads,
    head_dim,
    dtype,
    impl,
    device="cpu",
    skip_ends=False,
    window_size=(-1, -1),
    radius=None,
):
    """radius: of the table of relative biases; None: no table."""
    q, k, targets = inputs(lengths, heads, head_dim, dtype, device)
    cu_seqlens = offsets(lengths, device)
    table = None if radius is None else torch.randn(heads, 2 * radius + 1, device=device)
    seen = {"window_size": window_size, "relative_bias": table}
    statistics = head_statistics(
        q, k, cu_seqlens, max(lengths), targets=targets, skip_ends=skip_ends, impl=impl, **seen
    )
    plain, _ = reference(q, k, cu_seqlens, targets, head_dim**-0.5, skip_ends, **seen)
    truth = by_numpy(q, k, lengths, targets, skip_ends, **seen)
    for index, name in enumerate(NAMES):
        assert_within_budget(
            getattr(statistics, name),
            plain[..., index],
            torch.from_numpy(truth[name]).to(device),
            f"{name} {dtype}",
            # A score of a few units is rounded by about this much, and how depends on the order of its sum.
            rounded=torch.finfo(torch.float32).eps,
        )
    assert statistics.strongest.dtype == torch.int32
    assert np.array_equal(statistics.strongest.cpu().numpy(), truth["strongest"])
