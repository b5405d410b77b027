"""Classes of characters, for regular expressions."""

import unicodedata
from functools import cache

JOINERS = "\u200c\u200d"  # zero-width non-joiner and joiner, which stand inside words


@cache
def marks() -> str:
    """All combining marks, such as the vowel signs of Devanagari, which Python's \\w does not match."""
    return "".join(c for c in map(chr, range(0x110000)) if unicodedata.category(c)[0] == "M")
