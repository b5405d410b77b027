"""The compiled code: one library with the C++ ops, and a module for each Python that binds what is not an op."""

import importlib.util
import sys
import warnings
from pathlib import Path

import torch

import fastenc

LIBRARY = "libfastenc.dylib" if sys.platform == "darwin" else "libfastenc.so"
REBUILD = (
    "install fastenc again (pip install --force-reinstall --no-deps fastenc), "
    "or in a checkout run python setup.py build_ext --inplace"
)


def load():
    """Register the C++ ops. Returns the module ``fastenc._C``, or None, with a warning, where it cannot be used.

    Raises:
        ImportError: The library and the module are not of one build, or not of this version of fastenc.
    """
    spec = importlib.util.find_spec("fastenc._C")
    if spec is None:
        return _without(f"no module for Python {sys.version_info[0]}.{sys.version_info[1]}")
    module, library = Path(spec.origin), Path(fastenc.__file__).with_name(LIBRARY)
    if not library.exists():
        raise ImportError(
            f"fastenc's compiled module needs the library of its own build beside it, got {module.name} without "
            f"{LIBRARY} in {library.parent}: {REBUILD}"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return _without(error)
    try:
        from fastenc import _C

        builds = _C.library_build_id(), _C.BUILD_ID
    except (ImportError, AttributeError) as error:  # a module that does not fit the library at all
        raise ImportError(f"{module.name} does not fit {LIBRARY} ({error}): {REBUILD}") from error
    if builds[0] != builds[1] or builds[0].partition("+")[0] != fastenc.__version__:
        raise ImportError(
            f"fastenc {fastenc.__version__} needs its library and its module from one build of this version, got "
            f"{LIBRARY} of {builds[0]} and {module.name} of {builds[1]}: {REBUILD}"
        )
    return _C


def _without(reason):
    warnings.warn(
        f"fastenc's compiled extension is not available ({reason}); every op takes its slower PyTorch "
        "reference path. To compile it: pip install --no-build-isolation fastenc, with a C++ compiler.",
        stacklevel=3,
    )
