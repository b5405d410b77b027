"""Starting kernels: a compiled kernel is looked up by what it was specialised for and started without Triton's binder.

Triton examines every argument again at each launch, 30 us of Python for attention's 34; training a small encoder then
waits for the host. Here a launch is one look-up: kernel, device, pointers' types and alignment, numbers that Triton
specialises, constants. A launch that is new goes through Triton, which compiles or finds the kernel.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "maxnreg")


class _Signature(NamedTuple):
    """A kernel's parameters: pointers first, then numbers, then constants.

    Fields:
        pointers: how many parameters are pointers; a pointer that is None is a constant to Triton.
        specialised: places of numbers of which Triton may compile in that they are 1 or a multiple of 16.
        varying: places of integers of which only the width matters.
        compiled: what was looked up → the kernel.
    """

    kernel: str
    names: tuple[str, ...]
    pointers: int
    specialised: tuple[int, ...]
    varying: tuple[int, ...]
    compiled: dict


_signatures: dict[int, _Signature] = {}  # by the kernel's id: its own hash is the source's


def signatures() -> Iterable[_Signature]:
    """Of the kernels that have run in this process."""
    return _signatures.values()


def signature_of(kernel: JITFunction) -> _Signature:
    found = _signatures.get(id(kernel))
    if found is None:
        pointers = [p.num for p in kernel.params if p.name.endswith("_ptr")]
        numbers = [p for p in kernel.params[len(pointers) :] if not p.is_constexpr]
        found = _signatures[id(kernel)] = _Signature(
            kernel.__name__,
            tuple(kernel.arg_names),
            len(pointers),
            tuple(p.num for p in numbers if not p.do_not_specialize),
            tuple(p.num for p in numbers if p.do_not_specialize),
            {},
        )
    return found


def run(kernel, grid: Sequence[int], *arguments, **named) -> None:
    """Start ``kernel`` on the current device and stream.

    Args:
        grid: one to three numbers of programs.
        arguments, named: the kernel's arguments and its launch parameters.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*arguments, **named)
        return
    signature = signature_of(kernel)
    values = [*arguments, *[named[name] for name in signature.names[len(arguments) :]]]
    pointers = values[: signature.pointers]
    key = (
        values[0].get_device(),
        *[p if p is None else (p.dtype, p.data_ptr() % 16 == 0) for p in pointers],
        *[None if values[n].__class__ is float else values[n] for n in signature.specialised],
        *[values[n] >> 31 for n in signature.varying],
        *values[signature.pointers + len(signature.specialised) + len(signature.varying) :],
        *[named.get(name) for name in OPTIONS],
    )
    compiled = signature.compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*values)
        return
    # Triton 3.10 leaves fused multiply-adds out unless they are asked for.
    signature.compiled[key] = kernel[grid](*arguments, **named, enable_fp_fusion=True)
