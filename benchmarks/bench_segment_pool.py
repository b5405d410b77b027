"""Mean and maximum of each sequence's tokens, forward and forward + backward."""

import torch

from benchmarks._harness import compare, write
from fastenc.ops import segment_pool

# Lengths of a batch, hidden size.
SHAPES = {
    "MiniLM 32 sequences of 8 to 40": ([8 + i for i in range(32)], 384),
    "BERT-base 16 sequences of 128 to 512": ([512 - 24 * i for i in range(16)], 768),
}


def bytes_moved(tokens: int, width: int, element: int) -> int:
    """Forward: x read."""
    return tokens * width * element


def main() -> None:
    cases = {}
    for shape, (lengths, width) in SHAPES.items():
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        sizes = torch.tensor(lengths)
        mask = torch.arange(max(lengths)) < sizes[:, None]
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(sum(lengths), width).to(dtype).requires_grad_()
            # What other libraries hold: the padded tensor, real tokens anywhere but in the padding.
            padded = torch.zeros(*mask.shape, width).to(dtype)
            padded[mask] = x.detach()
            padded.requires_grad_()
            dy = torch.randn(len(lengths), width).to(dtype)
            weights = mask.unsqueeze(2).to(dtype)
            for mode in ("mean", "max"):
                ours = lambda: segment_pool(x, cu_seqlens, mode)
                reduce = lambda: torch.segment_reduce(x, mode, lengths=sizes, axis=0)

                def masked():
                    if mode == "mean":
                        return (padded * weights).sum(1) / sizes[:, None].to(dtype)
                    return padded.masked_fill(~mask.unsqueeze(2), float("-inf")).max(1).values

                parts = x.detach().double().split(lengths)
                exact = [p.mean(0) if mode == "mean" else p.amax(0) for p in parts]
                tolerance = 1e-5 if dtype == torch.float32 else 0.05

                def check(_, result):
                    error = (result.double() - torch.stack(exact)).abs().max().item()
                    return f"error {error:.2g}" if not error < tolerance else None

                providers = {"fastenc": ours, "padded, masked": masked, "segment_reduce": reduce}
                name = f"{shape}, {mode}, {str(dtype).removeprefix('torch.')}"
                with torch.no_grad():
                    rows = compare(providers, baseline="padded, masked", check=check, seconds=2)
                for row in rows.values():
                    if "median_ms" in row:
                        moved = bytes_moved(sum(lengths), width, x.element_size())
                        row["GB_per_s"] = moved / row["median_ms"] / 1e6
                cases[f"{name}, forward"] = rows
                train = lambda f, leaf: lambda: torch.autograd.grad(f(), leaf, dy)
                cases[f"{name}, forward + backward"] = compare(
                    {
                        "fastenc": train(ours, x),
                        "padded, masked": train(masked, padded),
                        "segment_reduce": train(reduce, x),
                    },
                    baseline="padded, masked",
                    seconds=2,
                )
    write("segment_pool", cases)


if __name__ == "__main__":
    main()
