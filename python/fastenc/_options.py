"""Options: dataclass fields that Python, the command line and configuration files share."""

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
REQUIRED: Any = MISSING


def option(default: Any, help: str, *flags: str, predict: bool = False) -> Any:
    """A field that the command line offers as ``--name`` and a configuration file as ``name = value``.

    Args:
        default: ``REQUIRED`` for none.
        help: for a user; the default is added to it.
        flags: other names of the option, such as "-t".
        predict: of a task: prediction takes the option too; the others matter to training alone.
    """
    return field(default=default, metadata={"help": help, "flags": flags, "predict": predict})


def argument(help: str, *, default: Any = REQUIRED) -> Any:
    """A field that the command line takes by its position."""
    return field(default=default, metadata={"help": help, "flags": (), "positional": True})


def group(title: str) -> Any:
    """A field that is a dataclass of options, under a heading of the help."""
    return field(metadata={"group": title})


def options_listed_by(function: Callable[[], list]) -> Any:
    """A field that is a dictionary of those of the options ``function()`` that were given."""
    return field(default_factory=dict, metadata={"options": function})


def documented(kind: Class) -> Class:
    """Add the help of a dataclass's options to its docstring."""
    lines = [
        f"    {field.name}: {field.metadata['help']}"
        for field in fields(kind)  # type: ignore[arg-type]
        if "help" in field.metadata
    ]
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\nFields:\n" + "\n".join(lines) + "\n"
    return kind
