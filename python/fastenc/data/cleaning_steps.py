"""Steps of a cleaning pipeline that datatrove does not have: our file formats, and scripts without spaces."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer

from fastenc.data.fertility import UNSPACED, count_words
from fastenc.data.readers import iterate_texts
from fastenc.data.sentences import SENTENCE_BREAK

_RANGES = UNSPACED.pattern[1:-1]
# A word is text between white space. In scripts without spaces a word is a run of the average length of words: two
# characters of Han and Kana, five (vowel signs included) of the scripts from Thai to Khmer, with its punctuation.
WORD = re.compile(
    rf"(?:(?:(?![\u0e00-\u17ff])[{_RANGES}]){{1,2}}|[{_RANGES}]{{1,5}})[^\w\s{_RANGES}]*|[^\s{_RANGES}]+"
)
# For n-grams each character of these scripts is a word: after one inserted character, runs would all be others.
WORD_OR_CHARACTER = re.compile(rf"[{_RANGES}]|[^\s{_RANGES}]+")


class Words(WordTokenizer):
    """Words and sentences without a dictionary, in any script.

    Args: word: WORD or WORD_OR_CHARACTER.
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
    """The documents of files in the formats of ``read_texts``. Task ``rank`` reads every ``world_size``-th file.

    Empty documents are dropped. Args: files: (language, path) pairs.
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
    """One filter for documents with spaces between words, another for those without."""

    def __init__(self, spaced: BaseFilter, unspaced: BaseFilter, exclusion_writer: Any):
        self.name = spaced.name
        super().__init__(exclusion_writer)
        self.spaced, self.unspaced = spaced, unspaced
        spaced.stats = unspaced.stats = self.stats  # where C4's filter counts lines

    def filter(self, doc: Document) -> Any:
        return (self.unspaced if count_words(doc.text) is None else self.spaced).filter(doc)


class TextWriter(JsonlWriter):
    """A line {"text": ...} for each document."""

    def _default_adapter(self, document: Document) -> dict[str, str]:
        return {"text": document.text}
