"""A layer's halves as one autograd node each, beside the same formulas composed of single ops."""

import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastenc.models import Encoder, EncoderConfig
from fastenc.nn import encoder_layer as module
from fastenc.nn.encoder_layer import encoder_layer
from fastenc.packing import pack_sequences
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import (
    NAMES,
    inputs,
    options,
    plain_layer,
    weights_of,
)

pytestmark = needs_cpp


def run(values, cu_seqlens, longest, o, run_layer=encoder_layer):
    torch.manual_seed(7)
    return run_layer(values["x"], cu_seqlens, longest, weights_of(values), o)


def gradients(y, values):
    torch.manual_seed(8)
    wanted = {name: v for name, v in values.items() if v.requires_grad}
    found = torch.autograd.grad(y, tuple(wanted.values()), torch.randn_like(y))
    return dict(zip(wanted, found, strict=True))


def of_single_ops(monkeypatch, function):
    with monkeypatch.context() as context:
        context.setattr(module, "_one_node", lambda *_: False)
        return function()


def assert_equal_within_rounding(ours, theirs, dtype=torch.float32, whole=None):
    """A key's bias cannot change a softmax: its gradient is rounding noise, measured against the others' size.

    ``whole`` holds the gradients of all weights, where ``theirs`` are those of a few.
    """
    sizes = [float(v.abs().max()) for v in (whole or theirs).values() if v.numel()]
    floor = max(sizes, default=0.0) / 50
    for name in theirs:
        if not theirs[name].numel():
            continue
        a, b = ours[name].float(), theirs[name].float()
        steps = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=steps, atol=steps * max(floor, float(b.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation,approximate", [("gelu", "none"), ("gelu_new", "tanh")])
def test_values_and_every_gradient_keep_the_budget(activation, approximate, dtype):
    lengths = EDGE_LENGTHS
    values, *batch = inputs(lengths, dtype)
    wide = {name: v.detach().double().requires_grad_() for name, v in values.items()}
    y = run(values, *batch, options(activation=activation))
    assert type(y.grad_fn).__name__ == "FeedForwardHalfBackward"
    plain, truth = (plain_layer(v, lengths, approximate) for v in (values, wide))
    assert_within_budget(y, plain, truth, "y")
    ours, theirs = gradients(y, values), gradients(plain, values)
    exact = gradients_like(truth, wide, dtype)
    for name in values:
        # The key's weight sums the same terms as its bias, whose sum is zero.
        scale = float(exact["key"].abs().max()) if name == "key_bias" else 0.0
        assert_within_budget(ours[name], theirs[name], exact[name], f"d{name}", scale=scale)


def gradients_like(y, values, dtype):
    """:func:`gradients` with the dy that a result of another dtype got."""
    torch.manual_seed(8)
    dy = torch.randn(y.shape, dtype=dtype).double()
    return dict(zip(values, torch.autograd.grad(y, tuple(values.values()), dy), strict=True))


@pytest.mark.parametrize("p", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("lengths", [EDGE_LENGTHS, (0, 0)], ids=["edges", "empty"])
def test_gradients_are_those_of_single_ops(monkeypatch, p, precision, lengths):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    values, *batch = inputs(lengths, dtype)

    def once():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            y = run(values, *batch, options(p))
        return y, gradients(y, values)

    y, ours = once()
    y_single, theirs = of_single_ops(monkeypatch, once)
    assert torch.equal(y, y_single)
    assert all(ours[name].dtype == dtype for name in values)
    computed = torch.float32 if precision == "fp32" else torch.bfloat16
    assert_equal_within_rounding(ours, theirs, computed)


SUBSETS = {name: {name} for name in ("x", *NAMES)}
SUBSETS |= {f"all but {name}": {"x", *NAMES} - {name} for name in ("x", *NAMES)}
SUBSETS["biases"] = {name for name in NAMES if name.endswith("_bias")}
SUBSETS["second half"] = set(NAMES[10:])


@pytest.mark.parametrize("trained", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_of_weights_may_be_frozen(monkeypatch, trained):
    values, *batch = inputs((5, 0, 33))
    whole = gradients(run(values, *batch, options(0.1)), values)
    for name, value in values.items():
        value.requires_grad_(name in trained)
    once = lambda: gradients(run(values, *batch, options(0.1)), values)
    ours, theirs = once(), of_single_ops(monkeypatch, once)
    assert ours.keys() == trained
    assert_equal_within_rounding(ours, theirs, whole=whole)


def kept(function) -> int:
    """Elements of activations that a forward keeps for its backward."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(sizes.values())


@pytest.mark.parametrize(
    "trained", [set(), {"out_norm_bias"}, {"down_bias"}, {"down"}, set(NAMES), {"x", *NAMES}]
)
def test_no_more_is_kept_than_by_single_ops(monkeypatch, trained):
    values, *batch = inputs((64,))
    for name, value in values.items():
        value.requires_grad_(name in trained)
    once = lambda: kept(lambda: run(values, *batch, options(0.1)))
    ours, theirs = once(), of_single_ops(monkeypatch, once)
    assert ours <= theirs
    if not trained:
        assert ours == 0


def test_double_backward_is_an_error():
    values, *batch = inputs((4, 3))
    y = run(values, *batch, options())
    (dx,) = torch.autograd.grad(y.square().sum(), values["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_second_backward_over_a_kept_graph_gives_the_same_gradients():
    values, *batch = inputs((4, 3))
    y = run(values, *batch, options(0.1))
    once = lambda: torch.autograd.grad(y.sum(), tuple(values.values()), retain_graph=True)
    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


def test_backward_inside_autocast_keeps_the_forwards_precision():
    values, *batch = inputs((4, 3))
    outside = gradients(run(values, *batch, options()), values)
    y = run(values, *batch, options())
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(y, values)
    assert all(torch.equal(inside[name], outside[name]) for name in values)


def test_checkpointing_and_parameter_hooks(monkeypatch):
    values, *batch = inputs((5, 20))
    plain = gradients(run(values, *batch, options(0.1)), values)
    again = partial(checkpoint, encoder_layer, use_reentrant=False)
    recomputed = gradients(run(values, *batch, options(0.1), again), values)
    assert all(torch.equal(plain[name], recomputed[name]) for name in values)
    seen = []
    values["up"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    values["up"].register_hook(lambda grad: 2 * grad)
    y = run(values, *batch, options(0.1))
    torch.manual_seed(8)
    y.backward(torch.randn_like(y))
    torch.testing.assert_close(seen[0], 2 * plain["up"])


def test_compiled_it_is_made_of_single_ops():
    config = EncoderConfig(50, 32, 2, 2, 48, 16, hidden_dropout_p=0.0, attention_dropout_p=0.0)
    model = Encoder(config)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for sequences in ([[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10], [4, 5], [1]]):
        batch = pack_sequences(sequences)
        results = []
        for m in (compiled, model):
            model.zero_grad(set_to_none=True)
            m(batch).pooled.square().sum().backward()
            results.append({name: p.grad for name, p in model.named_parameters()})
        assert_equal_within_rounding(*results)


def test_layers_that_the_kernels_do_not_cover_are_made_of_single_ops():
    values, *batch = inputs((5, 20))
    y = run(values, *batch, options(activation="relu"))
    assert type(y.grad_fn).__name__ == "_LayerNormBackward"
    wide = {name: v.detach().double().requires_grad_() for name, v in values.items()}
    y = run(wide, *batch, options())
    assert type(y.grad_fn).__name__ != "FeedForwardHalfBackward"
    gradients(y, wide)


def test_bad_input_is_named():
    values, cu_seqlens, longest = inputs((4, 3))
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest sequence, got 3"):
        run(values, cu_seqlens, 3, options())
    narrow = {**values, "out_norm": values["out_norm"][:8]}
    with pytest.raises(ValueError, match=r"weight must have shape \(64,\)"):
        run(narrow, cu_seqlens, longest, options())
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.0"):
        run(values, cu_seqlens, longest, options(1.0))


def test_sharded_parameters_get_the_whole_models_gradients():
    """FSDP2 and DDP over one process: hooks, resharding and gradients through both nodes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    config = EncoderConfig(50, 32, 2, 2, 48, 16, hidden_dropout_p=0.0, attention_dropout_p=0.0)
    model = Encoder(config)
    batch = pack_sequences([[1, 2, 3], [4, 5]])
    loss = lambda m: m(batch).pooled.square().sum()
    loss(model).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrapped in (DistributedDataParallel(copy.deepcopy(model)), copy.deepcopy(model)):
            if wrapped.__class__ is Encoder:
                mesh = dist.init_device_mesh("cpu", (1,))
                for layer in wrapped.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(wrapped, mesh=mesh)
            loss(wrapped).backward()
            for name, p in wrapped.named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(grad, expected[name.removeprefix("module.")])
    finally:
        dist.destroy_process_group()
