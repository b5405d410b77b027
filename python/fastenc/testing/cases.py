"""What the numerics report runs: each op at a small shape of real encoders, beside PyTorch's own computation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc import ops, packing
from fastenc.reference import crf

LENGTHS = (5, 64, 33, 128)
TOKENS = sum(LENGTHS)
LONGEST = max(LENGTHS)


@dataclass(frozen=True)
class Case:
    """One op, computed by the library and by plain PyTorch.

    Fields:
        op: its name in ``fastenc.ops``.
        inputs: makes the arguments, with a CPU generator. Floating-point tensors are cast to the dtype under test and
            differentiated; everything else is passed on as it is, tensors on the device.
        ours, plain: called with the inputs by name; one tensor each, of the same dtype. ``plain`` in float64 is taken
            for the truth, so it must compute in float64 when given that.
        detail: what tells two cases of one op apart.
    """

    op: str
    inputs: Callable[[torch.Generator], dict[str, Any]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    detail: str = ""


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _attention(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
    parts = (part.permute(1, 2, 0, 3).unsqueeze(1) for part in qkv.split(LENGTHS))
    return torch.cat([F.scaled_dot_product_attention(*part)[0].transpose(0, 1) for part in parts])


def _norm_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    wide, narrow = (TOKENS, 768), (768,)
    return {
        "x": normal(draw, *wide),
        "residual": normal(draw, *wide),
        "x_bias": normal(draw, *narrow),
        "weight": normal(draw, *narrow),
    }


def _embedding_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(2000, (TOKENS,), generator=draw),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]),
        "word": normal(draw, 2000, 384),
        "position": normal(draw, LONGEST, 384),
        "token_type": normal(draw, 2, 384),
        "weight": normal(draw, 384),
        "bias": normal(draw, 384),
    }


def _embedding_layer_norm(input_ids, position_ids, word, position, token_type, weight, bias):
    types = F.embedding(torch.zeros_like(input_ids), token_type)
    h = F.embedding(input_ids, word) + types + F.embedding(position_ids, position)
    return F.layer_norm(h, (384,), weight, bias, 1e-12)


def _tied_scores(**inputs: Any) -> Tensor:
    """What a tied decoder makes of the embeddings."""
    return F.linear(*ops.tied_embedding_layer_norm(**inputs))


def _geglu(x: Tensor, bias: Tensor) -> Tensor:
    gate, value = (x + bias).chunk(2, dim=1)
    return F.gelu(gate) * value


def _labels(draw: torch.Generator, rows: int, vocabulary: int) -> Tensor:
    labels = torch.randint(vocabulary, (rows,), generator=draw)
    return labels.where(torch.rand(rows, generator=draw) < 0.15, -100)


def _logits_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {"logits": 3 * normal(draw, 64, 30522), "labels": _labels(draw, 64, 30522)}


def _projection_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "hidden": normal(draw, TOKENS, 384),
        "weight": normal(draw, 8000, 384) / 384**0.5,
        "bias": normal(draw, 8000),
        "labels": _labels(draw, TOKENS, 8000),
    }


def _crf_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "emissions": normal(draw, TOKENS, 9),
        "start": normal(draw, 9),
        "end": normal(draw, 9),
        "transitions": normal(draw, 9, 9),
        "tags": torch.randint(9, (TOKENS,), generator=draw),
        "cu_seqlens": offsets(),
    }


def _crf_likelihood(function: Callable) -> Callable[..., Tensor]:
    return lambda emissions, start, end, transitions, tags, cu_seqlens: function(
        emissions, tags, cu_seqlens, start, end, transitions
    )


def _crf_marginals(emissions, start, end, transitions, tags, cu_seqlens) -> Tensor:
    """(is it the tag?) - the gradient of any path's log-likelihood."""
    leaf = _widened(emissions.detach()).requires_grad_()
    with torch.enable_grad():
        likelihood = crf.log_likelihood(leaf, tags, cu_seqlens, start, end, transitions)
    (gradient,) = torch.autograd.grad(likelihood.sum(), leaf)
    return F.one_hot(tags, 9) - gradient


