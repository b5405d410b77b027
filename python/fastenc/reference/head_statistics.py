"""What attention heads look at, from their probabilities, in plain torch.

Source: Clark et al. 2019, arXiv:1906.04341.
"""

import torch
from torch import Tensor


def head_statistics(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    targets: Tensor | None,
    scale: float,
    skip_ends: bool,
) -> tuple[Tensor, Tensor]:
    """(statistics (total_tokens, num_heads, 8), strongest int32 (total_tokens, num_heads)), in the order of
    :class:`fastenc.ops.head_statistics.HeadStatistics`; a sequence at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    total, heads = q.shape[:2]
    statistics = torch.empty(total, heads, 8, dtype=wide, device=q.device)
    strongest = torch.empty(total, heads, dtype=torch.int32, device=q.device)
    bounds = cu_seqlens.tolist()
    for first, stop in zip(bounds, bounds[1:], strict=False):
        length = stop - first
        if not length:
            continue
        rows = slice(first, stop)
        scores = scale * torch.einsum("ihd,jhd->ihj", q[rows].to(wide), k[rows].to(wide))
        log_p = scores.log_softmax(-1)
        p = log_p.exp()
        position = torch.arange(length, device=q.device)
        distance = (position[None, :] - position[:, None]).abs().to(wide)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        # Probabilities along the diagonals; 0 where there is no neighbour.
        shifted = torch.nn.functional.pad(p, (1, 1))
        at = lambda column, x=shifted: x.gather(-1, column[:, None, None].expand(-1, heads, 1))[
            ..., 0
        ]
        wanted = torch.full_like(position, -1) if targets is None else targets[rows].long()
        of_target = at(wanted.clamp(min=0) + 1) * (wanted >= 0)[:, None]
        columns = (
            entropy,
            (p * distance[:, None]).sum(-1),
            p[..., 0],
            p[..., -1],
            at(position + 1),
            at(position),
            at(position + 2),
            of_target,
        )
        statistics[rows] = torch.stack(columns, dim=-1)
        inner = scores[..., 1:-1] if skip_ends and length > 2 else scores
        strongest[rows] = (inner.argmax(-1) + (skip_ends and length > 2)).int()
    return statistics, strongest
