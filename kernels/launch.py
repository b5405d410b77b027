"""Launch parameters: an architecture's tuned table where it has an entry, else the kernel's own rule.

tuned/sm_<capability>.json holds what ``fastenc bench --tune`` found on a device; without it nothing changes. A kernel's
``config`` becomes tunable by a line above it, which lists the values to try:

    @tunable("layer_norm", ROWS=(1, 2, 4), num_warps=(4, 8))
    def config(width: int, backward: bool) -> dict: ...

and by ``like=x`` in its launcher's call, x being a tensor of the launch.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import torch

TABLES = Path(__file__).parent / "tuned"
Key = tuple[tuple[str, object], ...]  # ("dtype", "bfloat16"), ("width", 768), ...

registry: dict[str, "Tunable"] = {}
_overruling: Callable[["Tunable", Key, dict], dict] | None = None


@cache
def architecture(device: torch.device) -> str | None:
    """ "sm_90" and the like; None where no table can count."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def table(name: str) -> dict[tuple[str, Key], dict]:
    """(op, key) → launch parameters; empty for an architecture that nobody has tuned."""
    path = TABLES / f"{name}.json"
    entries = json.loads(path.read_text())["entries"] if path.is_file() else []
    return {
        (entry["op"], tuple(sorted(entry["key"].items()))): entry["launch"] for entry in entries
    }


class Tunable:
    """A rule from shapes to launch parameters that a table can overrule. Called as the rule, and with:

    Args:
        like: a tensor of the launch, whose device and dtype choose the entry; without it only the rule counts.
        apart: further keys of an entry, such as dropout, which the rule does not need.
    """

    def __init__(
        self, op: str, rule: Callable[..., dict], bucketed: tuple[str, ...], grid: dict[str, tuple]
    ):
        self.op, self.rule, self.bucketed, self.grid = op, rule, bucketed, grid
        self.names = tuple(inspect.signature(rule).parameters)
        self.__doc__ = rule.__doc__
        self._chosen = lru_cache(maxsize=4096)(self._choose)

    def __call__(self, *arguments, like: torch.Tensor | None = None, **apart) -> dict:
        if like is None:
            return self.rule(*arguments)
        where = architecture(like.device)
        if where is None and _overruling is None:
            return self.rule(*arguments)
        if _overruling is not None:
            key = self._key(like.dtype, arguments, tuple(apart.items()))
            return _overruling(self, key, self.rule(*arguments))
        return self._chosen(where, like.dtype, arguments, tuple(apart.items()))

    def _choose(self, where: str, dtype: torch.dtype, arguments: tuple, apart: tuple) -> dict:
        found = table(where).get((self.op, self._key(dtype, arguments, apart)))
        return self.rule(*arguments) if found is None else found

    def _key(self, dtype: torch.dtype, arguments: tuple, apart: tuple) -> Key:
        named = dict(zip(self.names, arguments, strict=True)) | dict(apart)
        for name in self.bucketed:
            named[name] = bucket(named[name])
        named["dtype"] = str(dtype).removeprefix("torch.")
        return tuple(sorted(named.items()))


def bucket(length: int) -> int:
    """The power of two, 16 or more, that holds the length."""
    return max(16, 1 << max(0, length - 1).bit_length())


def tunable(
    op: str, *, bucketed: tuple[str, ...] = (), **grid: tuple
) -> Callable[[Callable[..., dict]], Tunable]:
    """Make a rule tunable.

    Args:
        op: unique name of the kernel's entries.
        bucketed: arguments of the rule that are lengths: entries are for powers of two that hold them.
        grid: launch parameter → values to try.
    """

    def decorate(rule: Callable[..., dict]) -> Tunable:
        registry[op] = Tunable(op, rule, bucketed, grid)
        return registry[op]

    return decorate


@contextmanager
def overruled(answer: Callable[[Tunable, Key, dict], dict]) -> Iterator[None]:
    """Within, ``answer(tunable, key, the rule's parameters)`` decides every launch, on any device: for the tuner."""
    global _overruling
    _overruling = answer
    try:
        yield
    finally:
        _overruling = None
