"""Steps of a cleaning pipeline that datatrove lacks: fastenc's file formats, and rules for scripts without spaces."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer

from fastenc.data.fertility import UNSPACED, count_words
from fastenc.data.readers import iterate_texts
from fastenc.data.sentences import SENTENCE_BREAK
from fastenc.text.characters import marks

_RANGES = UNSPACED.pattern[1:-1]
# A word is text between white space. In scripts without spaces, a word is as many characters as an average word has:
# two of Han and Kana, five (vowel signs included) of the scripts from Thai to Khmer, with the punctuation after them.
WORD = re.compile(
    rf"(?:(?:(?![\u0e00-\u17ff])[{_RANGES}]){{1,2}}|[{_RANGES}]{{1,5}})[^\w\s{_RANGES}]*|[^\s{_RANGES}]+"
)
# For n-grams, each character of these scripts is a word. One inserted character would shift all words of two or five
# characters after it, and no n-gram after it would match.
WORD_OR_CHARACTER = re.compile(rf"[{_RANGES}]|[^\s{_RANGES}]+")


def whole_words(words: Iterable[str]) -> str:
    """A regular expression that finds these words, in any case, where no letter continues them.

    A word of a script without spaces is found anywhere: there, no neighbour continues a word.
    Source: C4's code, which does so for Chinese, Japanese and Thai.
    """
    letter = rf"(?![{_RANGES}])[\w{marks()}]"
    return rf"(?i)(?<!{letter})(?:{'|'.join(map(re.escape, words))})(?!{letter})"


class Words(WordTokenizer):
    """datatrove's word tokenizer without a dictionary, for any script.

    Args:
        word: WORD or WORD_OR_CHARACTER.
    """

    def __init__(self, word: re.Pattern[str]):
        super().__init__()
        self.word = word

    def word_tokenize(self, text: str) -> list[str]:
        return self.word.findall(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [*(match.start() for match in SENTENCE_BREAK.finditer(text)), len(text)]
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return [(start, end) for start, end in spans if text[start:end].strip()]

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[start:end].strip() for start, end in self.span_tokenize(text)]


class TextReader(PipelineStep):
    """Reads documents from files in the formats of ``read_texts``. Empty documents are dropped.

    Task ``rank`` reads every ``world_size``-th file, from file ``rank`` on.

    Args:
        files: (language, path) pairs.
        column, quoting: as in ``read_texts``.
    """

    type, name = "📖 - READER", "Texts"

    def __init__(
        self, files: Sequence[tuple[str, str]], column: str | None, quoting: str | None
    ) -> None:
        super().__init__()
        self.files, self.column, self.quoting = list(files), column, quoting

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for language, path in self.files[rank::world_size]:
            for number, text in enumerate(iterate_texts(path, self.column, self.quoting)):
                self.stat_update("read")
                if text.strip():
                    yield Document(text, f"{path}/{number}", metadata={"language": language})
                else:
                    self.stat_update("dropped_empty")


class ByScript(BaseFilter):
    """Applies one filter to documents in scripts with spaces between words, and another to the other documents."""

    def __init__(self, spaced: BaseFilter, unspaced: BaseFilter, exclusion_writer: Any):
        self.name = spaced.name
        super().__init__(exclusion_writer)
        self.spaced, self.unspaced = spaced, unspaced
        spaced.stats = unspaced.stats = self.stats  # C4's filter counts dropped lines there

    def filter(self, doc: Document) -> Any:
        kept = (self.unspaced if count_words(doc.text) is None else self.spaced).filter(doc)
        # Without a number of sentences to reach, C4's filter keeps a document of which it has dropped every line.
        return kept if doc.text else (False, "no_lines")


class TextWriter(JsonlWriter):
    """Writes a line {"text": ...} for each document."""

    def _default_adapter(self, document: Document) -> dict[str, str]:
        return {"text": document.text}
