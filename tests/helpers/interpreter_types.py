"""Triton's interpreter, with the types and shapes of results found once.

It compares types, casts and broadcasts whenever it combines two values. Here a later call with values of the same types
and shapes is one call of NumPy.
"""

import numpy
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

# Operations that NumPy computes as Triton does, if both values have types of one of the groups below.
OF_NUMBERS = {
    "add": numpy.add,
    "sub": numpy.subtract,
    "mul": numpy.multiply,
    "less_than": numpy.less,
    "less_equal": numpy.less_equal,
    "greater_than": numpy.greater,
    "greater_equal": numpy.greater_equal,
    "equal": numpy.equal,
    "not_equal": numpy.not_equal,
}
OF_BITS = {"and_": numpy.bitwise_and, "or_": numpy.bitwise_or, "xor_": numpy.bitwise_xor}
INTEGERS = {"int32": numpy.int32, "int64": numpy.int64}
FLOATS = {"fp16": numpy.float16, "fp32": numpy.float32}
NUMBERS = INTEGERS | FLOATS


def find_types_of_results_once() -> None:
    """Combine values faster. Results are kept by the identity of a shape, so equal shapes must be one object that is
    never freed (tests.helpers.interpreter.make_types_once)."""
    for name, compute in (OF_NUMBERS | OF_BITS).items():
        original = getattr(TritonSemantic, name)
        setattr(TritonSemantic, name, _with_known_types(name, original, compute))
    TritonSemantic.expand_dims = _expanded_with_known_types(TritonSemantic.expand_dims)


def _with_known_types(name, original, compute):
    """``original``, which ``compute`` replaces from the second call with values of the same types on."""
    known = {}

    def combine(self, lhs, rhs, *options, **named):
        if type(lhs) is not language.tensor:
            return original(self, lhs, rhs, *options, **named)
        if type(rhs) is language.tensor:
            other = rhs.handle.data
            key = lhs.dtype.name, rhs.dtype.name, id(lhs.shape), id(rhs.shape)
        else:
            other = rhs
            key = lhs.dtype.name, type(rhs), id(lhs.shape)
        if key not in known:
            result = original(self, lhs, rhs, *options, **named)
            known[key] = _computation(name, compute, lhs.dtype, key[1]), result.type, result.dtype
            return result
        function, type_, dtype = known[key]
        if function is None:
            return original(self, lhs, rhs, *options, **named)
        return language.tensor(TensorHandle(function(lhs.handle.data, other), dtype), type_)

    return combine


def _computation(name, compute, first, second):
    """The function of two arrays, or of an array and a number, if it is one of NumPy.

    Args:
        first: the type of the left value's elements.
        second: the name of that of the right value, or Python's type of a number.
    """
    if first.is_ptr():
        return _moved(first) if name == "add" and second in INTEGERS else None
    if first.name in {int: NUMBERS, float: FLOATS}.get(second, ()):
        convert = NUMBERS[first.name]
        return lambda values, number: compute(values, convert(number))
    groups = (INTEGERS, {"int1"}) if name in OF_BITS else (INTEGERS, FLOATS)
    return compute if any(first.name in group and second in group for group in groups) else None


def _moved(pointer):
    """The sum of pointers of this type and integers."""
    size = numpy.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
    return lambda pointers, offsets: pointers + size * offsets.astype(numpy.uint64)


def _expanded_with_known_types(original):
    known = {}

    def expand_dims(self, value, axis):
        key = value.dtype.name, id(value.shape), axis
        if not value.shape or key not in known:
            result = original(self, value, axis)
            known[key] = result.type, (*axis * (slice(None),), None)
            return result
        type_, place = known[key]
        return language.tensor(TensorHandle(value.handle.data[place], type_.scalar), type_)

    return expand_dims
