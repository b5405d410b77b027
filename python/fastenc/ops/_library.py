"""The namespace torch.ops.fastenc: schemas here, C++ implementations in the extension.

The schemas are defined in Python so that an installation without a compiled extension has them too.
"""

import warnings

import torch

library = torch.library.Library("fastenc", "DEF")

try:
    from fastenc import _C  # importing it registers the C++ implementations
except ImportError as error:
    _C = None
    warnings.warn(
        f"fastenc's compiled extension is not available ({error}); every op takes its slower PyTorch "
        "reference path. To compile it: pip install --no-build-isolation fastenc, with a C++ compiler.",
        stacklevel=2,
    )

HAS_CPP = _C is not None


def fingerprint(buffers: list[tuple[int, int]]) -> int:
    """A hash of a sample of the contents of [(address, bytes), ...]; the extension only."""
    return _C.fingerprint(buffers)


CPP_DTYPES = (torch.float32, torch.bfloat16)


def define(schema: str, fake) -> None:
    """Declare an op and the function that tells torch.compile its output shapes."""
    library.define(schema)
    torch.library.register_fake("fastenc::" + schema.split("(", 1)[0])(fake)
