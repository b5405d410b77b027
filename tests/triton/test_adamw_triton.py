"""AdamW's kernel and the copies that it writes, compared with torch's AdamW: on a GPU, or interpreted."""

import copy
import gc
import shutil
from functools import partial

import pytest
import torch

from fastenc.models import Encoder, EncoderConfig
from fastenc.nn import adamw, weight_copies
from fastenc.nn.adamw import AdamW
from fastenc.packing import pack_sequences
from fastenc.testing import assert_within_budget
from fastenc.train import TrainConfig
from fastenc.train.optimizer import build_optimizer, lr_factor
from tests.helpers.training_run import assert_bitwise_equal, build
from tests.helpers.training_run import weights as weights_in

pytest.importorskip("triton")
SHAPES = ((5, 7), (3000,), (1,), (0,), (1025,), (64, 40))
COPIES = torch.bfloat16


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parameters(device, dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in SHAPES]


def groups(tensors):
    """Two groups, each with settings of its own."""
    decayed = {"params": tensors[:4], "weight_decay": 0.1, "betas": (0.8, 0.98)}
    return [decayed, {"params": tensors[4:], "weight_decay": 0.0, "eps": 1e-3}]


def give_gradients(step, *models):
    torch.manual_seed(step)
    for tensors in zip(*models, strict=True):
        gradient = torch.randn(tensors[0].shape) * 10.0 ** (1 - step)
        for tensor in tensors:
            tensor.grad = gradient.to(tensor)


def test_steps_keep_the_budget(device):
    """With decay, groups, a schedule and clipping, against torch's fused kernel, and torch's formula in float64."""
    ours, theirs, exact = parameters(device), parameters(device), parameters(device, torch.float64)
    copies = [torch.empty_like(p, dtype=torch.float16) for p in ours[1:]]
    optimizers = (
        AdamW(groups(ours), lr=0.01),
        torch.optim.AdamW(groups(theirs), lr=0.01, fused=True),
        torch.optim.AdamW(groups(exact), lr=0.01, foreach=False),
    )
    optimizers[0].copies = torch.float16
    for parameter, kept in zip(ours[1:], copies, strict=True):
        weight_copies.keep(parameter, kept)
    for step in range(6):
        give_gradients(step, ours, theirs, exact)
        for tensors, optimizer in zip((ours, theirs, exact), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(tensors, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * lr_factor(step + 1, 2, 10)
            optimizer.step()
    for number, triple in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_within_budget(*triple, f"parameter {number}")
        for entry in ("exp_avg", "exp_avg_sq"):
            states = zip(optimizers, triple, strict=True)
            assert_within_budget(*(o.state[p][entry] for o, p in states), f"{entry} {number}")
        assert optimizers[0].state[ours[number]]["step"] == 6
    assert all(torch.equal(c, p.half()) for c, p in zip(copies, ours[1:], strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 1 - 1e-6])
def test_bias_corrections_keep_their_digits(device, beta):
    """1 - beta^t: in float32 it would lose most digits where the power is near 1."""
    for step in (1, 3, 700, 100_000):
        p = torch.zeros(1, device=device).requires_grad_()
        w = torch.zeros(1, device=device, dtype=torch.float64).requires_grad_()
        for tensor, optimizer_class, options in (
            (p, AdamW, {}),
            (w, torch.optim.AdamW, {"foreach": False}),
        ):
            optimizer = optimizer_class(
                [tensor], lr=1.0, betas=(beta, beta), weight_decay=0.0, **options
            )
            tensor.grad = torch.ones_like(tensor)
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(6)))
            optimizer.state[tensor]["step"].fill_(step - 1)
            optimizer.step()
        torch.testing.assert_close(p.double(), w, rtol=3e-6, atol=0)


