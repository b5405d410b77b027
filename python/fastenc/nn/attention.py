"""Self-attention module over the packed op."""

import torch
from torch import Tensor, nn

from fastenc import ops, packing
from fastenc.ops._gemm import linear


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose self-attention without weights runs on packed tokens.

    The fused path takes calls with query, key and value the same tensor, ``need_weights=False``, no
    ``attn_mask``, no ``is_causal`` and no added keys; every other call goes to torch's own forward. Padding named
    by a boolean ``key_padding_mask`` is not computed, and its rows of the output are 0.
    ``forward_packed`` takes tokens that are packed already.
    """

    def forward_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """x: (total_tokens, embed_dim) → the same shape; offsets as in :func:`fastenc.ops.attention`."""
        qkv = linear(x, self.in_proj_weight, self.in_proj_bias)
        dropout_p = self.dropout if self.training else 0.0
        heads = qkv.view(x.shape[0], 3, self.num_heads, self.head_dim)
        mixed = ops.attention(heads, cu_seqlens, max_seqlen, dropout_p=dropout_p)
        return self.out_proj(mixed.flatten(1))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        fused = (
            query is key
            and key is value
            and query.dim() == 3
            and not (need_weights or is_causal or self.add_zero_attn)
            and attn_mask is None
            and self.bias_k is None
            and self._qkv_same_embed_dim
            and (key_padding_mask is None or key_padding_mask.dtype == torch.bool)
        )
        if not fused:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        x = query if self.batch_first else query.transpose(0, 1)
        real = None if key_padding_mask is None else ~key_padding_mask
        batch = packing.pack(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), real)
        mixed = self.forward_packed(ops.pack(x, batch), batch.cu_seqlens, batch.max_seqlen)
        y = ops.unpack(mixed, batch)
        return (y if self.batch_first else y.transpose(0, 1)), None
