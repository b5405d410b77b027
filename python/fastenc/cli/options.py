"""Command-line options and configuration files made from the fields of dataclasses, over argparse.

A command is a dataclass whose fields are its options. A field is made by ``option`` or ``argument`` of
``fastenc._base.options``, or is a dataclass of such fields. An option's value comes from the command line, else from
the file of ``--config``, else from the command's presets (a recipe), else it is the default.
"""

import argparse
import math
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from fastenc._base import options
from fastenc._base.config_files import read_config


class Option(NamedTuple):
    """An option of a command.

    Fields:
        name: name of the dataclass's field.
        type: type of the value, or of each value if there are several; bool for a flag.
        number: number of values: None for one value, "any" for any number of values.
        default: MISSING if a value must be given.
        help: text for the user.
        flags: other names on the command line, such as "-o".
        positional: whether the value is given by its position, without a name.
        group: heading of the option in the help; "" for the first group.
    """

    name: str
    type: type
    number: int | str | None
    default: object
    help: str
    flags: tuple[str, ...] = ()
    positional: bool = False
    group: str = ""

    @property
    def key(self) -> str:
        """The option's name in a configuration file and, after two dashes, on the command line."""
        return self.name.rstrip("_").replace("_", "-")

    @property
    def keys(self) -> tuple[str, ...]:
        """The names that a configuration file may give the option, such as "learning-rate" and "lr"."""
        return self.key, *(flag[2:] for flag in self.flags if flag.startswith("--"))

    @property
    def full_help(self) -> str:
        """The help with the default, unless the help already says it."""
        no_default = self.default is MISSING or self.default is None or self.default is False
        if no_default or self.default in ((), "") or "Default" in self.help:
            return self.help
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        return f"{self.help} Default: {' '.join(map(str, values))}."


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. A subclass is a dataclass of options, and its docstring is the command's help.

    Class attributes:
        instead: {option: another option that replaces it}, such as max_steps, which replaces epochs. If the command
            line gives the former, the latter is removed from a recipe or a file, so that the former has an effect.
        not_in_files: options of a single call, which a configuration file may not contain.
    """

    instead: ClassVar[dict[str, str]] = {}
    not_in_files: ClassVar[set[str]] = {"config", "resume", "overwrite"}

    config: Path | None = options.option(
        None, "File of options, .toml or .yaml. Options on the command line override it."
    )

    @classmethod
    def presets(cls, given: dict[str, Any]) -> dict[str, object]:
        """{key: value} that replace the defaults, such as a recipe's.

        Args:
            given: the options that the file and the command line give.
        """
        return {}

    @classmethod
    def from_arguments(cls, name: str, arguments: Sequence[str]) -> "Command":
        """The command with the options of a command line."""
        return parse(name, cls, arguments)

    def run(self) -> None:
        """Do what the command is for."""
        raise NotImplementedError


def options_of(command_class: Any) -> list[Option]:
    """The options of a dataclass, including those of dataclasses in its fields."""
    hints, options = get_type_hints(command_class), []
    for each in fields(command_class):
        if is_dataclass(hints[each.name]):
            title = each.metadata["group"]
            options += [o._replace(group=title) for o in options_of(hints[each.name])]
        elif "options" in each.metadata:
            options += each.metadata["options"]()
        elif "help" in each.metadata:
            options.append(option_of(each, hints[each.name]))
    return options


def option_of(each: Field, hint: Any) -> Option:
    """The option of a field with this type hint."""
    if get_origin(hint) in (Union, types.UnionType):
        hint, *_ = (choice for choice in get_args(hint) if choice is not type(None))
    number: int | str | None = None
    if get_origin(hint) in (tuple, list):
        kinds = get_args(hint)
        number = "any" if get_origin(hint) is list or kinds[1:] == (...,) else len(kinds)
        hint = kinds[0]
    metadata = each.metadata
    return Option(
        each.name,
        hint,
        number,
        each.default,
        metadata["help"],
        metadata["flags"],
        metadata.get("positional", False),
    )


def parse(name: str, command_class: type[Command], arguments: Sequence[str]) -> Command:
    """The command with the options of these arguments, and of their configuration file and recipe.

    Raises: ValueError for an unknown option, a value of a wrong type, or a missing option.
    """
    options = options_of(command_class)
    given = vars(make_parser(name, command_class, options).parse_intermixed_args(arguments))
    given = {key: value for key, value in given.items() if value != []}
    config = given.get("config")
    in_file = {} if config is None else read_config(Path(config))
    in_files = [option for option in options if option.name not in command_class.not_in_files]
    known = {key: option for option in in_files for key in option.keys}
    stored = check_values(in_file, known, f"{config}")
    presets = check_values(command_class.presets({**stored, **given}), known, "the recipe")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    values = override(command_class, override(command_class, presets, stored), given)
    _check_numbers(values, options)
    if missing := [o for o in options if o.default is MISSING and o.name not in values]:
        raise ValueError(
            f"fastenc {name} needs {' and '.join(_title(option) for option in missing)}: fastenc {name} --help "
            "explains"
        )
    return build(command_class, values)


def _check_numbers(values: dict[str, object], options: Iterable[Option]) -> None:
    """Raises: ValueError for a whole number that does not fit in 64 bits, and for NaN."""
    for option in options:
        value = values.get(option.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and not -(2**63) <= each < 2**63:
                raise ValueError(f"{_title(option)} must be less than 2^63, got {each}: give less")
            if isinstance(each, float) and math.isnan(each):
                raise ValueError(f"{_title(option)} must be a number, got {each}: give one")


def override(
    command_class: type[Command], values: dict[str, object], others: dict[str, object]
) -> dict[str, object]:
    """``values`` after ``others`` override them, with regard to ``command_class.instead``."""
    replaced = {
        command_class.instead[name] for name in others if name in command_class.instead
    } - others.keys()
    return {k: v for k, v in values.items() if k not in replaced} | others


def build(command_class: Any, values: dict[str, object]) -> Any:
    """An instance of a dataclass from {field: value}. A field may be of the dataclass or of one inside it."""
    hints, arguments = get_type_hints(command_class), {}
    for each in fields(command_class):
        if is_dataclass(hints[each.name]):
            arguments[each.name] = build(hints[each.name], values)
        elif "options" in each.metadata:
            names = {option.name for option in each.metadata["options"]()}
            arguments[each.name] = {k: v for k, v in values.items() if k in names}
        elif each.name in values:
            arguments[each.name] = values[each.name]
    return command_class(**arguments)


def in_options_words(text: str, options: Iterable[Option]) -> str:
    """An error message in which names of fields are replaced by names of options, such as --batch-size, and arguments
    of Python by options: resume=True by --resume, quoting="csv" by --quoting csv, and label= by --label. Names of
    config.json's entries stay."""
    names = {option.name: _title(option) for option in options}

    def as_option(match: re.Match) -> str:
        value = f" {match[2]}" if match[2] else ""
        return f"{names[match[1]]}{value}" if match[1] in names else match[0]

    text = re.sub(r'\b(\w+)=(?:True\b|"([^"]*)"|(?=\s))', as_option, text)
    field = r"^\w+(?= must\b)|(?<!config\.json: )(?<!config\.json's )\b\w+_\w+\b"
    return re.sub(field, lambda match: names.get(match[0], match[0]), text)


