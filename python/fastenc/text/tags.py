"""Tags of words that mark entities, in the schemes IOB2 and BIOES.

IOB2: B- begins an entity, I- continues it, O is outside. BIOES: also E- ends an entity, S- is a single-word entity.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SCHEMES = ("iob2", "bioes")
PREFIXES = {"iob2": "BI", "bioes": "BIES"}


class Span(NamedTuple):
    """An entity: its type, the index of its first word, and the index after its last word."""

    type: str
    first: int
    stop: int


def scheme_of(tags: Iterable[str]) -> str | None:
    """The scheme of a set of tags, "iob2" or "bioes"; None if they mark no entities, such as parts of speech."""
    inside = {tag for tag in tags if tag != "O"}
    if not inside or not all(re.fullmatch(r"[BIES]-.+", tag) for tag in inside):
        return None
    return "bioes" if any(tag[0] in "ES" for tag in inside) else "iob2"


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities that a sentence's tags mark, in either scheme.

    An I- or E- tag that does not continue an entity begins one, as in conlleval and seqeval.
    """
    entities: list[Span] = []
    first, entity_type, before = 0, "", "O"
    for word, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        if not (prefix in ("I", "E") and before in ("B", "I") and name == entity_type):
            if entity_type:
                entities.append(Span(entity_type, first, word))
            first, entity_type = word, name
        before = prefix
    return entities


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities in another scheme. The result is well-formed even if the tags are not."""
    converted = ["O"] * len(tags)
    for entity_type, first, stop in spans(tags):
        converted[first:stop] = [f"B-{entity_type}", *[f"I-{entity_type}"] * (stop - first - 1)]
        if scheme == "bioes":
            converted[stop - 1] = f"S-{entity_type}" if stop - first == 1 else f"E-{entity_type}"
    return converted


def every_tag(tags: Iterable[str]) -> list[str]:
    """All tags of the set in a fixed order. Tags of entities are completed to O and all tags of each type."""
    tags = set(tags)
    scheme = scheme_of(tags)
    if scheme is None:
        return sorted(tags)
    entity_types = sorted({tag[2:] for tag in tags - {"O"}})
    return [
        "O",
        *(f"{prefix}-{entity_type}" for entity_type in entity_types for prefix in PREFIXES[scheme]),
    ]


def may_follow(before: str | None, after: str | None, scheme: str) -> bool:
    """Whether the tag ``after`` may follow the tag ``before``. None is the sentence's begin or end."""
    is_open = before is not None and before[0] in "BI"
    if after is not None and after[0] in "IE":
        return is_open and before is not None and before[2:] == after[2:]
    return scheme == "iob2" or not is_open
