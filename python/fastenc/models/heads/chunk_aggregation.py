"""One vector per document from the vectors of its chunks."""

import torch
from torch import Tensor, nn

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import Biases
from fastenc.models.config import EncoderConfig
from fastenc.models.layer_stack import EncoderLayer
from fastenc.nn import LayerNorm
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.nn.pooling import pool
from fastenc.nn.stack import StackModules, StackSpec, run_stack
from fastenc.ops import cross_attention
from fastenc.packing import Documents


def chunk_aggregator(aggregation: str, config: EncoderConfig, max_chunks: int) -> nn.Module:
    """A module with forward(vectors (chunks, hidden_size), documents) -> (documents, hidden_size).

    Args:
        aggregation: "mean", "max", "attention" or "transformer".
        max_chunks: number of positions of the transformer.
    """
    if aggregation == "attention":
        return ChunkAttention(config)
    if aggregation == "transformer":
        return ChunkTransformer(config, max_chunks)
    return ChunkPooling(aggregation)


class ChunkPooling(nn.Module):
    """Mean or maximum over a document's chunks, without parameters."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode = mode

    def forward(self, vectors: Tensor, documents: Documents) -> Tensor:
        return pool(vectors, documents.cu_chunks, self.mode)


class ChunkAttention(nn.Module):
    """Multi-head attention pooling over a document's chunks with learned queries.

        y_h = sum_c a_hc v_hc,   a_h = softmax over chunks c of query_h . tanh(W v_c + b)_h

    v_hc are the columns of v_c that belong to head h.
    Source: Yang et al. 2016, Hierarchical Attention Networks; here with as many heads as the encoder has, not one.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.query = nn.Parameter(
            torch.empty(config.num_heads, config.hidden_size // config.num_heads)
        )

    def forward(self, vectors: Tensor, documents: Documents) -> Tensor:
        keys = torch.tanh(self.key(vectors))
        heads = (vectors.shape[0], *self.query.shape)
        count = documents.cu_chunks.shape[0] - 1
        attended = cross_attention(
            self.query.to(keys.dtype).expand(count, -1, -1).contiguous(),
            keys.view(heads),
            vectors.to(keys.dtype).view(heads),
            torch.arange(count + 1, dtype=torch.int32, device=vectors.device),
            documents.cu_chunks,
            1,
            documents.max_chunks,
            softmax_scale=1.0,
        )
        return attended.flatten(1)


class ChunkTransformer(nn.Module):
    """Two post-norm encoder layers over a document's chunks with learned positions, then the mean over chunks.

        x_c = LN(v_c + position_c),  y = mean over c of Layer_2(Layer_1(x))_c

    The layers are post-norm for every family.
    Source: Pappagari et al. 2019, arXiv:1910.10781, a transformer over the chunks' vectors. The number of layers and
        the mean differ from the paper.
    """

    def __init__(self, config: EncoderConfig, max_chunks: int, num_layers: int = 2):
        super().__init__()
        self.positions = EmbeddingTable(max_chunks, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.eps)
        # Not named "layers", so that these layers get the head's learning rate and not the encoder's layer-wise ones.
        spec = Architecture().layer(config, 0)
        self.stack = StackSpec(
            (spec,) * num_layers, tuple(range(num_layers)), (None,) * num_layers, None, max_chunks
        )
        self.blocks = nn.ModuleList(EncoderLayer(config, spec, Biases()) for _ in range(num_layers))

    def forward(self, vectors: Tensor, documents: Documents) -> Tensor:
        """vectors (chunks, hidden_size) → (documents, hidden_size).

        Raises: ValueError for a document with more chunks than positions.
        """
        if documents.max_chunks > self.positions.num_embeddings:
            raise ValueError(
                f"a document may have at most {self.positions.num_embeddings} chunks, the positions of the model's "
                f"transformer, got {documents.max_chunks}: cut it first, or train with a larger max_chunks"
            )
        x = self.norm(vectors + self.positions(documents.position_ids).to(vectors.dtype))
        layers = [block for block in self.blocks if isinstance(block, EncoderLayer)]
        modules = StackModules(layers, None, (), 0.0, [False] * len(layers), None)
        states = run_stack(x, documents.cu_chunks, documents.max_chunks, self.stack, modules)
        *_, last = states
        return pool(last, documents.cu_chunks, "mean")
