"""Recipes: the options of ``fastenc pretrain`` in a TOML file. The published ones come with the package."""

import json
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from fastenc._extras import require
from fastenc._files import write_atomically

SHIPPED = files("fastenc.train") / "recipes"


class Recipe(NamedTuple):
    """Fields:
    description: one line.
    values: option without its dashes ("learning-rate") → value.
    """

    description: str
    values: dict[str, Any]


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    names = (entry.name for entry in SHIPPED.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_recipe(name: str) -> Recipe:
    """A shipped recipe by its name, or a TOML file; tables only group the options.

    Raises: ValueError for an unknown name, a file that is not TOML, or an option that stands in two tables.
    """
    toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli", extra="train")
    if name in recipe_names():
        text = (SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml") and Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise ValueError(
            f"--recipe must be a .toml file or one of {', '.join(recipe_names())}, got {name}"
            + _nearest(name, recipe_names())
        )
    try:
        content = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ValueError(f"{name} is not TOML: {error}") from error
    description = content.pop("description", "")
    values: dict[str, Any] = {}
    for key, value in content.items():
        for option, setting in (value if isinstance(value, dict) else {key: value}).items():
            if option in values:
                raise ValueError(f"{name} gives {option} twice: leave one of them")
            values[option] = setting
    return Recipe(description, values)


def check_options(recipe: Recipe, known: Iterable[str], where: str) -> None:
    """Raises: ValueError for an option that is not among the ``known`` ones, naming the nearest."""
    known = list(known)
    for option in recipe.values:
        if option not in known:
            raise ValueError(
                f"{where}: there is no option {option}{_nearest(option, known)}. "
                f"A recipe may have {', '.join(sorted(known))}"
            )


def write_recipe(path: Path, values: dict[str, Any], description: str) -> None:
    """Write options as a recipe; those that are None are left out."""
    lines = [f"description = {_toml_value(description)}"]
    lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _toml_value(value: Any) -> str:
    """Numbers, truth values, texts and lists of them are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f" (is it {near[0]}?)" if near else ""
