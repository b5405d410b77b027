"""Random valid calls of every public op."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastenc import ops
from fastenc.packing import PackedBatch, pack, pack_sequences
from fastenc.reference import linear_kl_divergence
from fastenc.reference import rotary as rotary_reference
from tests.helpers.mlm_corruption import tables

WIDTHS = (8, 16, 17, 24, 33, 64, 96, 130)


@dataclass
class Call:
    """An op's arguments; ``truth`` computes the same in plain torch.

    ``compare`` picks the results that are compared; where several answers are right, such as the tags of two paths of
    one score, it leaves them out.
    """

    op: Callable[..., Any]
    arguments: dict[str, Any]
    truth: Callable[..., Any]
    compare: Callable[[Any], Any] = field(default=lambda result: result)
    leaves: tuple[str, ...] | None = (
        None  # what it is differentiated for; None: every floating-point tensor
    )


def by_reference(op: Callable[..., Any]) -> Callable[..., Any]:
    return partial(op, impl="reference")


def dtype_of(rng: Random) -> torch.dtype:
    return rng.choice((torch.float32, torch.float32, torch.bfloat16))


def laid_out(rng: Random, x: Tensor) -> Tensor:
    """The same values in another layout."""
    layout = rng.choice(("rows", "rows", "strided", "columns", "slice"))
    if layout == "strided" and x.dim():
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if layout == "columns" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "slice" and x.dim():
        return torch.cat([x[:0].new_zeros(1, *x.shape[1:]), x])[1:]
    return x


def lengths_of(rng: Random, most: int = 40) -> list[int]:
    return [rng.choice((0, 1, 2, rng.randint(1, most))) for _ in range(rng.randint(0, 5))]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def maybe(rng: Random, value: Any) -> Any:
    return value if rng.random() < 0.5 else None


def norm(op: Callable[..., Any], rng: Random) -> Call:
    shape = [rng.randint(0, 9) for _ in range(rng.randint(0, 2))] + [rng.choice((*WIDTHS, 1000))]
    dtype = dtype_of(rng)
    draw = lambda *sizes: laid_out(rng, torch.randn(sizes).to(dtype))
    arguments = {
        "x": draw(*shape),
        "weight": maybe(rng, torch.randn(shape[-1]).to(rng.choice((dtype, torch.float32)))),
        "residual": maybe(rng, draw(*shape)),
        "x_bias": maybe(rng, draw(shape[-1])),
        "dropout_p": rng.choice((0.0, 0.0, 0.1, 0.9)),
        "eps": rng.choice((1e-5, 1e-3)),
    }
    if op is ops.layer_norm:
        arguments["bias"] = maybe(rng, draw(shape[-1]))
        if rng.random() < 0.2:  # rows of one value, whose rounding a small eps would show
            x = torch.full_like(arguments["x"], rng.choice((0.1, -37.3, 12345.678)))
            arguments |= {"x": x, "residual": None, "x_bias": None, "eps": 1e-12}
    return Call(op, arguments, by_reference(op))


def pre_activations(rng: Random, width: int, dtype: torch.dtype) -> Tensor:
    """Some of them the lowest numbers, of which every activation is 0."""
    x = 3 * torch.randn(rng.randint(0, 9), width)
    if rng.random() < 0.3:
        x[torch.rand(x.shape) < 0.2] = rng.choice((torch.finfo(dtype).min, -1e30, -3e19))
    return laid_out(rng, x.to(dtype))


def bias_gelu(rng: Random) -> Call:
    dtype, width = dtype_of(rng), rng.choice(WIDTHS)
    arguments = {
        "x": pre_activations(rng, width, dtype),
        "bias": maybe(rng, torch.randn(width).to(dtype)),
        "approximate": rng.choice(("none", "tanh")),
    }
    return Call(ops.bias_gelu, arguments, by_reference(ops.bias_gelu))


def bias_glu(rng: Random) -> Call:
    dtype, width = dtype_of(rng), rng.choice(WIDTHS)
    gate = pre_activations(rng, width, dtype)
    arguments = {
        "x": laid_out(rng, torch.cat([gate, 3 * torch.randn(gate.shape).to(dtype)], dim=1)),
        "bias": maybe(rng, torch.randn(2 * width).to(dtype)),
        "activation": rng.choice(("gelu", "silu")),
    }
    return Call(ops.bias_glu, arguments, by_reference(ops.bias_glu))


def linear_gelu(rng: Random) -> Call:
    shape = [rng.randint(0, 9) for _ in range(rng.randint(0, 2))]
    width, inner, out, dtype = *(rng.choice(WIDTHS) for _ in range(3)), dtype_of(rng)
    draw = lambda *sizes: laid_out(rng, (torch.randn(sizes) / sizes[-1] ** 0.5).to(dtype))
    arguments = {
        "x": laid_out(rng, torch.randn(*shape, width).to(dtype)),
        "up_weight": draw(inner, width),
        "up_bias": laid_out(rng, torch.randn(inner).to(dtype)),
        "down_weight": draw(out, inner),
    }
    return Call(ops.linear_gelu, arguments, by_reference(ops.linear_gelu))


def biases_of(rng: Random, heads: int, q: Tensor, k: Tensor) -> dict[str, Any]:
    chance = rng.random()
    if chance < 0.15:
        return extreme_scores(rng, q, k)
    if chance < 0.5:
        return {}
    keys = len(k)
    reach = rng.randint(0, 9)
    return {
        "window_size": rng.choice(((-1, -1), (2, 3), (0, 0), (-1, 4))),
        "alibi_slopes": maybe(rng, torch.rand(heads)),
        "relative_bias": maybe(rng, torch.randn(heads, 2 * reach + 1)),
        "key_bias": maybe(rng, torch.randn(keys)),
    }


def extreme_scores(rng: Random, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Fills q and k so that the scores are large, exact in float32, and often equal; further arguments of the call."""
    magnitude = rng.choice((2.0**20, -(2.0**40), 2.0**60))
    step = max(1.0, 4 * abs(magnitude) * torch.finfo(torch.float32).eps)
    q.zero_()[..., 0], k.zero_()[..., 0] = 4 * magnitude, 1
    q[..., 1], k[..., 1] = 4 * step, torch.randint(-3, 4, k.shape[:2]).to(k.dtype)
    lowest = torch.full(
        (len(k),), torch.finfo(torch.float32).min
    )  # of every key: then all of them are equal
    some = torch.where(torch.rand(len(k)) < 0.5, lowest, 0.0)
    return {
        "softmax_scale": 0.25,
        "window_size": rng.choice(((-1, -1), (2, 3))),
        "key_bias": rng.choice((None, lowest, some)),
    }


