"""Inputs and the peer of the tests of attention over a window and global tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.attention_cases import offsets_of


class Inputs(NamedTuple):
    """Leaves: qkv, global_q and global_kv."""

    qkv: Tensor
    global_q: Tensor
    global_kv: Tensor
    global_tokens: Tensor
    window: tuple[int, int]
    lengths: tuple[int, ...]

    def leaves(self) -> list[Tensor]:
        return [self.qkv, self.global_q, self.global_kv]

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Inputs":
        leaves = [x.detach().to(device, dtype).requires_grad_() for x in self.leaves()]
        return Inputs(*leaves, self.global_tokens.to(device), *self[4:])

    def arguments(self) -> dict:
        """The arguments of the public function."""
        return {
            "qkv": self.qkv,
            "global_q": self.global_q,
            "global_kv": self.global_kv,
            "cu_seqlens": offsets_of(self.lengths).to(self.qkv.device),
            "max_seqlen": max(self.lengths, default=0),
            "global_tokens": self.global_tokens,
            "window_size": self.window,
        }


def inputs_of(lengths, heads, dim, window=(4, 4), chosen=None, dtype=torch.float32) -> Inputs:
    """``chosen``: the global tokens; None: the first token of each sequence, and one in seven of the others."""
    tokens = sum(lengths)
    if chosen is None:
        first = offsets_of(lengths)[:-1][torch.tensor(lengths, dtype=torch.long) > 0].tolist()
        chosen = sorted({*first, *range(6, tokens, 7)})
    indices = torch.tensor(chosen, dtype=torch.long)
    leaf = lambda *shape: torch.randn(*shape, heads, dim).to(dtype).requires_grad_()
    return Inputs(
        leaf(tokens, 3), leaf(len(indices)), leaf(tokens, 2), indices, window, tuple(lengths)
    )


def plain(inputs: Inputs) -> Tensor:
    """A sequence at a time: PyTorch's own attention, for local and for global queries, with dense masks."""
    outputs, first = [], 0
    left, right = (n if n >= 0 else sum(inputs.lengths) for n in inputs.window)
    attend = lambda q, k, v, mask=None: F.scaled_dot_product_attention(
        q[None], k[None], v[None], mask
    )[0]
    for length in inputs.lengths:
        rows = slice(first, first + length)
        of_batch = inputs.global_tokens
        inside = (of_batch >= first) & (of_batch < first + length)
        chosen = of_batch[inside] - first
        q, k, v = inputs.qkv[rows].permute(1, 2, 0, 3).unbind(0)  # each (heads, length, dim)
        gk, gv = inputs.global_kv[rows].permute(1, 2, 0, 3).unbind(0)
        position = torch.arange(length)
        distance = position - position[:, None]
        visible = (distance >= -left) & (distance <= right)
        visible[:, chosen] = True
        with sdpa_kernel(SDPBackend.MATH):
            local = attend(q, k, v, visible)
            of_globals = attend(inputs.global_q[inside].transpose(0, 1), gk, gv)
        outputs.append(local.index_copy(1, chosen, of_globals).transpose(0, 1))
        first += length
    return torch.cat(outputs)
