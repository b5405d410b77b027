"""Optional libraries: imported where they are used, with an error that names the extra."""

from importlib import import_module
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module`` or say which extra of fastenc brings it.

    Raises: ImportError naming the module, the extra and the command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {module!r} ({error}); install it with: pip install 'fastenc[{extra}]'"
        ) from error
