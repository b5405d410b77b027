"""A self-attention module over the packed op."""

import torch
from torch import Tensor, nn

from fastenc import ops, packing
from fastenc.ops.gemm import linear


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` that computes self-attention on packed tokens with the fused kernel.

    The fused kernel takes a call if query, key and value are the same tensor, ``need_weights=False``, and there is no
    ``attn_mask``, no ``is_causal`` and no bias_k, bias_v or zero key. Every other call goes to torch's forward. Tokens
    that a boolean ``key_padding_mask`` marks as padding are not computed; their output is 0.
    ``forward_packed`` takes packed tokens.
    """

    def forward_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """x (total_tokens, embed_dim) → the same shape; cu_seqlens, max_seqlen: see :func:`fastenc.ops.attention`."""
        qkv = linear(x, self.in_proj_weight, self.in_proj_bias)
        qkv = qkv.view(x.shape[0], 3, self.num_heads, self.head_dim)
        dropout_p = self.dropout if self.training else 0.0
        attended = ops.attention(qkv, cu_seqlens, max_seqlen, dropout_p=dropout_p)
        return self.out_proj(attended.flatten(1))

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
        packed = self.forward_packed(ops.pack(x, batch), batch.cu_seqlens, batch.max_seqlen)
        y = ops.unpack(packed, batch)
        return (y if self.batch_first else y.transpose(0, 1)), None