def attention(rng: Random) -> Call:
    lengths, heads, dim = lengths_of(rng, 70), rng.randint(1, 3), rng.choice((8, 16, 32, 64))
    qkv = torch.randn(sum(lengths), 3, heads, dim).to(dtype_of(rng))
    arguments = {
        "qkv": laid_out(rng, qkv),
        "cu_seqlens": offsets_of(lengths),
        "max_seqlen": max(lengths, default=0) + rng.randint(0, 3),
        "dropout_p": rng.choice((0.0, 0.0, 0.2)),
        "softmax_scale": rng.choice((None, 0.3)),
    }
    q, k, _ = arguments["qkv"].unbind(1)
    arguments |= biases_of(rng, heads, q, k)
    op = ops.attention
    return Call(op, arguments, by_reference(op), leaves=("qkv", "relative_bias"))


def disentangled_attention(rng: Random) -> Call:
    lengths, heads, dim = lengths_of(rng, 70), rng.randint(1, 3), rng.choice((8, 16, 32, 64))
    reach, rows, dtype = rng.choice((0, 3, 100)), rng.randint(1, 9), dtype_of(rng)
    draw = lambda *shape: laid_out(rng, torch.randn(*shape, heads, dim).to(dtype))
    arguments = {
        "qkv": draw(sum(lengths), 3),
        "cu_seqlens": offsets_of(lengths),
        "max_seqlen": max(lengths, default=0) + rng.randint(0, 3),
        "slots": torch.randint(rows, (2 * reach + 1,)).int(),
        "position_keys": maybe(rng, draw(rows)),
        "position_queries": maybe(rng, draw(rows)),
        "dropout_p": rng.choice((0.0, 0.0, 0.2)),
        "softmax_scale": rng.choice((None, 0.3)),
    }
    op = ops.disentangled_attention
    return Call(op, arguments, by_reference(op))


