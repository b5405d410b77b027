"""Profiling: a device's measured peak rates, an op's bytes and FLOPs, and the profile of a model's step."""

from fastenc.profiling.roofline import Ceilings, Work

__all__ = ["Ceilings", "Work"]
