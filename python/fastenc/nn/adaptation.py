"""Small trained modules that are added to a frozen layer: LoRA, bottleneck adapters, prefixes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.nn.evaluation_mode import trains
from fastenc.ops.gemm import linear

_of_call: ContextVar[str | None] = ContextVar("adaptation of this thread's calls", default=None)


@contextmanager
def adaptation_of_calls(name: str | None) -> Iterator[None]:
    """Inside the block, calls by this thread use the adaptation of this name; None: the one in use.

    The models are not changed, because other threads would see that.
    """
    token = _of_call.set(name)
    try:
        yield
    finally:
        _of_call.reset(token)


def used_name(in_use: str | None) -> str | None:
    """The name of the adaptation that a call uses; ``in_use``: that of the model."""
    of_call = None if torch.compiler.is_compiling() else _of_call.get()
    return in_use if of_call is None else of_call


class LowRank(nn.Module):
    """The LoRA addition to one linear layer, which may stack several linear layers of a checkpoint (q, k and v).

        delta(x)[target] = scale * dropout(x) A[target]^T B[target]^T

    Each target has its own A (rank, in_features) and B (rows[target], rank). A is initialised as nn.Linear's weight and
    B with 0, so training starts from the layer's output without LoRA.

    Args:
        rows: name → number of output features of each stacked layer, in order ({"query": d, "key": d, "value": d}).
        targets: names of the stacked layers that get matrices.
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
        """(out_features, in_features): the sum of this and the layer's weight is the merged weight."""
        return self.scale * self._b() @ self._a()

    def _a(self) -> Tensor:
        return torch.cat([self.a[name] for name in self.rows if name in self.a])

    def _b(self) -> Tensor:
        """The block-diagonal matrix of the targets' B, (out_features, rank * targets), 0 in rows of other layers."""
        like = next(iter(self.b.values()))
        return torch.block_diag(
            *(self.b[p] if p in self.b else like.new_empty(n, 0) for p, n in self.rows.items())
        )


class LowRankRows(nn.Module):
    """The LoRA addition to a table of vectors.

        delta[i] = scale * A[i] B

    A (rows, rank) is initialised with 0, and B (rank, width) normally distributed, as in the PEFT library.

    Args: scale: alpha / rank.
    """

    def __init__(self, rows: int, width: int, rank: int, scale: float):
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.zeros(rows, rank))
        self.b = nn.Parameter(torch.randn(rank, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.a) @ self.b * self.scale

    def weight(self) -> Tensor:
        """(rows, width): the sum of this and the table is the merged table."""
        return self.scale * self.a @ self.b


class Bottleneck(nn.Module):
    """x + up(GELU(down(x))), with up initialised as 0. Source: Houlsby et al. 2019, arXiv:1902.00751."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)
        nn.init.normal_(self.down.weight, std=0.01)
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


class LayerAdaptation(nn.Module):
    """All that an adaptation adds to one layer.

    Args:
        low_rank: linear layer ("qkv", "attention_out", "up" or "down") → its LoRA addition, or None.
        after_attention, after_feed_forward: bottlenecks between a sublayer's dropout and its residual sum, or None.
        prefix: (P, 2, hidden_size), P learned keys and values that every token also attends to, or None.
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

    def is_active(self) -> bool:
        """Whether a call computes the additions."""
        return True

    def to_output(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """y plus the LoRA addition, if the linear layer has one; y is the layer's output for the input x."""
        return y + self.low_rank[name](x).to(y.dtype) if name in self.low_rank else y
