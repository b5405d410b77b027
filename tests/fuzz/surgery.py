"""Surgery on a patched model (modules, constants, hooks, layers, dtypes, copies): it computes as the changed model."""

import copy
import io
import pickle
import types
from contextlib import suppress
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fastenc
from fastenc.integrations.transformers.patching import FROZEN
from tests.fuzz.patched_models import Edit, check_edits, modules_of

NORMS = ("LayerNorm", "RMSNorm")
_global_hooks: list[Any] = []


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Halved(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


class Around(nn.Module):
    """A module around a module, which makes its first result larger."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _larger(self.inner(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Sign(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + 0.01


def _larger(result: Any) -> Any:
    if isinstance(result, tuple):
        return (_larger(result[0]), *result[1:])
    return result * 1.25 if torch.is_tensor(result) and result.is_floating_point() else result


def _swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the first occurrence of ``old`` by ``new``."""
    for parent in [model, *modules_of(model)]:
        for name, child in parent._modules.items():
            if child is old:
                setattr(parent, name, new)
                return


def other_linear(model: nn.Module, rng: Random) -> None:
    old = rng.choice(modules_of(model, nn.Linear))
    sizes = (old.in_features, old.out_features)
    way = rng.choice(("class", "new", "no bias", "sequential", "low rank", "class in place"))
    if way == "class in place":
        old.__class__ = Doubled
    elif way == "sequential":
        _swap(model, old, nn.Sequential(old, nn.Identity()))
    elif way == "low rank":
        _swap(model, old, nn.Sequential(nn.Linear(sizes[0], 4), nn.Linear(4, sizes[1])))
    else:
        linear_class = Doubled if way == "class" else nn.Linear
        _swap(model, old, linear_class(*sizes, bias=way != "no bias"))


def other_norm(model: nn.Module, rng: Random) -> None:
    norms = [m for m in modules_of(model) if type(m).__name__.endswith(NORMS)]
    old = rng.choice(norms)
    width = old.weight.shape[0]
    _swap(
        model,
        old,
        rng.choice(
            (
                nn.LayerNorm(width, eps=0.1),
                nn.LayerNorm(width, elementwise_affine=False),
                nn.LayerNorm(width, bias=False),
                nn.RMSNorm(width),
                nn.Identity(),
            )
        ),
    )


def other_activation(model: nn.Module, rng: Random) -> None:
    names = ("GELU", "Activation", "ReLU", "SiLU", "Tanh")
    some = [m for m in modules_of(model) if any(name in type(m).__name__ for name in names)]
    _swap(model, rng.choice(some), rng.choice((nn.ReLU(), nn.GELU("tanh"), nn.Identity())))


def other_dropout(model: nn.Module, rng: Random) -> None:
    old = rng.choice(modules_of(model, nn.Dropout))
    _swap(model, old, rng.choice((nn.Identity(), Halved(0.5), nn.Dropout(0.3).eval())))


def other_embedding(model: nn.Module, rng: Random) -> None:
    old = rng.choice(modules_of(model, nn.Embedding))
    _swap(model, old, rng.choice((Shifted, nn.Embedding))(*old.weight.shape))


def wrapped(model: nn.Module, rng: Random) -> None:
    """Wraps any module: an attention, a layer, a pooler, a head."""
    _swap(model, old := rng.choice(modules_of(model)), Around(old))


def removed(model: nn.Module, rng: Random) -> None:
    parent = rng.choice([m for m in modules_of(model) if m._modules])
    name = rng.choice([name for name in parent._modules if name != FROZEN])
    if rng.random() < 0.5:
        setattr(parent, name, None)
    else:
        delattr(parent, name)


def added(model: nn.Module, rng: Random) -> None:
    """Adds modules that the forward does not read."""
    module = rng.choice(modules_of(model))
    what = rng.choice(("module", "buffer", "parameter", "attribute"))
    if what == "module":
        module.add_module("extra", nn.Linear(2, 2))
    elif what == "buffer":
        module.register_buffer("extra_buffer", torch.ones(2))
    elif what == "parameter":
        module.register_parameter("extra_parameter", nn.Parameter(torch.ones(2)))
    else:
        module.extra_attribute = rng.choice((1, "note", [1], torch.ones(2)))


def constant(model: nn.Module, rng: Random) -> None:
    """Changes a number, a switch or a probability of a module."""
    places = [
        (m, name, value)
        for m in modules_of(model)
        for name, value in vars(m).items()
        if name[0] != "_" and name != "training" and isinstance(value, int | float)
    ]
    module, name, value = rng.choice(places)
    setattr(module, name, _another(value, rng))


def configuration(model: nn.Module, rng: Random) -> None:
    values = model.config.to_dict()
    numbers = [name for name, value in values.items() if isinstance(value, int | float)]
    name = rng.choice([*numbers, "output_hidden_states", "return_dict", "output_attentions"])
    setattr(model.config, name, _another(values.get(name, False), rng))


def _another(value: Any, rng: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, max(0, value - 1), 2 * value))
    return rng.choice((0.0, 0.5 * value, value + 0.25))


