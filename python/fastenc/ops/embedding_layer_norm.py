"""BERT's embeddings in one pass: sum of table rows, LayerNorm, dropout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base import debug
from fastenc.ops import checks
from fastenc.ops._index_sum import MAX_SIZE, add_sorted, index_sum, zero_rows
from fastenc.ops.cases import Draw, Size, declare_case
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.reference import embedding_layer_norm as reference

declare("embedding_layer_norm", "cpp", "triton")
declare("tied_embedding_layer_norm", "cpp", "triton")

OP = "embedding_layer_norm"


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
    eps: float = 1e-12,
    impl: str = "auto",
) -> Tensor:
    """dropout(LayerNorm(word + position + token type)) in one pass.

        h = word[input_ids] + position[position_ids + position_offset] + token_type[token_type_ids]
        y = dropout((h - mean(h)) / sqrt(var(h) + eps) * weight + bias)

    Args:
        input_ids: (...), int64 or int32, in [0, vocabulary); packed tokens have shape (total_tokens,).
        word: (vocabulary, width), floating point.
        weight, bias: (width,) or None, LayerNorm's; any floating dtype.
        position_ids, position: integers of input_ids' shape, and a table (rows, width) of word's dtype; give both or
            neither.
        token_type_ids: integers of input_ids' shape, or None for row 0 everywhere.
        token_type: (types, width) of word's dtype, or None.
        position_offset: added to the position ids (RoBERTa's first token takes row 2).
        padding_idx, position_padding_idx: the row of word, or of position, that gets no gradient, as in
            torch.nn.Embedding. None: there is no such row.
        dropout_p: probability of zeroing an element, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation. The mask comes from the device's default generator.
        eps: added to the variance.
        impl: "auto", "cpp", "triton" (width up to 4096) or "reference".
    Returns: y (..., width), dtype of word.
    Raises: ValueError stating rule, received value, remedy. The values of ids are checked on CPU tensors only, because
        on a GPU that would wait for the device.
    Numerics: sums and statistics in fp32. Gradients of tables are sums over tokens in fp32, in an order that depends on
        ids and shapes alone. On a GPU, a token with a gradient that is not finite can also make neighbouring rows NaN
        in the gradients of position and token_type.
    Deterministic: yes. Differentiable: word, position, token_type, weight, bias.
    Source: Devlin et al. 2018, arXiv:1810.04805.
    """
    y, _ = tied_embedding_layer_norm(
        input_ids,
        word,
        weight,
        bias,
        position_ids=position_ids,
        position=position,
        token_type_ids=token_type_ids,
        token_type=token_type,
        position_offset=position_offset,
        padding_idx=padding_idx,
        position_padding_idx=position_padding_idx,
        dropout_p=dropout_p,
        eps=eps,
        impl=impl,
    )
    return y


def tied_embedding_layer_norm(
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
    eps: float = 1e-12,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`embedding_layer_norm`, and the word embeddings again as a second result, for a tied decoder.

    If the embeddings and a decoder both use ``word``, autograd computes two gradients of its size and adds them up. If
    the decoder takes the second result instead, the decoder's gradient passes through the backward of this op, which
    adds the tokens' rows to it in place. This saves filling a second gradient with zeros and adding it. The values are
    the same either way.

        hidden, tied_word = tied_embedding_layer_norm(ids, word, ...)
        loss = linear_masked_cross_entropy(encode(hidden), tied_word, None, labels)

    The backward overwrites the gradient of the second result. Use it in matrix products only, whose gradient tensor
    nothing else holds. Do not use it in a sum, whose terms share one gradient tensor, nor with a hook or
    ``retain_grad``.

    Arguments, errors and numerics as :func:`embedding_layer_norm`.
    Returns: (y, word), the second sharing the memory of ``word``.
    """
    _check(input_ids, word, weight, bias, position_ids, position, token_type_ids, token_type)
    checks.check_dropout(OP, dropout_p)
    checks.check_eps(OP, eps)
    _check_padding("padding_idx", padding_idx, word)
    _check_padding("position_padding_idx", position_padding_idx, position)
    limit = None if word.shape[1] <= 4096 else f"width must be at most 4096, got {word.shape[1]}"
    chosen = choose(OP, impl, word, triton_limit=limit)
    ids_and_tables = (
        input_ids,
        word,
        position_ids,
        position,
        token_type_ids,
        token_type,
        position_offset,
    )
    rng_state = checks.mask_rng_state(OP, None, dropout_p, word)
    if (chosen == "reference" or debug.ENABLED) and debug.may_read(input_ids):
        _check_values(*ids_and_tables)
    if chosen == "reference":
        y = reference.embedding_layer_norm(
            input_ids,
            word,
            weight,
            bias,
            position_ids=position_ids,
            position=position,
            token_type_ids=token_type_ids,
            token_type=token_type,
            position_offset=position_offset,
            padding_idx=padding_idx,
            position_padding_idx=position_padding_idx,
            dropout_p=dropout_p,
            rng_state=rng_state,
            eps=eps,
        )
        return y, word
    ids = tuple(None if v is None else v.long() for v in (input_ids, position_ids, token_type_ids))
    tensors = (*ids, word, position, token_type, weight, bias, rng_state)
    paddings = tuple(-1 if p is None else p for p in (padding_idx, position_padding_idx))
    try:
        return _run(tensors, position_offset, paddings, dropout_p, eps)
    except RuntimeError:
        # The CPU kernel checks every id before it starts. The error that names the wrong id is raised here.
        if word.device.type == "cpu":
            _check_values(*ids_and_tables)
        raise


def _run(tensors, position_offset, paddings, dropout_p, eps):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        y, table = _EmbeddingLayerNorm.apply(*tensors, position_offset, paddings, dropout_p, eps)
        # If the table is frozen, return the original tensor, so that autograd does not compute its gradient just
        # because other inputs need one.
        return y, table if tensors[3].requires_grad else tensors[3]
    y, _, _ = torch.ops.fastenc.embedding_layer_norm_fwd(
        *tensors, position_offset, dropout_p, eps, False
    )
    return y, tensors[3]


class _EmbeddingLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        input_ids,
        position_ids,
        token_type_ids,
        word,
        position,
        token_type,
        weight,
        bias,
        rng_state,
        position_offset,
        paddings,
        dropout_p,
        eps,
    ):
        inputs = (input_ids, position_ids, token_type_ids, word, position, token_type, weight)
        y, mean, rstd = torch.ops.fastenc.embedding_layer_norm_fwd(
            *inputs, bias, rng_state, position_offset, dropout_p, eps, True
        )
        ctx.save_for_backward(*inputs, bias, rng_state, mean, rstd)
        ctx.position_offset, ctx.paddings, ctx.dropout_p = position_offset, paddings, dropout_p
        ctx.set_materialize_grads(False)
        return y, word.view_as(word)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtied):
        if dy is None:
            return None, None, None, dtied, *(None,) * 9
        *inputs, weight, bias, rng_state, mean, rstd = ctx.saved_tensors
        input_ids, position_ids, token_type_ids, word, position, token_type = inputs
        needs_word, needs_position, needs_type, needs_weight, needs_bias = ctx.needs_input_grad[3:8]
        dh, dweight, dbias = torch.ops.fastenc.embedding_layer_norm_bwd(
            dy,
            *inputs,
            weight,
            rng_state,
            mean,
            rstd,
            ctx.position_offset,
            ctx.dropout_p,
            needs_weight or needs_bias,
        )
        dh = dh.view(-1, word.shape[1])
        dword = dposition = dtype = None
        if needs_word:
            dword = zero_rows(word) if dtied is None else _for_writing(dtied)
            add_sorted(dword, dh, input_ids, 0, ctx.paddings[0])
        if needs_position:
            offset, padding_idx = ctx.position_offset, ctx.paddings[1]
            dposition = _table_gradient(position, dh, position_ids, offset, padding_idx)
        if needs_type and token_type_ids is None:  # every token has type 0
            dtype = zero_rows(token_type)
            dtype[0] = torch.ops.fastenc.column_sum(dh)
        elif needs_type:
            dtype = _table_gradient(token_type, dh, token_type_ids, 0, -1)
        return (
            None,
            None,
            None,
            dword,
            dposition,
            dtype,
            dweight.to(weight.dtype) if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            *(None,) * 5,
        )


