"""The error budget, and a report that measures every op's error against it on the current device."""

from fastenc.ops.cases import CASES, Case, Draw, Size
from fastenc.testing.budget import assert_within_budget, error_budget
from fastenc.testing.numerics import NumericsRow, numerics_report, ops_without_case

__all__ = [
    "CASES",
    "Case",
    "Draw",
    "NumericsRow",
    "Size",
    "assert_within_budget",
    "error_budget",
    "numerics_report",
    "ops_without_case",
]
