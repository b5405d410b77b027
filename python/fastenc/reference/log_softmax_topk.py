"""The most probable classes of each row of logits, in plain torch."""

import torch
from torch import Tensor


def log_softmax_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, columns = torch.log_softmax(x, -1).topk(count)
    return values, columns
