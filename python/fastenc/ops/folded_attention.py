"""Attention of few queries to many tokens whose keys and values are not computed.

Query q sees the keys W_k x_j + b_k and the values W_v x_j + b_v of all tokens x_j of its sequence:

    q . (W_k x_j + b_k) = x_j . (W_k^T q) + q . b_k
    sum_j p_j (W_v x_j + b_v) = W_v (sum_j p_j x_j) + b_v sum_j p_j

The sum of the probabilities p is not 1 if some are dropped. Queries as wide as x take num_heads times as many products
with each token, and none of the projections.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastenc.ops import dispatch
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.gemm import linear_in_one_order
from fastenc.reference.dropout import dropout_scales

Biases = Sequence[Tensor | None]


def folded_attention(
    x: Tensor,
    query_tokens: Tensor,
    rows: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    weights: Sequence[Tensor],
    biases: Biases,
    *,
    num_heads: int,
    softmax_scale: float,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
) -> Tensor:
    """:func:`fastenc.ops.cross_attention` of the queries, keys and values W x + b, on a CPU.

    Args:
        x: (total_tokens, hidden_size).
        query_tokens: int64 (queries,), the tokens that have a query, ascending.
        rows: int64 (queries,), the queries' rows in dropout's mask.
        lengths, counts: for each sequence its number of tokens and of queries.
        weights, biases: of queries, keys and values: (num_heads * head_dim, hidden_size) and (num_heads * head_dim,).
        rng_state: int64 (2,), seed and offset of dropout's mask, which is that of cross_attention; None: no dropout.
    Returns: (queries, num_heads, head_dim), dtype of x.
    Numerics: fp32 arithmetic. A sequence's result has the same bits beside other sequences, where the products are our
        kernels' (:func:`fastenc.ops.gemm.linear_in_one_order`).
    Memory: num_heads numbers for each pair of a query and a token of its sequence.
    Differentiable: x, weights, biases.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        query, key, value = (weight.to(wide) for weight in weights)
        query_bias, key_bias, value_bias = (
            bias if bias is None else bias.to(wide) for bias in biases
        )
        states, heads = x.to(wide), (num_heads, query.shape[0] // num_heads)
        queries = linear_in_one_order(states[query_tokens], query, query_bias).unflatten(1, heads)
        folded = _products_of_heads(queries, key.unflatten(0, heads).transpose(1, 2))
        shifts = None if key_bias is None else (queries * key_bias.view(heads)).sum(2)
        streams, sums, totals = torch.arange(num_heads), [], []
        indices = torch.arange(len(rows)).split(list(counts))
        # The gradient of a split is a copy.
        parts = (states,) if len(lengths) == 1 else states.split(list(lengths))
        for of_sequence, chosen in zip(parts, indices, strict=True):
            if not len(chosen):
                continue
            scores = linear_in_one_order(folded[chosen].flatten(0, 1), of_sequence)
            if shifts is not None:
                scores = scores + shifts[chosen].view(-1, 1)
            p = (softmax_scale * scores).softmax(1)
            if rng_state is not None:
                kept = (rows[chosen, None], len(of_sequence), dropout_p)
                p = p * dropout_scales(rng_state, streams, *kept).flatten(0, 1).to(wide)
            sums.append(linear_in_one_order(p, of_sequence.t()))
            totals.append(p.sum(1))
        summed = torch.cat(sums).view(folded.shape)
        results = _products_of_heads(summed, value.unflatten(0, heads))
        if value_bias is not None:
            results = results + torch.cat(totals).view(-1, num_heads, 1) * value_bias.view(heads)
    return results.to(x.dtype)


def _products_of_heads(x: Tensor, weights: Tensor) -> Tensor:
    """x (rows, heads, inner) and weights (heads, outer, inner) → (rows, heads, outer)."""
    return _ProductsOfHeads.apply(x, weights)


class _ProductsOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        # A batched product of PyTorch's would round as the number of rows decides. Gradients are sums over rows anyway.
        products = [
            linear_in_one_order(rows, w) for rows, w in zip(x.unbind(1), weights, strict=True)
        ]
        return torch.stack(products, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weights = ctx.saved_tensors
        needs_x, needs_weights = ctx.needs_input_grad
        x, dy = x.transpose(0, 1), dy.transpose(0, 1)
        dx = dweights = None
        with dispatch.no_autocast(dy):
            if needs_x:
                dx = torch.bmm(dy, weights).transpose(0, 1)
            if needs_weights and weights.is_contiguous():
                dweights = torch.bmm(dy.mT, x)
            elif needs_weights:  # transposed, and so is its gradient
                dweights = torch.bmm(x.mT, dy).mT
        return dx, dweights
