"""Profiling: the ceilings of a device, the work of an op, and the profile of a model's step."""

from fastenc.profiling.roofline import Ceilings, Work

__all__ = ["Ceilings", "Work"]
