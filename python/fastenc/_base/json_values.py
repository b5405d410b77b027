"""The types of what config.json and other JSON files hold."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, Union

JsonValue: TypeAlias = Union[  # noqa: UP007 (its own name is a text here)
    str, int, float, bool, Sequence["JsonValue"], Mapping[str, "JsonValue"], None
]
JsonObject: TypeAlias = dict[str, JsonValue]
