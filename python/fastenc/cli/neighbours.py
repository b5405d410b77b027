"""fastenc neighbours."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._base.options import REQUIRED, argument, option
from fastenc.analysis.neighbours import (
    compare_neighbours,
    find_occurrences,
    in_brackets,
    isolated_vectors,
    listed,
)
from fastenc.analysis.static_vectors import read_static_vectors
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, DTYPE, checked_dtype, device_named
from fastenc.data.columns import read_words
from fastenc.models import Encoder


@dataclass(frozen=True, kw_only=True)
class Neighbours(Command):
    """Compare a word's nearest words in different sentences with those of its static vector.

    The contextual candidates are the words of all sentences. The static vectors are those of the file --static, else
    the encoder's vectors of each word by itself.

    Examples:
    fastenc neighbours sentence-transformers/all-MiniLM-L6-v2 texts.txt --word bank
    fastenc neighbours sentence-transformers/all-MiniLM-L6-v2 texts.txt --word bank --static glove.6B.100d.txt
    """

    model: str = argument("Checkpoint folder, or name on the hub.")
    inputs: str = argument(
        "Sentences: .txt with one on each line, or a file in columns (.conll, .conllu)."
    )
    word: str = option(REQUIRED, "The word.")
    static: Path | None = option(None, "File of word2vec (.bin, text) or GloVe vectors.")
    count: int = option(5, "Number of nearest words that are shown.")
    occurrences: int = option(10, "Number of sentences with the word that are shown.")
    layer: int = option(-1, "Layer of the contextual vectors; -1 is the last.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)

    def run(self) -> None:
        for name in ("count", "occurrences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}: give more")
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        sentences = [each.words for each in read_words(self.inputs).sentences]
        occurrences = find_occurrences(sentences, self.word, self.occurrences)
        static = None if self.static is None else read_static_vectors(self.static)
        encoder = Encoder.from_pretrained(self.model, dtype=dtype).to(device)
        layers = (self.layer,)
        if static is None:
            static = isolated_vectors(encoder, sentences, layers, show_progress=None)
        uses = compare_neighbours(
            encoder, occurrences, sentences, static, self.count, layers, show_progress=None
        )
        for use in uses:
            contextual, alone = listed(use)
            print(f"{in_brackets(use)}\n  in the sentence: {contextual}\n  static: {alone}")
