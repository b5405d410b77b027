"""Launches of compiled kernels without Triton's argument binder.

At each launch Triton examines every argument again. For attention's 34 arguments that is 30 us of Python, and the GPU
waits for the host when it trains a small encoder. Here a launch looks the compiled kernel up in a dictionary. The key
is all that Triton compiles for: kernel, device, types and alignment of the pointers, numbers that Triton specialises
on, constants. The first launch with a key goes through Triton, which compiles the kernel or loads it.

FASTENC_PLAIN_LAUNCH=1 makes every launch Triton's own, and so does a Triton with which this was not tried: what its
launcher takes is no public interface.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "maxnreg")
OLDEST, NEWEST = (3, 6), (3, 9)  # versions of Triton whose launcher is known


def launches_are_plain(version: str = triton.__version__) -> bool:
    """Whether every launch goes through Triton's argument binder."""
    known = OLDEST <= tuple(map(int, version.split(".")[:2])) <= NEWEST
    return not known or os.environ.get("FASTENC_PLAIN_LAUNCH", "0") != "0"


PLAIN = launches_are_plain()


class _Signature(NamedTuple):
    """A kernel's parameters: pointers first, then numbers, then constants.

    Fields:
        pointers: the number of pointers. Triton treats a pointer that is None as a constant.
        specialised: indices of the numbers that Triton specialises on (equal to 1, multiple of 16).
        varying: indices of the integers that it does not specialise on; only whether they fit in 32 bits matters.
        constants: index of the first constant.
        compiled: launch key → compiled kernel.
    """

    kernel: str
    names: tuple[str, ...]
    pointers: int
    specialised: tuple[int, ...]
    varying: tuple[int, ...]
    constants: int
    compiled: dict


# By the kernel's id, because hash(kernel) would hash its source.
_signatures: dict[int, _Signature] = {}
_compiles_only = False


def signatures() -> Iterable[_Signature]:
    """The signatures of the kernels that have run in this process."""
    return _signatures.values()


def signature_of(kernel: JITFunction) -> _Signature:
    pointers = [p.num for p in kernel.params if p.name.endswith("_ptr")]
    numbers = [p for p in kernel.params[len(pointers) :] if not p.is_constexpr]
    return _Signature(
        kernel.__name__,
        tuple(kernel.arg_names),
        len(pointers),
        tuple(p.num for p in numbers if not p.do_not_specialize),
        tuple(p.num for p in numbers if p.do_not_specialize),
        len(pointers) + len(numbers),
        {},
    )


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, kernels are compiled into Triton's cache on disk and not started, so their outputs are not written."""
    global _compiles_only
    _compiles_only = True
    try:
        yield
    finally:
        _compiles_only = False


def run(kernel, grid: Sequence[int], *arguments, **named) -> None:
    """Start ``kernel`` on the current device, which must be that of the tensors, and on its current stream.

    Args:
        grid: number of programs along each of one to three axes.
        arguments, named: the kernel's arguments and its launch parameters.
    """
    if PLAIN and not _compiles_only and isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **named, enable_fp_fusion=True)
        return
    signature = _signatures.get(id(kernel))
    if signature is None:
        if not isinstance(kernel, JITFunction):  # interpreted
            kernel[grid](*arguments, **named)
            return
        signature = _signatures[id(kernel)] = signature_of(kernel)
    # Loops and map, because a comprehension is a function call before Python 3.12. This runs a thousand times a step.
    values = (*arguments, *map(named.__getitem__, signature.names[len(arguments) :]))
    key: list = []
    append, addresses, width = key.append, 0, 0
    for pointer in values[: signature.pointers]:
        if pointer is None:
            append(None)
        else:
            append(pointer.dtype)
            addresses |= pointer.data_ptr()
    # If not all pointers are aligned, the key says which are.
    append(
        addresses % 16 == 0
        or tuple(p is None or p.data_ptr() % 16 == 0 for p in values[: signature.pointers])
    )
    for n in signature.specialised:
        value = values[n]
        append(None if value.__class__ is float else value)
    for n in signature.varying:
        width |= values[n]
    append(width >> 31 and tuple(values[n] >> 31 for n in signature.varying))
    key += values[signature.constants :]
    key += map(named.get, OPTIONS)
    device = values[0].get_device()
    append(device)
    known = tuple(key)
    compiled = signature.compiled.get(known)
    if compiled is not None and not _compiles_only:
        x, y, z = (*grid, 1, 1)[:3]
        hook = knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):  # a profiler's
            compiled[x, y, z](*values)
            return
        # Triton's own launch, without the arguments that it prepares for hooks.
        stream = driver.active.get_current_stream(device)
        handle = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(x, y, z, *handle, None, None, None, *values)
        return
    if _compiles_only:
        kernel.run(*arguments, **named, grid=grid, warmup=True, enable_fp_fusion=True)
        return
    # Triton 3.10 fuses multiply-adds only on request.
    signature.compiled[known] = kernel[grid](*arguments, **named, enable_fp_fusion=True)
