"""Checks that a live transformers model is the same as a new model of its class with its configuration.

The fused forward replaces the code of the class, so the modules must be unchanged. The model is compared once with a
new model of the same class: classes of modules, constants, buffers, hooks. That takes milliseconds. Later calls only
check that nothing has changed since then, which takes microseconds.
"""

import copy
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fastenc.integrations.transformers import lora
from fastenc.integrations.transformers.hooks import HOOKS, has_hooks
from fastenc.nn.frozen_weights import FrozenWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attributes that do not change what a module computes, or that the fused forward reads in every call. num_embeddings is
# also the number of rows of an embedding's weight. Some encoders have the same number as vocab_size and never read it.
READ_LIVE = {
    "training",
    "config",
    "generation_config",
    "gradient_checkpointing",
    "num_embeddings",
    "vocab_size",
    "_is_hf_initialized",  # a module that the user has inserted does not have it
}
# Attributes that patch sets on the root.
PATCHED = {"forward", "_replicate_for_data_parallel"}
# Methods of tensors, and functions of torch.nn.init, that set weights in place.
_INITIALISERS = {
    "fill_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "zero_",
    "zeros_",
}


class _WithoutParameters(TorchFunctionMode):
    """Inside, modules create parameters without memory. Buffers have memory, because their values are compared.

    Parameters are not initialised: on the meta device that takes longer than on a CPU.

    Args: dtype: the dtype of a buffer that is made of one number, such as Gemma 3's scale of the embeddings. Without it
        the caller's default dtype would decide.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif getattr(func, "__name__", None) in _INITIALISERS:
            weight = args[0] if args else kwargs["tensor"]
            if weight.is_meta:
                return weight
        elif func is torch.tensor and args and isinstance(args[0], float):
            kwargs.setdefault("dtype", self._dtype)
        return func(*args, **kwargs)


def new_of_same_class(model: "PreTrainedModel", changes: Mapping[str, Any] | None = None) -> Any:
    """A new model of the same class and configuration, without memory for the parameters.

    Args: changes: values of the configuration that differ from the model's.
    """
    config = copy.deepcopy(model.config)
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    # On the CPU, even if the caller has set another default device.
    with torch.device("cpu"), _WithoutParameters(model.dtype):
        return _new(model, config)


# {class of a model and its forward: the class of its outputs}
_output_classes: dict[tuple[type, Callable[..., Any]], type] = {}


def output_class(model: "PreTrainedModel") -> type:
    """The class that the model's forward returns. It does not depend on the configuration."""
    key = type(model), type(model).forward
    if key not in _output_classes:
        _output_classes[key] = _returned_class(model)
    return _output_classes[key]


def _returned_class(model: "PreTrainedModel") -> type:
    """The class that a new model returns on the meta device. The forward's annotation may name another class.

    Longformer's forward cannot run there, because it reads values; its class is the one that its annotation names.
    """
    config = copy.deepcopy(model.config)
    config.return_dict, config._attn_implementation = True, "eager"
    rope = getattr(config, "rope_parameters", None) or {}
    # One dictionary for all layers, or one for each kind of layer. "dynamic" reads position ids, which have no values
    # on the meta device.
    for given in (rope, *rope.values()):
        if isinstance(given, dict) and "rope_type" in given:
            given["rope_type"] = "default"
    if hasattr(config, "attention_type"):
        # BigBird would warn that it takes this one for so short a text.
        config.attention_type = "original_full"
    if config.model_type == "gemma3_text":
        config.use_cache = True  # without a cache it reads the values of position ids
    if getattr(config, "relative_attention", False):
        # DeBERTa v1 would read a length that it puts on the device.
        config.relative_attention = False
    with torch.device("meta"), _WithoutParameters(model.dtype), torch.no_grad():
        ids = torch.ones(1, 1, dtype=torch.long)
        new = _new(model, config).eval()
        # It would read the ids' values, which do not exist on the meta device.
        new.warn_if_padding_and_no_attention_mask = lambda *arguments: None
        try:
            # A mask of four dimensions is taken as it is. BigBird would read the values of one that it makes itself.
            mask = torch.zeros(1, 1, 1, 1) if hasattr(config, "attention_type") else None
            return type(new(input_ids=ids, attention_mask=mask))
        except RuntimeError:
            return annotated_output(type(model).forward)