def cross_attention(rng: Random) -> Call:
    queries, heads, dim = lengths_of(rng, 70), rng.randint(1, 3), rng.choice((8, 16, 32, 64))
    keys = [rng.choice((0, 1, rng.randint(1, 70))) for _ in queries]
    dtype = dtype_of(rng)
    draw = lambda rows: laid_out(rng, torch.randn(rows, heads, dim).to(dtype))
    arguments = {
        "q": draw(sum(queries)),
        "k": draw(sum(keys)),
        "v": draw(sum(keys)),
        "cu_seqlens_q": offsets_of(queries),
        "cu_seqlens_k": offsets_of(keys),
        "max_seqlen_q": max(queries, default=0),
        "max_seqlen_k": max(keys, default=0) + rng.randint(0, 3),
        "dropout_p": rng.choice((0.0, 0.0, 0.2)),
    }
    arguments |= biases_of(rng, heads, arguments["q"], arguments["k"])
    op = ops.cross_attention
    return Call(op, arguments, by_reference(op), leaves=("q", "k", "v", "relative_bias"))


def head_statistics(rng: Random) -> Call:
    lengths, heads, dim = lengths_of(rng), rng.randint(1, 3), rng.choice((16, 32, 64))
    dtype = dtype_of(rng)
    draw = lambda: laid_out(rng, torch.randn(sum(lengths), heads, dim).to(dtype))
    arguments = {
        "q": draw(),
        "k": draw(),
        "cu_seqlens": offsets_of(lengths),
        "max_seqlen": max(lengths, default=0),
        "skip_ends": rng.random() < 0.5,
        "window_size": rng.choice(((-1, -1), (2, 3), (0, 0), (-1, 40))),
        "relative_bias": maybe(rng, torch.randn(heads, 2 * rng.randint(0, 40) + 1)),
    }
    op = ops.head_statistics
    return Call(op, arguments, by_reference(op), lambda found: found[:-1], leaves=())


def crf_inputs(rng: Random) -> dict[str, Any]:
    lengths, tags = lengths_of(rng), rng.choice((1, 2, 5, 9, 17, 33))
    draw = lambda *sizes: laid_out(rng, torch.randn(sizes).to(dtype_of(rng)))
    return {
        "emissions": draw(sum(lengths), tags),
        "cu_seqlens": offsets_of(lengths),
        "start": draw(tags),
        "end": draw(tags),
        "transitions": draw(tags, tags),
    }


def used_of(rng: Random, cu_seqlens: Tensor) -> Tensor | None:
    lengths = cu_seqlens.diff().tolist()
    return maybe(rng, torch.tensor([rng.randint(0, n) for n in lengths], dtype=torch.int32))


def crf_log_likelihood(rng: Random) -> Call:
    inputs = crf_inputs(rng)
    tokens, tags = inputs["emissions"].shape
    inputs["tags"] = torch.randint(tags, (tokens,))
    inputs["seqused"] = used_of(rng, inputs["cu_seqlens"])
    return Call(ops.crf_log_likelihood, inputs, by_reference(ops.crf_log_likelihood))


def crf_marginals(rng: Random) -> Call:
    return Call(ops.crf_marginals, crf_inputs(rng), by_reference(ops.crf_marginals), leaves=())


def crf_decode(rng: Random) -> Call:
    inputs = crf_inputs(rng)
    inputs["seqused"] = used_of(rng, inputs["cu_seqlens"])
    op = ops.crf_decode
    return Call(op, inputs, by_reference(op), lambda found: found[1], leaves=())


def crf_decode_nbest(rng: Random) -> Call:
    inputs = {**crf_inputs(rng), "n": rng.randint(1, 5)}
    op = ops.crf_decode_nbest
    return Call(op, inputs, by_reference(op), lambda found: found[1], leaves=())