def _for_writing(gradient: Tensor) -> Tensor:
    # A compiled backward must not change its inputs. The compiler removes the copy where it can.
    return gradient.clone() if torch.compiler.is_compiling() else gradient.contiguous()


def _table_gradient(
    table: Tensor, rows: Tensor, ids: Tensor, offset: int, padding_idx: int
) -> Tensor:
    """The gradient of a table of positions or token types: the sum of ``rows`` for each id."""
    if table.shape[0] <= MAX_SIZE.get(rows.element_size(), 0):
        return index_sum(rows, ids, table.shape[0], offset, padding_idx)
    gradient = zero_rows(table)
    add_sorted(gradient, rows, ids, offset, padding_idx)
    return gradient


def _fake_forward(
    input_ids,
    position_ids,
    token_type_ids,
    word,
    position,
    token_type,
    weight,
    bias,
    rng_state,
    position_offset,
    dropout_p,
    eps,
    save,
):
    statistics = lambda: word.new_empty((input_ids.numel() if save else 0,), dtype=torch.float32)
    return word.new_empty((*input_ids.shape, word.shape[1])), statistics(), statistics()


def _fake_backward(
    dy,
    input_ids,
    position_ids,
    token_type_ids,
    word,
    position,
    token_type,
    weight,
    rng_state,
    mean,
    rstd,
    position_offset,
    dropout_p,
    wants_affine,
):
    sums = lambda: word.new_empty((word.shape[1] if wants_affine else 0,), dtype=torch.float32)
    return torch.empty_like(dy, memory_format=torch.contiguous_format), sums(), sums()


