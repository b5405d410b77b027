"""The most probable classes of each row of logits, without the table of all log-probabilities."""

import torch
from torch import Tensor

from fastenc.ops.library import HAS_CPP, define
from fastenc.reference import log_softmax_topk as reference


def log_softmax_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` greatest of log softmax(x)[r, c] = x[r, c] - log sum_j exp(x[r, j]); not differentiable.

    Args:
        x: (rows, width), float32.
        count: at most width.
    Returns: the log-probabilities (rows, count), descending, and their columns, int64 (rows, count). On a CPU, of equal
        logits the first column comes first.
    """
    if x.device.type == "cpu" and HAS_CPP:
        return torch.ops.fastenc.log_softmax_topk(x, count)
    return reference.log_softmax_topk(x, count)


def _fake(x, count):
    shape = (x.shape[0], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


define("log_softmax_topk(Tensor x, int count) -> (Tensor, Tensor)", _fake)