def tied_embedding_layer_norm(rng: Random) -> Call:
    shape = [rng.randint(0, 9) for _ in range(rng.randint(1, 2))]
    width, vocabulary, dtype = rng.choice(WIDTHS), rng.randint(1, 50), dtype_of(rng)
    draw = lambda *sizes: laid_out(rng, torch.randn(sizes).to(dtype))
    integers = lambda limit: torch.randint(
        limit, shape, dtype=rng.choice((torch.int64, torch.int32))
    )
    arguments = {
        "input_ids": integers(vocabulary),
        "word": draw(vocabulary, width),
        "weight": maybe(rng, draw(width)),
        "bias": maybe(rng, draw(width)),
        "padding_idx": maybe(rng, rng.randrange(vocabulary)),
        "dropout_p": rng.choice((0.0, 0.0, 0.1)),
        "eps": 1e-5,
    }
    if rng.random() < 0.5:
        offset = rng.choice((0, 2))
        arguments |= {"position_ids": integers(7), "position": draw(7 + offset, width)}
        arguments["position_offset"] = offset
    if rng.random() < 0.5:
        arguments["token_type"] = draw(2, width)
        arguments["token_type_ids"] = maybe(rng, integers(2))
    op = ops.tied_embedding_layer_norm
    return Call(op, arguments, by_reference(op), lambda found: found[0])


def embedding_layer_norm(rng: Random) -> Call:
    arguments = tied_embedding_layer_norm(rng).arguments
    op = ops.embedding_layer_norm
    return Call(op, arguments, by_reference(op))


def loss_options(rng: Random) -> dict[str, Any]:
    return {
        "label_smoothing": rng.choice((0.0, 0.1)),
        "z_loss": rng.choice((0.0, 1e-2)),
        "reduction": rng.choice(("mean", "sum", "none")),
    }


def labels_of(rng: Random, rows: int, vocabulary: int) -> Tensor:
    choices = [-100, rng.randrange(vocabulary)] + [rng.randrange(vocabulary) for _ in range(5)]
    return torch.tensor([rng.choice(choices) for _ in range(rows)], dtype=torch.int64)


def masked_cross_entropy(rng: Random) -> Call:
    rows, vocabulary = rng.randint(0, 20), rng.choice((1, 2, 9, 100, 517))
    arguments = {
        "logits": laid_out(rng, 3 * torch.randn(rows, vocabulary).to(dtype_of(rng))),
        "labels": labels_of(rng, rows, vocabulary),
        **loss_options(rng),
    }
    op = ops.masked_cross_entropy
    return Call(op, arguments, by_reference(op))


def linear_masked_cross_entropy(rng: Random) -> Call:
    rows, vocabulary, width = rng.randint(0, 20), rng.choice((2, 9, 100, 517)), rng.choice(WIDTHS)
    dtype = dtype_of(rng)
    arguments = {
        "hidden": laid_out(rng, torch.randn(rows, width).to(dtype)),
        "weight": laid_out(rng, torch.randn(vocabulary, width).to(dtype)),
        "bias": maybe(rng, torch.randn(vocabulary).to(dtype)),
        "labels": labels_of(rng, rows, vocabulary),
        **loss_options(rng),
    }
    op = ops.linear_masked_cross_entropy
    return Call(op, arguments, by_reference(op))


def divergence(rng: Random) -> Call:
    rows, vocabulary, dtype = rng.randint(0, 12), rng.choice((2, 9, 100)), dtype_of(rng)
    draw = lambda *sizes: laid_out(rng, torch.randn(sizes).to(dtype))
    arguments: dict[str, Any] = {}
    for whose in ("", "teacher_"):
        width = rng.choice(WIDTHS)
        arguments[f"{whose}hidden"] = draw(rows, width)
        arguments[f"{whose}weight"] = draw(vocabulary, width)
        arguments[f"{whose}bias"] = maybe(rng, draw(vocabulary))
    arguments["mask"] = maybe(rng, torch.rand(rows) < 0.5)
    arguments["temperature"] = rng.choice((1.0, 2.0))
    truth, leaves = linear_kl_divergence.linear_kl_divergence, ("hidden", "weight", "bias")
    return Call(ops.linear_kl_divergence, arguments, truth, leaves=leaves)