TABLES = (
    "Tensor input_ids, Tensor? position_ids, Tensor? token_type_ids, Tensor word, Tensor? position, "
    "Tensor? token_type, Tensor? weight"
)
define(
    f"embedding_layer_norm_fwd({TABLES}, Tensor? bias, Tensor? rng_state, int position_offset, float dropout_p, "
    "float eps, bool save) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    triton="embedding_layer_norm.embedding_layer_norm_forward",
)
define(
    f"embedding_layer_norm_bwd(Tensor dy, {TABLES}, Tensor? rng_state, Tensor mean, Tensor rstd, int position_offset, "
    "float dropout_p, bool wants_affine) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    triton="embedding_layer_norm.embedding_layer_norm_backward",
)


def _check(input_ids, word, weight, bias, position_ids, position, token_type_ids, token_type):
    if word.dim() != 2 or not word.is_floating_point():
        raise ValueError(
            f"{OP}: word must be floating point of shape (vocabulary, width), got {word.dtype} of shape "
            f"{tuple(word.shape)}"
        )
    if (position_ids is None) != (position is None):
        given, lacking = (
            ("position_ids", "position") if position is None else ("position", "position_ids")
        )
        raise ValueError(
            f"{OP}: position_ids and position go together, got {given} only: give {lacking} too"
        )
    if token_type_ids is not None and token_type is None:
        raise ValueError(
            f"{OP}: token_type_ids need the table token_type, got None: give the table, or leave the ids out"
        )
    for name, ids in (
        ("input_ids", input_ids),
        ("position_ids", position_ids),
        ("token_type_ids", token_type_ids),
    ):
        if ids is None:
            continue
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{OP}: {name} must be int64 or int32, got {ids.dtype}")
        if ids.shape != input_ids.shape:
            raise ValueError(
                f"{OP}: {name} must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(ids.shape)}"
            )
        checks.check_device(OP, name, ids, word)
    for name, table in (("position", position), ("token_type", token_type)):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[1] != word.shape[1] or table.dtype != word.dtype:
            raise ValueError(
                f"{OP}: {name} must have shape (rows, {word.shape[1]}) and word's dtype {word.dtype}, "
                f"got {table.dtype} of shape {tuple(table.shape)}"
            )
        checks.check_device(OP, name, table, word)
    if token_type is not None and not token_type.shape[0]:
        raise ValueError(f"{OP}: token_type must have at least one row, got none: leave it out")
    for name, vector in (("weight", weight), ("bias", bias)):
        checks.check_vector(OP, name, vector, word)


