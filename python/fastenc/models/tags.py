"""Tags of entities on words: IOB2 and BIOES.

IOB2: B- begins an entity, I- goes on, O is outside. BIOES: E- ends an entity, S- is one of a single word.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SCHEMES = ("iob2", "bioes")
PREFIXES = {"iob2": "BI", "bioes": "BIES"}


class Span(NamedTuple):
    """An entity: its type, its first word, and the word after its last."""

    type: str
    first: int
    stop: int


def scheme_of(tags: Iterable[str]) -> str | None:
    """ "iob2" or "bioes" for a set of entity tags; None for others, such as parts of speech."""
    inside = {tag for tag in tags if tag != "O"}
    if not inside or not all(re.fullmatch(r"[BIES]-.+", tag) for tag in inside):
        return None
    return "bioes" if any(tag[0] in "ES" for tag in inside) else "iob2"


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence's tags, of either scheme.

    As conlleval and seqeval have it, an I- or E- that continues nothing begins an entity of its own.
    """
    found: list[Span] = []
    first, kind, before = 0, "", "O"
    for place, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        if not (prefix in ("I", "E") and before in ("B", "I") and name == kind):
            if kind:
                found.append(Span(kind, first, place))
            first, kind = place, name
        before = prefix
    return found


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities in another scheme; tags that break the rules of theirs come out well-formed."""
    converted = ["O"] * len(tags)
    for kind, first, stop in spans(tags):
        converted[first:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - first - 1)]
        if scheme == "bioes":
            converted[stop - 1] = f"S-{kind}" if stop - first == 1 else f"E-{kind}"
    return converted


def every_tag(tags: Iterable[str]) -> list[str]:
    """The tags in a fixed order: of entities O and each type's, those that happen not to occur included."""
    tags = set(tags)
    scheme = scheme_of(tags)
    if scheme is None:
        return sorted(tags)
    kinds = sorted({tag[2:] for tag in tags - {"O"}})
    return ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in PREFIXES[scheme])]


def may_follow(before: str | None, after: str | None, scheme: str) -> bool:
    """Whether a scheme has ``after`` next to ``before``; None stands for a sentence's edge."""
    is_open = before is not None and before[0] in "BI"
    if after is not None and after[0] in "IE":
        return is_open and before is not None and before[2:] == after[2:]
    return scheme == "iob2" or not is_open
