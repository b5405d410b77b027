"""Attention in which a block of queries sees some blocks of keys (BigBird)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, sequences
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare, head_limits
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import block_sparse_attention as reference

OP = "block_sparse_attention"
declare(OP, "cpp", "triton")


class BlockPlan(NamedTuple):
    """Which blocks of keys each block of queries sees, for a packed batch of T tokens in B sequences.

    A sequence's blocks are its tokens [0, block_size), [block_size, 2 block_size), ...; the last may be shorter. The
    plan has T // block_size + B rows, a number that the host knows. Block i of sequence s has row
    cu_seqlens[s] // block_size + s + i; some rows have no block.

    Fields:
        starts: int32 (plans * rows + 1,), ascending from 0: row r of plan p has the entries from starts[p * rows + r]
            to starts[p * rows + r + 1]. There is one plan for all heads, or one for each head.
        columns: int32 (entries,), the index of a block of keys in the sequence. Entries past the last row's are unused.
        counts: int32 (entries,), at least 1: how often the softmax counts this block's keys.
    """

    starts: Tensor
    columns: Tensor
    counts: Tensor


def block_sparse_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    plan: BlockPlan,
    block_size: int,
    *,
    softmax_scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention inside each sequence of a packed batch, in which a block of queries sees the blocks that a plan names.

        s[i, j] = softmax_scale * q[i] . k[j] + log n[i, j]
        out[i] = sum_j softmax_j(s[i, j]) v[j]

    n[i, j] is the sum of the counts of key j's block in the row of query i's block. Keys of blocks that the row does
    not name have no weight. A query that sees no key has the output 0.

    Args:
        qkv: (total_tokens, 3, num_heads, head_dim), floating point. It is read in place if its last stride is 1.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        plan: ``BlockPlan(starts, columns, counts)`` of this module, three int32 vectors. Block i of sequence s has row
            r = cu_seqlens[s] // block_size + s + i of total_tokens // block_size + batch rows, and row r the entries
            starts[r] to starts[r + 1]: the indices ``columns`` of blocks of keys in the sequence, and how often the
            softmax counts them. With as many rows for each head, every head has a plan of its own. On a GPU the values
            are not checked, because that would wait for the device.
        block_size: tokens of a block.
        softmax_scale: head_dim ** -0.5 if None.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 128) or "reference".
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. On a GPU, products of float32 are in TF32 if torch.backends.cuda.matmul allows it.
        Deterministic: yes; no result depends on the number of threads.
    Memory: C++ and Triton keep nothing of size length x length, the reference does.
    Differentiable: qkv.
    Source: Zaheer et al. 2020, arXiv:2007.14062.
    """
    checks.check_qkv(OP, qkv)
    checks.check_device(OP, "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    _check_plan(plan, block_size, qkv, cu_seqlens)
    head_dim = qkv.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    arguments = (*plan, cu_seqlens, max_seqlen, block_size)
    if choose(OP, impl, qkv, **head_limits(head_dim)) == "reference":
        q, k, v = qkv.unbind(1)
        out, _ = reference.block_sparse_attention(
            q, k, v, *plan, cu_seqlens, max_seqlen, block_size, softmax_scale=scale
        )
        return out
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _BlockSparseAttention.apply(qkv, *arguments, scale)
    return torch.ops.fastenc.block_sparse_attention_fwd(*qkv.unbind(1), *arguments, scale)[0]


class _BlockSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, *arguments):
        out, lse = torch.ops.fastenc.block_sparse_attention_fwd(*qkv.unbind(1), *arguments)
        # The backward computes the probabilities again.
        ctx.save_for_backward(out, lse, qkv, *arguments[:TENSORS])
        ctx.numbers = arguments[TENSORS:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        out, lse, qkv, *tensors = ctx.saved_tensors
        dqkv, _ = torch.ops.fastenc.block_sparse_attention_bwd(
            dout, out, lse, *qkv.unbind(1), *tensors, *ctx.numbers, False
        )
        return dqkv, *(None,) * (TENSORS + len(ctx.numbers))


def plan_rows(total_tokens: int, batch: int, block_size: int) -> int:
    """The number of rows of a :class:`BlockPlan`."""
    return total_tokens // block_size + batch


def first_rows(cu_seqlens: Tensor, block_size: int) -> Tensor:
    """(batch,): the row of a :class:`BlockPlan` of each sequence's first block."""
    offsets = cu_seqlens[:-1]
    return offsets // block_size + torch.arange(len(offsets), device=offsets.device)


def visible_pairs(plan: BlockPlan, cu_seqlens: Tensor, block_size: int) -> float:
    """The number of pairs of a query and a key that it sees, in one head of the batch: the mean of the heads' plans.

    It reads the plan back from its device.
    """
    starts, columns, cu_seqlens = (x.cpu().long() for x in (plan.starts, plan.columns, cu_seqlens))
    first = first_rows(cu_seqlens, block_size)
    rows = int(cu_seqlens[-1]) // block_size + len(first)
    if not rows:
        return 0.0
    row = torch.arange(rows)
    sequence = torch.searchsorted(first, row, right=True) - 1
    lengths = cu_seqlens.diff()[sequence]
    tokens_of = lambda lengths, blocks: (lengths - blocks * block_size).clamp(0, block_size)
    queries = tokens_of(lengths, row - first[sequence])
    plans = (len(starts) - 1) // rows
    owner = torch.repeat_interleave(row.repeat(plans), starts.diff())
    keys = tokens_of(lengths[owner], columns[: int(starts[-1])])
    return float((queries[owner] * keys).sum()) / plans


def _check_plan(plan: BlockPlan, block_size: int, qkv: Tensor, cu_seqlens: Tensor) -> None:
    if not 1 <= block_size < 2**31:
        rule = "at least 1" if block_size < 1 else "below 2**31"
        raise ValueError(f"{OP}: block_size must be {rule}, got {block_size}")
    if not isinstance(plan, BlockPlan):
        raise ValueError(
            f"{OP}: plan must be a BlockPlan, got {type(plan).__name__}: make one of starts, columns and counts"
        )
    for name, values in plan._asdict().items():
        if values.dtype != torch.int32 or values.dim() != 1:
            raise ValueError(
                f"{OP}: plan.{name} must be int32 of one dimension, got {values.dtype} of shape {tuple(values.shape)}"
            )
        checks.check_device(OP, f"plan.{name}", values, qkv)
    starts, columns, counts = plan
    rows = plan_rows(qkv.shape[0], len(cu_seqlens) - 1, block_size)
    if starts.shape[0] - 1 not in (rows, qkv.shape[2] * rows):
        raise ValueError(
            f"{OP}: plan.starts must have {rows} + 1 values, or {rows} for each of the {qkv.shape[2]} heads and 1 "
            f"more, got {starts.shape[0]}: is the plan of another batch or block_size?"
        )
    if columns.shape != counts.shape:
        raise ValueError(
            f"{OP}: plan.columns and plan.counts must have as many values, got {len(columns)} and {len(counts)}"
        )
    if qkv.device.type != "cpu" or torch.compiler.is_compiling() or not rows:
        return
    if starts[0] != 0 or (starts.diff() < 0).any() or starts[-1] > len(columns):
        raise ValueError(
            f"{OP}: plan.starts must ascend from 0 to at most the {len(columns)} entries, got {starts.tolist()[:8]}..."
        )
    used = slice(0, int(starts[-1]))
    blocks = _blocks_of_rows(cu_seqlens, rows, block_size).repeat((len(starts) - 1) // rows)
    most = torch.repeat_interleave(blocks, starts.diff())
    for name, wrong in (
        ("columns", (columns[used] < 0) | (columns[used] >= most)),
        ("counts", counts[used] < 1),
    ):
        if wrong.any():
            value = getattr(plan, name)[used][wrong][0]
            rule = "blocks of the row's sequence" if name == "columns" else "at least 1"
            raise ValueError(f"{OP}: plan.{name} must be {rule}, got {int(value)}")


def _blocks_of_rows(cu_seqlens: Tensor, rows: int, block_size: int) -> Tensor:
    """(rows,): the number of blocks of each row's sequence."""
    sequence = torch.searchsorted(
        first_rows(cu_seqlens, block_size), torch.arange(rows), right=True
    )
    return (-(-cu_seqlens.diff() // block_size))[sequence - 1]


TENSORS = 4
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor starts, Tensor columns, Tensor counts, Tensor cu_seqlens, SymInt max_seqlen, "
    "SymInt block_size, float scale"
)


def _fake_forward(q, *rest):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_backward(dout, out, lse, q, *rest):
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    columns = 3 * q.shape[1] * q.shape[2] if rest[-1] else 0
    return dqkv, q.new_empty(columns, dtype=torch.float32)


define(
    f"block_sparse_attention_fwd({_CALL}) -> (Tensor out, Tensor lse)",
    _fake_forward,
    triton="block_sparse_attention.block_sparse_attention_forward",
)
# wants_bias: return the gradient of the projection's bias too, the sum of dqkv over the tokens, float32
# (3 * num_heads * head_dim,).
define(
    f"block_sparse_attention_bwd(Tensor dout, Tensor out, Tensor lse, {_CALL}, bool wants_bias) -> (Tensor dqkv, "
    "Tensor dbias)",
    _fake_backward,
    triton="block_sparse_attention.block_sparse_attention_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    """Each block sees the first one twice or more often, and some more, drawn for all heads or for each."""
    block_size, plans = draw.choice(64, 16, 20), draw.choice(1, size.heads)
    cu_seqlens = draw.offsets(size.lengths)
    rows = plan_rows(size.tokens, len(size.lengths), block_size)
    blocks = [0] * rows
    for first, length in zip(
        first_rows(cu_seqlens.cpu(), block_size).tolist(), size.lengths, strict=True
    ):
        count = -(-length // block_size)
        blocks[first : first + count] = [count] * count
    drawn = draw.integers(1 << 20, plans * rows, 3).cpu()
    columns = [
        sorted({0, *(int(value) % count for value in row)}) if count else []
        for row, count in zip(drawn, blocks * plans, strict=True)
    ]
    flat = [column for row in columns for column in row]
    plan = BlockPlan(
        torch.tensor([0, *map(len, columns)]).cumsum(0),
        torch.tensor(flat, dtype=torch.int64),
        torch.tensor([1 + 2 * (column == 0) for column in flat], dtype=torch.int64),
    )
    return {
        "qkv": draw.normal(size.tokens, 3, size.heads, size.head_dim),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": size.longest,
        "plan": BlockPlan(*(values.int().to(draw.device) for values in plan)),
        "block_size": block_size,
        "softmax_scale": draw.choice(None, 0.3),
    }


def _plain(qkv, cu_seqlens, max_seqlen, plan, block_size, softmax_scale) -> Tensor:
    """A block of queries at a time."""
    outputs = []
    offsets, (starts, columns, counts) = cu_seqlens.tolist(), (values.tolist() for values in plan)
    for s, part in enumerate(sequences(qkv, cu_seqlens)):
        first = offsets[s] // block_size + s
        for i in range(-(-len(part) // block_size)):
            q = part[i * block_size : (i + 1) * block_size, 0]
            entries = range(starts[first + i], starts[first + i + 1])
            blocks = [part[columns[e] * block_size :][:block_size, 1:] for e in entries]
            # Each (num_heads, keys, head_dim).
            k, v = torch.cat(blocks).permute(1, 2, 0, 3).unbind(0)
            n = torch.cat(
                [qkv.new_full((len(b),), counts[e]) for e, b in zip(entries, blocks, strict=True)]
            )
            scores = qkv.shape[3] ** -0.5 * (q.transpose(0, 1) @ k.mT) + n.log()
            outputs.append((scores.softmax(2) @ v).transpose(0, 1))
    return torch.cat(outputs)


declare_case(block_sparse_attention, _case_inputs, _plain)
