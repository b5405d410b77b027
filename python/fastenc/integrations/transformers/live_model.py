"""Whether a live transformers model is still what its class and configuration make.

The fused forward stands in for the class's code, so the model must not have been changed. It is compared once with a
new model of the same class: classes of modules, their constants and buffers, hooks. That takes milliseconds. Later
calls only check that nothing has changed since, which takes microseconds.
"""

import copy
import inspect
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastenc.integrations.transformers import lora
from fastenc.integrations.transformers.hooks import HOOKS, has_hooks
from fastenc.nn.frozen_weights import FrozenWeights

# Attributes that do not change what a module computes, or that the fused forward reads at every call. An embedding's
# number of rows is its weight's.
READ_LIVE = {
    "training",
    "config",
    "generation_config",
    "gradient_checkpointing",
    "num_embeddings",
    "_is_hf_initialized",  # a module that the user put in lacks it
}
# What patch puts on the root.
PATCHED = {"forward", "_replicate_for_data_parallel"}


class _WithoutParameters(TorchFunctionMode):
    """Parameters are made without memory; buffers, which are computed, have their values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def new_of_same_class(model: Any) -> Any:
    """What ``type(model)`` makes of the model's configuration, without memory for the parameters."""
    with (
        torch.device("cpu"),
        _WithoutParameters(),
    ):  # whichever device the caller makes its tensors on
        return _new(model, copy.deepcopy(model.config))


def output_class(model: Any) -> type:
    """The class of what the model's forward returns, found by calling a new model without values."""
    config = copy.deepcopy(model.config)
    config.return_dict, config._attn_implementation = True, "eager"
    rope = getattr(config, "rope_parameters", None) or {}
    for given in (rope, *rope.values()):  # one for all layers, or one for each kind of them
        if isinstance(given, dict) and "rope_type" in given:
            given["rope_type"] = "default"  # "dynamic" reads positions, which have no values here
    with torch.device("meta"), torch.no_grad():
        ids = torch.ones(1, 1, dtype=torch.long)
        return type(_new(model, config).eval()(input_ids=ids))


def _new(model: Any, config: Any) -> Any:
    options = {}
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        options["add_pooling_layer"] = model.pooler is not None
    return type(model)(config, **options)


class Allowed(NamedTuple):
    """Where a live model may differ from a new one, by path.

    Fields:
        called: modules that are called as they are, whatever they have become.
        linears: linear layers that may have LoRA added to them.
        dropouts: dropout modules, whose probabilities are read from them.
    """

    called: frozenset[str] = frozenset()
    linears: frozenset[str] = frozenset()
    dropouts: frozenset[str] = frozenset()


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
    # The root's own forward is fastenc's, and its hooks run around it.
    if path and has_hooks(live):
        return f"{name} has hooks"
    read = READ_LIVE | {"p"} if path in allowed.dropouts else READ_LIVE
    difference = _other_attribute(live.__dict__, expected.__dict__, read, type(live), not path)
    if difference is None:
        difference = _other_buffer(live._buffers, expected._buffers)
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


def _other_attribute(
    live: dict, expected: dict, read: set[str], kind: type, is_root: bool
) -> str | None:
    for key, value in live.items():
        if key in expected:
            if key[0] != "_" and key not in read and not _same(value, expected[key]):
                return key
        elif not (is_root and key in PATCHED) and callable(getattr(kind, key, None)):
            return key  # it hides a method of the class
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


def _other_buffer(live: dict, expected: dict) -> str | None:
    if live.keys() != expected.keys():
        return "the set of buffers"
    for key, value in live.items():
        new = expected[key]
        if (value is None) != (new is None) or not (value is None or _same_values(value, new)):
            return key
    return None


def _same_values(live: Tensor, new: Tensor) -> bool:
    """An accelerator is waited for; that is once after a change of the model."""
    if live.dtype != new.dtype or live.shape != new.shape:
        return False
    return live.is_meta or torch.equal(live, new.to(live.device))


def weight_difference(module: Any, shape: torch.Size) -> str | None:
    """What the kernels have against the weight or bias of a linear layer or a norm as they now are, or None. Read at
    every call, so past ``nn.Module.__getattr__`` where that gives the same.

    Args:
        shape: the weight's in a new model.
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
    """What modules were made of at one moment. It compares in loops that are not Python's."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = [module for module in modules if not isinstance(module, FrozenWeights)]
        self._types = list(map(type, self._modules))
        self._attributes = [module.__dict__ for module in self._modules]
        self._attributes_then = [attributes.copy() for attributes in self._attributes]
        self._children = [module._modules for module in self._modules]
        self._children_then = [children.copy() for children in self._children]
        hooks = [getattr(module, name) for module in self._modules for name in HOOKS]
        self._no_hooks = [some for some in hooks if not some]
        self._hooks = [some for some in hooks if some]
        self._hooks_then = [dict(some) for some in self._hooks]
        self._buffers = [
            (module._buffers, key, buffer, _Contents(buffer))
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
                and all(
                    buffers.get(key) is buffer and contents.are_those_of(buffer)
                    for buffers, key, buffer, contents in self._buffers
                )
            )
        except (
            RuntimeError,
            ValueError,
        ):  # of an attribute that is a tensor, which has no truth value
            return False


class _Contents:
    """A buffer's values; on an accelerator, where reading them would wait, the number of its changes."""

    def __init__(self, buffer: Tensor):
        self._values = buffer.clone() if buffer.device.type == "cpu" else None
        self._version = 0 if buffer.is_inference() else buffer._version

    def are_those_of(self, buffer: Tensor) -> bool:
        if self._values is None:
            return buffer.is_inference() or buffer._version == self._version
        return torch.equal(buffer, self._values)
