"""Packed rows back in their padded places, and the same as the gradient of packing."""

import torch

from benchmarks._harness import compare, write
from fastenc import ops, packing

# Lengths of a batch, hidden size.
SHAPES = {
    "MiniLM 32 sequences of 8 to 40": ([8 + i for i in range(32)], 384),
    "BERT-base 16 sequences of 128 to 512": ([512 - 24 * i for i in range(16)], 768),
}


def bytes_moved(tokens: int, places: int, width: int, element: int) -> int:
    """Packed rows read, padded rows written."""
    return (tokens + places) * width * element


def main() -> None:
    cases = {}
    for shape, (lengths, width) in SHAPES.items():
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = packing.pack(torch.zeros(mask.shape, dtype=torch.long), mask)
        indices, places = batch.indices, mask.numel()
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(sum(lengths), width).to(dtype)
            padded = torch.randn(*mask.shape, width).to(dtype).requires_grad_()
            expected = torch.zeros(padded.shape, dtype=dtype)
            expected[mask] = values

            def check(_, result):
                return None if torch.equal(result.view_as(expected), expected) else "other rows"

            name = f"{shape}, {str(dtype).removeprefix('torch.')}"
            rows = compare(
                {
                    "fastenc": lambda: ops.unpack(values, batch),
                    "index_copy_ into zeros": lambda: values.new_zeros(places, width).index_copy_(
                        0, indices, values
                    ),
                },
                baseline="index_copy_ into zeros",
                check=check,
                seconds=2,
            )
            for row in rows.values():
                if "median_ms" in row:
                    moved = bytes_moved(len(values), places, width, values.element_size())
                    row["GB_per_s"] = moved / row["median_ms"] / 1e6
            cases[f"{name}, unpack"] = rows
            train = lambda f: lambda: torch.autograd.grad(f(), padded, values)
            cases[f"{name}, pack, forward + backward"] = compare(
                {
                    "fastenc": train(lambda: ops.pack(padded, batch)),
                    "index_select": train(lambda: padded.flatten(0, 1).index_select(0, indices)),
                },
                baseline="index_select",
                check=lambda _, result: check(_, result[0]),
                seconds=2,
            )
    write("packing", cases)


if __name__ == "__main__":
    main()
