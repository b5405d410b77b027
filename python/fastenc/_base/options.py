"""Options: dataclass fields that are also options of the command line and of configuration files."""

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from inspect import cleandoc
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
REQUIRED: Any = MISSING


def option(default: Any, help: str, *flags: str, predict: bool = False) -> Any:
    """A field that the command line takes as ``--name`` and a configuration file as ``name = value``.

    Args:
        default: the default value, or ``REQUIRED``.
        help: the help text, to which the command line adds the default.
        flags: further names of the option, such as "-t".
        predict: for fields of a task: whether ``fastenc predict`` takes the option too.
    """
    return field(default=default, metadata={"help": help, "flags": flags, "predict": predict})


def argument(help: str, *, default: Any = REQUIRED) -> Any:
    """A field that is a positional argument of the command line."""
    return field(default=default, metadata={"help": help, "flags": (), "positional": True})


def group(title: str) -> Any:
    """A field that is itself a dataclass of options; the help lists them under ``title``."""
    return field(metadata={"group": title})


def options_listed_by(function: Callable[[], list]) -> Any:
    """A field that is a dictionary {name: value} of the given options among those that ``function()`` lists."""
    return field(default_factory=dict, metadata={"options": function})


def documented(options_class: Class) -> Class:
    """Class decorator: add the help texts of a dataclass's options to its docstring."""
    lines = [
        f"    {field.name}: {field.metadata['help']}"
        for field in fields(options_class)  # type: ignore[arg-type]
        if "help" in field.metadata
    ]
    options_class.__doc__ = (
        f"{cleandoc(options_class.__doc__ or '')}\n\nFields:\n" + "\n".join(lines) + "\n"
    )
    return options_class