def values_of(command: Any) -> dict[str, object]:
    """{key: value} of a command's options, as in a configuration file."""
    hints, values = get_type_hints(type(command)), dict[str, object]()
    for each in fields(command):
        value = getattr(command, each.name)
        if is_dataclass(hints[each.name]):
            values |= values_of(value)
        elif "help" in each.metadata:
            key = option_of(each, hints[each.name]).key
            values[key] = str(value) if isinstance(value, Path) else value
    return values


def check_values(
    values: dict[str, object], known: dict[str, Option], where: str
) -> dict[str, object]:
    """{field: value} of a configuration file's {key: value}.

    Raises: ValueError for an unknown option, with the most similar name, an option that is given by two names, or a
        value of a wrong type.
    """
    checked: dict[str, object] = {}
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f" (is it {near[0]}?)" if near else ""
            raise ValueError(
                f"{where}: there is no option {key}{hint}: use some of {', '.join(sorted(known))}"
            )
        option = known[key]
        if option.name in checked:
            raise ValueError(f"{where}: {' and '.join(option.keys)} are one option: give it once")
        several = value if isinstance(value, list) else [value]
        takes_list = option.number is not None
        if isinstance(value, list) != takes_list or (
            isinstance(option.number, int) and len(several) != option.number
        ):
            number = "" if option.number == "any" else f"{option.number} "
            amount = f"a list of {number}values" if takes_list else "one value"
            raise ValueError(f"{where}: {key} takes {amount}, got {value!r}: correct it")
        items = tuple(_of_type(item, option, where) for item in several)
        checked[option.name] = items if option.number is not None else items[0]
    return checked


