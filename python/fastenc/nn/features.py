"""The features of a layer's description: what a way of running the layer has to name before it may take the layer."""

from dataclasses import MISSING, field, fields, is_dataclass
from operator import is_
from typing import Any

NONE: frozenset[str] = frozenset()


def size(**options: Any) -> Any:
    """A dataclass field that every way reads, so that no value of it is a feature."""
    return field(metadata={"size": True}, **options)


def features_of(description: Any) -> frozenset[str]:
    """The names of all fields whose value is not the default, in this description and those inside it.

    A field without a default is a size or a description. A text is named with its value: "activation=relu". So a field
    that is added to a description is a feature as soon as a layer uses it, and the ways that do not know it decline.

    Args: description: a dataclass.
    """
    names: set[str] = set()
    for each in fields(description):
        if not each.init:  # computed from the other fields
            continue
        value = getattr(description, each.name)
        if is_dataclass(value):
            names |= features_of(value)
        if each.default not in (MISSING, value) and not each.metadata.get("size"):
            names.add(f"{each.name}={value}" if isinstance(value, str) else each.name)
    return frozenset(names)


def unknown_features(features: frozenset[str], known: frozenset[str]) -> str | None:
    """Why code that computes ``known`` features alone cannot take these, or None."""
    unknown = features - known
    return f"it does not compute {', '.join(sorted(unknown))}" if unknown else None


def given_fields(values: Any, ignored: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names of a NamedTuple's fields that have a default and another value, except ``ignored`` ones."""
    defaults = values._field_defaults  # of the last fields
    if all(map(is_, values[-len(defaults) :], defaults.values())):  # each layer of each call asks
        return NONE
    return frozenset(
        name
        for name, default in defaults.items()
        if name not in ignored and getattr(values, name) is not default
    )
