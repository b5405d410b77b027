"""dropout(LayerNorm(word + position + token type)) in plain torch.

Source: Devlin et al. 2018, arXiv:1810.04805; Ba et al. 2016, arXiv:1607.06450.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.reference.dropout import dropout_scales
from fastenc.reference.layer_norm import layer_norm


def embedding_layer_norm(
    input_ids: Tensor,
    word: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    position: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    token_type: Tensor | None = None,
    position_offset: int = 0,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    eps: float = 1e-12,
) -> Tensor:
    wide = torch.promote_types(word.dtype, torch.float32)
    # The tables are widened before the look-up, so that the gradients of many tokens are summed in float32.
    h = F.embedding(input_ids, word.to(wide), padding_idx)
    if token_type is not None:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        h = h + F.embedding(types, token_type.to(wide))
    if position is not None and position_ids is not None:
        rows = position_ids + position_offset
        h = h + F.embedding(rows, position.to(wide), position_padding_idx)
    y = layer_norm(h, weight, bias, eps=eps)
    if rng_state is not None:
        tokens = torch.arange(input_ids.numel(), device=word.device)
        scales = dropout_scales(rng_state, 0, tokens, word.shape[1], dropout_p)
        y = y * scales.view(y.shape).to(wide)
    return y.to(word.dtype)
