"""One post-norm layer for inference, whose weights are reordered once for the CPU."""

import math

import torch
from torch import Tensor

from fastenc.nn.encoder_layer import ACTIVATIONS, LayerOptions, LayerWeights, activate
from fastenc.nn.prepacked_linear import PrepackedLinear, reordering
from fastenc.ops import _dispatch, _encoder_layer, attention, layer_norm
from fastenc.ops._matmul import pack_panels
from fastenc.packing import check_cu_seqlens

# Rows that inference on a CPU takes at once from the attention's output to the layer's end: larger intermediates
# would come from fresh pages at every call.
ROWS_AT_ONCE = 2048


def wants_inference(x: Tensor, options: LayerOptions) -> bool:
    """Whether a layer's input can take :class:`InferenceLayer`: no gradient, no dropout, no autocast."""
    return not (
        torch.is_grad_enabled()
        or options.attention_dropout_p
        or options.attention_out_dropout_p
        or options.down_dropout_p
        or _dispatch.autocast_dtype(x.device.type)
    )


class InferenceLayer:
    """:func:`fastenc.nn.encoder_layer.encoder_layer` without gradients and dropout, its weights reordered once.

    Where our own products are the faster ones, a block of rows runs through each half of the layer in one op
    (:mod:`fastenc.ops._encoder_layer`); otherwise, and for what those do not take, single ops compose it.
    """

    def __init__(self) -> None:
        self._qkv, self._attention_out = PrepackedLinear(), PrepackedLinear()
        self._up, self._down = PrepackedLinear(), PrepackedLinear()

    def forget(self) -> None:
        """Drop the reordered weights: training is about to change them, and needs the memory."""
        for prepacked in (self._qkv, self._attention_out, self._up, self._down):
            prepacked.forget()

    def __call__(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        weights: LayerWeights,
        options: LayerOptions,
    ) -> Tensor:
        w, o = weights, options
        mixed = self._attention(x, cu_seqlens, max_seqlen, w, o)
        if self._is_one_op(x, w, o):
            return self._in_one_op(mixed, x, w, o)
        count = 1
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            count = max(1, math.ceil(x.shape[0] / ROWS_AT_ONCE))
        blocks = zip(mixed.chunk(count), x.chunk(count), strict=True)
        parts = [self._after_attention(rows, residual, w, o) for rows, residual in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attention(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, w: LayerWeights, o: LayerOptions
    ) -> Tensor:
        width = sum(len(weight) for weight in w.qkv_weights) // 3
        if reordering(x, w.qkv_weights[0]) is pack_panels and _encoder_layer.attention_pays(
            x, max_seqlen, width, o.num_heads
        ):
            check_cu_seqlens(cu_seqlens, x.shape[0], max_seqlen)
            qkv = _packed(self._qkv, w.qkv_weights, w.qkv_biases)
            return _encoder_layer.attention(x, qkv, cu_seqlens, max_seqlen, o.num_heads)
        heads = self._qkv(x, w.qkv_weights, w.qkv_biases)
        heads = heads.view(x.shape[0], 3, o.num_heads, width // o.num_heads)
        return attention(heads, cu_seqlens, max_seqlen).flatten(1)

    def _is_one_op(self, x: Tensor, w: LayerWeights, o: LayerOptions) -> bool:
        return (
            isinstance(ACTIVATIONS[o.activation], str)
            and reordering(x, w.up_weight) is pack_panels
            and _encoder_layer.after_attention_pays(x, len(w.up_weight))
        )

    def _in_one_op(self, mixed: Tensor, x: Tensor, w: LayerWeights, o: LayerOptions) -> Tensor:
        return _encoder_layer.after_attention(
            mixed,
            x,
            _packed(self._attention_out, (w.attention_out_weight,), (w.attention_out_bias,)),
            (w.attention_norm_weight, w.attention_norm_bias),
            _packed(self._up, (w.up_weight,), (w.up_bias,)),
            _packed(self._down, (w.down_weight,), (w.down_bias,)),
            (w.out_norm_weight, w.out_norm_bias),
            ACTIVATIONS[o.activation] == "tanh",
            o.eps,
        )

    def _after_attention(
        self, mixed: Tensor, x: Tensor, w: LayerWeights, o: LayerOptions
    ) -> Tensor:
        projected = self._attention_out(mixed, (w.attention_out_weight,), (w.attention_out_bias,))
        h = layer_norm(
            projected, w.attention_norm_weight, w.attention_norm_bias, residual=x, eps=o.eps
        )
        inner = self._up(h, (w.up_weight,), (w.up_bias,))
        inner = activate(inner, None, o.activation, inplace=True)
        projected = self._down(inner, (w.down_weight,), (w.down_bias,))
        return layer_norm(projected, w.out_norm_weight, w.out_norm_bias, residual=h, eps=o.eps)


def _packed(
    layer: PrepackedLinear, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    weight, bias = layer.reordered(pack_panels, weights, biases)
    assert bias is not None
    return weight, bias
