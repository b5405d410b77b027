"""``--recipe``: a file's values become the defaults of a command's other options."""

from typing import Any

import typer

from fastenc.train.recipe import check_options, read_recipe, recipe_names

# What belongs to one run and not to a recipe.
NOT_IN_RECIPES = {"train", "output", "resume", "recipe", "help"}
# Options that count instead of one before them.
INSTEAD = {
    "epochs": "max_steps",
    "accumulation": "global_batch_size",
    "batch_tokens": "global_batch_size",
    "warmup": "warmup_steps",
}


def use_recipe(context: typer.Context, name: str | None) -> str | None:
    """Callback of an eager option. Raises: ValueError for an unknown recipe, or an option that the command lacks."""
    if name == "list":
        show_recipes()
        raise typer.Exit()
    if name is not None:
        recipe = read_recipe(name)
        options = _options(context)
        check_options(recipe, options, name)
        context.default_map = {options[key]: value for key, value in recipe.values.items()}
    return name


def resolved(context: typer.Context) -> dict[str, Any]:
    """The command's options with their values, wherever those came from, as a recipe holds them."""
    return {key: context.params[name] for key, name in _options(context).items()}


def given(context: typer.Context) -> list[str]:
    """The options, as in a recipe, that stand on the command line."""
    return [key for key, name in _options(context).items() if _from(context, name, "COMMANDLINE")]


def give_way(context: typer.Context, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without what a recipe says of something that the command line says in other units."""
    gone = [
        theirs
        for ours, theirs in INSTEAD.items()
        if _from(context, ours, "COMMANDLINE") and _from(context, theirs, "DEFAULT_MAP")
    ]
    context.params.update(dict.fromkeys(gone))
    return {**settings, **dict.fromkeys(gone)}


def show_recipes() -> None:
    for name in recipe_names():
        print(f"{name:16} {read_recipe(name).description}")


def _from(context: typer.Context, name: str, source: str) -> bool:
    found = context.get_parameter_source(name)
    return found is not None and found.name == source


def _options(context: typer.Context) -> dict[str, str]:
    """Option as in a recipe → name of the parameter."""
    return {
        parameter.opts[0].removeprefix("--"): parameter.name
        for parameter in context.command.params
        if parameter.name is not None and parameter.name not in NOT_IN_RECIPES
    }
