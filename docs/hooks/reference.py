"""A hook of mkdocs: fills pages with a module's public names, the ops' kernels, or the commands' options."""

import re
from importlib import import_module

from fastenc.cli.commands import COMMANDS, command_named
from fastenc.cli.options import help_texts, options_of
from fastenc.ops import __all__ as OPS
from fastenc.ops._dispatch import DECLARED

COMMANDS_MARKER = "[[options of the commands]]"
KERNELS_MARKER = "[[kernels of the ops]]"
MARKER = re.compile(r"^\[\[members of ([\w.]+)\]\]$", re.MULTILINE)


def on_page_markdown(markdown: str, **_) -> str:
    if COMMANDS_MARKER in markdown:
        markdown = markdown.replace(COMMANDS_MARKER, "\n\n".join(commands()))
    if KERNELS_MARKER in markdown:
        markdown = markdown.replace(KERNELS_MARKER, kernels())
    return MARKER.sub(lambda match: "\n\n".join(blocks(match[1])), markdown)


def blocks(module: str) -> list[str]:
    """A block for each public name, at the place where it is defined: an op has the name of its module."""
    home = import_module(module)
    return [block(module, name, getattr(home, name)) for name in sorted(home.__all__)]


def block(module: str, name: str, value: object) -> str:
    identifier = f"{module}.{name}"
    if getattr(value, "__module__", "").startswith("fastenc") and hasattr(value, "__qualname__"):
        identifier = f"{value.__module__}.{value.__qualname__}"
    return f"::: {identifier}"


def kernels() -> str:
    """What ``impl="auto"`` takes, from the ops' declarations."""
    rows = ["| op | CPU | GPU |", "|---|---|---|"]
    for op in OPS:
        names = DECLARED[op].implementations
        gpu = next((name for name in ("cuda", "triton") if name in names), "reference")
        rows.append(f"| `{op}` | {'cpp' if 'cpp' in names else 'reference'} | {gpu} |")
    return "\n".join(rows)


def commands() -> list[str]:
    """A section for each command, from the dataclasses that make its --help."""
    return [command(name) for name in COMMANDS if name != "bench"]


def command(name: str) -> str:
    kind = command_named(name)
    description, examples = help_texts(kind)
    lines = [f"## fastenc {name}", description]
    if examples:
        code = "\n".join(line.strip() for line in examples.splitlines()[1:])
        lines.append(f"```sh\n{code}\n```")
    rows = ["| option | |", "|---|---|"]
    for option in options_of(kind):
        shown = option.name.upper() if option.positional else f"--{option.key}"
        names = ", ".join(f"`{each}`" for each in (shown, *option.flags))
        rows.append(f"| {names} | {option.full_help.replace('|', chr(92) + '|')} |")
    return "\n\n".join([*lines, "\n".join(rows)])
