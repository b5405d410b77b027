"""Small trained modules that are added to a frozen layer."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.nn.evaluation_mode import trains
from fastenc.ops._gemm import linear


class LowRank(nn.Module):
    """What LoRA adds to a linear layer that stands for several of a checkpoint's, with a pair of matrices for each.

        delta(x)[target] = scale * dropout(x) A[target]^T B[target]^T

    A is drawn as nn.Linear's weight and B is 0, so that training starts from the layer as it is.

    Args:
        rows: output features of each of the checkpoint's layers, in order ({"query": d, "key": d, "value": d}).
        targets: those that get matrices.
        scale: alpha / rank.
    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    def __init__(
        self,
        in_features: int,
        rows: Mapping[str, int],
        targets: Sequence[str],
        rank: int,
        scale: float,
        dropout_p: float,
    ):
        super().__init__()
        self.rows, self.rank, self.scale, self.dropout_p = dict(rows), rank, scale, dropout_p
        self.a = nn.ParameterDict({name: torch.empty(rank, in_features) for name in targets})
        self.b = nn.ParameterDict({name: torch.zeros(rows[name], rank) for name in targets})
        for matrix in self.a.values():
            nn.init.kaiming_uniform_(matrix, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        inner = linear(F.dropout(x, self.dropout_p, trains(self)), self._a())
        return linear(inner, self._b()) * self.scale

    def weight(self) -> Tensor:
        """(out_features, in_features): what the layer's weight would gain."""
        return self.scale * self._b() @ self._a()

    def _a(self) -> Tensor:
        return torch.cat([self.a[name] for name in self.rows if name in self.a])

    def _b(self) -> Tensor:
        """The targets' matrices on a diagonal: each target's rows see its columns alone."""
        some = next(iter(self.b.values()))
        return torch.block_diag(
            *(self.b[p] if p in self.b else some.new_empty(n, 0) for p, n in self.rows.items())
        )


class Bottleneck(nn.Module):
    """x + up(GELU(down(x))); up starts at 0. Source: Houlsby et al. 2019, arXiv:1902.00751."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)
        nn.init.normal_(self.down.weight, std=0.01)
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


class LayerAdaptation(nn.Module):
    """What is added to one layer; each may be missing.

    Args:
        low_rank: by linear layer, "qkv", "attention_out", "up" or "down".
        after_attention, after_feed_forward: bottlenecks between a sublayer's dropout and its residual sum.
        prefix: length P of learned keys and values (P, 2, hidden_size) that every token also attends to.
    """

    def __init__(
        self,
        low_rank: Mapping[str, LowRank] | None = None,
        after_attention: Bottleneck | None = None,
        after_feed_forward: Bottleneck | None = None,
        prefix: Tensor | None = None,
    ):
        super().__init__()
        self.low_rank = nn.ModuleDict(low_rank or {})
        self.after_attention, self.after_feed_forward = after_attention, after_feed_forward
        self.prefix = None if prefix is None else nn.Parameter(prefix)

    def to_output(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """A linear layer's output y for input x, with the low-rank addition if it has one."""
        return y + self.low_rank[name](x).to(y.dtype) if name in self.low_rank else y
