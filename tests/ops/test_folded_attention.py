import pytest
import torch
import torch.nn.functional as F

from fastenc.ops.folded_attention import folded_attention

HEADS, HIDDEN, LENGTHS, COUNTS, TOKENS = 2, 32, (9, 4, 7), (2, 0, 1), (0, 5, 14)


def projected(x, weights, biases):
    """Scaled dot-product attention over keys and values that are computed, a sequence at a time."""
    q, k, v = (
        F.linear(x, *each).unflatten(1, (HEADS, -1)) for each in zip(weights, biases, strict=True)
    )
    results, tokens, start = [], torch.tensor(TOKENS), 0
    for length in LENGTHS:
        inside = tokens[(tokens >= start) & (tokens < start + length)]
        heads = (q[inside], k[start : start + length], v[start : start + length])
        results.append(
            F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in heads), scale=0.3)
        )
        start += length
    return torch.cat(results, 1).transpose(0, 1)


@pytest.mark.parametrize("joined", [False, True], ids=["three weights", "parts of one weight"])
def test_values_and_gradients_are_those_with_keys_and_values(joined):
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), HIDDEN, requires_grad=True)
    if joined:
        leaves = [torch.randn(3 * 16, HIDDEN), torch.randn(3 * 16)]
        weights, biases = (leaf.requires_grad_().chunk(3) for leaf in leaves)
    else:
        leaves = [torch.randn(16, HIDDEN) for _ in range(3)] + [torch.randn(16) for _ in range(3)]
        weights, biases = leaves[:3], leaves[3:]
    parameters = [leaf.requires_grad_() for leaf in (x, *leaves)]
    ours = folded_attention(
        x, torch.tensor(TOKENS), torch.arange(3), LENGTHS, COUNTS, weights, biases,
        num_heads=HEADS, softmax_scale=0.3,
    )  # fmt: skip
    theirs = projected(x, weights, biases)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(ours)
    gradients = (torch.autograd.grad(y, parameters, dy) for y in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