@cache
def annotated_output(forward: Callable[..., Any]) -> type:
    """The class of outputs in the annotation of a forward of transformers: ``tuple | SomeOutput``, or it alone."""
    returned = typing.get_type_hints(inspect.unwrap(forward))["return"]
    classes = typing.get_args(returned) or (returned,)
    return next(each for each in classes if hasattr(each, "to_tuple"))


def _new(model: "PreTrainedModel", config: Any) -> Any:
    options = {}
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        options["add_pooling_layer"] = model.pooler is not None
    return type(model)(config, **options)


class Allowed(NamedTuple):
    """Paths of modules of a live model that may differ from those of a new one.

    Fields:
        called: modules that are called, not replaced, so that they may differ in any way.
        linears: linear layers, which may have LoRA.
        dropouts: dropout modules, whose probability may differ.
        buffers: buffers that are read in every call, so that their values may differ.
    """

    called: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()
    dropouts: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


def first_difference(live: Any, expected: Any, allowed: Allowed, path: str = "") -> str | None:
    """How ``live`` differs from ``expected``, a new model of its class, or None."""
    if path in allowed.called:
        return None
    name = path or "the model"
    if path in allowed.linears and lora.is_lora_linear(live):
        reason = lora.unsupported_reason(live)
        if reason is not None:
            return f"the LoRA of {name} {reason}"
        live = live.base_layer
    if type(live) is not type(expected):
        kinds = [type(live).__name__, type(expected).__name__]
        if kinds[0] == kinds[1]:
            kinds = [f"{type(one).__module__}.{type(one).__name__}" for one in (live, expected)]
        return f"{name} is a {kinds[0]}, not a {kinds[1]}"
    if not _of_known_library(type(live).forward):
        return f"the forward of {type(live).__name__} is not transformers'"
    # The root's forward is fastenc's. Hooks of the root run around it.
    if path and has_hooks(live):
        return f"{name} has hooks"
    read = READ_LIVE | {"p"} if path in allowed.dropouts else READ_LIVE
    difference = _other_attribute(live.__dict__, expected.__dict__, read, type(live), not path)
    if difference is None:
        free = {name.removeprefix(f"{path}.") for name in allowed.buffers}
        difference = _other_buffer(live._buffers, expected._buffers, free)
    if difference is not None:
        return f"{difference} of {name} was changed"
    children = {key: m for key, m in live._modules.items() if not isinstance(m, FrozenWeights)}
    if children.keys() != expected._modules.keys():
        return f"{name} has other modules than a new {type(live).__name__}"
    for key, child in children.items():
        new = expected._modules[key]
        inner = f"{path}.{key}" if path else key
        if child is None or new is None:
            if child is not new:
                return f"{inner} was {'added' if new is None else 'removed'}"
            continue
        difference = first_difference(child, new, allowed, inner)
        if difference is not None:
            return difference
    return None


def attention_difference(config: Any) -> str | None:
    """Which function of a user computes a model's attention, or None.

    transformers' own functions, and those of the libraries that it fetches, compute softmax attention.
    """
    from transformers import AttentionInterface

    name = getattr(config, "_attn_implementation", None)
    function = AttentionInterface().get(name)
    if function is None or _of_known_library(function):
        return None
    return f"its attention is {name}, a function of {_home(function)}"


def _of_known_library(function: Any) -> bool:
    return _home(function).partition(".")[0] in ("transformers", "torch", "fastenc")


def _home(function: Any) -> str:
    """The module of a function, also of one that is a part of a partial."""
    return str(getattr(getattr(function, "func", function), "__module__", ""))


def _other_attribute(
    live: dict, expected: dict, read: set[str], module_class: type, is_root: bool
) -> str | None:
    for key, value in live.items():
        if key in expected:
            if key[0] != "_" and key not in read and not _same(value, expected[key]):
                return key
        elif not (is_root and key in PATCHED) and callable(getattr(module_class, key, None)):
            return key  # the attribute hides a method of the class
    return next((key for key in expected if key not in live and key not in READ_LIVE), None)


def _same(live: Any, new: Any) -> bool:
    if live is new:
        return True
    if isinstance(live, int | float | str | tuple | list | dict | set | type(None)):
        return bool(live == new)
    if type(live) is not type(new):
        return False
    if isinstance(live, MethodType):
        return live.__func__ is new.__func__
    if isinstance(live, partial):
        return live.func is new.func and live.args == new.args and live.keywords == new.keywords
    return not callable(live)


