"""Launch parameters of the kernels: from a GPU architecture's tuned table if it has an entry, else from a rule.

The rule is the kernel's function ``config``. A tuned table is a file tuned/sm_<capability>.json, which
``fastenc bench --tune`` writes from measurements. To make a rule tunable, list the values to try above it:

    @tunable("layer_norm", ROWS=(1, 2, 4), num_warps=(4, 8))
    def config(width: int, backward: bool) -> dict: ...

and pass ``like=x`` where it is called, x being a tensor of the launch.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import torch
from fastenc.kernels.batch_invariance import is_batch_invariant

TABLES = Path(__file__).parent / "tuned"
Key = tuple[tuple[str, object], ...]  # ("dtype", "bfloat16"), ("width", 768), ...

registry: dict[str, "Tunable"] = {}
_override: Callable[["Tunable", Key, dict], dict] | None = None


@cache
def architecture(device: torch.device) -> str | None:
    """The GPU architecture of a device, such as "sm_90"; None for other devices, which have no tuned table."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def warp_groups(device: torch.device) -> bool:
    """Whether rules choose tiles for matrix instructions of four warps (wgmma). FASTENC_WARP_GROUPS=0 or 1 decides.

    Those of sm_100 (tcgen05) are of four warps too. Which rules are faster there is not measured yet.
    """
    choice = os.environ.get("FASTENC_WARP_GROUPS")
    return architecture(device) == "sm_90" if choice is None else choice != "0"


@cache
def table(name: str) -> dict[tuple[str, Key], dict]:
    """(op, key) → launch parameters; empty if there is no file for the architecture."""
    path = TABLES / f"{name}.json"
    entries = json.loads(path.read_text())["entries"] if path.is_file() else []
    return {
        (entry["op"], tuple(sorted(entry["key"].items()))): entry["launch"] for entry in entries
    }


class Tunable:
    """A rule from shapes to launch parameters, whose result a tuned table can replace. It is called like the rule.

    Args:
        like: a tensor of the launch. Its device and dtype select the table's entry. None: take the rule.
        further_keys: keys of an entry that the rule does not need, such as dropout.
    """

    def __init__(
        self,
        op: str,
        rule: Callable[..., dict],
        bucketed: tuple[str, ...],
        candidates: tuple[dict, ...],
        grid: dict[str, tuple],
    ):
        self.op, self.rule, self.bucketed, self.grid = op, rule, bucketed, grid
        self.candidates = candidates
        self.names = tuple(inspect.signature(rule).parameters)
        self.__doc__ = rule.__doc__
        self._chosen = lru_cache(maxsize=4096)(self._choose)

    def __call__(self, *arguments, like: torch.Tensor | None = None, **further_keys) -> dict:
        if like is None or (self.bucketed and is_batch_invariant(like.device.type)):
            return self.rule(*arguments)
        name = architecture(like.device)
        if name is None and _override is None:
            return self.rule(*arguments)
        if _override is not None:
            key = self._key(like.dtype, arguments, tuple(further_keys.items()))
            return _override(self, key, self.rule(*arguments))
        return self._chosen(name, like.dtype, arguments, tuple(further_keys.items()))

    def _choose(self, name: str, dtype: torch.dtype, arguments: tuple, further_keys: tuple) -> dict:
        tuned = table(name).get((self.op, self._key(dtype, arguments, further_keys)))
        return self.rule(*arguments) if tuned is None else tuned

    def _key(self, dtype: torch.dtype, arguments: tuple, further_keys: tuple) -> Key:
        named = dict(zip(self.names, arguments, strict=True)) | dict(further_keys)
        for name in self.bucketed:
            named[name] = bucket(named[name])
        named["dtype"] = str(dtype).removeprefix("torch.")
        return tuple(sorted(named.items()))


def bucket(length: int) -> int:
    """The length rounded up to a power of two, at least 16."""
    return max(16, 1 << max(0, length - 1).bit_length())


def tunable(
    op: str, *, bucketed: tuple[str, ...] = (), candidates: tuple[dict, ...] = (), **grid: tuple
) -> Callable[[Callable[..., dict]], Tunable]:
    """Make a rule tunable.

    Args:
        op: the name of the kernel's entries; no two rules share one.
        bucketed: arguments of the rule that are lengths. An entry's key has them rounded up to a power of two.
        candidates: launches that the tuner tries first, each given by what it changes in the rule's: several parameters
            at once, or a parameter that not every launch of the op has.
        grid: launch parameter → values to try. From the best candidate on, the tuner changes one parameter at a time.
    Returns: a decorator of the rule.
    """

    def decorate(rule: Callable[..., dict]) -> Tunable:
        registry[op] = Tunable(op, rule, bucketed, candidates, grid)
        return registry[op]

    return decorate


@contextmanager
def overruled(answer: Callable[[Tunable, Key, dict], dict]) -> Iterator[None]:
    """Inside, ``answer(tunable, key, the rule's parameters)`` gives the parameters of every launch on any device.

    The tuner tries candidates this way.
    """
    global _override
    _override = answer
    try:
        yield
    finally:
        _override = None
