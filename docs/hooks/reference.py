"""A hook of mkdocs: fills a reference page with the public names of its module, from the module's ``__all__``."""

import re
from importlib import import_module

MARKER = re.compile(r"^\[\[members of ([\w.]+)\]\]$", re.MULTILINE)


def on_page_markdown(markdown: str, **_) -> str:
    return MARKER.sub(lambda match: "\n\n".join(blocks(match[1])), markdown)


def blocks(module: str) -> list[str]:
    """A block for each public name, at the place where it is defined: an op has the name of its module."""
    home = import_module(module)
    return [block(module, name, getattr(home, name)) for name in sorted(home.__all__)]


def block(module: str, name: str, value: object) -> str:
    place = f"{module}.{name}"
    if getattr(value, "__module__", "").startswith("fastenc") and hasattr(value, "__qualname__"):
        place = f"{value.__module__}.{value.__qualname__}"
    return f"::: {place}"