def _other_buffer(live: dict, expected: dict, free: set[str]) -> str | None:
    """The name of a buffer that is missing or has other values, or None. free: names whose values may differ."""
    if live.keys() != expected.keys():
        return "the set of buffers"
    for key, value in live.items():
        new = expected[key]
        if (value is None) != (new is None):
            return key
        if value is not None and key not in free and not _same_values(value, new):
            return key
    return None


# Buffer of a live model on an accelerator → its contents, and the new model's buffer that they were found equal to.
_equal = WeakTensorKeyDictionary()


def _same_values(live: Tensor, new: Tensor) -> bool:
    """Whether two buffers are equal. This waits for an accelerator, but only once after a change of the buffer.

    A buffer of one number may have another dtype than ``new``, which has the weights' dtype: Gemma 3's forward converts
    its scale to that.
    """
    if live.shape != new.shape or (live.dtype != new.dtype and live.dim() > 0):
        return False
    if live.is_meta or live.device.type == "cpu":
        return live.is_meta or torch.equal(live.to(new.dtype), new)
    seen = _equal.get(live)
    if seen is not None and seen[0].are_those_of(live) and seen[1] is new:
        return True
    same = torch.equal(live.to(new.dtype), new.to(live.device))
    if same:
        _equal[live] = Contents(live), new
    return same


def weight_difference(module: Any, shape: torch.Size) -> str | None:
    """Why the kernels cannot take the current weight or bias of a linear layer or a norm, or None.

    It is called in every forward, so it avoids ``nn.Module.__getattr__``, which is slow, where it can.

    Args: shape: the shape of the weight in a new model.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        return f"a weight is a {type(weight).__name__}"
    if weight.layout is not torch.strided:
        return f"a weight is {weight.layout}"
    if weight.shape != shape:
        return f"a weight has shape {tuple(weight.shape)}, not {tuple(shape)}"
    bias = module._parameters.get("bias")
    if bias is not None and (bias.dim() != 1 or bias.numel() != shape[0]):
        return f"a bias has shape {tuple(bias.shape)}, not {tuple(shape[:1])}"
    return None


class Snapshot:
    """The attributes, submodules, hooks and buffers of modules, and the forwards of their classes, at one moment.

    It is compared in every forward, so the comparison uses built-in functions instead of Python loops where it can.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = [module for module in modules if not isinstance(module, FrozenWeights)]
        self._types: list[type[nn.Module]] = list(map(type, self._modules))
        self._forwards = {each: each.forward for each in self._types}
        self._attributes = [module.__dict__ for module in self._modules]
        self._attributes_then = [_with_copied_lists(each) for each in self._attributes]
        self._children = [module._modules for module in self._modules]
        self._children_then = [children.copy() for children in self._children]
        hooks = [getattr(module, name) for module in self._modules for name in HOOKS]
        self._no_hooks = [registered for registered in hooks if not registered]
        self._hooks = [registered for registered in hooks if registered]
        self._hooks_then = [dict(registered) for registered in self._hooks]
        self._buffers = [
            (module._buffers, key, buffer, Contents(buffer))
            for module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def is_current(self) -> bool:
        try:
            return (
                self._attributes == self._attributes_then
                and self._children == self._children_then
                and not any(self._no_hooks)
                and self._hooks == self._hooks_then
                and list(map(type, self._modules)) == self._types
                and all(each.forward is forward for each, forward in self._forwards.items())
                and all(
                    buffers.get(key) is buffer and contents.are_those_of(buffer)
                    for buffers, key, buffer, contents in self._buffers
                )
            )
        except (RuntimeError, ValueError):
            # An attribute is a tensor, whose comparison has no truth value.
            return False


def _with_copied_lists(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's attributes. PEFT adds to a list in place the names of the adapters that it merges."""
    return {k: value.copy() if type(value) is list else value for k, value in attributes.items()}


class Contents:
    """The values of a tensor; on an accelerator, where reading them would wait, its version counter."""

    def __init__(self, tensor: Tensor):
        self._values = tensor.detach().clone() if tensor.device.type == "cpu" else None
        self._version = 0 if tensor.is_inference() else tensor._version

    def are_those_of(self, tensor: Tensor) -> bool:
        if self._values is None:
            return tensor.is_inference() or tensor._version == self._version
        return torch.equal(tensor, self._values)
