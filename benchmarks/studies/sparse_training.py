"""SPLADE on a CPU: fastenc beside sentence-transformers' SparseEncoder, with its own forward and patched, in float32.

FASTENC_DATA=... python -m benchmarks.studies.sparse_training [times] [memory]

MiniLM (6 x 384) with a masked-LM head of random weights and 30,522 tokens; questions of SQuAD with their paragraphs.
Losses, gradients and weights of texts must agree before anything is timed; dropout is off. A step is the forward with
SpladeLoss, the backward and fused AdamW, which the trainers of both libraries take; tokenising is not timed in a step,
but in encode.

Memory is how much the largest resident size of a process grows in a step, or in encode, above what it holds after a
step of one pair of short texts and encode of a short text: without the weights and AdamW's moments, with the gradients.
Freed memory goes back to the system at once, so what the allocator would keep is not counted. Each provider runs
in a process of its own.
"""

import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._compare import compare
from benchmarks._process import isolated
from benchmarks._results import read_cases, write
from benchmarks._squad import questions_and_paragraphs
from benchmarks.studies.peak_memory import resident
from fastenc import SparseEncoder, patch
from fastenc.data.pairs import TextPairs, collate_pairs, encode_pairs
from fastenc.demo.checkpoint import minilm_folder

RESULT = "sparse_training"
THEIRS, PATCHED, OURS = "sentence-transformers", "sentence-transformers, patched", "fastenc"
PROVIDERS = (THEIRS, PATCHED, OURS)
QUERY_FLOPS, DOCUMENT_FLOPS = 5e-5, 3e-5
TIMED_PAIRS = 8
M_MMAP_THRESHOLD = -3  # in malloc.h
SHORT_PAIR = [("a river", "water that flows")]


class SentenceTransformers:
    """A SparseEncoder of sentence-transformers with SpladeLoss, as ``prepare`` leaves it."""

    def __init__(
        self, folder: Path, pairs: list[tuple[str, str]], prepare: Callable[[Any], Any]
    ) -> None:
        from sentence_transformers import SparseEncoder as Model
        from sentence_transformers.sparse_encoder import losses

        self.model = prepare(Model(str(folder), device="cpu"))
        self._loss = losses.SpladeLoss(
            self.model,
            losses.SparseMultipleNegativesRankingLoss(self.model, scale=1.0),
            query_regularizer_weight=QUERY_FLOPS,
            document_regularizer_weight=DOCUMENT_FLOPS,
        )
        self.read(pairs)

    def read(self, pairs: list[tuple[str, str]]) -> None:
        """Take these pairs into the next steps."""
        self._columns = [self.model.preprocess(list(each)) for each in zip(*pairs, strict=True)]

    def loss(self) -> Tensor:
        self.model.train()
        return sum(self._loss([dict(column) for column in self._columns], None).values())

    def embeddings(self) -> Tensor:
        return self.model[0].model.get_input_embeddings().weight

    def encode(self, texts: list[str]) -> Tensor:
        return self.model.encode(texts)


class Fastenc:
    def __init__(self, folder: Path, pairs: list[tuple[str, str]]) -> None:
        regularisers = {"query_flops": QUERY_FLOPS, "document_flops": DOCUMENT_FLOPS}
        self.model = SparseEncoder.from_pretrained(folder, **regularisers)
        self.read(pairs)

    def read(self, pairs: list[tuple[str, str]]) -> None:
        """Take these pairs into the next steps."""
        data = TextPairs(pairs, [])
        self._arguments = collate_pairs(
            encode_pairs(data, self.model.own_tokenizer(), self.model.max_tokens)
        )

    def loss(self) -> Tensor:
        return self.model.train()(**self._arguments).loss

    def embeddings(self) -> Tensor:
        return self.model.encoder.embeddings.word.weight

    def encode(self, texts: list[str]) -> Tensor:
        return self.model.encode_sparse(texts, convert_to_tensor=True)


def make(provider: str, folder: Path, pairs: list[tuple[str, str]]) -> Any:
    if provider == OURS:
        return Fastenc(folder, pairs)
    return SentenceTransformers(
        folder, pairs, patch if provider == PATCHED else lambda model: model
    )


def checkpoint(folder: Path) -> Path:
    """MiniLM with a masked-LM head."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    AutoModelForMaskedLM.from_pretrained(minilm_folder(), **no_dropout).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder)
    return folder


def check(sides: dict[str, Any], texts: list[str]) -> None:
    """Exits if losses, gradients of the embeddings or weights of texts differ."""
    results = {}
    for name, side in sides.items():
        loss = side.loss()
        (gradient,) = torch.autograd.grad(loss, side.embeddings())
        results[name] = {
            "loss": loss.detach(),
            "gradient of the embeddings": gradient,
            "weights": side.encode(texts).to_dense(),
        }
    for name, result in results.items():
        for what, value in result.items():
            expected = results[THEIRS][what]
            apart = float((value - expected).norm() / expected.norm())
            # Of two maxima within rounding, either may take the gradient.
            if not apart < (1e-3 if "gradient" in what else 1e-4):
                raise SystemExit(f"{name}: {what} apart by {apart:.1e}, nothing was measured")


def step_of(side: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(side.model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        side.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def times(folder: Path) -> Iterator[tuple[str, dict]]:
    """(case, its rows) for each."""
    pairs = questions_and_paragraphs(TIMED_PAIRS)
    sides = {provider: make(provider, folder, pairs) for provider in PROVIDERS}
    texts = [text for pair in pairs for text in pair]
    check(sides, texts)
    steps = {provider: step_of(side) for provider, side in sides.items()}
    encodes = {provider: lambda side=side: side.encode(texts) for provider, side in sides.items()}
    named = {f"step of {len(pairs)} pairs": steps, f"encode {len(texts)} texts": encodes}
    for case, calls in named.items():
        yield case, compare(calls, baseline=THEIRS, seconds=30)


def grown(provider: str, folder: Path, count: int, encodes: bool) -> dict:
    """For :func:`isolated`: a step, or encode of the texts; returns the MiB that the process held before."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # larger blocks are the system's own
    pairs = questions_and_paragraphs(count)
    side = make(provider, folder, SHORT_PAIR)
    step = step_of(side)
    step()
    side.encode(["a river"])
    side.read(pairs)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no longer resident
    before = resident()
    if encodes:
        side.encode([text for pair in pairs for text in pair])
    else:
        step()
    return {"before": before}


def memory(folder: Path) -> Iterator[tuple[str, dict]]:
    """(case, its rows) for each."""
    for name, count, encodes in (
        ("step of 8 pairs, memory", 8, False),
        ("step of 16 pairs, memory", 16, False),
        ("step of 32 pairs, memory", 32, False),
        ("encode 64 texts, memory", 32, True),
    ):
        rows = {}
        for provider in PROVIDERS:
            measured = isolated(grown, provider, folder, count, encodes)
            rows[provider] = {"MiB": measured["peak_memory"] - measured["before"]}
            print(f"{name}, {provider}: {rows[provider]['MiB']:,.0f} MiB", flush=True)
        yield name, rows


def main() -> None:
    wanted = sys.argv[1:] or ["times", "memory"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint(Path(scratch))
        # Memory first: the largest resident size of a process can start at its parent's.
        for name, measure in {"memory": memory, "times": times}.items():
            for case, rows in measure(folder) if name in wanted else ():
                write(RESULT, read_cases(RESULT) | {case: rows})


if __name__ == "__main__":
    main()
