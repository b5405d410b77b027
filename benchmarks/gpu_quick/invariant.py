"""``encode(batch_invariant=True)``: whether a text's vector has the same bits in other batches, and what it costs.

The same without the option, beside it: cuBLAS and the kernels for short sequences.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks._cases import Case
from benchmarks._device import DEVICE, ON_GPU
from benchmarks.gpu_quick import problems
from benchmarks.gpu_quick.problems import Size
from fastenc.models import Encoder
from fastenc.nn.pooling import normalize_rows, pool
from fastenc.ops.dispatch import batch_invariance
from fastenc.packing import PackedBatch, pack_sequences
from fastenc.profiling import models
from fastenc.profiling.timing import synchronize

LIMIT = 60
REPEATS = 10 if ON_GPU else 1
ALONE = 4  # sequences that are also encoded alone


def cases(size: Size) -> Iterator[Case]:
    for name, (tokens, length) in product(size.models, size.batches):
        case = f"{name}, {tokens} tokens in sequences of {length // 4} to {length}"
        yield case, partial(compare, case, name, tokens, length)


def compare(case: str, name: str, tokens: int, length: int) -> dict:
    encoder = models.load(name, training=False).to(DEVICE, problems.DTYPE).eval()
    lengths = [length, length // 2, length // 4, length // 3] * (tokens // (2 * length) or 1)
    sequences = models.random_sequences(encoder.config, lengths)
    plain, invariant = (with_option(encoder, sequences, option) for option in (False, True))
    cost = invariant["ms"] / plain["ms"]
    print(
        f"  {'right' if invariant['same_bits'] else 'WRONG':6} {case}: {invariant['ms']:.2f} ms, "
        f"{cost:.2f} times those without the option, whose bits are "
        f"{'' if plain['same_bits'] else 'not '}the same",
        flush=True,
    )
    return {
        "right": invariant["same_bits"],
        "cost": cost,
        "plain": plain,
        "batch_invariant": invariant,
    }


def with_option(encoder: Encoder, sequences: list[list[int]], option: bool) -> dict:
    """Milliseconds of a packed batch of all sequences, and whether other batches give the same bits."""

    def packed(numbers: list[int]) -> PackedBatch:
        return pack_sequences([sequences[number] for number in numbers]).to(DEVICE)

    def vectors(batch: PackedBatch) -> Tensor:
        return normalize_rows(pool(encoder(batch).last_hidden_state, batch.cu_seqlens, "mean"))

    everything = [*range(len(sequences))]
    others = [everything[::-1], everything[1 : len(everything) // 2 + 1]]
    others += [[number] for number in everything[:ALONE]]
    with torch.inference_mode(), batch_invariance(option):
        batch = packed(everything)
        whole = vectors(batch)
        same = all(torch.equal(vectors(packed(numbers)), whole[numbers]) for numbers in others)
        synchronize(DEVICE)
        start = time.perf_counter()
        for _ in range(REPEATS):
            vectors(batch)
        synchronize(DEVICE)
    return {"ms": (time.perf_counter() - start) / REPEATS * 1e3, "same_bits": same}
