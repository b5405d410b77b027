"""Triton's interpreter without work that it repeats or throws away."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy
from triton import language

# A launch would import it while `print` stands in for `static_print`: Python 3.10 knows no signature of that.
from triton.experimental import gluon  # noqa: F401
from triton.language import semantic
from triton.runtime import interpreter

from tests.helpers.interpreter_types import find_types_of_results_once


@cache
def spare_work() -> None:
    """The interpreter takes less than half of its time for this library's kernels."""
    replace_language_once_a_launch()
    call_functions_directly()
    make_types_once()
    compare_shapes_once()
    look_up_numpy_types()
    find_types_of_results_once()
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


def call_functions_directly() -> None:
    """A function of the language is called through two others. One of them copies the named arguments."""

    def patch(obj, name, member, builder, scope):
        # What is wrapped does not check that a call comes from a kernel.
        function = getattr(member, "__wrapped__", member)

        def call(*arguments, **named):
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def make_types_once() -> None:
    """The interpreter makes a block type and a shape for each value of a kernel, and checks their numbers again."""
    core = language.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, shapes = {}, {}

    def shape_of(type):
        """A tensor's shape and number of elements."""
        value = object.__new__(core.tensor)
        make_tensor(value, None, type)
        return value.shape, value.numel

    def block_type(cls, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        pointer = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else None
        key = element_ty.name, pointer, sizes
        if key not in types:
            types[key] = made = object.__new__(cls)
            make_type(made, element_ty, list(sizes))
            if sizes not in shapes:
                shapes[sizes] = shape_of(made)
            made.of_tensors = shapes[sizes]
        return types[key]

    def tensor(self, handle, type):
        self.shape, self.numel = type.of_tensors if type.is_block() else of_numbers
        self.handle, self.type, self.dtype = handle, type, type.scalar

    of_numbers = shape_of(core.int32)
    core.block_type.__new__, core.block_type.__init__ = block_type, lambda *_: None
    core.tensor.__init__ = tensor


def compare_shapes_once() -> None:
    """The interpreter compares the shapes of two values size by size whenever it combines them."""
    broadcast, common_shapes = semantic.TritonSemantic.broadcast_impl_value, {}

    def broadcast_to(value, shape, sizes):
        if value.shape is shape:
            return value
        handle = interpreter.TensorHandle(numpy.broadcast_to(value.handle.data, sizes), value.dtype)
        return language.tensor(handle, language.block_type(value.dtype, sizes))

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)  # each shape is one object, which stays
        if key not in common_shapes:
            result, _ = broadcast(self, lhs, rhs)
            common_shapes[key] = result.shape, tuple(result.type.shape)
        return tuple(broadcast_to(value, *common_shapes[key]) for value in (lhs, rhs))

    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value


def look_up_numpy_types() -> None:
    """The interpreter makes a dictionary of all types whenever it needs NumPy's."""
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(type):
        if type.name not in found:
            found[type.name] = find(type)
        return found[type.name]

    interpreter._get_np_dtype = numpy_type
