"""fastenc rerank."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fastenc._base.options import REQUIRED, argument, option
from fastenc._base.progress import progress_bar
from fastenc.cli.encoders import with_finite_weights
from fastenc.cli.options import Command
from fastenc.cli.outputs import (
    DEVICE,
    DTYPE,
    check_output,
    checked_dtype,
    device_named,
    write_lines,
)
from fastenc.data.readers import read_inputs
from fastenc.data.writers import check_cells, lines_of
from fastenc.tasks.reranker import Reranker
from fastenc.tasks.shared_options import QUOTING


@dataclass(frozen=True, kw_only=True)
class Rerank(Command):
    """Rank documents for each query with a cross-encoder.

    Every query is scored with every document, so the documents should be a search's candidates. The output has the
    query, the rank, the score, the number of the document (0 is the first) and its text.

    Examples:
    fastenc rerank cross-encoder/ms-marco-MiniLM-L6-v2 queries.txt documents.txt -o ranked.tsv
    fastenc rerank cross-encoder/ms-marco-MiniLM-L6-v2 queries.txt documents.jsonl --document-text text -o ranked.jsonl
    """

    model: str = argument(
        "Checkpoint folder of a cross-encoder with one label, or its name on the hub."
    )
    queries: str = argument(
        "Queries: .txt with a text on each line, .tsv, .csv or .jsonl (also .gz)."
    )
    documents: str = argument("Documents, in the same formats.")
    output: Path = option(REQUIRED, "File to write: .tsv or .jsonl.", "-o")
    text: str = option("sentence", "Column of the text in a table.", "-t")
    document_text: str | None = option(
        None, "Column of the text in a table of documents. Default: as --text."
    )
    top_k: int = option(10, "Number of documents that are written for each query.")
    max_length: int | None = option(
        None, "Longest pair in tokens; its longer text is cut. Default: as the checkpoint says."
    )
    batch_size: int = option(32, "Number of pairs in a batch.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)
    quoting: str | None = option(None, QUOTING)

    def run(self) -> None:
        check_output(self.output, (".tsv", ".jsonl"), self.queries, self.documents)
        for name in ("top_k", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}: give more")
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        queries = read_inputs(self.queries, (self.text,), self.quoting)
        documents = read_inputs(self.documents, (self.document_text or self.text,), self.quoting)
        if self.output.suffix == ".tsv":
            check_cells(chain(queries, documents))
        reranker = Reranker.from_pretrained(self.model, dtype=dtype, max_length=self.max_length)
        with_finite_weights(reranker.model.to(device), self.model)
        rows = [*self._rows(reranker, queries, documents)]
        write_lines(self.output, lines_of(rows, self.output.suffix))
        print(f"{self.output}: {len(rows)} of {len(queries) * len(documents)} pairs")

    def _rows(
        self, reranker: Reranker, queries: list[str], documents: list[str]
    ) -> Iterator[dict[str, Any]]:
        for query in progress_bar(queries, "rerank", "query", None):
            ranked = reranker.rank(
                query, documents, self.top_k, batch_size=self.batch_size, show_progress=False
            )
            for rank, each in enumerate(ranked, 1):
                index, score = each["corpus_id"], each["score"]
                yield {
                    "query": query,
                    "rank": rank,
                    "score": score,
                    "document": index,
                    "text": documents[index],
                }
