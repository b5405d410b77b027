"""A large batch computed group by group, so that the activations of one group are in memory at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastenc.packing import PackedBatch


def in_groups(
    function: Callable[[PackedBatch], Tensor],
    batch: PackedBatch,
    groups: Sequence[tuple[int, int, int]] | None,
) -> Tensor:
    """``function(batch)``, computed for one group of sequences after the other.

    This is gradient caching. With gradients, the first pass keeps no activations. The loss of all results gives their
    gradient, and the backward computes one group after the other again, with the same dropout, and passes the gradient
    on. So the gradient is that of the whole batch, up to rounding. It costs a second forward.

    Args:
        function: a function of a packed batch that returns a row for each sequence.
        groups: of :func:`fastenc.packing.token_groups`; None or a single group: the whole batch at once.
    Source: Gao et al. 2021, arXiv:2101.06983; ``torch.utils.checkpoint`` stores and restores the random states.
    """
    if groups is None or len(groups) < 2 or batch.hidden is not None:
        return function(batch)
    parts = batch.split(groups)
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts])
    # A tensor among the arguments says of which device the random state is stored.
    of_part = lambda part, _: function(part)
    results = [checkpoint(of_part, part, part.input_ids, use_reentrant=False) for part in parts]
    return torch.cat(results)  # type: ignore[arg-type]
