"""Imports of optional libraries, with an error that says how to install them."""

import re
from importlib import import_module
from types import ModuleType

# Library → the oldest version that fastenc works with. pyproject.toml and docs/versions.md say the same.
OLDEST = {"transformers": "5.10"}


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module``, which the given extra of fastenc installs.

    Raises: ImportError naming the module and the command that installs the extra, if the library is missing or older
        than :data:`OLDEST`.
    """
    try:
        library = import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {module!r} ({error}); install it with: pip install 'fastenc[{extra}]'"
        ) from error
    oldest = OLDEST.get(module)
    if oldest is not None and _release(library.__version__) < _release(oldest):
        raise ImportError(
            f"this needs {module} {oldest} or newer, got {library.__version__}: "
            f"pip install '{module}>={oldest}'"
        )
    return library


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
