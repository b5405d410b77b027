"""An extension of griffe: docstrings name other objects by Sphinx's roles, which Markdown shows as code."""

import re

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
