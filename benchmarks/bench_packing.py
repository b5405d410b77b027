"""Packed rows copied back to their padded places, and the same as the gradient of packing."""

import torch

from benchmarks._compare import compare, compiled
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import run_shapes
from fastenc import ops, packing
from fastenc.profiling import Work

TABLES = {"packing": "Packed rows from and to padded ones"}
SMALLEST = ([3, 1, 5], 8, torch.float32)  # the shape that the tests measure
# Lengths of a batch, hidden size.
SHAPES = {
    "MiniLM 32 sequences of 8 to 40": ([8 + i for i in range(32)], 384),
    "BERT-base 16 sequences of 128 to 512": ([512 - 24 * i for i in range(16)], 768),
}


def measure(name: str, lengths: list[int], width: int, dtype: torch.dtype) -> dict[str, dict]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = packing.pack(torch.zeros(mask.shape, dtype=torch.long), mask).to(DEVICE)
    indices, positions = batch.indices, mask.numel()
    values = torch.randn(sum(lengths), width).to(DEVICE, dtype)
    padded = torch.randn(*mask.shape, width).to(DEVICE, dtype).requires_grad_()
    expected = torch.zeros_like(padded)
    expected[mask.to(DEVICE)] = values

    def check(_, result):
        return None if torch.equal(result.view_as(expected), expected) else "other rows"

    def scatter(values):
        return values.new_zeros(positions, width).index_copy_(0, indices, values)

    def gather(padded):
        return padded.flatten(0, 1).index_select(0, indices)

    def train(function):
        return lambda: torch.autograd.grad(function(padded), padded, values)

    # packed rows read, padded rows written
    moved = Work(values.nbytes + padded.nbytes, dtype=dtype)
    unpacks = {
        "fastenc": lambda: ops.unpack(values, batch),
        "index_copy_ into zeros": lambda: scatter(values),
    }
    if ON_GPU:
        fused_scatter = compiled(scatter)
        unpacks["torch.compile"] = lambda: fused_scatter(values)
    cases = {
        f"{name}, unpack": compare(
            unpacks, baseline="index_copy_ into zeros", check=check, work=moved
        )
    }
    packs = {"fastenc": train(lambda x: ops.pack(x, batch)), "index_select": train(gather)}
    if ON_GPU:
        packs["torch.compile"] = train(compiled(gather))
    cases[f"{name}, pack, forward + backward"] = compare(
        packs,
        baseline="index_select",
        check=lambda _, result: check(_, result[0]),
        work=moved + moved,
    )
    return cases


def main() -> None:
    run_shapes("packing", measure, SHAPES)


if __name__ == "__main__":
    main()
