"""Activations act(u) = u * gate(u) for the kernels that apply one, and their slopes.

    GELU: gate = P(u), the normal distribution;  GELU_TANH: sigmoid(2 k(u)), k = sqrt(2/pi) (u + 0.044715 u^3);
    SILU: sigmoid(u)

With erf, GELU is bound by arithmetic. For 2-byte types (NARROW) its gate is sigmoid(z(u)) instead, where z is an odd
polynomial of degree 9 fitted to log(P(u) / P(-u)). The largest absolute error against the erf form is 4e-6, and that of
the slope 1.7e-5, without the errors of the hardware's exp2 and rsqrt. float32 keeps erf.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
import triton.language as tl

GELU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
SILU = tl.constexpr(2)


@triton.jit
def _argument(u, KIND: tl.constexpr):
    """z, where gate = sigmoid(z)."""
    if KIND == SILU:
        z = u
    elif KIND == GELU_TANH:
        # Beyond |u| = 10 the gate is 0 or 1 in float32, and u * u would overflow.
        z = 1.5957691216057308 * u * (1.0 + 0.044715 * tl.minimum(u * u, 100.0))
    else:
        # Beyond |u| = 6 the gate is 0 or 1, and the polynomial would turn.
        s = tl.minimum(u * u, 36.0)
        z = -6.0934406e-5 + s * 2.2252639e-6
        z = u * (1.5956552 + s * (0.072939861 + s * (-2.5095235e-4 + s * z)))
    return z


@triton.jit
def _argument_slope(u, KIND: tl.constexpr):
    if KIND == SILU:
        dz = tl.full(u.shape, 1.0, tl.float32)
    elif KIND == GELU_TANH:
        dz = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * tl.minimum(u * u, 100.0))
    else:
        s = tl.minimum(u * u, 36.0)
        dz = 7.0 * -6.0934406e-5 + s * (9.0 * 2.2252639e-6)
        dz = 1.5956552 + s * (3.0 * 0.072939861 + s * (5.0 * -2.5095235e-4 + s * dz))
    return dz


@triton.jit
def _sigmoid(z, NARROW: tl.constexpr):
    if NARROW:
        # The square of an approximate reciprocal root: a division is five instructions longer.
        root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * z))
        g = root * root
    else:
        g = tl.sigmoid(z)
    return g


@triton.jit
def gate(u, KIND: tl.constexpr, NARROW: tl.constexpr):
    if KIND == GELU and not NARROW:
        g = 0.5 + 0.5 * tl.math.erf(u * 0.7071067811865476)
    else:
        g = _sigmoid(_argument(u, KIND), NARROW)
    return g


@triton.jit
def slope(u, g, KIND: tl.constexpr, NARROW: tl.constexpr):
    """act'(u), given g = gate(u)."""
    if KIND == GELU and not NARROW:
        from_gate = 0.3989422804014327 * tl.exp(-0.5 * u * u)
    elif NARROW:
        from_gate = g * (1.0 - g) * _argument_slope(u, KIND)
    else:
        # 1 - g would lose its digits where the gate is near 1.
        from_gate = g * tl.sigmoid(-_argument(u, KIND)) * _argument_slope(u, KIND)
    return g + u * from_gate


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries whose launches, of the ops with an activation, a test compiles ahead of time."""
    for width, backward in product((256, 512, 1536, 3072), (False, True)):
        for dtype in ("bfloat16", "float32") if width > 1000 else ("bfloat16",):
            yield {"width": width, "backward": backward, "dtype": dtype}


def launched(key: dict, kernel: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernel that an entry with this key launches, for each activation in names."""
    kinds = {"erf": GELU, "tanh": GELU_TANH, "silu": SILU}
    narrow = key["dtype"] != "float32"
    for name in names if narrow else ("erf",):
        constants = {"HAS_BIAS": True, "ACTIVATION": kinds[name].value, "NARROW": narrow}
        yield f" {name}", kernel, constants
