"""Inputs and peers of the tests of disentangled attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastenc.nn.relative_positions import RelativePositionSpec, distance_slots
from tests.helpers.attention_cases import offsets_of

TERMS = {"both": (True, True), "c2p": (True, False), "p2c": (False, True), "none": (False, False)}


class Inputs(NamedTuple):
    """Leaves: qkv and the tables that a case has."""

    qkv: Tensor
    keys: Tensor | None
    queries: Tensor | None
    slots: Tensor
    lengths: tuple[int, ...]

    def leaves(self) -> list[Tensor]:
        return [x for x in self[:3] if isinstance(x, Tensor)]

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Inputs":
        leaf = lambda x: None if x is None else x.detach().to(device, dtype).requires_grad_()
        return Inputs(*map(leaf, self[:3]), self.slots.to(device), self.lengths)

    def arguments(self) -> dict:
        """The arguments of the public function."""
        return {
            "qkv": self.qkv,
            "cu_seqlens": offsets_of(self.lengths).to(self.qkv.device),
            "max_seqlen": max(self.lengths, default=0),
            "slots": self.slots,
            "position_keys": self.keys,
            "position_queries": self.queries,
        }


def inputs_of(lengths, heads, dim, terms="both", buckets=8, farthest=30, dtype=torch.float32):
    """buckets, farthest: of DeBERTa's logarithmic buckets; 0 buckets: every distance up to ``farthest`` has a row."""
    spec = RelativePositionSpec(buckets, farthest)
    leaf = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()
    slots = distance_slots(spec, max(lengths, default=1))
    keys, queries = (leaf(spec.rows, heads, dim) if on else None for on in TERMS[terms])
    return Inputs(leaf(sum(lengths), 3, heads, dim), keys, queries, slots, tuple(lengths))


def plain(inputs: Inputs) -> Tensor:
    """A sequence at a time: PyTorch's own attention, with the terms of positions as its mask."""
    outputs, reach = [], len(inputs.slots) // 2
    terms = 1 + (inputs.keys is not None) + (inputs.queries is not None)
    scale = (inputs.qkv.shape[3] * terms) ** -0.5
    for part in inputs.qkv.split(list(inputs.lengths)):
        q, k, v = part.permute(1, 2, 0, 3).unbind(0)  # each (heads, length, dim)
        position = torch.arange(len(part))
        rows = inputs.slots[(position - position[:, None]).clamp(-reach, reach) + reach].long()
        mask = q.new_zeros(len(q), len(part), len(part))
        if inputs.keys is not None:
            mask = mask + torch.einsum("hid,ijhd->hij", q, inputs.keys[rows]) * scale
        if inputs.queries is not None:
            mask = mask + torch.einsum("hjd,ijhd->hij", k, inputs.queries[rows]) * scale
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