def buffer(model: nn.Module, rng: Random) -> None:
    places = [
        (m, name) for m in modules_of(model) for name, b in m._buffers.items() if b is not None
    ]
    module, name = rng.choice(places)
    old = getattr(module, name)
    way = rng.choice(("data", "in place", "new", "None", "dtype"))
    if way == "data":
        old.data.copy_(old.flip(-1))
    elif way == "in place":
        old.zero_()
    elif way == "new":
        setattr(module, name, torch.zeros_like(old))
    elif way == "None":
        setattr(module, name, None)
    else:
        setattr(module, name, old.to(torch.int32 if old.dtype == torch.int64 else torch.float64))


def forward_hook(model: nn.Module, rng: Random) -> None:
    module = rng.choice(modules_of(model))
    way = rng.choice(("result", "argument", "keywords", "sees", "result with keywords"))
    if way == "result":
        handle = module.register_forward_hook(lambda m, args, result: _larger(result))
    elif way == "argument":
        handle = module.register_forward_pre_hook(lambda m, args: tuple(map(_larger, args)))
    elif way == "keywords":
        handle = module.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True)
    elif way == "sees":
        handle = module.register_forward_hook(lambda m, args, result: None)
    else:
        handle = module.register_forward_hook(
            lambda m, args, kwargs, result: _larger(result), with_kwargs=True, always_call=True
        )
    if rng.random() < 0.2:
        handle.remove()


def backward_hook(model: nn.Module, rng: Random) -> None:
    module = rng.choice(modules_of(model, nn.Linear))
    if rng.random() < 0.5:
        module.register_full_backward_hook(lambda m, dx, dy: tuple(map(_larger, dx)))
    else:
        module.register_full_backward_pre_hook(lambda m, dy: tuple(map(_larger, dy)))


def gradient_hook(model: nn.Module, rng: Random) -> None:
    parameter = rng.choice([p for p in model.parameters() if p.requires_grad])
    if rng.random() < 0.5:
        parameter.register_hook(_larger)
    else:
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))


def global_hook(model: nn.Module, rng: Random) -> None:
    linear_only = lambda m, args, result: _larger(result) if isinstance(m, nn.Linear) else None
    _global_hooks.append(nn.modules.module.register_module_forward_hook(linear_only))


def parametrization(model: nn.Module, rng: Random) -> None:
    linear = rng.choice(modules_of(model, nn.Linear))
    way = rng.choice(("weight", "spectral", "any", "old weight", "old spectral", "removed"))
    if way == "weight":
        nn.utils.parametrizations.weight_norm(linear)
    elif way == "spectral":
        nn.utils.parametrizations.spectral_norm(linear)
    elif way == "any":
        owners = [m for m in modules_of(model) if m._parameters]
        module = rng.choice(owners)
        parametrize.register_parametrization(module, rng.choice(list(module._parameters)), Sign())
    elif way == "old weight":
        nn.utils.weight_norm(linear)
    elif way == "old spectral":
        nn.utils.spectral_norm(linear)
    else:
        parametrize.register_parametrization(linear, "weight", Sign())
        parametrize.remove_parametrizations(linear, "weight")


