"""Edits of a patched model's weights in every possible way: the next call computes with the new weights."""

import io
import threading
from contextlib import suppress
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import fastenc
from fastenc.integrations.transformers.patching import FROZEN
from tests.fuzz.patched_models import Edit, check_edits, modules_of


def _owners(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules, and the names of their parameters."""
    return [
        (m, name) for m in modules_of(model) for name, p in m._parameters.items() if p is not None
    ]


def _place(model: nn.Module, rng: Random) -> tuple[nn.Module, str]:
    return rng.choice(_owners(model))


def parameter_of(model: nn.Module, rng: Random) -> Any:
    module, name = _place(model, rng)
    return getattr(module, name)


def region(x: Tensor, rng: Random) -> Tensor:
    """A view: one element, rows, columns, every second element, or all."""
    index: list[Any] = []
    for size in x.shape:
        start = rng.randrange(size) if size else 0
        index.append(
            rng.choice(
                (slice(None), slice(start, start + 1), slice(start, None), slice(0, None, 2))
            )
        )
    return x[tuple(index)]


def change(x: Tensor, rng: Random) -> None:
    way = rng.choice(("add", "scale", "fill", "random", "mask", "huge"))
    if way == "add":
        x.add_(rng.uniform(-2, 2))
    elif way == "scale":
        x.mul_(rng.choice((-3.0, 0.0, 1.5)))
    elif way == "fill":
        x.fill_(rng.choice((0.0, 0.25)))
    elif way == "random":
        x.copy_(torch.randn(x.shape))
    elif way == "mask":
        x.mul_(torch.rand(x.shape) < 0.5)
    else:
        x.fill_(40.0)


def by_data(model: nn.Module, rng: Random) -> None:
    change(region(parameter_of(model, rng).data, rng), rng)


def by_numpy(model: nn.Module, rng: Random) -> None:
    change(torch.from_numpy(region(parameter_of(model, rng).detach(), rng).numpy()), rng)


@torch.no_grad()
def in_place(model: nn.Module, rng: Random) -> None:
    change(region(parameter_of(model, rng), rng), rng)


@torch.inference_mode()
def in_inference_mode(model: nn.Module, rng: Random) -> None:
    change(region(parameter_of(model, rng), rng), rng)


def in_another_thread(model: nn.Module, rng: Random) -> None:
    thread = threading.Thread(target=by_data, args=(model, rng))
    thread.start(), thread.join()


def in_shared_memory(model: nn.Module, rng: Random) -> None:
    parameter = parameter_of(model, rng)
    parameter.share_memory_()
    change(region(parameter.data, rng), rng)


def through_state_dict(model: nn.Module, rng: Random) -> None:
    """The tensors of a state dict share the parameters' memory."""
    state = model.state_dict()
    change(region(state[rng.choice(list(state))], rng), rng)


def other_storage(model: nn.Module, rng: Random) -> None:
    """The same values in other memory: untied, at an offset, in another layout."""
    parameter = parameter_of(model, rng)
    layout = rng.choice(("clone", "offset", "columns", "stride"))
    x = parameter.data.clone()
    if layout == "offset":
        x = torch.cat([x.flatten()[:3], x.flatten()])[3:].view(x.shape)
    elif layout == "columns" and x.dim() == 2:
        x = x.t().contiguous().t()
    elif layout == "stride":
        x = torch.stack([x, x + 1], -1)[..., 0]
    parameter.data = x


def expanded(model: nn.Module, rng: Random) -> None:
    """One value for all elements, with the memory of one."""
    parameter = parameter_of(model, rng)
    parameter.data = torch.full((), 0.125).expand(parameter.shape)


def new_parameter(model: nn.Module, rng: Random) -> None:
    module, name = _place(model, rng)
    setattr(module, name, nn.Parameter(torch.randn(getattr(module, name).shape)))


def not_a_parameter(model: nn.Module, rng: Random) -> None:
    module, name = _place(model, rng)
    value = getattr(module, name).detach() * 1.5
    delattr(module, name)
    setattr(module, name, value)


def inference_tensor(model: nn.Module, rng: Random) -> None:
    module, name = _place(model, rng)
    with torch.inference_mode():
        value = torch.randn(getattr(module, name).shape)
    module._parameters[name] = nn.Parameter(value, requires_grad=False)


def swapped(model: nn.Module, rng: Random) -> None:
    parameter = parameter_of(model, rng)
    other = nn.Parameter(parameter.detach() * -2)
    parameter.data, other.data = other.data, parameter.data


def no_bias(model: nn.Module, rng: Random) -> None:
    places = [(m, name) for m, name in _owners(model) if name == "bias"]
    module, name = rng.choice(places)
    module.register_parameter(name, None)


def optimizer_step(model: nn.Module, rng: Random) -> None:
    # A fused optimiser would write outside the memory of an expanded tensor.
    whole = lambda p: p.untyped_storage().nbytes() >= p.numel() * p.element_size()
    parameters = [p for p in model.parameters() if whole(p) and not p.is_inference()]
    parameters = rng.sample(parameters, rng.randint(1, len(parameters)))
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer_class, options = rng.choice(
        (
            (torch.optim.SGD, {"foreach": True}),
            (torch.optim.SGD, {"fused": True}),
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": False}),
            (torch.optim.Adagrad, {}),
        )
    )
    optimizer_class(parameters, lr=0.05, **options).step()


def load_state(model: nn.Module, rng: Random) -> None:
    state = {name: value * 1.25 for name, value in model.state_dict().items()}
    names = rng.sample(list(state), rng.randint(1, len(state)))
    model.load_state_dict(
        {name: state[name] for name in names}, strict=False, assign=rng.random() < 0.5
    )


def from_file(model: nn.Module, rng: Random) -> None:
    file = io.BytesIO()
    torch.save({name: value + 0.1 for name, value in model.state_dict().items()}, file)
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=rng.random() < 0.5)


