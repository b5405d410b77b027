"""Inputs, torch's own computation, and the checks that CPU and GPU tests share."""

import torch
import torch.nn.functional as F

from fastenc.ops import embedding_layer_norm, tied_embedding_layer_norm
from fastenc.reference import embedding_layer_norm as reference
from fastenc.testing import assert_within_budget

NAMES = ("word", "position", "token_type", "weight", "bias")


def inputs(tokens, vocabulary, width, dtype, device="cpu"):
    """Ids and tables; half of the tokens have id 0, like special tokens in real texts."""
    make = lambda *shape: torch.randn(*shape, device=device).to(dtype).requires_grad_()
    draw = lambda high: torch.randint(high, (tokens,), device=device)
    ids = {
        "input_ids": torch.where(draw(2) > 0, draw(vocabulary), 0),
        "position_ids": draw(12),
        "token_type_ids": draw(2),
    }
    tables = {
        "word": make(vocabulary, width),
        "position": make(15, width),
        "token_type": make(2, width),
        "weight": make(width),
        "bias": make(width),
    }
    return ids, tables


def plain(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias):
    h = F.embedding(input_ids, word) + F.embedding(token_type_ids, token_type)
    h = h + F.embedding(position_ids + 3, position)
    return F.layer_norm(h, word.shape[1:], weight, bias, 1e-12)


def check_budget(dtype, impl, tokens, vocabulary, width, device="cpu"):
    ids, tables = inputs(tokens, vocabulary, width, dtype, device)
    dy = torch.randn(tokens, width, device=device).to(dtype)
    wide = {name: table.detach().double().requires_grad_() for name, table in tables.items()}
    y = embedding_layer_norm(**ids, **tables, position_offset=3, impl=impl)
    y_plain = plain(**ids, **tables)
    y_truth = reference.embedding_layer_norm(**ids, **wide, position_offset=3)
    assert_within_budget(y, y_plain, y_truth, f"{dtype} y")
    ours = torch.autograd.grad(y, list(tables.values()), dy)
    theirs = torch.autograd.grad(y_plain, list(tables.values()), dy)
    exact = torch.autograd.grad(y_truth, list(wide.values()), dy.double())
    for name, *triple in zip(NAMES, ours, theirs, exact, strict=True):
        assert_within_budget(*triple, f"{dtype} d{name}")


def decoded(hidden, table):
    return F.linear(torch.tanh(hidden), table).square().mean()


def check_tied_budget(dtype, impl, device="cpu"):
    ids, tables = inputs(200, 30, 48, dtype, device)
    word = tables["word"]
    wide = {name: table.detach().double().requires_grad_() for name, table in tables.items()}
    options = {**ids, "position_offset": 3}
    ours = decoded(*tied_embedding_layer_norm(**tables, **options, impl=impl))
    twice = decoded(plain(**ids, **tables), word)
    truth = decoded(reference.embedding_layer_norm(**wide, **options), wide["word"])
    grads = [
        torch.autograd.grad(loss, table)[0]
        for loss, table in ((ours, word), (twice, word), (truth, wide["word"]))
    ]
    assert_within_budget(*grads, "dword")


def check_constant_rows(impl, device):
    """Tokens whose elements are equal have deviation 0, whatever the rounding of their sum."""
    word = torch.tensor([0.1, 1.0, -37.3, 12345.678])[:, None].repeat(1, 768).to(device)
    ids = torch.arange(4, device=device)
    bias = torch.randn(768, device=device)
    y = embedding_layer_norm(ids, word, torch.ones_like(bias), bias, eps=1e-12, impl=impl)
    assert torch.equal(y, bias.expand(4, 768))
