"""Where words begin among the tokens of a text, in scripts with and without spaces."""

import unicodedata
from typing import Any

import torch
from torch import Tensor

LONGEST = 16
# Blocks of the scripts that put no space between words, and of the punctuation that comes with them.
UNSPACED = (
    (0x0E00, 0x0FFF),  # Thai, Lao, Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x2E80, 0xA4CF),  # Han, Hiragana, Katakana, Bopomofo, Yi
    (0xA9E0, 0xA9FF),  # Myanmar
    (0xAA60, 0xAADF),  # Myanmar, Tai Viet
    (0xF900, 0xFAFF),  # Han
    (0xFF00, 0xFF9F),  # fullwidth signs, halfwidth Katakana
    (0x1B000, 0x1B16F),  # Kana
    (0x20000, 0x3FFFF),  # Han
)


class WordStarts:
    """Tells which tokens begin a word.

    A word begins at a piece that the vocabulary marks ("Ġx" and "▁x") or does not mark as a continuation ("##x" of
    WordPiece), and beside a special token. In scripts without spaces these marks stand sentences apart; there every
    piece is a word, but not the rest of a character and its marks (vowel signs, tones), nor another script's letters
    after it. A word of more than ``LONGEST`` tokens (an address, a row of signs, text in bytes) is cut into words of
    as many: what is hidden together must be small beside a block.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        is_special: bool (vocabulary,).
    Raises: ValueError for a vocabulary that does not mark words.
    Source: BERT's own tokenizer takes each Han character for a word, but no Kana; the scripts are those of Unicode's
        line breaking classes ID and SA, and Tibetan (UAX #14).
    """

    def __init__(self, tokenizer: Any, is_special: Tensor):
        vocabulary = range(tokenizer.get_vocab_size())
        pieces = [tokenizer.id_to_token(place) or "" for place in vocabulary]
        # By the model and not the pieces: "##" is also a piece of many BPE vocabularies.
        if type(tokenizer.model).__name__ == "WordPiece":
            marked = [not piece.startswith("##") for piece in pieces]
            texts = [piece.removeprefix("##").encode() for piece in pieces]
        else:
            # By the number: "Ġ" is also a letter, of Maltese.
            space = max("▁Ġ", key=lambda sign: sum(piece.startswith(sign) for piece in pieces))
            marked = [piece.startswith(space) for piece in pieces]
            encode = _bytes_of if space == "Ġ" else str.encode
            texts = [encode(piece.removeprefix(space)) for piece in pieces]
        if not any(marked):
            raise ValueError(
                "whole_word needs a vocabulary that marks words (## of WordPiece, Ġ of byte-level BPE, ▁ of "
                f"Unigram), got a {type(tokenizer.model).__name__} without: set whole_word=False"
            )
        self.is_special = is_special
        unspaced = [_begins_unspaced(text) for text in texts]
        self._begins = torch.tensor(marked) | torch.tensor(unspaced)

    def __call__(self, ids: Tensor) -> Tensor:
        """bool (tokens,): whether a token is the first of its word; special tokens are words."""
        special = self.is_special[ids]
        first = self._begins[ids] | special
        first[1:] |= special[:-1]
        first[:1] = True
        places = torch.arange(len(ids))
        since = places - places[first][first.long().cumsum(0) - 1]
        return since % LONGEST == 0


def _bytes_of(piece: str) -> bytes:
    """What a piece of a byte-level vocabulary stands for."""
    return b"".join(BYTES.get(sign) or sign.encode() for sign in piece)


def _byte_signs() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write for bytes: printable ones of Latin-1 for themselves, and for
    the others, in order, those from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


BYTES = _byte_signs()
INSIDE = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character


def _begins_unspaced(text: bytes) -> bool:
    """Whether the first character that begins in a text can only be one of an unspaced script, and no mark.

    A byte-level piece may begin with the last bytes of a character, and end with the first ones of another.
    """
    text = text.lstrip(INSIDE)
    whole = text.decode("utf-8", "ignore")[:1]
    if whole and unicodedata.category(whole).startswith("M"):
        return False
    lead = text[:1].ljust(1)[0]
    size = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
    lowest, highest = (_character(text[:size].ljust(size, fill)) for fill in (b"\x80", b"\xbf"))
    return any(first <= lowest and highest <= last for first, last in UNSPACED)


def _character(utf8: bytes) -> int:
    """The code point of a character's bytes, valid or not."""
    size = len(utf8)
    value = utf8[0] & (0x7F if size == 1 else 0x7F >> size)
    for byte in utf8[1:]:
        value = value << 6 | byte & 0x3F
    return value