def average(model: nn.Module, rng: Random) -> nn.Module:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    by_data(model, rng)
    averaged.update_parameters(model)
    return averaged.module


def from_vector(model: nn.Module, rng: Random) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 1.1, model.parameters())


def initialised(model: nn.Module, rng: Random) -> None:
    linear = rng.choice(modules_of(model, nn.Linear))
    nn.init.xavier_normal_(linear.weight)


def frozen_and_thawed(model: nn.Module, rng: Random) -> None:
    """A frozen model sees every change after unfreeze, and after a call that announces a change."""
    is_patched = any(FROZEN in m._modules for m in model.modules())
    thaw = rng.choice((fastenc.unfreeze, lambda m: m.train().eval(), lambda m: m.float()))
    if is_patched:
        try:
            fastenc.freeze(model)
        except ValueError:
            is_patched = False
    by_data(model, rng)
    if is_patched:
        thaw(model)


def frozen_and_stepped(model: nn.Module, rng: Random) -> None:
    """A frozen model sees a step after a call with gradients, whichever forward the call took."""
    ids, mask = torch.randint(5, 97, (4, 12)), torch.ones(4, 12, dtype=torch.long)
    mask[0, :5] = 0  # a row that starts with padding
    by_function = rng.random() < 0.3
    with suppress(ValueError):  # some edits leave a model that cannot be frozen
        if any(FROZEN in m._modules for m in model.modules()):
            fastenc.freeze(model)
    with torch.no_grad():
        model(input_ids=ids)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    names, parameters = zip(*model.named_parameters(), strict=True)

    def of_tokens(output: Any) -> Tensor:
        """Padding holds 0 where the forward leaves it out, as that of Qwen3 and Gemma 3 does on the left too."""
        real = mask.bool() if output[0].shape[:2] == mask.shape else slice(None)
        return output[0][real].square().mean()

    def loss(values: tuple[Tensor, ...]) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return of_tokens(functional_call(model, given, (), batch))

    if by_function:
        detached = tuple(p.detach() for p in parameters)
        gradients = torch.func.grad(loss)(detached)
    else:
        output = of_tokens(model(**batch))
        gradients = torch.autograd.grad(output, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient / (1 + gradient.norm()))


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        by_data,
        by_numpy,
        in_place,
        in_inference_mode,
        in_another_thread,
        in_shared_memory,
        through_state_dict,
        other_storage,
        expanded,
        new_parameter,
        not_a_parameter,
        inference_tensor,
        swapped,
        no_bias,
        optimizer_step,
        load_state,
        from_file,
        average,
        from_vector,
        initialised,
        frozen_and_thawed,
        frozen_and_stepped,
    )
}


def check(rng: Random) -> None:
    check_edits(EDITS, rng)
