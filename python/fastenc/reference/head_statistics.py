"""Statistics of attention heads' probabilities, in plain torch.

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
    window_size: tuple[int, int] = (-1, -1),
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(statistics (total_tokens, num_heads, 8), strongest int32 (total_tokens, num_heads)), one sequence at a time.

    The statistics are in the order of :class:`fastenc.ops.head_statistics.HeadStatistics`.
    """
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
        position = torch.arange(length, device=q.device)
        away = position[None, :] - position[:, None]
        if relative_bias is not None:
            span = relative_bias.shape[1] // 2
            scores += relative_bias.to(wide)[:, away.clamp(-span, span) + span].transpose(0, 1)
        left, right = (length if side < 0 else side for side in window_size)
        hidden = ((away < -left) | (away > right))[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        p = scores.log_softmax(-1).exp()
        distance = away.abs().to(wide)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        # Key j is column j + 1; columns 0 and length + 1 are 0, for neighbours that do not exist.
        padded = torch.nn.functional.pad(p, (1, 1))
        at = lambda column, x=padded: x.gather(-1, column[:, None, None].expand(-1, heads, 1))[
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
        if skip_ends:
            ends = (position == 0) | (position == length - 1)
            inner = scores.masked_fill(ends, float("-inf"))
            no_inner = (hidden | ends).all(-1, keepdim=True)
            scores = torch.where(no_inner, scores, inner)
        strongest[rows] = scores.argmax(-1).int()
    return statistics, strongest
