"""The cases of the numerics report: each op at a small shape of real encoders, and the same in plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc import ops, packing
from fastenc.reference import crf

LENGTHS = (5, 64, 33, 128)
LONG_LENGTHS = (5, 300, 33)  # past the kernel of short sequences
TOKENS = sum(LENGTHS)
LONGEST = max(LENGTHS)
WINDOW, FARTHEST = 64, 32  # tokens to each side; the largest distance with its own bias in a table


@dataclass(frozen=True)
class Case:
    """One op, computed by the library and by plain PyTorch.

    Fields:
        op: the op's name in ``fastenc.ops``.
        inputs: makes the arguments from a CPU generator. Floating-point tensors are cast to the dtype under test and
            differentiated; other values are passed unchanged, tensors on the device.
        ours, plain: called with the inputs by name; each returns one tensor of the same dtype. ``plain`` in float64 is
            the truth, so it must compute in float64 if its inputs are float64.
        detail: distinguishes several cases of one op.
    """

    op: str
    inputs: Callable[[torch.Generator], dict[str, Any]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    detail: str = ""


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def offsets(lengths: Sequence[int] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plain_attention(qkv: Sequence[Tensor], lengths, key_lengths, mask=None) -> Tensor:
    """One sequence at a time. ``mask(length)`` is added to the scores of a sequence of that length."""
    sizes = (lengths, key_lengths, key_lengths)
    rows = zip(*(x.split(n) for x, n in zip(qkv, sizes, strict=True)), strict=True)
    parts = []
    for row in rows:
        added = None if mask is None else mask(len(row[0])).to(qkv[0].dtype)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in row)
        parts.append(F.scaled_dot_product_attention(q, k, v, added)[0].transpose(0, 1))
    return torch.cat(parts)


def _distances(length: int, device: torch.device) -> Tensor:
    positions = torch.arange(length, device=device)
    return positions - positions[:, None]


def _attention(detail: str, lengths: Sequence[int], mask=None, **options: Any) -> Case:
    """Attention over packed qkv. ``mask``: the options as a mask for a sequence of the given length."""
    longest = max(lengths)
    return Case(
        "attention",
        lambda draw: {"qkv": normal(draw, sum(lengths), 3, 12, 64), "cu_seqlens": offsets(lengths)},
        lambda qkv, cu_seqlens: ops.attention(qkv, cu_seqlens, longest, **options),
        lambda qkv, cu_seqlens: _plain_attention(
            qkv.unbind(1), lengths, lengths, mask and partial(mask, qkv.device)
        ),
        detail,
    )


def _window(device: torch.device, length: int) -> Tensor:
    hidden = _distances(length, device).abs() > WINDOW
    return torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf"))


def _relative_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "qkv": normal(draw, sum(LONG_LENGTHS), 3, 12, 64),
        "relative_bias": normal(draw, 12, 2 * FARTHEST + 1),
        "cu_seqlens": offsets(LONG_LENGTHS),
    }


def _relative_attention(qkv: Tensor, relative_bias: Tensor, cu_seqlens: Tensor) -> Tensor:
    def mask(length: int) -> Tensor:
        columns = _distances(length, qkv.device).clamp(-FARTHEST, FARTHEST) + FARTHEST
        return relative_bias[:, columns]

    return _plain_attention(qkv.unbind(1), LONG_LENGTHS, LONG_LENGTHS, mask)


def _rotary_inputs(draw: torch.Generator) -> dict[str, Any]:
    frequencies = 10000 ** -(torch.arange(32, dtype=torch.float64) / 32)
    angles = torch.arange(LONGEST, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    # A function, because tensors of floating point are cast to the dtype under test: a table stays in float32.
    return {
        "qkv": normal(draw, TOKENS, 3, 12, 64),
        "cu_seqlens": offsets(),
        "table": lambda like: table.to(like.device),
    }


def _rotated(x: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
    cosine, sine = (
        torch.cat([part[:length] for length in LENGTHS])[:, None].to(x.dtype)
        for part in table(x).chunk(2, 1)
    )
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _plain_rotary_attention(qkv: Tensor, cu_seqlens: Tensor, table) -> Tensor:
    q, k, v = qkv.unbind(1)
    return _plain_attention((_rotated(q, table), _rotated(k, table), v), LENGTHS, LENGTHS)


def _head_inputs(lengths: Sequence[int], draw: torch.Generator) -> dict[str, Tensor]:
    q, k = (normal(draw, sum(lengths), 12, 64) for _ in range(2))
    table = normal(draw, 12, 2 * FARTHEST + 1)
    return {"q": q, "k": k, "relative_bias": table, "cu_seqlens": offsets(lengths)}


def _head_statistics(q: Tensor, k: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    found = ops.head_statistics(q, k, cu_seqlens, max(LONG_LENGTHS), **options)
    return torch.stack(found[:7], -1)


def _plain_head_statistics(q: Tensor, k: Tensor, lengths, mask=None) -> Tensor:
    """From all probabilities, one sequence at a time; ``mask``: as in :func:`_plain_attention`."""
    parts = []
    for q_rows, k_rows in zip(q.split(lengths), k.split(lengths), strict=True):
        scores = (
            torch.einsum("ihd,jhd->hij", _widened(q_rows), _widened(k_rows)) * q.shape[2] ** -0.5
        )
        length = len(q_rows)
        if mask is not None:
            scores = scores + mask(length).to(scores.dtype)
        p = scores.softmax(-1)
        away = _distances(length, q.device).abs()
        around = F.pad(p, (1, 1))
        columns = (
            torch.special.entr(p).sum(-1),
            (p * away).sum(-1),
            p[..., 0],
            p[..., -1],
            *(around.diagonal(offset, 1, 2) for offset in (1, 0, 2)),
        )
        parts.append(torch.stack([column[:, :length] for column in columns], -1).transpose(0, 1))
    return torch.cat(parts)


def _head_mask(relative_bias: Tensor, length: int) -> Tensor:
    away = _distances(length, relative_bias.device)
    hidden = _window(relative_bias.device, length)
    return relative_bias[:, away.clamp(-FARTHEST, FARTHEST) + FARTHEST] + hidden


def _cross_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    tokens = sum(LONG_LENGTHS)
    return {
        "q": normal(draw, sum(LENGTHS[1:]), 12, 64),
        "k": normal(draw, tokens, 12, 64),
        "v": normal(draw, tokens, 12, 64),
        "cu_q": offsets(LENGTHS[1:]),
        "cu_k": offsets(LONG_LENGTHS),
    }


def _divergence_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "hidden": normal(draw, 64, 384),
        "weight": normal(draw, 8000, 384) / 384**0.5,
        "bias": normal(draw, 8000),
    }


def _teacher(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
    """Tensors of the student's size, without gradients."""
    numbers = torch.arange(8000 * 384, device=hidden.device).view(8000, 384)
    weight = (0.1 * torch.sin(numbers.double())).to(hidden.dtype)
    return hidden.detach().flip(0), weight, None


