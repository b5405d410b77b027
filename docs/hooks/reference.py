"""A hook of mkdocs: in the site mkdocstrings shows a module's members, at the place where each is defined.

The pages hold them as Markdown too (``pages.py``), for who reads the files.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import public_names

MEMBERS = re.compile(r"<!-- members of ([\w.]+) -->\n.*?<!-- /members of \1 -->", re.DOTALL)


def on_page_markdown(markdown: str, **_) -> str:
    return MEMBERS.sub(lambda match: "\n\n".join(blocks(match[1])), markdown)


def blocks(module_name: str) -> list[str]:
    """A block for each public name: an op has the name of its module."""
    module = import_module(module_name)
    return [block(module_name, name, getattr(module, name)) for name in public_names(module)]


def block(module: str, name: str, value: object) -> str:
    identifier = f"{module}.{name}"
    if getattr(value, "__module__", "").startswith("fastenc") and hasattr(value, "__qualname__"):
        identifier = f"{value.__module__}.{value.__qualname__}"
    return f"::: {identifier}"