def _padded_inputs(draw: torch.Generator) -> dict[str, Any]:
    return {"x": normal(draw, len(LENGTHS), LONGEST, 384), "cu_seqlens": offsets()}


def _packed_inputs(draw: torch.Generator) -> dict[str, Any]:
    return {"x": normal(draw, TOKENS, 384), "cu_seqlens": offsets()}


def _batch(device: torch.device) -> packing.PackedBatch:
    return packing.pack_sequences([[0] * length for length in LENGTHS]).to(device)


def _pool(mode: str, function: Callable[[Tensor], Tensor]) -> Case:
    return Case(
        "segment_pool",
        _packed_inputs,
        lambda x, cu_seqlens: ops.segment_pool(x, cu_seqlens, mode),
        lambda x, cu_seqlens: torch.stack([function(part) for part in x.split(LENGTHS)]),
        mode,
    )


CASES = [
    Case(
        "attention",
        lambda draw: {"qkv": normal(draw, TOKENS, 3, 12, 64), "cu_seqlens": offsets()},
        lambda qkv, cu_seqlens: ops.attention(qkv, cu_seqlens, LONGEST),
        _attention,
    ),
    Case(
        "embedding_layer_norm",
        _embedding_inputs,
        ops.embedding_layer_norm,
        _embedding_layer_norm,
    ),
    Case(
        "tied_embedding_layer_norm",
        _embedding_inputs,
        _tied_scores,
        lambda word, **rest: F.linear(_embedding_layer_norm(word=word, **rest), word),
    ),
    Case(
        "layer_norm",
        lambda draw: {**_norm_inputs(draw), "bias": normal(draw, 768)},
        ops.layer_norm,
        lambda x, residual, x_bias, weight, bias: F.layer_norm(
            residual + (x + x_bias), (768,), weight, bias
        ),
    ),
    Case(
        "rms_norm",
        _norm_inputs,
        ops.rms_norm,
        lambda x, residual, x_bias, weight: F.rms_norm(
            residual + (x + x_bias), (768,), weight, 1e-6
        ),
    ),
    Case(
        "bias_gelu",
        lambda draw: {"x": normal(draw, TOKENS, 3072), "bias": normal(draw, 3072)},
        ops.bias_gelu,
        lambda x, bias: F.gelu(x + bias),
    ),
    Case(
        "bias_glu",
        lambda draw: {"x": normal(draw, TOKENS, 2304), "bias": normal(draw, 2304)},
        ops.bias_glu,
        _geglu,
    ),
    Case(
        "masked_cross_entropy",
        _logits_inputs,
        ops.masked_cross_entropy,
        lambda logits, labels: F.cross_entropy(_widened(logits), labels),
    ),
    Case(
        "linear_masked_cross_entropy",
        _projection_inputs,
        ops.linear_masked_cross_entropy,
        lambda hidden, weight, bias, labels: F.cross_entropy(
            _widened(F.linear(hidden, weight, bias)), labels
        ),
    ),
    Case(
        "crf_log_likelihood",
        _crf_inputs,
        _crf_likelihood(ops.crf_log_likelihood),
        _crf_likelihood(crf.log_likelihood),
    ),
    Case(
        "crf_marginals",
        _crf_inputs,
        lambda tags, **rest: ops.crf_marginals(**rest),
        _crf_marginals,
    ),
    _pool("mean", lambda part: part.mean(0)),
    _pool("max", lambda part: part.max(0).values),
    Case(
        "pack",
        _padded_inputs,
        lambda x, cu_seqlens: ops.pack(x, _batch(x.device)),
        lambda x, cu_seqlens: torch.cat(
            [row[:length] for row, length in zip(x, LENGTHS, strict=True)]
        ),
    ),
    Case(
        "unpack",
        _packed_inputs,
        lambda x, cu_seqlens: ops.unpack(x, _batch(x.device)),
        lambda x, cu_seqlens: torch.nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True),
    ),
]
