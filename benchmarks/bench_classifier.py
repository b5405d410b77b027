"""A classifier or a reranker (MiniLM, 6 x 384, with BERT's head) on a CPU: whole corpora of texts of real lengths.

The corpora and their batches of 32 are those of ``encoder``. A head reads the first token of a text, so fastenc's last
layer computes no other token after its attention. Before anything is timed, the logits are compared with Hugging
Face's.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks._compare import compare
from benchmarks._device import ON_GPU
from benchmarks._peers import padded
from benchmarks._results import run_groups
from benchmarks.bench_encoder import batches, corpora
from fastenc import freeze, patch
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import SequenceClassifier
from fastenc.packing import pack_sequences

BASELINE = "Hugging Face sdpa"


def classifier_folder(target: Path) -> Path:
    """MiniLM with a random head for two classes."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=2
    ).save_pretrained(target)
    return target


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: models measures whole models on a GPU")
        return
    from transformers import AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as scratch:
        folder = classifier_folder(Path(scratch))
        hugging_face = lambda: AutoModelForSequenceClassification.from_pretrained(folder).eval()
        ours = lambda dtype=torch.float32: SequenceClassifier.from_pretrained(
            folder, dtype=dtype
        ).eval()
        plain = hugging_face()
        patched = patch(hugging_face())
        patched_frozen = freeze(patch(hugging_face()))
        own, frozen, frozen_bf16 = ours(), freeze(ours()), freeze(ours(torch.bfloat16))

    def run(forward: Callable, inputs: list) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat([forward(batch) for batch in inputs]).float()

    def measure(corpus: str, sequences: list[list[int]]) -> dict[str, dict]:
        in_order, by_length = (
            [padded(batch) for batch in batches(sequences, sort)] for sort in (False, True)
        )
        packed = [pack_sequences(batch) for batch in batches(sequences, False)]
        of_theirs = lambda model: lambda batch: model(**batch).logits
        of_ours = lambda model: lambda batch: model(batch).logits
        providers = {
            BASELINE: run(of_theirs(plain), in_order),
            f"{BASELINE}, sorted": run(of_theirs(plain), by_length),
            "Hugging Face, patched by fastenc": run(of_theirs(patched), in_order),
            "Hugging Face, patched and frozen": run(of_theirs(patched_frozen), in_order),
            "fastenc": run(of_ours(own), packed),
            "fastenc, frozen": run(of_ours(frozen), packed),
            "fastenc bf16, frozen": run(of_ours(frozen_bf16), packed),
        }
        with torch.inference_mode():
            truth = {name: providers[name]() for name in (BASELINE, f"{BASELINE}, sorted")}

            def check(name: str, result: torch.Tensor) -> str | None:
                expected = truth[f"{BASELINE}, sorted" if "sorted" in name else BASELINE]
                error = (result - expected).abs().max().item()
                allowed = 0.05 if "bf16" in name else 1e-4
                return f"differs from Hugging Face by {error:.2g}" if not error < allowed else None

            rows = compare(providers, baseline=BASELINE, check=check, seconds=40)
        for row in rows.values():
            if "median_ms" in row:
                row["sentences_per_s"] = len(sequences) / row["median_ms"] * 1e3
        return {corpus: rows}

    texts = corpora(minilm_folder())
    run_groups("classifier", {name: partial(measure, name, each) for name, each in texts.items()})


if __name__ == "__main__":
    main()
