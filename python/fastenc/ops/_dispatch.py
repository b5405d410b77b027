"""Which implementation an op takes: the rule of DESIGN.md's dispatch table."""

from torch import Tensor

from fastenc.ops._library import CPP_DTYPES, HAS_CPP

IMPLEMENTATIONS = ("auto", "cpp", "reference")


def choose(op: str, impl: str, x: Tensor, unsupported: str | None = None) -> str:
    """Resolve ``impl`` for input ``x`` to "cpp" or "reference".

    Args:
        unsupported: why this call's arguments are beyond the C++ kernel, or None.
    Raises: ValueError when an implementation asked for by name cannot take the call.
    """
    if impl == "reference":
        return impl
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    reason: str | None
    if not HAS_CPP:
        reason = "the compiled extension is not available: see `fastenc info`"
    elif x.device.type != "cpu":
        reason = f"it runs on CPU tensors, got one on {x.device}"
    elif x.dtype not in CPP_DTYPES:
        reason = f"it takes float32 or bfloat16, got {x.dtype}"
    else:
        reason = unsupported
    if reason is None:
        return "cpp"
    if impl == "cpp":
        raise ValueError(f"{op}: impl='cpp' cannot take this call: {reason}")
    return "reference"