def _of_type(value: object, option: Option, where: str) -> Any:
    wanted = option.type
    if wanted in (str, Path) and isinstance(value, str):
        return wanted(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is float and isinstance(value, str):  # YAML reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) is not wanted:
        raise ValueError(f"{where}: {option.key} takes {_kind(wanted)}, got {value!r}: correct it")
    return value


def _kind(wanted: type) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(wanted, "a text")


class _Parser(argparse.ArgumentParser):
    """Raises errors, so that the command line's main function prints them as one line."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        # argparse takes -1 for a value, but -4,-3 and -1e-3 for options. No name of ours begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> Any:
        unknown = re.search(r"^unrecognized arguments: (--[\w-]+)", message)
        near = unknown and get_close_matches(unknown[1], self._option_string_actions, 1)
        hint = f" (is it {near[0]}?)" if near else ""
        raise ValueError(f"{message}{hint}; {self.prog} --help lists the options")


def make_parser(name: str, command_class: Any, options: list[Option]) -> argparse.ArgumentParser:
    """A parser of a command's arguments. Its result has only the options that were given."""
    required = [
        f"{option.flags[0] if option.flags else '--' + option.key} {_metavar(option)}"
        for option in options
        if option.default is MISSING and not option.positional
    ]
    positional = [_metavar(option) for option in options if option.positional]
    description, examples = help_texts(command_class)
    parser = _Parser(
        prog=f"fastenc {name}",
        usage=" ".join(["fastenc", name, *positional, *required, "[options]"]),
        description=description,
        epilog=examples,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for option in options:
        text = option.full_help.replace("%", "%%")
        if option.positional:
            several = "*" if option.number else "?"
            parser.add_argument(
                option.name,
                metavar=_metavar(option),
                nargs=several,
                type=option.type,
                default=argparse.SUPPRESS,
                help=text,
            )
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        settings: dict[str, Any] = {"type": option.type, "metavar": _metavar(option)}
        if option.type is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        elif option.number == "any":
            settings["action"] = "append"
        elif option.number is not None:
            settings["nargs"] = option.number
        groups[option.group].add_argument(
            f"--{option.key}", *option.flags, dest=option.name, help=text, **settings
        )
    return parser


def help_texts(command_class: Any) -> tuple[str, str]:
    """(description, examples) of a command's docstring. Each paragraph of the description is one line."""
    text = re.sub(r"(?m)^    ", "", command_class.__doc__ or "")
    description, _, examples = text.partition("Examples:")
    paragraphs = [" ".join(paragraph.split()) for paragraph in description.split("\n\n")]
    lines = "\n".join(f"  {line.strip()}" for line in examples.splitlines() if line.strip())
    return "\n\n".join(filter(None, paragraphs)), f"Examples:\n{lines}" if lines else ""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps the lines of paragraphs, but not those of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("Examples:"):
            return text
        fill = argparse.HelpFormatter._fill_text
        return "\n\n".join(fill(self, each, width, indent) for each in text.split("\n\n"))


def _metavar(option: Option) -> str:
    """The name of an option's value in the help."""
    if option.positional:
        return option.name.upper()
    return {int: "N", float: "X", Path: "PATH"}.get(option.type, option.key.upper())


def _title(option: Option) -> str:
    """The option's name for the user."""
    return option.name.upper() if option.positional else f"--{option.key}"
