"""Packed attention against padded sdpa and its backends, a loop over the sequences, and torch's varlen_attn."""

import random

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._harness import (
    DEVICE,
    ON_GPU,
    Provider,
    Work,
    compare_op,
    compiled,
    dtype_name,
    peer,
    write,
)
from fastenc.ops import attention, unpack
from fastenc.packing import pack_sequences

HEADS, HEAD_DIM = (12, 64) if ON_GPU else (12, 32)
DTYPES = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)
DROPOUTS = (0.0, 0.1) if ON_GPU else (0.0,)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def corpora() -> dict[str, list[int]]:
    """Lengths of the sequences of a batch: 16,384 tokens or so on a GPU, fewer on a CPU."""
    draw = random.Random(0)
    if ON_GPU:
        ragged = lambda low, high: [
            draw.randint(low, high) for _ in range(2 * 16384 // (low + high))
        ]
        same = {f"{16384 // n} sequences of {n}": [n] * (16384 // n) for n in (64, 128, 512, 2048)}
        return {
            f"lengths {low} to {high}": ragged(low, high) for low, high in ((8, 40), (10, 512))
        } | same
    return {
        "32 sequences of 8 to 40": [draw.randint(8, 40) for _ in range(32)],
        "32 sequences of 10 to 256": [draw.randint(10, 256) for _ in range(32)],
        "16 sequences of 128": [128] * 16,
        "4 sequences of 512": [512] * 4,
    }


def forward_work(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> Work:
    """qkv read, out written; the products q k^T and p v."""
    moved = 4 * sum(lengths) * heads * dim * dtype.itemsize
    return Work(moved, 4 * heads * dim * sum(n**2 for n in lengths), dtype)


def backward_work(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> Work:
    """qkv, out and dout read, dqkv written; the scores once more and four products of gradients."""
    moved = 8 * sum(lengths) * heads * dim * dtype.itemsize
    return Work(moved, 10 * heads * dim * sum(n**2 for n in lengths), dtype)


def sdpa(qkv, mask=None, dropout_p=0.0, backend=None):
    """(batch, length, 3, heads, dim) → (batch, length, heads, dim)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p).transpose(1, 2)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p).transpose(1, 2)


def providers(lengths: list[int], dtype: torch.dtype, p: float) -> tuple[dict, Provider]:
    """Every way to attend over the batch, and the truth. Padding and its removal are the caller's own, as in a padded
    model: not timed."""
    tokens = sum(lengths)
    batch = pack_sequences([[0] * length for length in lengths]).to(DEVICE)
    qkv = torch.randn(tokens, 3, HEADS, HEAD_DIM, device=DEVICE).to(dtype).requires_grad_()
    dout = torch.randn(tokens, HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    real = unpack(torch.ones(tokens, device=DEVICE), batch) != 0
    mask = None if len(set(lengths)) == 1 else real[:, None, None, :]
    padded, dout_padded = unpack(qkv.detach(), batch).requires_grad_(), unpack(dout, batch)

    def on_padded(call) -> Provider:
        return Provider(call, (padded,), dout_padded, lambda tensor: tensor[real])

    def loop(values):
        return torch.cat([sdpa(part[None], None, p)[0] for part in values.split(lengths)])

    def varlen(module):
        q, k, v = qkv.unbind(1)
        offsets, longest = batch.cu_seqlens, batch.max_seqlen
        call = lambda: module.varlen_attn(q, k, v, offsets, offsets, longest, longest)
        return "no dropout" if p else Provider(call, (qkv,), dout)

    found = {"sdpa, padded": on_padded(lambda: sdpa(padded, mask, p))}
    if ON_GPU:
        for name, backend in BACKENDS.items():
            call = lambda backend=backend: sdpa(padded, mask, p, backend)
            found[f"sdpa {name}, padded"] = on_padded(call)
        fused = compiled(sdpa)
        found["torch.compile of sdpa, padded"] = on_padded(lambda: fused(padded, mask, p))
        found["varlen_attn"] = peer("torch.nn.attention.varlen", varlen)
    else:
        found["sdpa, a loop"] = Provider(lambda: loop(qkv), (qkv,), dout)
    ours = lambda: attention(qkv, batch.cu_seqlens, batch.max_seqlen, dropout_p=p)
    found["fastenc"] = Provider(ours, (qkv,), dout)
    wide = qkv.detach().double().requires_grad_()
    parts = lambda: torch.cat([sdpa(part[None])[0] for part in wide.split(lengths)])
    return found, Provider(parts, (wide,), dout.double())


def main() -> None:
    cases = {}
    for case, lengths in corpora().items():
        for dtype in DTYPES:
            for p in DROPOUTS:
                found, truth = providers(lengths, dtype, p)
                cases |= compare_op(
                    f"{case}, {dtype_name(dtype)}" + (f", dropout {p}" if p else ""),
                    found,
                    truth,
                    baseline="sdpa, padded",
                    forward=forward_work(lengths, HEADS, HEAD_DIM, dtype),
                    backward=backward_work(lengths, HEADS, HEAD_DIM, dtype),
                    checked=not p,
                )
    write("attention", cases)


if __name__ == "__main__":
    main()
