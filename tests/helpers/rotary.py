"""Tables of angles, transformers' formula in plain torch, and the checks that CPU and GPU tests share."""

import torch
import torch.nn.functional as F

from fastenc.ops import attention, rotary
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of, plain_cross


def table_of(positions, rotary_dim, device="cpu"):
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(positions).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(device)


def plain(x, table, lengths):
    """x cos + rotate_half(x) sin, transformers' formula, in the dtype of x."""
    rotary_dim = table.shape[1]
    parts = torch.cat([table[:length] for length in lengths])[:, None].to(x.dtype)
    cosine, sine = (part.repeat(1, 1, 2) for part in parts.chunk(2, -1))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


def check_rotary(lengths, heads, dim, rotary_dim, dtype, impl, device="cpu"):
    x = torch.randn(sum(lengths), heads, dim, device=device).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    table, dy = table_of(max(lengths) + 3, rotary_dim, device), torch.randn_like(x)
    y = rotary(x, table, offsets_of(lengths).to(device), max(lengths), impl=impl)
    theirs, exact = (plain(v, table, lengths) for v in (x, wide))
    assert y.is_contiguous()
    assert_within_budget(y, theirs, exact, f"{dtype} y")
    grads = [
        torch.autograd.grad(result, leaf, dy.to(result.dtype))[0]
        for result, leaf in ((y, x), (theirs, x), (exact, wide))
    ]
    assert_within_budget(*grads, f"{dtype} dx")


def check_rotary_attention(lengths, dim, rotary_dim, dtype, impl, device="cpu", **options):
    heads = 2
    qkv = torch.randn(sum(lengths), 3, heads, dim, device=device).to(dtype).requires_grad_()
    wide = qkv.detach().double().requires_grad_()
    table = table_of(max(lengths), rotary_dim, device)
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device)
    out = attention(qkv, cu_seqlens, max(lengths), rotary=table, impl=impl, **options)

    def theirs(leaf):
        q, k, v = leaf.unbind(1)
        window = options.get("window_size", (-1, -1))
        rotated = (plain(x, table, lengths) for x in (q, k))
        return plain_cross(*rotated, v, lengths, lengths, window)

    values = [out, theirs(qkv), theirs(wide)]
    assert_within_budget(*values, f"{dtype} out")
    dout = torch.randn_like(out)
    grads = [
        torch.autograd.grad(result, leaf, dout.to(result.dtype))[0]
        for result, leaf in zip(values, (qkv, qkv, wide), strict=True)
    ]
    assert_within_budget(*grads, f"{dtype} dqkv")