def _divergence(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    states, teacher, _ = _teacher(hidden)
    logits, targets = (
        _widened(x) for x in (F.linear(hidden, weight, bias), F.linear(states, teacher))
    )
    log_q, log_p = logits.log_softmax(1), targets.log_softmax(1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _norm_inputs(draw: torch.Generator) -> dict[str, Tensor]:
    wide, narrow = (TOKENS, 768), (768,)
    return {
        "x": normal(draw, *wide),
        "residual": normal(draw, *wide),
        "x_bias": normal(draw, *narrow),
        "weight": normal(draw, *narrow),
    }


def _residual_sum(x, residual, x_bias, weight) -> Tensor:
    return torch.cat(
        ops.rms_norm(x, weight, residual=residual, x_bias=x_bias, return_residual_sum=True)
    )


def _plain_residual_sum(x, residual, x_bias, weight) -> Tensor:
    h = residual + (x + x_bias)
    return torch.cat([F.rms_norm(h, (768,), weight, 1e-6), h])


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
    """The logits of a decoder that is tied to the embeddings."""
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
    _attention("", LENGTHS),
    _attention("long", LONG_LENGTHS),
    _attention("window", LONG_LENGTHS, _window, window_size=(WINDOW, WINDOW)),
    Case(
        "attention",
        _relative_inputs,
        lambda qkv, relative_bias, cu_seqlens: ops.attention(
            qkv, cu_seqlens, max(LONG_LENGTHS), relative_bias=relative_bias
        ),
        _relative_attention,
        "relative bias",
    ),
    Case(
        "attention",
        _rotary_inputs,
        lambda qkv, cu_seqlens, table: ops.attention(qkv, cu_seqlens, LONGEST, rotary=table(qkv)),
        _plain_rotary_attention,
        "rotary",
    ),
    Case(
        "rotary",
        _rotary_inputs,
        lambda qkv, cu_seqlens, table: ops.rotary(
            qkv.flatten(1, 2), table(qkv), cu_seqlens, LONGEST
        ),
        lambda qkv, cu_seqlens, table: _rotated(qkv.flatten(1, 2), table),
    ),
    Case(
        "cross_attention",
        _cross_inputs,
        lambda q, k, v, cu_q, cu_k: ops.cross_attention(
            q, k, v, cu_q, cu_k, LONGEST, max(LONG_LENGTHS)
        ),
        lambda q, k, v, cu_q, cu_k: _plain_attention((q, k, v), LENGTHS[1:], LONG_LENGTHS),
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
    Case("rms_norm", _norm_inputs, _residual_sum, _plain_residual_sum, "with the residual sum"),
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
        "linear_kl_divergence",
        _divergence_inputs,
        lambda hidden, weight, bias: ops.linear_kl_divergence(
            hidden, weight, bias, *_teacher(hidden)
        ),
        _divergence,
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
        "head_statistics",
        partial(_head_inputs, LENGTHS),
        lambda q, k, relative_bias, cu_seqlens: _head_statistics(q, k, cu_seqlens),
        lambda q, k, relative_bias, cu_seqlens: _plain_head_statistics(q, k, LENGTHS),
    ),
    Case(
        "head_statistics",
        partial(_head_inputs, LONG_LENGTHS),
        lambda q, k, relative_bias, cu_seqlens: _head_statistics(
            q, k, cu_seqlens, window_size=(WINDOW, WINDOW), relative_bias=relative_bias
        ),
        lambda q, k, relative_bias, cu_seqlens: _plain_head_statistics(
            q, k, LONG_LENGTHS, partial(_head_mask, relative_bias)
        ),
        "window and relative bias",
    ),
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
