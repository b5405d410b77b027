"""The rules for the values of a configuration: their types and bounds.

Every value of config.json that an architecture reads has a rule. All rules are checked before any value is used, so the
code that reads a value can rely on its type.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastenc.ops.activation import ACTIVATIONS

# Values by key, of a config.json or of the fields of EncoderConfig. An architecture checks what it reads.
ConfigValues: TypeAlias = dict[str, Any]

LARGEST = 2**63 - 1  # of a size in torch
SHOWN = 80  # characters of a wrong value in an error


@dataclass(frozen=True)
class Rule:
    """What a value must be. Fields: text, for error messages; accepts, whether a value is that."""

    text: str
    accepts: Callable[[object], bool]

    def or_none(self) -> "Rule":
        return Rule(f"{self.text}, or null", lambda value: value is None or self.accepts(value))


def number(text: str, within: Callable[[float], bool] = lambda value: True) -> Rule:
    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            return math.isfinite(value) and within(float(value))
        except OverflowError:  # an integer that no float holds
            return False

    return Rule(text, accepts)


def integer(text: str, low: int) -> Rule:
    return Rule(text, lambda value: type(value) is int and low <= value <= LARGEST)


def one_of(names: Collection[str]) -> Rule:
    return Rule(f"one of {sorted(names)}", lambda value: isinstance(value, str) and value in names)


COUNT = integer("a positive integer below 2**63", 1)
AT_LEAST_0 = integer("an integer of at least 0 and below 2**63", 0)
ID = integer("an integer", -LARGEST).or_none()
NUMBER = number("a finite number")
NOT_NEGATIVE = number("a finite number of at least 0", lambda value: value >= 0)
POSITIVE = number("a finite number above 0", lambda value: value > 0)
PROBABILITY = number("in [0, 1)", lambda value: 0 <= value < 1)
SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a text", lambda value: isinstance(value, str))
NAMES = Rule(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
).or_none()
TABLE = Rule("an object", lambda value: isinstance(value, dict)).or_none()
ACTIVATION = one_of(ACTIVATIONS)

# The fields of EncoderConfig.
FIELDS: dict[str, Rule] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"), COUNT
    ),
    "max_positions": COUNT,
    "embedding_size": AT_LEAST_0,
    "head_dim": AT_LEAST_0,
    "type_vocab_size": AT_LEAST_0,
    "position_offset": AT_LEAST_0,
    "pad_token_id": ID,
    "activation": ACTIVATION,
    "eps": NOT_NEGATIVE,
    "initializer_range": NOT_NEGATIVE,
    "hidden_dropout_p": PROBABILITY,
    "attention_dropout_p": PROBABILITY,
    "classifier_dropout_p": PROBABILITY.or_none(),
}
# rope_parameters.
ROPE: dict[str, Rule] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "partial_rotary_factor": NUMBER.or_none(),
    "factor": NUMBER.or_none(),
    "original_max_position_embeddings": COUNT.or_none(),
    "attention_factor": NUMBER.or_none(),
    "beta_fast": NOT_NEGATIVE.or_none(),
    "beta_slow": NOT_NEGATIVE.or_none(),
    "mscale": NUMBER.or_none(),
    "mscale_all_dim": NUMBER.or_none(),
    "truncate": SWITCH,
}


def check(values: Mapping[str, object], rules: Mapping[str, Rule], where: str = "") -> None:
    """Raise ValueError for the first value that breaks its rule. Values that are not there are not checked.

    Args: where: what the error begins with.
    """
    for key, rule in rules.items():
        if key in values and not rule.accepts(values[key]):
            raise ValueError(f"{where}{key} must be {rule.text}, got {shown(values[key])}")


def shown(value: object) -> str:
    """A wrong value in an error, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or too deep
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
