"""Bytes and FLOPs of the ops that a step dispatches, and FLOPs of a model by its sizes.

The bytes of an op are those of its inputs and outputs; each tensor counts once. Views and allocations count no bytes.
FLOPs are those of matrix products, by torch's formulas and those of :mod:`fastenc.ops.flops`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fastenc.models import EncoderConfig
from fastenc.nn.block_plan import block_plan
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.ops.block_sparse_attention import visible_pairs as planned_pairs
from fastenc.ops.flops import visible_pairs  # its module registers the formulas of our ops
from fastenc.profiling.roofline import Work

NO_WORK = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
WRITE_ONLY = {"aten::copy_", "aten::zero_", "aten::fill_"}
# Ops that read or write rows of a table: name -> function of (arguments, result) that returns tensors of these rows.
GATHERS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "aten::embedding": lambda arguments, out: out,
    "aten::index_select": lambda arguments, out: out,
    "fastenc::embedding_layer_norm_fwd": lambda arguments, out: out,
    "fastenc::embedding_layer_norm_bwd": lambda arguments, out: out,
    "fastenc::add_rows_": lambda arguments, out: arguments[1],
}


class OpCall(NamedTuple):
    """One dispatched op. ``shapes``: shapes of the two factors of a matrix product, else empty."""

    name: str
    shapes: str
    work: Work


# Matrix products that torch.utils.flop_counter does not know: name -> function of {argument's name: value}.
FLOPS: dict[str, Callable[[dict[str, Any]], float]] = {
    "mkldnn::_linear_pointwise": lambda a: 2 * a["X"].numel() * a["W"].shape[0],
}


class CountWork(TorchDispatchMode):
    """Records every op that runs inside, with its :class:`Work`. Reads sequence offsets back from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        work = _work(func, args, kwargs, out)
        factors = [t for t in _tensors(args) if t.dim() > 1][:2] if work.flops else []
        shapes = ["x".join(map(str, t.shape)) for t in factors]
        self.calls.append(OpCall(func.name().split(".")[0], " ".join(shapes), work))
        return out


class LabelOps(TorchDispatchMode):
    """Wraps every op that runs inside into a profiler range with the name "<number> <op>"."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        label = f"{self.number} {func.name().split('.')[0]}"
        self.number += 1
        with torch.profiler.record_function(label):
            return func(*args, **(kwargs or {}))


def _work(func, args, kwargs, out) -> Work:
    name = func.name().split(".")[0]
    inputs, outputs = _tensors((args, kwargs)), _tensors(out)
    dtype = next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point()), torch.float32)
    if func.is_view or name in NO_WORK:
        return Work(0.0, 0.0, dtype)
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    is_written = {
        a.name: bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments
    }
    changed = _tensors([value for argument, value in given.items() if is_written[argument]])
    written = {_memory(t): _bytes(t) for t in (*changed, *outputs)}
    read = {_memory(t): _bytes(t) for t in inputs}
    if name in WRITE_ONLY:
        read = {memory: size for memory, size in read.items() if memory not in written}
    if name in GATHERS:  # count only the rows of the table that are read or written
        limit = max(_bytes(t) for t in _tensors(GATHERS[name](args, out)))
        read, written = (
            {memory: min(size, limit) for memory, size in sizes.items()}
            for sizes in (read, written)
        )
    flops = 0.0
    if name in FLOPS:
        flops = FLOPS[name](given)
    elif func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
    return Work(float(sum(read.values()) + sum(written.values())), float(flops), dtype)


def _memory(tensor: Tensor) -> tuple[int, int]:
    # A tensor that oneDNN has reordered has no address.
    address = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    return address, tensor.numel()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension is read once."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = (min(size, 1) if stride == 0 else size for size, stride in dimensions)
    return math.prod(sizes) * tensor.element_size()


def encoder_flops(config: EncoderConfig, lengths: Sequence[int], labelled: int = 0) -> float:
    """FLOPs of the matrix products of one forward, without padding. A training step has three times as many.

    Those of the embeddings' projection, of the layers as their specs describe them, of the output's projection, and of
    the masked-LM head. Left out are products that do not depend on the texts, as those of a table of relative
    positions, and global tokens. Blocks are those of evaluation.

    Args:
        lengths: number of tokens of each sequence.
        labelled: number of rows that the masked-LM head computes, and of which the last layer computes its feed-forward
            sublayer. 0: without the head, and all tokens.
    """
    width, table_width, tokens = config.hidden_size, config.embedding_size, sum(lengths)
    flops = 2.0 * labelled * table_width * (width + config.vocab_size)
    if config.architecture.embedding_projection(config):
        flops += tokens * 2 * table_width * width
    for number in range(config.num_layers):
        spec = config.layer_spec(number)
        attention, feed_forward = spec.attention, spec.feed_forward
        heads = attention.num_heads * attention.head_dim
        matrices = 3 if feed_forward.gated else 2
        projections = (sum(attention.heads) + attention.num_heads) * attention.head_dim
        inner = matrices * feed_forward.intermediate_size
        rows = labelled if labelled and number == config.num_layers - 1 else tokens
        products = 2 + len(attention.position_terms)
        vectors = spec.layer_vector_size
        flops += 2 * width * (tokens * (projections + vectors) + rows * (inner + 2 * vectors))
        flops += 2 * products * heads * _pairs(attention, lengths)
    if output := config.architecture.output_projection(config):
        flops += 2 * width * output * (labelled or tokens)
    return flops


def _pairs(spec: AttentionSpec, lengths: Sequence[int]) -> float:
    """The number of pairs of a query and a key that it sees, in one head of a layer."""
    if spec.block_size:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        plan = block_plan(spec, cu_seqlens, sum(lengths), max(lengths, default=0))
        if plan is not None:
            return planned_pairs(plan, cu_seqlens, spec.block_size)
    return sum(visible_pairs(n, spec.window) for n in lengths)
