"""Mean and maximum of each sequence's tokens, forward and forward + backward."""

from functools import partial

import torch

from benchmarks._compare import compiled
from benchmarks._compare_ops import Provider, compare_op
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from fastenc.ops import segment_pool
from fastenc.profiling import Work

TABLES = {"segment_pool": "Mean and maximum of each sequence"}
SMALLEST = ([3, 1, 5], 8, "mean", torch.float32)  # the shape that the tests measure
# Lengths of a batch, hidden size.
SHAPES = {
    "MiniLM 32 sequences of 8 to 40": ([8 + i for i in range(32)], 384),
    "BERT-base 16 sequences of 128 to 512": ([512 - 24 * i for i in range(16)], 768),
}


def measure(
    name: str, lengths: list[int], width: int, mode: str, dtype: torch.dtype
) -> dict[str, dict]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    sizes = torch.tensor(lengths, device=DEVICE)
    mask = torch.arange(max(lengths), device=DEVICE) < sizes[:, None]
    x = torch.randn(sum(lengths), width, device=DEVICE).to(dtype).requires_grad_()
    # Other libraries hold the padded tensor.
    padded = torch.zeros(*mask.shape, width, device=DEVICE, dtype=dtype)
    padded[mask] = x.detach()
    padded.requires_grad_()
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(len(lengths), width, device=DEVICE).to(dtype)
    weights = mask.unsqueeze(2).to(dtype)
    real = lambda value: value[mask] if value.dim() == 3 else value

    def masked():
        if mode == "mean":
            return (padded * weights).sum(1) / sizes[:, None].to(dtype)
        return padded.masked_fill(~mask.unsqueeze(2), float("-inf")).max(1).values

    def exact():
        texts = wide.split(lengths)
        return torch.stack([x.mean(0) if mode == "mean" else x.max(0)[0] for x in texts])

    reduce = lambda: torch.segment_reduce(x, mode, lengths=sizes, axis=0)
    providers = {
        "fastenc": Provider(lambda: segment_pool(x, cu_seqlens, mode), (x,), dy),
        "padded, masked": Provider(masked, (padded,), dy, real),
        "segment_reduce": Provider(reduce, (x,), dy),
    }
    if ON_GPU:
        fused = compiled(masked)
        providers["torch.compile of padded, masked"] = Provider(fused, (padded,), dy, real)
    moved = Work(x.nbytes + dy.nbytes, dtype=dtype)
    return compare_op(
        name,
        providers,
        Provider(exact, (wide,), dy.double()),
        baseline="padded, masked",
        forward=moved,  # x read, one row for each sequence written
        backward=moved,  # the reverse
    )


def main() -> None:
    groups = {}
    for shape, (lengths, width) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for mode in ("mean", "max"):
                name = f"{shape}, {mode}, {dtype_name(dtype)}"
                groups[name] = partial(measure, name, lengths, width, mode, dtype)
    run_groups("segment_pool", groups)


if __name__ == "__main__":
    main()
