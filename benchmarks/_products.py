"""A lower bound of inference time on a CPU: the matrix products of an encoder's layers and nothing between them."""

import torch
from torch import nn

from fastenc.models import Encoder
from fastenc.models.layer_stack import EncoderLayer
from fastenc.ops.gemm import gemm_packed, pack_weight

FLOOR = "the packed tokens' matrix products alone, float32"


ROWS = 256  # of a product; its input and output then stay in the cache, as in a fused layer


class Products:
    """The products of every layer, with weights packed in advance, for ROWS tokens at a time."""

    def __init__(self, encoder: Encoder):
        linears = [
            linear
            for layer in (encoder.layers[i] for i in encoder.stack.module_of_layer)
            for linear in (layer.qkv, layer.attention_out, layer.up, layer.down, *vectors_of(layer))
        ]
        made = None if encoder.layer_vectors is None else encoder.layer_vectors.projection
        linears += [each for each in (made, encoder.output_projection) if each is not None]
        packed = {linear: pack_weight(linear.weight) for linear in set(linears)}
        self.linears = [(linear, packed[linear]) for linear in linears]

    def __call__(self, tokens: int) -> None:
        inputs = {
            k: torch.zeros(ROWS, k) for k in {linear.in_features for linear, _ in self.linears}
        }
        for linear, packed in self.linears:
            for start in range(0, tokens, ROWS):
                x = inputs[linear.in_features][: tokens - start]
                gemm_packed(x, packed, linear.bias, linear.out_features)


def vectors_of(layer: EncoderLayer) -> tuple[nn.Linear, ...]:
    """The products of the sublayer that a layer's vectors gate."""
    return () if layer.vectors is None else (layer.vectors.gate, layer.vectors.out)