def pruning(model: nn.Module, rng: Random) -> None:
    linear = rng.choice(modules_of(model, nn.Linear))
    way = rng.choice(("random", "norm", "rows", "final"))
    if way == "random":
        prune.random_unstructured(linear, "weight", amount=0.4)
    elif way == "norm":
        prune.l1_unstructured(linear, rng.choice(("weight", "bias")), amount=0.4)
    elif way == "rows":
        prune.ln_structured(linear, "weight", amount=0.3, n=2, dim=0)
    else:
        prune.random_unstructured(linear, "weight", amount=0.4)
        prune.remove(linear, "weight")


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    return [m for m in modules_of(model, nn.ModuleList) if len(m)]


def layers(model: nn.Module, rng: Random) -> None:
    stack = rng.choice(_stacks(model))
    way = rng.choice(("delete", "copy", "again", "reverse", "none"))
    some = list(stack)
    if way == "delete":
        del stack[rng.randrange(len(stack))]
    elif way == "copy":
        stack.append(copy.deepcopy(some[0]))
    elif way == "again":
        stack[0] = some[-1]
    elif way == "reverse":
        for i, one in enumerate(reversed(some)):
            stack[i] = one
    else:
        del stack[:]


def shared_modules(model: nn.Module, rng: Random) -> None:
    """Puts one module in two places."""
    some = modules_of(model, nn.Linear)
    one = rng.choice(some)
    same = [m for m in some if m is not one and m.weight.shape == one.weight.shape]
    if same:
        _swap(model, rng.choice(same), one)


def tied(model: nn.Module, rng: Random) -> None:
    some = modules_of(model, nn.Linear)
    one = rng.choice(some)
    for other in some:
        if other is not one and other.weight.shape == one.weight.shape and rng.random() < 0.5:
            other.weight = one.weight


def untied(model: nn.Module, rng: Random) -> None:
    for module in modules_of(model):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and rng.random() < 0.5:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


