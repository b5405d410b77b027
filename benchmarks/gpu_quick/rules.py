"""Attention with the rules for instructions of four warps, and with those for instructions of one.

On a new architecture this shows which rules are faster (``launch.warp_groups``). sm_90 has instructions of four warps;
older architectures have none.
"""

from collections.abc import Callable, Iterator
from functools import partial

from fastenc.kernels import launch

from benchmarks._cases import Case
from benchmarks._device import DEVICE
from benchmarks._environment import environment
from benchmarks.gpu_quick import problems, timing
from benchmarks.gpu_quick.check import check
from benchmarks.gpu_quick.problems import Problem, Size

LIMIT = 60
DECIDED = ("sm_80", "sm_86", "sm_89", "sm_90")
VARIABLE = "FASTENC_WARP_GROUPS"


def cases(size: Size) -> Iterator[Case]:
    if launch.architecture(DEVICE) in (None, *DECIDED):
        return
    for name, make in problems.problems(size):
        if name.startswith("attention"):
            for choice in ("0", "1"):
                case = f"{name}, {VARIABLE}={choice}"
                yield case, partial(with_rules, choice, case, make)


def with_rules(choice: str, name: str, make: Callable[[], Problem]) -> dict:
    """Times a problem only if its results are right."""
    with environment(VARIABLE, choice):
        launch.warp_groups.cache_clear()
        try:
            checked = check(name, make)
            return checked | timing.time_op(name, make) if checked["right"] else checked
        finally:
            launch.warp_groups.cache_clear()
