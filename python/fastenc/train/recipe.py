"""Recipes: published settings of ``fastenc pretrain``, as configuration files that come with the package."""

import json
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from fastenc._base.config_files import parse_config
from fastenc._base.files import write_text_atomically

SHIPPED = files("fastenc.train") / "recipes"


class Recipe(NamedTuple):
    """A recipe.

    Fields:
        description: one line.
        values: {option without its dashes, such as "learning-rate": value}.
    """

    description: str
    values: dict[str, object]


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    names = (entry.name for entry in SHIPPED.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_recipe(name: str) -> Recipe:
    """A published recipe. Raises: ValueError for an unknown name."""
    if name not in recipe_names():
        near = get_close_matches(name, recipe_names(), 1)
        hint = f" (is it {near[0]}?)" if near else ""
        raise ValueError(
            f"--recipe must be one of {', '.join(recipe_names())}, got {name}{hint}: give one of them, or a file by "
            "--config"
        )
    values = parse_config((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"), name)
    return Recipe(values.pop("description"), values)


def write_recipe(path: Path, values: dict[str, object], description: str) -> None:
    """Write options as a TOML configuration file. Options with the value None are left out."""
    lines = [f"description = {_toml_value(description)}"]
    lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
    text = "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)


def _toml_value(value: object) -> str:
    """A value in TOML. Numbers, Booleans, strings and lists of them are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