def smaller(model: nn.Module, rng: Random) -> None:
    """Cuts the inner dimension of a feed-forward network, or changes the shape of a single matrix."""
    linear = rng.choice(modules_of(model, nn.Linear))
    if rng.random() < 0.5:
        linear.weight = nn.Parameter(linear.weight.detach()[: linear.weight.shape[0] // 2].clone())
        return
    inner, outer = linear.weight.shape
    half = inner // 2
    for other in modules_of(model, nn.Linear):
        if tuple(other.weight.shape) == (outer, inner) and inner != outer:
            other.weight = nn.Parameter(other.weight.detach()[:, :half].clone())
        elif tuple(other.weight.shape) == (inner, outer) and inner != outer:
            other.weight = nn.Parameter(other.weight.detach()[:half].clone())
            if other.bias is not None:
                other.bias = nn.Parameter(other.bias.detach()[:half].clone())


def other_layout(model: nn.Module, rng: Random) -> None:
    """Makes a weight sparse, a view with a negation bit, or an instance of a subclass."""
    linear = rng.choice(modules_of(model, nn.Linear))
    way = rng.choice(("csr", "coo", "negative", "parameter of a subclass"))
    weight = linear.weight.detach()
    if way == "csr":
        linear.weight = nn.Parameter(weight.to_sparse_csr(), requires_grad=False)
    elif way == "coo":
        linear.weight = nn.Parameter(weight.to_sparse(), requires_grad=False)
    elif way == "negative":
        linear.weight = nn.Parameter(torch._neg_view(weight), requires_grad=False)
    else:
        linear.weight = nn.Parameter(weight.as_subclass(Loud), requires_grad=False)


class Loud(Tensor):
    """A tensor whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is nn.functional.linear:
            return (2 * result).as_subclass(Tensor)
        return result


def quantised(model: nn.Module, rng: Random) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def dtypes(model: nn.Module, rng: Random) -> None:
    way = rng.choice(("half and back", "bfloat16", "double", "a module", "a parameter"))
    if way == "half and back":
        model.half().float()
    elif way == "bfloat16":
        model.bfloat16()
    elif way == "double":
        model.double()
    elif way == "a module":
        rng.choice(modules_of(model)).to(rng.choice((torch.bfloat16, torch.float64)))
    else:
        module = rng.choice([m for m in modules_of(model) if m._parameters])
        name = rng.choice(list(module._parameters))
        setattr(module, name, nn.Parameter(getattr(module, name).detach().bfloat16()))


def emptied(model: nn.Module, rng: Random) -> None:
    """Moves the model to other memory and back, as large models are loaded."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    if rng.random() < 0.5:
        model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state, assign=rng.random() < 0.5)
    for name, value in buffers.items():  # a state dict leaves these out
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = value
    model.tie_weights()


def copied(model: nn.Module, rng: Random) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module, rng: Random) -> nn.Module:
    if rng.random() < 0.5:
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def patched_again(model: nn.Module, rng: Random) -> None:
    if any(FROZEN in m._modules for m in model.modules()):
        if rng.random() < 0.5:
            fastenc.unpatch(model)
        with suppress(ValueError):  # the configuration may have become that of another model
            fastenc.patch(model)


def gradients_wanted(model: nn.Module, rng: Random) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.6)


def mode(model: nn.Module, rng: Random) -> None:
    """Training mode, with dropout of nothing or of everything, for the model or a part of it."""
    for module in modules_of(model):
        if isinstance(module, nn.Dropout):
            module.p = rng.choice((0.0, 0.0, 0.0, 1.0))
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    part = model if rng.random() < 0.5 else rng.choice(modules_of(model))
    part.train(rng.random() < 0.7)


def checkpointing(model: nn.Module, rng: Random) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": rng.random() < 0.5})
    if rng.random() < 0.5:
        model.enable_input_require_grads()


def attention_backend(model: nn.Module, rng: Random) -> None:
    model.set_attn_implementation(rng.choice(("eager", "sdpa")))


def vocabulary(model: nn.Module, rng: Random) -> None:
    way = rng.choice(("resize", "same size", "other table"))
    if way == "other table":
        old = model.get_input_embeddings()
        model.set_input_embeddings(nn.Embedding(*old.weight.shape))
    else:
        model.resize_token_embeddings(97 if way == "same size" else 120)


def own_forward(model: nn.Module, rng: Random) -> None:
    """Gives one module, or the whole model, a forward of its own."""
    module = rng.choice([model, *modules_of(model)])
    inner = module.forward
    module.forward = types.MethodType(
        lambda self, *args, **kwargs: _larger(inner(*args, **kwargs)), module
    )


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        other_linear,
        other_norm,
        other_activation,
        other_dropout,
        other_embedding,
        wrapped,
        removed,
        added,
        constant,
        configuration,
        buffer,
        forward_hook,
        backward_hook,
        gradient_hook,
        global_hook,
        parametrization,
        pruning,
        layers,
        shared_modules,
        tied,
        untied,
        smaller,
        other_layout,
        quantised,
        dtypes,
        emptied,
        copied,
        pickled,
        patched_again,
        gradients_wanted,
        mode,
        checkpointing,
        attention_backend,
        vocabulary,
        own_forward,
    )
}


def check(rng: Random) -> None:
    try:
        check_edits(EDITS, rng)
    finally:
        for handle in _global_hooks:
            handle.remove()
        _global_hooks.clear()
