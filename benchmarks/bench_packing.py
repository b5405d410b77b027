"""Packed rows back in their padded places, and the same as the gradient of packing."""

import torch

from benchmarks._harness import DEVICE, Work, compare, dtype_name, write
from fastenc import ops, packing

# Lengths of a batch, hidden size.
SHAPES = {
    "MiniLM 32 sequences of 8 to 40": ([8 + i for i in range(32)], 384),
    "BERT-base 16 sequences of 128 to 512": ([512 - 24 * i for i in range(16)], 768),
}


def main() -> None:
    cases = {}
    for shape, (lengths, width) in SHAPES.items():
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = packing.pack(torch.zeros(mask.shape, dtype=torch.long), mask).to(DEVICE)
        indices, places = batch.indices, mask.numel()
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(sum(lengths), width).to(DEVICE, dtype)
            padded = torch.randn(*mask.shape, width).to(DEVICE, dtype).requires_grad_()
            expected = torch.zeros_like(padded)
            expected[mask.to(DEVICE)] = values

            def check(_, result):
                return None if torch.equal(result.view_as(expected), expected) else "other rows"

            name = f"{shape}, {dtype_name(dtype)}"
            # packed rows read, padded rows written
            moved = Work(values.nbytes + padded.nbytes, dtype=dtype)
            cases[f"{name}, unpack"] = compare(
                {
                    "fastenc": lambda: ops.unpack(values, batch),
                    "index_copy_ into zeros": lambda: values.new_zeros(places, width).index_copy_(
                        0, indices, values
                    ),
                },
                baseline="index_copy_ into zeros",
                check=check,
                work=moved,
            )
            train = lambda f: lambda: torch.autograd.grad(f(), padded, values)
            cases[f"{name}, pack, forward + backward"] = compare(
                {
                    "fastenc": train(lambda: ops.pack(padded, batch)),
                    "index_select": train(lambda: padded.flatten(0, 1).index_select(0, indices)),
                },
                baseline="index_select",
                check=lambda _, result: check(_, result[0]),
                work=moved + moved,
            )
    write("packing", cases)


if __name__ == "__main__":
    main()
