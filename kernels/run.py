"""Starting kernels: a compiled kernel is looked up by what it was specialised for and started without Triton's binder.

Triton examines every argument again at each launch, 30 us of Python for attention's 34; training a small encoder then
waits for the host. Here a launch is one look-up: kernel, device, pointers' types and alignment, numbers that Triton
specialises, constants. A launch that is new goes through Triton, which compiles or finds the kernel.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "maxnreg")


class _Signature(NamedTuple):
    """A kernel's parameters: pointers first, then numbers, then constants.

    Fields:
        pointers: how many parameters are pointers; a pointer that is None is a constant to Triton.
        specialised: of the numbers of which Triton may compile in that they are 1 or a multiple of 16.
        varying: of the integers of which only the width matters.
        constants: where they begin.
        compiled: what was looked up → the kernel.
    """

    kernel: str
    names: tuple[str, ...]
    pointers: int
    specialised: tuple[int, ...]
    varying: tuple[int, ...]
    constants: int
    compiled: dict


_signatures: dict[int, _Signature] = {}  # by the kernel's id: its own hash is the source's
_compiles_only = False


def signatures() -> Iterable[_Signature]:
    """Of the kernels that have run in this process."""
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
    """Within, kernels are compiled into Triton's cache on disk and not started: what they write stays as it is."""
    global _compiles_only
    _compiles_only = True
    try:
        yield
    finally:
        _compiles_only = False


def run(kernel, grid: Sequence[int], *arguments, **named) -> None:
    """Start ``kernel`` on the current device and stream.

    Args:
        grid: one to three numbers of programs.
        arguments, named: the kernel's arguments and its launch parameters.
    """
    signature = _signatures.get(id(kernel))
    if signature is None:
        if not isinstance(kernel, JITFunction):  # interpreted
            kernel[grid](*arguments, **named)
            return
        signature = _signatures[id(kernel)] = signature_of(kernel)
    # Loops and map: a comprehension is a call of its own before Python 3.12, and this runs a thousand times a step.
    values = (*arguments, *map(named.__getitem__, signature.names[len(arguments) :]))
    key: list = []
    append, addresses, width = key.append, 0, 0
    for pointer in values[: signature.pointers]:
        if pointer is None:
            append(None)
        else:
            append(pointer.dtype)
            addresses |= pointer.data_ptr()
    # Where not all are aligned, which of them are.
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
        # What Triton itself does then, without what it prepares for hooks.
        stream = driver.active.get_current_stream(device)
        handle = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(x, y, z, *handle, None, None, None, *values)
        return
    if _compiles_only:
        kernel.run(*arguments, **named, grid=grid, warmup=True, enable_fp_fusion=True)
        return
    # Triton 3.10 leaves fused multiply-adds out unless they are asked for.
    signature.compiled[known] = kernel[grid](*arguments, **named, enable_fp_fusion=True)
