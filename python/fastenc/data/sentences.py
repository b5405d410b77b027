"""Splits documents into sentences and tokenises them into one array, with the ends of sentences and documents."""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastenc._base.progress import progress_bar
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import without_limits

# SPACED_MARKS end a sentence only before white space (Latin and others, Arabic, Devanagari, Urdu, Ethiopic).
# UNSPACED_MARKS always end a sentence (Han and Kana, Myanmar, Khmer, Tibetan).
SPACED_MARKS = ".!?؟।॥۔።"
UNSPACED_MARKS = "。！？။។།"
SENTENCE_BREAK = re.compile(rf"(?<=[{SPACED_MARKS}])(?=\s)|(?<=[{UNSPACED_MARKS}])|(?=\n)")


@dataclass(frozen=True)
class SentenceTokens:
    """Token ids of documents, each followed by the separator ([SEP]).

    Fields (arrays in memory, or memory-mapped):
        tokens: ids of all documents' sentences, without special tokens other than the separators.
        sentence_ends: index after each sentence's last token, ascending.
        document_ends: index of each document's separator, ascending. Documents without tokens are left out.
    """

    tokens: Sequence[int]
    sentence_ends: Sequence[int]
    document_ends: Sequence[int]


def tokenize_documents(
    documents: Iterable[str], tokenizer: TokenizerLike, *, show_progress: bool | None = None
) -> SentenceTokens:
    """Tokenise documents sentence by sentence. Ids have 4 bytes, ends 8 bytes."""
    sep, tokenizer = special_tokens(tokenizer).sep, without_limits(tokenizer)
    tokens, sentence_ends, document_ends = array("i"), array("q"), array("q")
    for document in progress_bar(documents, "tokenizing", "document", show_progress):
        before = len(tokens)
        sentences = split_sentences(document)
        for encoding in tokenizer.encode_batch_fast(sentences, add_special_tokens=False):
            if encoding.ids:
                tokens.extend(encoding.ids)
                sentence_ends.append(len(tokens))
        if len(tokens) > before:
            document_ends.append(len(tokens))
            tokens.append(sep)
    return SentenceTokens(tokens, sentence_ends, document_ends)


def split_sentences(document: str) -> list[str]:
    """The sentences of a text.

    White space before a sentence becomes a single space. The sentences' tokens, one after another, are then the tokens
    of the running text.
    """
    parts = SENTENCE_BREAK.split(document.strip())
    return [re.sub(r"^\s+", " ", part.rstrip()) for part in parts if part.strip()]
