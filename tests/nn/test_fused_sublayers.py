"""Sublayers as one autograd node each, compared with single ops and with torch's own functions."""

import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastenc.models import Encoder, EncoderConfig
from fastenc.nn.layer import run_single_ops
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.ways import fused_sublayers
from fastenc.nn.ways.fused_sublayers import TAKES, run_fused_sublayers
from fastenc.packing import pack_sequences
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.layers import INNER, KINDS, Layer, exact_gradients, gradients, widened
from tests.helpers.products import widening_products_on_cpu

pytestmark = needs_cpp
TAKEN = [name for name, kind in KINDS.items() if not kind.spec.features - TAKES]
EVERY_VARIANT = pytest.mark.parametrize("variant", TAKEN)
DROPOUT = LayerDropout(0.1, 0.1, 0.0, 0.1)


def assert_equal_within_rounding(ours, theirs, dtype=torch.float32, whole=None):
    """A key's bias cannot change a softmax, so the sum that is its gradient is 0 plus rounding noise.

    The noise is compared with the gradient of the key's weight, which sums terms of the same size. ``whole`` holds the
    gradients of all weights, if ``theirs`` has only some of them.
    """
    sizes = {n: float(v.abs().max()) for n, v in (whole or theirs).items() if v.numel()}
    floor = max(sizes.values(), default=0.0) / 50
    for name in theirs:
        if not theirs[name].numel():
            continue
        a, b = ours[name].float(), theirs[name].float()
        steps = 8 * torch.finfo(dtype).eps
        scale = sizes.get("key", 0.0) if name == "key_bias" else float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=steps, atol=steps * max(floor, scale))


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_every_gradient_keep_the_budget(variant, dtype):
    layer = Layer(KINDS[variant], dtype=dtype)
    wide = widened(layer.values)
    results = layer.run(run_fused_sublayers)
    assert type(results[0].grad_fn).__name__ == "FusedFeedForwardBackward"
    plain, truth = layer.plain(), layer.plain(wide)
    for ours, theirs, exact in zip(results, plain, truth, strict=True):
        assert_within_budget(ours, theirs, exact, "y")
    ours, theirs = gradients(results, layer.values), gradients(plain, layer.values)
    exact = exact_gradients(truth, wide, dtype)
    for name in layer.values:
        # The gradient of the key's weight sums terms of the same size as its bias's, whose sum is zero.
        scale = float(exact["key"].abs().max()) if name == "key_bias" else 0.0
        assert_within_budget(ours[name], theirs[name], exact[name], f"d{name}", scale=scale)


