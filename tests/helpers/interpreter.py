"""Triton's interpreter without work that it repeats or throws away."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

from triton import language

# A launch would import it while `print` stands in for `static_print`: Python 3.10 knows no signature of that.
from triton.experimental import gluon  # noqa: F401
from triton.runtime import interpreter


@cache
def spare_work() -> None:
    """Halve the time of this library's kernels in the interpreter."""
    replace_language_once_a_launch()
    # Sums of integers are computed once more in 64 bits for an assertion that the interpreter does not make.
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def replace_language_once_a_launch() -> None:
    """The interpreter replaces ``triton.language``'s functions again whenever a kernel calls a device function."""
    replace_language, Scope = interpreter._patch_lang, interpreter._LangPatchScope
    every_language = SimpleNamespace(__globals__={"language": language, "core": language.core})
    in_a_launch = False

    class LaunchScope(Scope):
        def restore(self):
            nonlocal in_a_launch
            super().restore()
            in_a_launch = False

    def replace_once(function):
        nonlocal in_a_launch
        scope = Scope()
        if not in_a_launch:
            in_a_launch = True
            scope = LaunchScope()
            scope._changes = replace_language(every_language)._changes
        return scope

    interpreter._patch_lang = replace_once
