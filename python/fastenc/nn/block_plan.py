"""The blocks that a layer of BigBird sees: the plan of block-sparse attention for a packed batch.

The first and the last block of a sequence see all blocks and are seen by all. Any other sees the first, the last, the
block before it, itself, the block after it, and some random ones. In evaluation the random blocks are all the first
one, which the softmax thus counts more often; so does transformers. A sequence that is too short for this sees all
tokens.
Source: Zaheer et al. 2020, arXiv:2007.14062.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.ops.block_sparse_attention import BlockPlan, first_rows, plan_rows
from fastenc.ops.trace_constants import constant_in_trace

# Blocks that a block in the middle sees beside the random ones.
FIXED = 5
# Padded lengths whose random blocks transformers draws by another rule, from the first PAPER_REACH tokens.
PAPER_LENGTHS = (1024, 3072, 4096)
PAPER_REACH = 1024


def longest_full(spec: AttentionSpec) -> int:
    """The number of tokens up to which every token of a sequence sees every other."""
    return (FIXED + 2 * spec.random_blocks) * spec.block_size


def block_plan(
    spec: AttentionSpec,
    cu_seqlens: Tensor,
    total_tokens: int,
    max_seqlen: int,
    random_blocks: Tensor | None = None,
    padded_length: int | None = None,
) -> BlockPlan | None:
    """The plan of a batch, made on its device without reading anything back.

    Args:
        random_blocks: from :func:`draw_random_blocks`, in training; None: the first block every time.
        padded_length: the length of the padded batch that the sequences are from, if blocks count up to its end, as in
            a transformers model; None: up to each sequence's own end.
    Returns: None if plain attention does, because every token of every sequence sees every other.
    """
    size, count = spec.block_size, spec.random_blocks
    # With other block sizes, block-sparse and plain attention sum in different orders. Then every batch has a plan, so
    # that a sequence's result does not depend on the longest one.
    rounds_alike = size % 16 == 0 or padded_length is not None
    if rounds_alike and (padded_length or max_seqlen) <= longest_full(spec):
        return None
    lengths, device = cu_seqlens.diff(), cu_seqlens.device
    rows = plan_rows(total_tokens, len(lengths), size)
    first = first_rows(cu_seqlens, size)
    row = torch.arange(rows, device=device)
    sequence = torch.searchsorted(first, row, right=True) - 1
    index, own = row - first[sequence], _blocks(lengths, size)[sequence]
    counted = own if padded_length is None else torch.full_like(own, _blocks(padded_length, size))
    exists, sees_all = index < own, (index == 0) | (index == counted - 1)
    if padded_length is None:
        sees_all |= (lengths <= longest_full(spec))[sequence]

    # The blocks that each row names (plans, rows, FIXED + count), and how often the softmax counts each of them.
    fixed = torch.stack([index * 0, index - 1, index, index + 1, counted - 1], 1)
    if random_blocks is None:
        drawn = fixed.new_zeros(1, rows, count)
    else:
        is_paper = torch.zeros_like(sees_all)
        for length in PAPER_LENGTHS:
            is_paper |= counted * size == length
        known = index.clamp(0, random_blocks.shape[2] - 1)
        drawn = random_blocks[is_paper.long(), :, known].transpose(0, 1)
    plans, width = drawn.shape[0], FIXED + count
    named = torch.cat([fixed.expand(plans, -1, -1), drawn], 2)
    same = named[..., :, None] == named[..., None, :]
    repeats = (same & torch.ones(width, width, dtype=torch.bool, device=device).tril(-1)).any(3)
    # A neighbour that is also the first or the last block counts once.
    is_random = torch.arange(width, device=device) >= FIXED
    counts = (same & (~repeats | is_random)[..., None, :]).sum(3)
    kept = ~repeats & (named < own[:, None])
    order = torch.where(kept, named, rows + width).argsort(2)
    named, counts = (x.gather(2, order).flatten(0, 1) for x in (named, counts))

    sizes = torch.where(sees_all, own, kept.sum(2)) * exists
    starts, sees_all = F.pad(sizes.flatten().cumsum(0), (1, 0)), sees_all.repeat(plans)
    # A row of a short sequence has at most 5 + 2 count entries; two rows of a long one have one for each of its rows.
    entry = torch.arange(plans * rows * (FIXED + 2 * count + 2), device=device)
    owner = torch.searchsorted(starts[1:], entry, right=True).clamp(max=plans * rows - 1)
    place = entry - starts[owner]
    column = place.clamp(max=width - 1)
    return BlockPlan(
        starts.int(),
        torch.where(sees_all[owner], place, named[owner, column]).int(),
        torch.where(sees_all[owner], 1, counts[owner, column]).int(),
    )


def plan_of(inputs: AttentionInputs, spec: AttentionSpec) -> BlockPlan | None:
    """The plan of a layer's call, or None if every token of a sequence sees every other.

    Raises: ValueError for a layer with blocks whose call has a longer sequence, and no plan.
    """
    if inputs.block_plan is None and spec.block_size and inputs.max_seqlen > longest_full(spec):
        raise ValueError(
            f"a layer with blocks of {spec.block_size} tokens needs a plan for sequences of more than "
            f"{longest_full(spec)} tokens, got one of up to {inputs.max_seqlen} without: give inputs.block_plan"
        )
    return inputs.block_plan


def _blocks(length: Any, size: int) -> Any:
    """The number of blocks of ``size`` tokens that ``length`` tokens, a host int or a tensor, fill."""
    return (length + size - 1) // size


def draw_random_blocks(
    layer: int, spec: AttentionSpec, max_positions: int, device: torch.device
) -> Tensor:
    """int64 (2, num_heads, blocks, random_blocks): the blocks that transformers' training draws for a layer.

    [0] is for most lengths, [1] for ``PAPER_LENGTHS``; row i is that of block i. transformers draws them again in each
    call, by numpy's global generator, which it seeds with the layer's number, so they depend on nothing else. Here a
    private generator draws them once.
    """
    return _draw(
        layer, spec.num_heads, spec.block_size, spec.random_blocks, max_positions, str(device)
    )


@constant_in_trace
def _draw(*numbers: Any) -> Tensor:
    """The blocks. The compiler does not see through numpy's generators."""
    return _draw_once(*numbers)


