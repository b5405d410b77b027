"""Windows over sentences of words: each word's vector is taken from the window in which the word is most central."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import ids_and_starts, tokenizer_for_words
from fastenc.text.windows import cut_windows

CHUNK = 4096  # number of sentences that are tokenized together and sorted by length


class WordWindow(NamedTuple):
    """One sequence for the encoder, and the words whose vectors are taken from it.

    Fields:
        input_ids: the tokens, with special tokens.
        bounds: position of each word's first token, and the end of the last word.
        first_row: index of the first word among the words of all sentences.
    """

    input_ids: list[int]
    bounds: list[int]
    first_row: int


def words_of(sentence: Sequence[str] | str) -> Sequence[str]:
    return sentence.split() if isinstance(sentence, str) else sentence


def windows_of(
    sentences: Iterable[Sequence[str] | str], tokenizer: TokenizerLike, positions: int
) -> Iterator[list[WordWindow]]:
    """Lists of windows, one list for every ``CHUNK`` sentences."""
    special = special_tokens(tokenizer)
    splitter = tokenizer_for_words(tokenizer)
    before = len(special.begin)
    room = positions - before - 1
    row = 0
    rest = iter(sentences)
    while chunk := [list(words_of(each)) for each in islice(rest, CHUNK)]:
        windows: list[WordWindow] = []
        encodings = splitter.encode_batch(chunk, is_pretokenized=True, add_special_tokens=False)
        for words, encoding in zip(chunk, encodings, strict=True):
            ids, starts = ids_and_starts(encoding, len(words), special.unk)
            for first, stop, own_start, own_stop in _spans(starts, room):
                inside = [*special.begin, *ids[first:stop], special.sep]
                bounds = [start - first + before for start in starts[own_start:own_stop]]
                bounds.append(min(starts[own_stop], stop) - first + before)
                windows.append(WordWindow(inside, bounds, row + own_start))
            row += len(words)
        yield windows


def _spans(starts: list[int], room: int) -> Iterator[tuple[int, int, int, int]]:
    """(first token, end of the tokens, first word, end of the words) of each window.

    Args:
        starts: index of each word's first token, and the number of tokens.
        room: largest number of tokens in a window.
    """
    words = len(starts) - 1
    if starts[-1] <= room:
        if words:
            yield 0, starts[-1], 0, words
        return
    spans = [(window.start, window.stop) for window in cut_windows(starts[-1], room)]
    owner: list[tuple[int, int]] = []
    for start, stop in zip(starts, starts[1:], strict=False):
        holders = [span for span in spans if span[0] <= start and stop <= span[1]]
        # A word that is longer than the overlap of the windows may lie in none of them. It gets a separate window.
        central = lambda span, start=start, stop=stop: min(start - span[0], span[1] - stop)
        owner.append(max(holders, key=central) if holders else (start, min(stop, start + room)))
    begin = 0
    for index in range(1, words + 1):
        if index == words or owner[index] != owner[begin]:
            yield *owner[begin], begin, index
            begin = index