@EVERY_VARIANT
@pytest.mark.parametrize("p", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("lengths", [EDGE_LENGTHS, (0, 0)], ids=["edges", "empty"])
def test_gradients_are_those_of_single_ops(variant, p, precision, lengths):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layer = Layer(KINDS[variant], lengths, dtype)
    runs = []
    for way in (run_fused_sublayers, run_single_ops):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            results = layer.run(way, LayerDropout(p, p, p / 2, p))
        runs.append((results, gradients(results, layer.values)))
    (results, ours), (single, theirs) = runs
    computed = torch.float32 if precision == "fp32" else torch.bfloat16
    for a, b in zip(results, single, strict=True):
        assert_equal_within_rounding({"y": a.detach()}, {"y": b.detach()}, computed)
    assert all(ours[name].dtype == dtype for name in layer.values)
    assert_equal_within_rounding(ours, theirs, computed)


NAMES = tuple(name for name in Layer(KINDS["bert"]).values if name != "x")
SUBSETS = {name: {name} for name in ("x", *NAMES)}
SUBSETS |= {f"all but {name}": {"x", *NAMES} - {name} for name in ("x", *NAMES)}
SUBSETS["biases"] = {name for name in NAMES if name.endswith("_bias")}
SUBSETS["feed-forward"] = {name for name in NAMES if name.startswith(("up", "down", "out_norm"))}


@pytest.mark.parametrize("variant", ["bert", "mbart"])
@pytest.mark.parametrize("trained", SUBSETS.values(), ids=SUBSETS)
def test_any_subset_of_weights_may_be_frozen(variant, trained):
    layer = Layer(KINDS[variant], (5, 0, 33))
    # The residual sum does not depend on the last norm, so only y is used.
    once = lambda way: gradients(layer.run(way, DROPOUT)[:1], layer.values)
    whole = once(run_fused_sublayers)
    for name, value in layer.values.items():
        value.requires_grad_(name in trained)
    ours, theirs = once(run_fused_sublayers), once(run_single_ops)
    assert ours.keys() == trained
    assert_equal_within_rounding(ours, theirs, whole=whole)


def kept_shapes(function) -> list[torch.Size]:
    """The shapes of the tensors that a forward saves for its backward."""
    shapes = {}

    def pack(tensor):
        shapes[tensor.untyped_storage().data_ptr()] = tensor.shape
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return [*shapes.values()]


def kept(function) -> int:
    """Number of activation elements that a forward saves for its backward."""
    return sum(shape.numel() for shape in kept_shapes(function))


@pytest.mark.parametrize(
    "trained", [set(), {"out_norm_bias"}, {"down_bias"}, {"down"}, set(NAMES), {"x", *NAMES}]
)
def test_no_more_is_kept_than_by_single_ops(trained):
    layer = Layer(KINDS["bert"], (64,))
    for name, value in layer.values.items():
        value.requires_grad_(name in trained)
    ours, theirs = (
        kept(lambda way=way: layer.run(way, DROPOUT))
        for way in (run_fused_sublayers, run_single_ops)
    )
    assert ours <= theirs
    if not trained:
        assert ours == 0


@EVERY_VARIANT
def test_the_result_of_the_activation_is_computed_again(variant):
    layer = Layer(KINDS[variant], (60,))
    shapes = kept_shapes(lambda: layer.run(run_fused_sublayers, DROPOUT))
    # Without a gate its input has the same shape, with a gate twice the width.
    assert shapes.count((60, INNER)) == (not KINDS[variant].spec.feed_forward.gated)


def test_double_backward_is_an_error():
    layer = Layer(KINDS["bert"], (4, 3))
    (y,) = layer.run(run_fused_sublayers)
    with pytest.raises(RuntimeError, match="the kernels have no second derivatives"):
        torch.autograd.grad(y.square().sum(), layer.values["x"], create_graph=True)


@EVERY_VARIANT
def test_a_second_backward_over_a_kept_graph_gives_the_same_gradients(variant):
    layer = Layer(KINDS[variant], (4, 3))
    results = layer.run(run_fused_sublayers, DROPOUT)
    loss = sum(y.sum() for y in results)
    once = lambda: torch.autograd.grad(loss, tuple(layer.values.values()), retain_graph=True)
    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


@EVERY_VARIANT
def test_backward_inside_autocast_keeps_the_forwards_precision(variant):
    layer = Layer(KINDS[variant], (4, 3))
    outside = gradients(layer.run(run_fused_sublayers), layer.values)
    results = layer.run(run_fused_sublayers)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(results, layer.values)
    assert all(torch.equal(inside[name], outside[name]) for name in layer.values)


@EVERY_VARIANT
def test_checkpointing_and_parameter_hooks(variant):
    layer = Layer(KINDS[variant], (5, 20))
    plain = gradients(layer.run(run_fused_sublayers, DROPOUT), layer.values)
    again = partial(checkpoint, run_fused_sublayers, use_reentrant=False)
    recomputed = gradients(layer.run(again, DROPOUT), layer.values)
    assert all(torch.equal(plain[name], recomputed[name]) for name in layer.values)
    seen, up = [], layer.values["up"]
    up.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    up.register_hook(lambda grad: 2 * grad)
    results = layer.run(run_fused_sublayers, DROPOUT)
    torch.manual_seed(8)
    torch.autograd.backward(results, [torch.randn_like(y) for y in results])
    torch.testing.assert_close(seen[0], 2 * plain["up"])


def test_compiled_it_is_made_of_single_ops():
    config = EncoderConfig(50, 32, 2, 2, 48, 16, hidden_dropout_p=0.0, attention_dropout_p=0.0)
    model = Encoder(config)
    compiled = compiled_once(model)
    for sequences in ([[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10], [4, 5], [1]]):
        batch = pack_sequences(sequences)
        results = []
        for m in (compiled, model):
            model.zero_grad(set_to_none=True)
            m(batch).pooled.square().sum().backward()
            results.append({name: p.grad for name, p in model.named_parameters()})
        assert_equal_within_rounding(*results)


def reason(layer):
    return fused_sublayers.unsupported_reason(layer.layer_call())


def test_layers_that_the_kernels_do_not_cover_say_why():
    layer = Layer(KINDS["bert"], (5, 20))
    assert reason(layer) is None
    with torch.no_grad():
        assert reason(layer) == "gradients are off"
    layer.values = widened(layer.values)
    assert "no attention kernel for torch.float64" in reason(layer)
    assert "nothing requires a gradient" in reason(Layer(KINDS["bert"], (5,), grad=False))


def test_bad_input_is_named():
    layer = Layer(KINDS["bert"], (4, 3))
    layer.longest = 3
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest sequence, got 3"):
        layer.run(run_fused_sublayers)
    layer.longest = 4
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.0"):
        layer.run(run_fused_sublayers, LayerDropout(1.0))
    layer.values["out_norm"] = layer.values["out_norm"][:8]
    with pytest.raises(ValueError, match=r"weight must have shape \(64,\)"):
        layer.run(run_fused_sublayers)


def test_sharded_parameters_get_the_whole_models_gradients():
    """FSDP2 and DDP with one process: hooks, resharding and gradients through both nodes."""
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


def test_weight_gradients_of_widening_products_are_not_cast(monkeypatch):
    """Each cast is a launch on a GPU. Two layers of two sublayers would make four casts."""
    config = EncoderConfig(vocab_size=50, num_layers=2, hidden_size=64, num_heads=4)
    encoder, batch = Encoder(config).train(), pack_sequences([[1, 2, 3], [4, 5, 6]])

    def casts():
        with torch.autocast("cpu", torch.bfloat16):
            loss = encoder(batch).last_hidden_state.float().square().sum()
        with torch.profiler.profile() as profiler:
            loss.backward()
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in encoder.parameters())
        names = [event.name for event in profiler.events()]
        return names.count("aten::_foreach_copy_")

    assert casts() == 4
    widening_products_on_cpu(monkeypatch)
    assert casts() == 0
