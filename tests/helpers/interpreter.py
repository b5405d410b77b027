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
    make_types_of_a_shape_once()
    look_up_numpy_types()
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


def make_types_of_a_shape_once() -> None:
    """Every value of a kernel has a block type and a shape of its own, whose numbers are wrapped and checked again."""
    core = language.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, shapes = {}, {}

    def block_type(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes not in types:
            make_type(self, element_ty, shape)
            types[sizes] = self.shape, self.numel
        self.shape, self.numel = types[sizes]
        self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"

    def tensor(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.shape, self.numel = shapes[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def look_up_numpy_types() -> None:
    """The interpreter makes a dictionary of all types whenever it needs NumPy's."""
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(type):
        if type.name not in found:
            found[type.name] = find(type)
        return found[type.name]

    interpreter._get_np_dtype = numpy_type
