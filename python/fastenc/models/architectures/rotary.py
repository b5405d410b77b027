"""Rotary angles from config.json: ``rope_parameters``, in older files ``rope_scaling``."""

import math

from fastenc.models.architectures.values import ROPE, ConfigValues, check
from fastenc.nn.rotary import LinearScaling, RotarySpec, YarnScaling


def read_rotary(given: ConfigValues, dim: int, theta: float, positions: int) -> RotarySpec:
    """The description of rotary angles.

    Args:
        given: the rope_parameters.
        dim: width of a head.
        theta: base of the frequencies if ``given`` has none.
        positions: the model's max_positions.
    Raises: ValueError as :func:`read_scaling`.
    """
    check(given, ROPE, "config.json: rope_parameters' ")
    theta = float(given.get("rope_theta") or theta)
    bounded, scaling = _rope_type(given) == "dynamic", read_scaling(given, positions)
    if theta == 1 and isinstance(scaling, YarnScaling):
        raise ValueError("config.json: rope_theta of YaRN must not be 1, got 1: correct it")
    return RotarySpec(dim, theta, scaling, bounded)


def read_scaling(given: ConfigValues, positions: int) -> LinearScaling | YarnScaling | None:
    """How the frequencies are scaled; None for rope_type "default" and "dynamic".

    "dynamic" scales the angles of texts longer than the model's positions only.

    Raises: ValueError for another rope_type, a partial rotation, or a wrong factor.
    """
    check(given, ROPE, "config.json: rope_parameters' ")
    rope_type = _rope_type(given)
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor must be 1.0, got {given['partial_rotary_factor']!r}: take "
            "transformers for this model"
        )
    if rope_type in ("default", "dynamic"):
        return None
    if rope_type not in ("linear", "yarn"):
        by_batch = ", whose angles change with the longest text of a batch"
        raise ValueError(
            "config.json: rope_type must be 'default', 'linear', 'dynamic' or 'yarn', got "
            f"{rope_type!r}{by_batch if rope_type == 'longrope' else ''}: take transformers for this model"
        )
    factor = given.get("factor")
    original = given.get("original_max_position_embeddings") or positions
    if factor is None and rope_type == "yarn":
        factor = positions / original
    if factor is None or factor <= 0:
        raise ValueError(f"config.json: rope's factor must be a number above 0, got {factor!r}")
    if rope_type == "linear":
        return LinearScaling(float(factor))
    return YarnScaling(
        float(factor),
        original,
        given.get("beta_fast") or 32.0,
        given.get("beta_slow") or 1.0,
        given.get("truncate", True),
        _amplitude(given, factor),
    )


def _rope_type(given: ConfigValues) -> str:
    return given["rope_type"] if "rope_type" in given else given.get("type", "default")


def _amplitude(given: ConfigValues, factor: float) -> float:
    """YaRN's factor of cosines and sines, computed as in transformers."""
    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    mscale = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)
