"""Finds the tokens that begin a word, in scripts with and without spaces between words."""

import unicodedata

import torch
from torch import Tensor

from fastenc.text.tokenizer_like import TokenizerLike

MAX_WORD_TOKENS = 16
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
    """Finds the tokens that begin a word.

    - Byte-level BPE and Unigram mark the first token of a word ("Ġx", "▁x"); WordPiece marks the others ("##x").
    - A special token is a word, and a word begins after it.
    - In scripts without spaces, such a mark occurs only once in a sentence. There every token begins a word, except a
      token that continues a character or adds marks to it (vowel signs, tones). Letters of other scripts continue the
      word before them.
    - A word of more than ``MAX_WORD_TOKENS`` tokens (a web address, a row of symbols, bytes) is cut into words of
      that length. Tokens of a word are masked together, and they must be few compared with a block.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        is_special: bool (vocabulary,), whether a token id is a special token.
    Raises: ValueError for a vocabulary that does not mark words.
    Source: BERT's tokenizer treats each Han character as a word, but not Kana. The scripts are those of Unicode's line
        breaking classes ID and SA, and Tibetan (UAX #14).
    """

    def __init__(self, tokenizer: TokenizerLike, is_special: Tensor):
        vocabulary = range(tokenizer.get_vocab_size())
        pieces = [tokenizer.id_to_token(index) or "" for index in vocabulary]
        # Ask the model, not the pieces: many BPE vocabularies hold a piece "##".
        if type(tokenizer.model).__name__ == "WordPiece":
            marked = [not piece.startswith("##") for piece in pieces]
            texts = [piece.removeprefix("##").encode() for piece in pieces]
        else:
            # "Ġ" is also a letter of Maltese, so the more frequent sign is the mark.
            space = max("▁Ġ", key=lambda sign: sum(piece.startswith(sign) for piece in pieces))
            marked = [piece.startswith(space) for piece in pieces]
            encode = _bytes_of if space == "Ġ" else str.encode
            texts = [encode(piece.removeprefix(space)) for piece in pieces]
        if not any(marked):
            raise ValueError(
                "whole_word needs a vocabulary that marks words (## of WordPiece, Ġ of byte-level BPE, ▁ of "
                f"Unigram), got a {type(tokenizer.model).__name__} without marks: set whole_word=False"
            )
        self.is_special = is_special
        unspaced = [_begins_unspaced(text) for text in texts]
        self._begins = torch.tensor(marked) | torch.tensor(unspaced)

    def __call__(self, ids: Tensor) -> Tensor:
        """Whether each token is the first of its word.

        Args:
            ids: int64 (tokens,), the token ids of running text.
        Returns: bool (tokens,).
        """
        special = self.is_special[ids]
        first = self._begins[ids] | special
        first[1:] |= special[:-1]
        first[:1] = True
        positions = torch.arange(len(ids))
        in_word = positions - positions[first][first.long().cumsum(0) - 1]
        return in_word % MAX_WORD_TOKENS == 0


def _bytes_of(piece: str) -> bytes:
    """The bytes that a piece of a byte-level vocabulary stands for."""
    return b"".join(BYTES.get(sign) or sign.encode() for sign in piece)


def _byte_signs() -> dict[str, bytes]:
    """{character: byte} of byte-level vocabularies.

    Printable bytes of Latin-1 stand for themselves. The others are U+0100, U+0101, … in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


BYTES = _byte_signs()
CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8 bytes that continue a character


def _begins_unspaced(text: bytes) -> bool:
    """Whether the first character that begins in a token's bytes is of a script without spaces and not a mark.

    A byte-level token may begin with the last bytes of one character and end with the first bytes of another. The
    answer for an incomplete character is True only if every completion of it is of such a script.
    """
    text = text.lstrip(CONTINUATION)
    whole = text.decode("utf-8", "ignore")[:1]
    if whole and unicodedata.category(whole).startswith("M"):
        return False
    lead = text[:1].ljust(1)[0]
    size = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
    lowest, highest = (_character(text[:size].ljust(size, fill)) for fill in (b"\x80", b"\xbf"))
    return any(first <= lowest and highest <= last for first, last in UNSPACED)


def _character(utf8: bytes) -> int:
    """The code point that a character's UTF-8 bytes encode, even if it is not a valid character."""
    size = len(utf8)
    value = utf8[0] & (0x7F if size == 1 else 0x7F >> size)
    for byte in utf8[1:]:
        value = value << 6 | byte & 0x3F
    return value