@lru_cache(maxsize=64)
def _draw_once(
    layer: int, heads: int, size: int, count: int, max_positions: int, device: str
) -> Tensor:
    numpy = require("numpy", extra="train")
    blocks = _blocks(max_positions, size)
    drawn = numpy.zeros((2, heads, blocks, count), dtype=numpy.int64)
    generator, reach = numpy.random.RandomState(layer), FIXED + 2 * count
    for row in range(1, blocks - 1 if count else 0):
        hidden = {0, row - 1, row, row + 1, reach - 1}
        hidden |= {reach - 2} if row == 1 else {1} if row == reach - 2 else set()
        for head in range(heads):
            order = generator.permutation(numpy.arange(reach, dtype=numpy.int32)).tolist()
            drawn[0, head, row] = [block for block in order if block not in hidden][:count]
    if any(reach * size < length <= max_positions for length in PAPER_LENGTHS):
        whole = max_positions // size
        drawn[1, :, :whole] = _draw_as_in_the_paper(numpy, layer, heads, whole, size, count)
    return torch.from_numpy(drawn).to(device)


def _draw_as_in_the_paper(
    numpy: Any, layer: int, heads: int, blocks: int, size: int, count: int
) -> Any:
    """(num_heads, blocks, count), of the blocks of the first PAPER_REACH tokens; the last is not kept out of them."""
    drawn = numpy.zeros((heads, blocks, count), dtype=numpy.int64)
    generator, middle = numpy.random.RandomState(layer), numpy.arange(1, blocks - 1, dtype="int32")
    last = PAPER_REACH // size - 1 if 2 * size < PAPER_REACH else blocks - 1
    for head in range(heads):
        for row in range(1, blocks - 1):
            if row <= 2:
                allowed = middle[row + 1 : last]
            elif row >= blocks - 3 or row - 2 > last:
                allowed = middle[:last]
            elif row + 1 == last:
                allowed = middle[: row - 2]
            else:
                allowed = numpy.concatenate((middle[: row - 2], middle[row + 1 : last]))
            if len(allowed) < count:
                raise ValueError(
                    f"block {row} must have {count} other blocks of {size} tokens to draw from, got {len(allowed)}: "
                    "give a smaller num_random_blocks or block_size in config.json"
                )
            drawn[head, row] = generator.permutation(allowed)[:count]
    return drawn
