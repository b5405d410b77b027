"""Packed attention against sdpa: padded with a mask, and a loop over the sequences; 12 heads of 32."""

import random

import torch
import torch.nn.functional as F

from benchmarks._harness import compare, write
from fastenc.ops import attention, unpack
from fastenc.packing import pack_sequences

HEADS, HEAD_DIM = 12, 32


def flops(lengths: list[int]) -> int:
    """Forward: two products of (L, D) and (D, L) for each head."""
    return sum(4 * length**2 * HEADS * HEAD_DIM for length in lengths)


def main() -> None:
    draw = random.Random(0)
    corpora = {
        "32 sequences of 8 to 40": [draw.randint(8, 40) for _ in range(32)],
        "32 sequences of 10 to 256": [draw.randint(10, 256) for _ in range(32)],
        "16 sequences of 128": [128] * 16,
        "4 sequences of 512": [512] * 4,
    }
    cases = {}
    for case, lengths in corpora.items():
        for dtype in (torch.float32, torch.bfloat16):
            batch = pack_sequences([[0] * length for length in lengths])
            qkv = torch.randn(sum(lengths), 3, HEADS, HEAD_DIM).to(dtype).requires_grad_()
            real = unpack(torch.ones(sum(lengths)), batch) != 0
            mask = real[:, None, None, :]

            def packed():
                return attention(qkv, batch.cu_seqlens, batch.max_seqlen)

            def sdpa(padded, mask=None):
                q, k, v = padded.permute(2, 0, 3, 1, 4)
                return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

            # Padding and its removal are the caller's own, as in a padded model: not timed.
            padded = unpack(qkv.detach(), batch).requires_grad_()

            def masked():
                return sdpa(padded, mask)

            def loop():
                return torch.cat([sdpa(part[None])[0] for part in qkv.split(lengths)])

            with torch.no_grad():
                wide = torch.cat([sdpa(part[None])[0] for part in qkv.double().split(lengths)])
            tolerance = 1e-5 if dtype == torch.float32 else 0.03

            def check(name, result):
                tokens = result[real] if "padded" in name else result
                error = (tokens.double() - wide).abs().max().item()
                return f"error {error:.2g}" if not error < tolerance else None

            name = f"{case}, {str(dtype).removeprefix('torch.')}"
            providers = {"sdpa, padded": masked, "sdpa, a loop": loop, "fastenc": packed}
            with torch.no_grad():
                rows = compare(providers, baseline="sdpa, padded", check=check)
            for row in rows.values():
                if "median_ms" in row:
                    row["GFLOP_per_s"] = flops(lengths) / row["median_ms"] / 1e6
            cases[f"{name}, forward"] = rows

            dout = torch.randn(sum(lengths), HEADS, HEAD_DIM).to(dtype)
            dout_padded = unpack(dout, batch)
            train = {
                "sdpa, padded": lambda: torch.autograd.grad(masked(), padded, dout_padded)[0],
                "sdpa, a loop": lambda: torch.autograd.grad(loop(), qkv, dout)[0],
                "fastenc": lambda: torch.autograd.grad(packed(), qkv, dout)[0],
            }
            exact = qkv.detach().double().requires_grad_()
            parts = [sdpa(part[None])[0] for part in exact.split(lengths)]
            (truth,) = torch.autograd.grad(torch.cat(parts), exact, dout.double())

            def check_gradient(name, result):
                tokens = result[real] if "padded" in name else result
                error = ((tokens.double() - truth).norm() / truth.norm()).item()
                return f"relative error {error:.2g}" if not error < tolerance else None

            cases[f"{name}, forward + backward"] = compare(
                train, baseline="sdpa, padded", check=check_gradient
            )
    write("attention", cases)


if __name__ == "__main__":
    main()
