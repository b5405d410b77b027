"""Configuration files in TOML or YAML, which give options as name = value."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastenc._base.extras import require


def read_config(path: Path) -> dict[str, Any]:
    """Read {option: value} from a TOML or YAML file.

    Tables in the file group options and have no further meaning. The key ``description`` and a byte-order mark are
    ignored.
    Raises: ValueError for another file type, for a file that cannot be parsed, and for an option given twice.
    """
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"--config takes a .toml or .yaml file, got {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): convert the file") from error
    content = parse_config(text, str(path), yaml=path.suffix != ".toml")
    content.pop("description", None)
    return content


def parse_config(text: str, where: str, *, yaml: bool = False) -> dict[str, Any]:
    """{option: value} of a file's text. Underscores in names become dashes.

    Args: where: the file's name, for error messages.
    Raises: ValueError for a text that cannot be parsed, and for an option given twice.
    """
    content = (_read_yaml if yaml else _read_toml)(text, where)
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold name = value, got {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        for option, setting in (value if isinstance(value, dict) else {key: value}).items():
            option = str(option).replace("_", "-")  # YAML reads numbers, yes and no as other types
            if option in values:
                raise ValueError(f"{where} gives {option} twice: leave one of them")
            values[option] = setting
    return values


def _read_toml(text: str, where: str) -> Any:
    toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli", extra="train")
    return _read(toml.loads, toml.TOMLDecodeError, text, f"{where} is not TOML")


def _read_yaml(text: str, where: str) -> Any:
    yaml = require("yaml", extra="train")
    base: Any = yaml.SafeLoader

    class Loader(base):
        """Refuses a name that is given twice. SafeLoader takes the last value."""

        def construct_mapping(self, node, deep=False):
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{where} gives {name} twice: leave one of them")
            return super().construct_mapping(node, deep)

    load = partial(yaml.load, Loader=Loader)
    return _read(load, yaml.YAMLError, text, f"{where} is not YAML") or {}


def _read(reader: Callable, failure: type[Exception], text: str, message: str) -> Any:
    try:
        return reader(text)
    except failure as error:
        raise ValueError(f"{message}: {error}") from error