def mlm_corruption(rng: Random) -> Call:
    is_special, choices, cutoffs = tables(50)
    arguments = {
        "input_ids": torch.randint(50, (rng.randint(0, 200),)),
        "is_special": is_special,
        "choices": choices,
        "cutoffs": cutoffs,
        "mask_token_id": 3,
        "probability": rng.uniform(0.01, 0.99),
        "seed": torch.tensor([rng.getrandbits(60)]),
    }
    op = ops.mlm_corruption
    return Call(op, arguments, by_reference(op))


def batch_of(rng: Random) -> PackedBatch:
    """Packed from lists, or from a padded batch with its real tokens anywhere."""
    rows = [[rng.randrange(50) for _ in range(n)] for n in lengths_of(rng, 12)]
    if rng.random() < 0.5:
        return pack_sequences(rows)
    mask = torch.rand(len(rows), rng.randint(0, 12)) < rng.random()
    return pack(torch.randint(50, mask.shape), mask.long(), torch.zeros_like(mask).long())


def pack_rows(rng: Random) -> Call:
    batch = batch_of(rng)
    shape = (*batch.padded_indices()[1], *(rng.randint(1, 9) for _ in range(rng.randint(0, 2))))
    arguments = {"x": laid_out(rng, torch.randn(shape).to(dtype_of(rng))), "batch": batch}
    return Call(ops.pack, arguments, by_reference(ops.pack))


def unpack_rows(rng: Random) -> Call:
    batch = batch_of(rng)
    shape = (batch.total_tokens, *(rng.randint(1, 9) for _ in range(rng.randint(0, 2))))
    values = laid_out(rng, torch.randn(shape).to(dtype_of(rng)))
    arguments = {"values": values, "batch": batch, "padding_value": rng.choice((0.0, -1.5))}
    return Call(ops.unpack, arguments, by_reference(ops.unpack))


def segment_pool(rng: Random) -> Call:
    lengths, width = lengths_of(rng), rng.choice(WIDTHS)
    arguments = {
        "x": laid_out(rng, torch.randn(sum(lengths), width).to(dtype_of(rng))),
        "cu_seqlens": offsets_of(lengths),
        "mode": rng.choice(("cls", "mean", "max")),
    }
    return Call(ops.segment_pool, arguments, by_reference(ops.segment_pool))


def rotary(rng: Random) -> Call:
    lengths, heads, dim = lengths_of(rng), rng.randint(1, 3), 2 * rng.choice(WIDTHS[:6])
    longest = max(lengths, default=0)
    arguments = {
        "x": torch.randn(sum(lengths), heads, dim).to(dtype_of(rng)),
        "table": laid_out(
            rng, torch.randn(longest + rng.randint(0, 3), 2 * rng.randint(1, dim // 2))
        ),
        "cu_seqlens": offsets_of(lengths),
        "max_seqlen": longest,
    }
    truth = lambda x, table, cu_seqlens, max_seqlen: rotary_reference.rotary(x, table, cu_seqlens)
    return Call(ops.rotary, arguments, truth, leaves=("x",))


# op: a random call of it
CALLS: dict[str, Callable[[Random], Call]] = {
    "attention": attention,
    "bias_gelu": bias_gelu,
    "bias_glu": bias_glu,
    "crf_decode": crf_decode,
    "crf_decode_nbest": crf_decode_nbest,
    "crf_log_likelihood": crf_log_likelihood,
    "crf_marginals": crf_marginals,
    "cross_attention": cross_attention,
    "disentangled_attention": disentangled_attention,
    "embedding_layer_norm": embedding_layer_norm,
    "head_statistics": head_statistics,
    "layer_norm": partial(norm, ops.layer_norm),
    "linear_gelu": linear_gelu,
    "linear_kl_divergence": divergence,
    "linear_masked_cross_entropy": linear_masked_cross_entropy,
    "masked_cross_entropy": masked_cross_entropy,
    "mlm_corruption": mlm_corruption,
    "pack": pack_rows,
    "rms_norm": partial(norm, ops.rms_norm),
    "rotary": rotary,
    "segment_pool": segment_pool,
    "tied_embedding_layer_norm": tied_embedding_layer_norm,
    "unpack": unpack_rows,
}
