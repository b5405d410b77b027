"""fastenc mine."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fastenc._base.options import REQUIRED, argument, group, option
from fastenc.cli.encoders import load_encoder, with_finite_weights
from fastenc.cli.options import Command
from fastenc.cli.outputs import (
    DEVICE,
    DTYPE,
    check_output,
    checked_dtype,
    device_named,
    write_lines,
)
from fastenc.data.pairs import iterate_pairs
from fastenc.data.readers import read_inputs
from fastenc.data.writers import check_cells, lines_of
from fastenc.tasks.mining import Mined, Mining, mine_hard_negatives
from fastenc.tasks.reranker import Reranker
from fastenc.tasks.shared_options import QUOTING

FORMATS = ("triplets", "lists")


@dataclass(frozen=True, kw_only=True)
class Mine(Command):
    """Mine hard negatives for pairs of queries and documents.

    They are documents that are near a query and do not belong to it. The documents are all positives, and those of
    --corpus. Triplets are the data of `fastenc finetune --task sentence-embedding`, lists those of --task rerank. The
    scores are cosine similarities, or those of --cross-encoder, which a student can learn.

    Examples:
    fastenc mine sentence-transformers/all-MiniLM-L6-v2 pairs.tsv -o triplets.tsv --relative-margin 0.05
    fastenc mine sentence-transformers/all-MiniLM-L6-v2 pairs.tsv --corpus texts.txt -o lists.jsonl --write-as lists
    """

    model: str = argument(
        "Checkpoint folder of a model of sentence vectors, or its name on the hub."
    )
    pairs: str = argument(
        "Queries with a document that belongs to them: .tsv, .csv or .jsonl (also .gz)."
    )
    output: Path = option(REQUIRED, "File to write: .jsonl, and for triplets also .tsv.", "-o")
    text: tuple[str, ...] = option(
        ("sentence1", "sentence2"), "Columns of the query and of its document.", "-t"
    )
    write_as: str = option(
        "triplets",
        "triplets: a row with the query, its document and a negative, for each of these. lists: a row for each query "
        "with all its documents, their labels and scores.",
    )
    corpus: str | None = option(
        None, "Further documents, in the same formats or .txt. Empty ones are left out."
    )
    corpus_text: str = option("sentence", "Column of the document in the corpus.")
    mining: Mining = group("Choice of the negatives")
    cross_encoder: str | None = option(
        None,
        "Folder or name of a cross-encoder that scores the nearest documents again. Its scores are logits, which the "
        "limits of scores and the margins then compare.",
    )
    query_prompt: str | None = option(
        None,
        'Text to put before each query, such as "query: ". Default: the checkpoint\'s prompt "query", if it has one.',
    )
    document_prompt: str | None = option(
        None,
        'Text to put before each document. Default: the checkpoint\'s prompt "document", if it has one.',
    )
    batch_size: int = option(32, "Number of sequences in a batch.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)
    quoting: str | None = option(None, QUOTING)

    def run(self) -> None:
        if self.write_as not in FORMATS:
            raise ValueError(
                f"write_as must be one of {', '.join(FORMATS)}, got {self.write_as}: give one of them"
            )
        suffixes = (".jsonl",) if self.write_as == "lists" else (".tsv", ".jsonl")
        check_output(self.output, suffixes, self.pairs, self.corpus)
        if len(self.text) != 2:
            raise ValueError(
                f"text must name the columns of the query and its document, got {', '.join(self.text)}: give -t twice"
            )
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        pairs = list(iterate_pairs(self.pairs, self.text, self.quoting))
        corpus = []
        if self.corpus is not None:
            corpus = read_inputs(self.corpus, (self.corpus_text,), self.quoting)
        if self.output.suffix == ".tsv":
            check_cells(chain(chain.from_iterable(pairs), corpus))
        encoder = load_encoder(self.model, dtype, device)
        teacher = None
        if self.cross_encoder is not None:
            teacher = Reranker.from_pretrained(
                self.cross_encoder, dtype=dtype, activation="Identity"
            )
            with_finite_weights(teacher.model.to(device), self.cross_encoder)
        mined = mine_hard_negatives(
            encoder,
            pairs,
            corpus,
            self.mining,
            cross_encoder=teacher,
            query_prompt=self.query_prompt,
            document_prompt=self.document_prompt,
            batch_size=self.batch_size,
        )
        rows = [*(_lists(mined) if self.write_as == "lists" else self._triplets(mined))]
        write_lines(self.output, lines_of(rows, self.output.suffix))
        number = sum(len(each.negatives) for each in mined)
        wanted = self.mining.num_negatives * len(mined)
        print(f"{self.output}: {number:,} of {wanted:,} negatives for {len(mined):,} queries")

    def _triplets(self, mined: list[Mined]) -> Iterator[dict[str, Any]]:
        for query, positives, negatives, of_positives, of_negatives in mined:
            for positive, high in zip(positives, of_positives, strict=True):
                for negative, low in zip(negatives, of_negatives, strict=True):
                    texts = dict(zip(self.text, (query, positive), strict=True))
                    yield texts | {
                        "negative": negative,
                        "positive_score": high,
                        "negative_score": low,
                    }


def _lists(mined: list[Mined]) -> Iterator[dict[str, Any]]:
    for query, positives, negatives, of_positives, of_negatives in mined:
        yield {
            "query": query,
            "document": positives + negatives,
            "label": [1] * len(positives) + [0] * len(negatives),
            "score": of_positives + of_negatives,
        }
