"""The modules of vectors of each token for each layer (:mod:`fastenc.nn.layer_vectors`)."""

import torch
from torch import nn

from fastenc.nn.embeddings import make_norm
from fastenc.nn.layer_spec import LayerSpec, NormSpec
from fastenc.nn.layer_vectors import LayerVectorTable
from fastenc.nn.layer_weights import LayerVectorWeights


class LayerVectors(nn.Module):
    """What makes the vectors of all layers from the embeddings' output. ``sizes``: the layers' widths of a vector."""

    def __init__(self, width: int, sizes: list[int], norm: NormSpec):
        super().__init__()
        self.projection = nn.Linear(width, sum(sizes), bias=False)
        self.norm = make_norm(norm, sizes[0], False)

    def weights(self) -> LayerVectorTable:
        return LayerVectorTable(self.projection.weight, self.norm.weight)


class VectorSublayer(nn.Module):
    """The weights of the sublayer that a layer's vectors gate, and the layer's scale, which is not trained."""

    def __init__(self, width: int, spec: LayerSpec):
        super().__init__()
        self.gate = nn.Linear(width, spec.layer_vector_size, bias=False)
        self.out = nn.Linear(spec.layer_vector_size, width, bias=False)
        self.norm = make_norm(spec.out_norm, width, False)
        self.register_buffer("scale", torch.ones(1))

    def weights(self) -> LayerVectorWeights:
        scale = self.get_buffer("scale")
        return LayerVectorWeights(self.gate.weight, self.out.weight, self.norm.weight, scale)
