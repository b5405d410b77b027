"""Which arguments cuDNN's ops get, and which are refused. Stand-ins replace the ops."""

import pytest
import torch

from fastenc.ops import _cudnn_attention, attention, cross_attention, dispatch
from tests.helpers.attention_cases import packed

HALF = torch.bfloat16


def by_formula(q, k, v, cu_seqlens, scale):
    outs = []
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q_part, k_part, v_part = (x[a:b].transpose(0, 1).float() for x in (q, k, v))
        weights = (q_part @ k_part.mT * scale).softmax(-1)
        outs.append((weights @ v_part).transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


class StandIn:
    """Takes the arguments by their names in torch's schemas and records them."""

    def __init__(self):
        self.calls = []

    def arguments(self, op, given, named):
        arguments = op._schema.arguments
        names = [argument.name for argument in arguments]
        by_name = dict(zip(names, given, strict=False)) | named
        # Newer versions of PyTorch have more of them, with defaults.
        needed = {each.name for each in arguments if not each.has_default_value()} | {"scale"}
        assert needed <= by_name.keys() <= set(names)
        self.calls.append(by_name)
        for name in ("grad_out", "query", "key", "value", "out"):
            assert name not in by_name or by_name[name].is_contiguous(), name
        return by_name

    def forward(self, *given, **named):
        a = self.arguments(torch.ops.aten._cudnn_attention_forward.default, given, named)
        out = by_formula(a["query"], a["key"], a["value"], a["cum_seq_q"], a["scale"])
        lse, seed, offset = torch.zeros(1), torch.tensor([7]), torch.tensor([8])
        return out, lse, a["cum_seq_q"], a["cum_seq_k"], a["max_q"], a["max_k"], seed, offset, lse

    def backward(self, *given, **named):
        a = self.arguments(torch.ops.aten._cudnn_attention_backward.default, given, named)
        leaves = [a[name].detach().requires_grad_() for name in ("query", "key", "value")]
        with torch.enable_grad():
            out = by_formula(*leaves, a["cum_seq_q"], a["scale"])
        assert torch.equal(out, a["out"]) and (a["philox_seed"], a["philox_offset"]) == (7, 8)
        return torch.autograd.grad(out, leaves, a["grad_out"])


@pytest.fixture
def cudnn(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(_cudnn_attention, "FORWARD", stand_in.forward)
    monkeypatch.setattr(_cudnn_attention, "BACKWARD", stand_in.backward)
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    return stand_in


def test_values_and_gradients_are_the_references(cudnn):
    qkv, cu_seqlens, longest = packed((5, 30, 1), 2, 32, HALF)
    results = []
    for impl in ("cudnn", "reference"):
        out = attention(qkv, cu_seqlens, longest, softmax_scale=0.3, impl=impl)
        dout = torch.ones_like(out).transpose(1, 2).contiguous().transpose(1, 2)
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    forward, backward = cudnn.calls
    for arguments in (forward, backward):
        assert arguments["cum_seq_q"] is arguments["cum_seq_k"] is cu_seqlens
        assert (
            arguments["max_q"],
            arguments["max_k"],
            arguments["dropout_p"],
            arguments["scale"],
        ) == (
            30,
            30,
            0.0,
            0.3,
        )
        assert not arguments["is_causal"] and arguments["attn_bias"] is None
    assert forward["compute_log_sumexp"]


def test_dropout_is_cudnns_and_draws_nothing_of_ours(cudnn):
    qkv, cu_seqlens, longest = packed((5, 3), 2, 32, HALF)
    before = torch.get_rng_state()
    with torch.no_grad():
        attention(qkv, cu_seqlens, longest, dropout_p=0.1, impl="cudnn")
    assert torch.equal(torch.get_rng_state(), before)
    assert cudnn.calls[0]["dropout_p"] == 0.1 and not cudnn.calls[0]["compute_log_sumexp"]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"window_size": (3, 3), "key_bias": torch.zeros(8)}, "takes no window_size, key_bias"),
        ({"rotary": torch.zeros(8, 32)}, "takes no rotary"),
        ({"rng_state": torch.tensor([3, 4]), "dropout_p": 0.1}, "takes no rng_state"),
        ({"return_lse": True}, "takes no return_lse"),
        ({"dtype": torch.float32}, "takes float16 or bfloat16, got torch.float32"),
        ({"dim": 20}, "head_dim must be a multiple of 8 up to 128, got 20"),
    ],
)
def test_unsupported_arguments_are_named(cudnn, change, message):
    shape = {"dim": change.pop("dim", 32), "dtype": change.pop("dtype", HALF)}
    qkv, cu_seqlens, longest = packed((5, 3), 2, **shape)
    with pytest.raises(ValueError, match=f"impl='cudnn' cannot take this call: .*{message}"):
        attention(qkv, cu_seqlens, longest, impl="cudnn", **change)
    assert not cudnn.calls


def test_a_gradient_that_pytorch_computes_wrongly_is_refused(cudnn, monkeypatch):
    qkv, cu_seqlens, longest = packed((40, 3), 2, 32, HALF)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ValueError, match=r"at most head_dim = 32 tokens, got max_seqlen = 40"):
        attention(qkv, cu_seqlens, longest, impl="cudnn")
    with torch.no_grad():
        attention(qkv, cu_seqlens, longest, impl="cudnn")
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    attention(qkv, cu_seqlens, longest, impl="cudnn").sum().backward()


def test_it_runs_only_by_name_and_only_on_a_gpu():
    qkv, cu_seqlens, longest = packed((5, 3), 2, 32, HALF)
    with pytest.raises(ValueError, match="it runs on CUDA tensors, got one on cpu"):
        attention(qkv, cu_seqlens, longest, impl="cudnn")
    q, k, v = qkv.unbind(1)
    with pytest.raises(ValueError, match=r"cross_attention: .* it has no cuDNN kernel"):
        cross_attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, impl="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(5, 30, 64, 1), (200, 17, 512)])
def test_on_a_gpu_values_are_the_references(lengths):
    qkv, cu_seqlens, longest = packed(lengths, 4, 64, HALF)
    qkv = qkv.detach().cuda().requires_grad_(longest <= 64)
    results = []
    for impl in ("cudnn", "reference"):
        out = attention(qkv, cu_seqlens.cuda(), longest, impl=impl)
        gradients = torch.autograd.grad(out.square().sum(), qkv) if qkv.requires_grad else ()
        results.append((out, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
