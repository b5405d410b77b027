"""Imports of optional libraries, with an error that says how to install them."""

from importlib import import_module
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, which the given extra of fastenc installs.

    Raises: ImportError naming the module and the command that installs the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {module!r} ({error}); install it with: pip install 'fastenc[{extra}]'"
        ) from error