def test_found_inf_changes_nothing(device):
    tensors = parameters(device)
    optimizer = AdamW(tensors)
    optimizer.found_inf = torch.zeros((), device=device)
    give_gradients(0, tensors)
    optimizer.step()
    before = [t.detach().clone() for t in tensors]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf.fill_(1)
    give_gradients(1, tensors)
    tensors[0].grad.fill_(torch.nan)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize(
    "torchs",
    [
        {"fused": True},
        {"foreach": True},
        pytest.param({"capturable": True}, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("ours_first", [True, False])
def test_states_load_both_ways(device, ours_first, torchs):
    """A run that goes on with the other optimiser ends like a run with one optimiser."""
    make = {
        True: lambda tensors: AdamW(groups(tensors)),
        False: lambda tensors: torch.optim.AdamW(groups(tensors), **torchs),
    }
    whole, parts = parameters(device), parameters(device)
    reference, optimizer = torch.optim.AdamW(groups(whole)), make[ours_first](parts)
    for step in range(2):
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make[not ours_first](parts)
            optimizer.load_state_dict(state)
        give_gradients(step, whole, parts)
        reference.step()
        optimizer.step()
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    assert optimizer.state_dict().keys() == reference.state_dict().keys()
    if not ours_first:
        assert optimizer.param_groups[0]["fused"] and not optimizer.param_groups[0]["capturable"]
        assert all(state["step"].device.type == device.type for state in optimizer.state.values())


def test_a_deep_copy_steps_alike(device):
    tensors = parameters(device)
    optimizer = AdamW(tensors)
    give_gradients(0, tensors)
    twin = copy.deepcopy(optimizer)
    optimizer.step()
    twin.step()
    copies = twin.param_groups[0]["params"]
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_parameters_without_a_gradient_stay(device):
    tensors = parameters(device)
    optimizer = AdamW(tensors)
    optimizer.step()
    give_gradients(0, tensors)
    tensors[1].grad, before = None, tensors[1].detach().clone()
    optimizer.step()
    assert torch.equal(tensors[1], before) and tensors[1] not in optimizer.state
    assert optimizer.step(lambda: 7) == 7


def test_what_the_kernel_does_not_support_is_an_error(device):
    def stepped(tensor, **options):
        optimizer = AdamW([tensor])
        optimizer.param_groups[0] |= options
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()

    plain = torch.ones(3, 4, device=device)
    for name in ("amsgrad", "maximize", "differentiable", "capturable"):
        with pytest.raises(ValueError, match=f"does not support {name}, got True: use torch.optim"):
            stepped(plain.clone().requires_grad_(), **{name: True})
    with pytest.raises(ValueError, match="a learning rate that is a number, got a tensor"):
        stepped(plain.clone().requires_grad_(), lr=torch.tensor(0.1))
    with pytest.raises(
        ValueError, match=r"contiguous tensors of float32 .* got Tensor of torch\.f"
    ):
        stepped(plain.half().requires_grad_())
    with pytest.raises(ValueError, match=r"strides \(1, 3\): use torch\.optim\.AdamW"):
        stepped(torch.empty_strided((3, 4), (1, 3), device=device).fill_(1).requires_grad_())
    with pytest.raises(TypeError, match="amsgrad"):
        AdamW([plain.requires_grad_()], amsgrad=True)


@pytest.fixture
def subject(device, monkeypatch):
    """A model, its optimiser, and a call that runs a forward and a backward under autocast."""
    if device.type == "cpu":
        monkeypatch.setattr(weight_copies, "written", rounded(weight_copies.written))
    model = new_model(device)
    optimizer = AdamW(model.parameters(), lr=0.01)
    return model, optimizer, partial(forward_and_backward, model, optimizer)


def rounded(written):
    """The interpreter truncates when it makes bfloat16, where a GPU rounds."""

    def write(parameters, copies):
        for parameter, kept in zip(parameters, copies, strict=True):
            if kept is not None:
                torch.testing.assert_close(kept.float(), parameter.detach(), rtol=2**-7, atol=0)
                kept.data.copy_(parameter.detach())  # torch does not count this change
        written(parameters, copies)

    return write


def new_model(device):
    config = EncoderConfig(
        vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48,
        max_positions=32, hidden_dropout_p=0.0, attention_dropout_p=0.0, pooler=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Encoder(config).to(device).train()


def forward(model):
    device = next(model.parameters()).device
    with torch.autocast(device.type, COPIES):
        return model(pack_sequences([[2, 7, 9, 3], [2, 8, 3]]).to(device)).last_hidden_state


def forward_and_backward(model, optimizer):
    optimizer.zero_grad()
    out = forward(model)
    out.float().square().sum().backward()
    return out.detach()


def weights(model):
    """The weights of which the layers' products read copies."""
    return [
        m.weight
        for each in model.layers
        for m in (each.qkv, each.attention_out, each.up, each.down)
    ]


def current(model):
    return [weight_copies.current(weight, COPIES) for weight in weights(model)]


def casts(run):
    """The number of casts of several weights at once in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(
        event.count for event in profile.key_averages() if event.key == "aten::_foreach_copy_"
    )


def test_the_copies_are_the_rounded_weights_and_are_read(subject, monkeypatch):
    model, optimizer, run = subject
    first = casts(run)
    optimizer.step()
    for weight, kept in zip(weights(model), current(model), strict=True):
        assert torch.equal(kept, weight.to(COPIES))
    assert casts(run) == first - 1  # of the backward
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.forget_copies()
    assert casts(run) == first
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_training_is_that_of_torchs_adamw(subject):
    model, optimizer, run = subject
    for _ in range(3):
        run()
        optimizer.step()
    assert None not in current(model)
    again = new_model(next(model.parameters()).device)
    plain = torch.optim.AdamW(again.parameters(), lr=0.01, fused=True)
    for _ in range(3):
        forward_and_backward(again, plain)
        plain.step()
    moved = [
        (a - b).detach().abs() for a, b in zip(model.parameters(), again.parameters(), strict=True)
    ]
    # Where a gradient is nearly zero, Adam makes whole steps of rounding errors, of which a GPU has more.
    assert torch.cat([each.flatten() for each in moved]).mean() < 1e-4


@pytest.mark.parametrize("change", ["in place", "loaded", "replaced", "cast elsewhere", "data"])
def test_a_weight_that_changes_is_cast_again(subject, change):
    model, optimizer, run = subject
    run()
    optimizer.step()
    weight = model.layers[1].up.weight
    doubled = weight.detach() * 2
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "loaded":
            model.load_state_dict({**model.state_dict(), "layers.1.up.weight": doubled})
        elif change == "replaced":
            model.layers[1].up.weight = torch.nn.Parameter(doubled)
        elif change == "cast elsewhere":
            weight.data = doubled
        else:
            weight.data.mul_(2)
            optimizer.forget_copies()
    result = run()
    optimizer.forget_copies()
    assert torch.equal(result, run())


def test_a_frozen_weight_keeps_its_copy(subject):
    model, optimizer, run = subject
    run()
    optimizer.step()
    frozen = model.layers[0].down.weight.requires_grad_(False)
    kept = weight_copies.current(frozen, COPIES)
    run()
    optimizer.step()
    assert weight_copies.current(frozen, COPIES) is kept
    assert torch.equal(kept, frozen.to(COPIES))


def test_a_backward_after_the_step_is_torchs_error(subject):
    model, optimizer, run = subject
    run()
    loss = forward(model).float().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torchs_optimisers_keep_no_copies(device):
    model = new_model(device)
    forward_and_backward(model, torch.optim.AdamW(model.parameters()))
    assert current(model) == [None] * len(weights(model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU and GPU runs are not the same")
def test_a_run_that_is_resumed_ends_alike(tmp_path, monkeypatch):
    """Bit for bit, with the copies of the step and with new ones."""
    steps = []
    monkeypatch.setattr(weight_copies, "written", rounded(weight_copies.written))
    monkeypatch.setattr(AdamW, "step", counted(AdamW.step, steps))
    monkeypatch.setattr(adamw, "runs_on", lambda device: True)
    run = lambda name: build(tmp_path / name, precision="bf16", max_steps=3, save_every=2)
    trainer = run("whole")
    trainer.train()
    assert all(weight_copies.current(p, COPIES) is None for p in trainer.plain_model.parameters())
    half = tmp_path / "resumed" / "checkpoint-00000002"
    shutil.copytree(tmp_path / "whole" / half.name, half)
    run("resumed").train(resume=True)
    assert len(steps) == 3 + 1
    assert_bitwise_equal(weights_in(tmp_path / "whole"), weights_in(tmp_path / "resumed"))


def counted(function, calls):
    def run(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return run


@pytest.mark.parametrize("end", ["released", "deleted"])
def test_copies_end_with_the_optimiser(device, end):
    model = new_model(device)
    optimizer = AdamW(model.parameters())
    forward_and_backward(model, optimizer)
    assert None not in current(model)
    if end == "released":
        optimizer.release()
    del optimizer
    gc.collect()
    assert current(model) == [None] * len(weights(model))
    forward(model)
    assert current(model) == [None] * len(weights(model))


def test_it_is_taken_where_it_is_safe(tmp_path, monkeypatch):
    """In bfloat16 on a GPU, for whole float32 tensors, in steps without graphs."""
    model = torch.nn.Linear(3, 4)
    gpu = torch.device("cuda")
    monkeypatch.delenv("FASTENC_ADAMW", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    built = lambda device=gpu, m=model, **changes: type(
        build_optimizer(m, TrainConfig(str(tmp_path), **changes), device)
    )
    assert built(precision="bf16") is AdamW
    assert built() is torch.optim.AdamW
    assert built(torch.device("cpu"), precision="bf16") is torch.optim.AdamW
    assert built(precision="bf16", graph=True) is torch.optim.AdamW
    assert built(precision="bf16", parallel="fsdp") is torch.optim.AdamW
    assert built(m=torch.nn.Linear(3, 4).bfloat16(), precision="bf16") is torch.optim.AdamW
    monkeypatch.setenv("FASTENC_ADAMW", "0")
    assert built(precision="bf16") is torch.optim.AdamW
    monkeypatch.delenv("FASTENC_ADAMW")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert built(precision="bf16") is torch.optim.AdamW
    monkeypatch.setattr(adamw, "HAS_TRITON", False)
    assert built(precision="bf16") is torch.optim.AdamW
