"""Argument checks that the ops share. Each raises ValueError with the rule, the received value and the remedy."""

import math

import torch
from torch import Tensor

from fastenc.ops.dispatch import autocast_dtype


def check_vector(op: str, name: str, value: Tensor | None, x: Tensor) -> None:
    """A weight or bias: floating point (size of x's last dimension,), on x's device; None passes."""
    if value is None:
        return
    if value.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have shape ({x.shape[-1]},), the last dimension of x, "
            f"got {tuple(value.shape)}"
        )
    check_parameter(op, name, value, x)


def check_parameter(op: str, name: str, value: Tensor, x: Tensor) -> None:
    """A floating-point tensor of any shape on x's device."""
    check_device(op, name, value, x)
    if not value.is_floating_point():
        raise ValueError(f"{op}: {name} must be floating point, got {value.dtype}")


def check_like(op: str, name: str, value: Tensor | None, x: Tensor) -> None:
    """A second input with x's shape, dtype and device; None passes."""
    if value is None:
        return
    if value.shape != x.shape:
        raise ValueError(
            f"{op}: {name} must have x's shape {tuple(x.shape)}, got {tuple(value.shape)}"
        )
    if value.dtype != x.dtype:
        raise ValueError(
            f"{op}: {name} must have x's dtype {x.dtype}, got {value.dtype}: cast one of them"
        )
    check_device(op, name, value, x)


def check_device(op: str, name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(
            f"{op}: {name} must be on the input's device {x.device}, got {value.device}: move it there"
        )


def check_floating(op: str, x: Tensor) -> None:
    if not x.is_floating_point() or x.dim() < 1:
        raise ValueError(
            f"{op}: the input must be a floating-point tensor of at least one dimension, "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )


def check_qkv(op: str, qkv: Tensor) -> None:
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_floating_point():
        raise ValueError(
            f"{op}: qkv must be floating point of shape (total_tokens, 3, num_heads, head_dim), "
            f"got {qkv.dtype} of shape {tuple(qkv.shape)}: view the fused projection's output that way"
        )


def check_dropout(op: str, dropout_p: float) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{op}: dropout_p must be in [0, 1), got {dropout_p}")


def check_window(op: str, window_size: tuple[int, int]) -> None:
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(
            f"{op}: window_size must be (left, right), each a number of tokens or -1 for no limit, "
            f"got {window_size}"
        )


def check_relative_bias(op: str, value: Tensor | None, q: Tensor) -> None:
    """A table of biases by distance, (heads, 2 R + 1), for q (tokens, heads, head_dim); None passes."""
    if value is None:
        return
    heads = q.shape[1]
    fits = value.dim() == 2 and value.shape[0] == heads and value.shape[1] % 2 == 1
    if not fits or not value.is_floating_point():
        raise ValueError(
            f"{op}: relative_bias must be floating point of shape ({heads}, 2 * R + 1), distances -R to R for each "
            f"head, got {value.dtype} of shape {tuple(value.shape)}"
        )
    check_device(op, "relative_bias", value, q)


def check_eps(op: str, eps: float) -> None:
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{op}: eps must be a finite number of at least 0, got {eps}")


def draw_rng_states(device: torch.device, masks: int) -> tuple[Tensor, ...]:
    """Random Philox seeds and offsets for ``masks`` dropout masks, by one call of the device's default generator.

    Returns: an int64 tensor (2,) for each mask, on that device.
    """
    return torch.randint(2**62, (masks, 2), device=device).unbind()


def mask_rng_state(op: str, rng_state: Tensor | None, dropout_p: float, x: Tensor) -> Tensor | None:
    """The given state after a check, or a random one if None was given; None if ``dropout_p`` is 0."""
    if dropout_p == 0:
        return None
    if rng_state is None:
        return draw_rng_states(x.device, 1)[0]
    if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
        raise ValueError(
            f"{op}: rng_state must be int64 of shape (2,), seed and offset, got {rng_state.dtype} of shape "
            f"{tuple(rng_state.shape)}"
        )
    check_device(op, "rng_state", rng_state, x)
    return rng_state


def check_vocabulary_layer(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = ""
) -> None:
    """Raise ValueError unless weight and bias map hidden (rows, width) to a vocabulary, on its device and in its dtype.
    Under autocast, which casts all of them, the dtypes may differ."""
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{op}: {prefix}weight must have shape (vocabulary, {hidden.shape[1]}), got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: {prefix}bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        check_device(op, prefix + name, value, hidden)
        if value.dtype != hidden.dtype and autocast_dtype(hidden.device.type) is None:
            raise ValueError(
                f"{op}: {prefix}{name} must have {prefix}hidden's dtype {hidden.dtype}, got {value.dtype}: cast one of "
                "them"
            )
