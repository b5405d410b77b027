"""fastenc recipes."""

from dataclasses import dataclass

from fastenc.cli.options import Command
from fastenc.train.recipe import read_recipe, recipe_names


@dataclass(frozen=True, kw_only=True)
class Recipes(Command):
    """List the published settings for `pretrain --recipe`.

    Each recipe is a file in fastenc/train/recipes with the source of each value.
    """

    def run(self) -> None:
        for name in recipe_names():
            print(f"{name:16} {read_recipe(name).description}")