def _check_padding(name: str, padding_idx: int | None, table: Tensor | None) -> None:
    if padding_idx is None:
        return
    rows = 0 if table is None else table.shape[0]
    if not 0 <= padding_idx < rows:
        raise ValueError(
            f"{OP}: {name} must be a row of its table, in [0, {rows}), got {padding_idx}"
        )


def _check_values(input_ids, word, position_ids, position, token_type_ids, token_type, offset):
    _check_range("token ids", input_ids, word, 0, "was another model's tokenizer used?")
    if position is not None:
        _check_range("positions", position_ids, position, offset, "cut or split the sequence")
    if token_type_ids is not None:
        _check_range("token types", token_type_ids, token_type, 0, "give 0 or 1")


def _check_range(what: str, ids: Tensor, table: Tensor, offset: int, remedy: str) -> None:
    if not ids.numel():
        return
    low, high = (int(value) for value in ids.aminmax())
    if low + offset < 0 or high + offset >= table.shape[0]:
        raise ValueError(
            f"{OP}: {what} must be in [{-offset}, {table.shape[0] - offset}), "
            f"got {low if low + offset < 0 else high}: {remedy}"
        )


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    shape, words, types = draw.leading(size.tokens), size.vocabulary, draw.choice(2, 1)
    ids = lambda limit: draw.integers(
        limit, *shape, dtype=draw.choice(torch.int64, torch.int64, torch.int32)
    )
    # A quarter of the tokens are one word, as [MASK] is.
    one_word = draw.integers(4, *shape) == 0
    inputs = {
        "input_ids": ids(words).masked_fill(one_word, 0),
        "word": draw.normal(words, size.width),
        "weight": draw.choice(draw.parameter(size.width), None),
        "bias": draw.choice(draw.parameter(size.width), None),
        "padding_idx": draw.choice(None, words - 1),
        "dropout_p": draw.choice(0.0, 0.1),
        "eps": draw.choice(1e-12, 1e-5),
    }
    if draw.choice(True, False):
        offset, positions = draw.choice(0, 2), max(size.longest, 1)
        inputs |= {
            "position_ids": ids(positions),
            "position": draw.normal(positions + offset, size.width),
            "position_offset": offset,
        }
    if draw.choice(True, False):
        inputs["token_type"] = draw.normal(types, size.width)
        inputs["token_type_ids"] = draw.choice(ids(types), None)
    return inputs


def _plain(
    input_ids,
    word,
    weight,
    bias,
    position_ids,
    position,
    token_type,
    token_type_ids,
    eps,
    **options,
) -> Tensor:
    h = F.embedding(input_ids, word) + F.embedding(token_type_ids, token_type)
    h = h + F.embedding(position_ids, position)
    return F.layer_norm(h, weight.shape, weight, bias, eps)


declare_case(embedding_layer_norm, _case_inputs, _plain)
# The table as an output has a gradient of its own: that of its squares.
declare_case(
    tied_embedding_layer_norm,
    _case_inputs,
    lambda word, **rest: torch.cat([_plain(word=word, **rest), word.square()]),
    result=lambda both: torch.cat([both[0].reshape(-1, both[1].shape[1]), both[1].square()]),
)
