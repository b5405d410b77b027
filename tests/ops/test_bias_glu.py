import pytest
import torch
import torch.nn.functional as F

from fastenc import nn as fnn
from fastenc.ops import bias_glu
from fastenc.ops.activation import GATED
from fastenc.reference import bias_glu as reference
from fastenc.testing import assert_within_budget
from tests.helpers.bias_glu import TORCHS, plain
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows,width", [(1, 1), (7, 37), (130, 1152)])
def test_values_and_gradients_keep_the_budget(instruction_set, rows, width, dtype, activation):
    x = (2 * torch.randn(rows, 2 * width)).to(dtype).requires_grad_()
    bias = torch.randn(2 * width).to(dtype).requires_grad_()
    dy = torch.randn(rows, width).to(dtype)
    wide = [v.detach().double().requires_grad_() for v in (x, bias)]
    y = bias_glu(x, bias, activation=activation, impl="cpp")
    y_plain = plain(x, bias, activation)
    truth = reference.bias_glu(*wide, activation=activation)
    assert_within_budget(y, y_plain, truth, "y")
    ours, theirs = (
        torch.autograd.grad(y, (x, bias), dy),
        torch.autograd.grad(y_plain, (x, bias), dy),
    )
    exact = torch.autograd.grad(truth, wide, dy.double())
    for name, *triple in zip(("dx", "dbias"), ours, theirs, exact, strict=True):
        assert_within_budget(*triple, name)


@pytest.mark.parametrize("activation", GATED)
def test_tails_are_exact(instruction_set, activation):
    lowest = torch.finfo(torch.float32).min
    u = torch.tensor([lowest, -3e19, -1e4, -60.0, 0.0, 60.0, 1e4, 3e19])
    x = torch.cat([u, torch.full_like(u, 3.0)]).requires_grad_()
    y = bias_glu(x, activation=activation)
    exact = 3 * TORCHS[activation](u.double()).float()
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx[:8], 1.5 + 1.5 * u.sign(), rtol=0, atol=1e-6)
    x = torch.tensor([[float("nan"), 1.0, 1.0, 1.0]])
    y = bias_glu(x, activation=activation)[0]
    assert y[0].isnan() and y[1].isfinite()


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_halves_are_ordered_as_in_transformers_models(instruction_set, impl):
    """The rows of a stacked weight: ModernBERT's Wi, T5 v1.1's (wi_0, wi_1), LLaMA's (gate_proj, up_proj)."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    sizes = dict(hidden_size=16, intermediate_size=24)
    modern = ModernBertMLP(transformers.ModernBertConfig(**sizes))
    t5 = T5DenseGatedActDense(
        transformers.T5Config(d_model=16, d_ff=24, feed_forward_proj="gated-gelu", dropout_rate=0)
    )
    llama = LlamaMLP(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    stack = lambda *linears: torch.cat([linear.weight for linear in linears])
    x = torch.randn(5, 16)
    for theirs, weight, out, activation in (
        (modern, modern.Wi.weight, modern.Wo, "gelu"),
        (t5, stack(t5.wi_0, t5.wi_1), t5.wo, "gelu_tanh"),
        (llama, stack(llama.gate_proj, llama.up_proj), llama.down_proj, "silu"),
    ):
        ours = out(bias_glu(F.linear(x, weight), activation=activation, impl=impl))
        torch.testing.assert_close(ours, theirs.eval()(x), rtol=1e-5, atol=1e-6)


@needs_cpp
def test_registration_passes_opcheck():
    x, bias, dy = torch.randn(4, 24), torch.randn(24), torch.randn(4, 12)
    torch.library.opcheck(torch.ops.fastenc.bias_glu_fwd.default, (x, bias, 2))
    torch.library.opcheck(torch.ops.fastenc.bias_glu_bwd.default, (dy, x, bias, 1))
    torch.library.opcheck(torch.ops.fastenc.bias_glu_bwd.default, (dy, x, None, 0))


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(lambda x, b: bias_glu(x, b).sum())
    bias = torch.randn(40, requires_grad=True)
    for rows in (3, 7):
        x = torch.randn(rows, 40, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, bias), (x, bias))
        theirs = torch.autograd.grad(plain(x, bias, "gelu").sum(), (x, bias))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_cpp
def test_result_does_not_depend_on_the_number_of_threads():
    x, bias = torch.randn(700, 90, requires_grad=True), torch.randn(90, requires_grad=True)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        y = bias_glu(x, bias)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, bias))])
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_no_rows_leading_dimensions_and_strides(instruction_set):
    bias = torch.randn(16, requires_grad=True)
    y = bias_glu(torch.empty(0, 16, requires_grad=True), bias)
    y.sum().backward()
    assert y.shape == (0, 8) and torch.equal(bias.grad, torch.zeros(16))
    assert bias_glu(torch.empty(3, 0)).shape == (3, 0)
    x = torch.randn(16, 9).t()
    for shaped in (x, x.reshape(3, 3, 16)):
        torch.testing.assert_close(bias_glu(shaped), plain(shaped, None, "gelu"))


def test_modules():
    x, bias = torch.randn(3, 10), torch.randn(10)
    torch.testing.assert_close(fnn.GEGLU()(x), plain(x, None, "gelu"))
    torch.testing.assert_close(fnn.GEGLU("tanh")(x, bias), plain(x, bias, "gelu_tanh"))
    torch.testing.assert_close(fnn.SwiGLU()(x, bias), plain(x, bias, "silu"))


def test_bad_input_is_named():
    x = torch.ones(2, 8)
    for attempt, message in (
        (
            lambda: bias_glu(torch.ones(2, 7)),
            "last dimension of x must be even, because it has two halves, got 7",
        ),
        (lambda: bias_glu(x, torch.ones(4)), r"bias must have shape \(8,\)"),
        (lambda: bias_glu(x, activation="relu"), r"activation must be one of .* got 'relu'"),
        (lambda: bias_glu(x.long()), "must be a floating-point tensor"),
        (lambda: bias_glu(x.double(), impl="cpp"), "impl='cpp' cannot take this call"),
        (lambda: fnn.GEGLU("erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
