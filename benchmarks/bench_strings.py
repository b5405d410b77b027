"""From strings to vectors on a CPU: MiniLM (6 x 384) on real sentences, each library's whole call.

FASTENC_DATA=... python -m benchmarks.bench_strings [--texts N] [--parts N]

The sentences are the training phrases of SST-2, then Tatoeba's English sentences, in random order. They are cut into
parts, which the providers encode by turns, each provider every part once. "encoder alone" is fastenc's encoder on the
same batches, tokenised and packed beforehand, without pooling. ONNX Runtime and OpenVINO run inside
sentence-transformers' ``encode``, as its back-ends do. Vectors of the first texts are compared with
sentence-transformers' before anything is timed.
"""

import argparse
import csv
import gzip
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks._compare import PAUSE, peer
from benchmarks._device import ON_GPU
from benchmarks._peers import OnnxRuntime, OpenVino, export_onnx
from benchmarks._results import run_groups
from benchmarks.bench_encoder import BATCH, HEADS, HIDDEN
from fastenc import Encoder, freeze, patch
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models.embedding.text_batches import TextBatches
from fastenc.tasks import embed_file

PEER, ALONE = "sentence-transformers", "encoder alone"
CHECKED = 256  # texts whose vectors are compared
TOLERANCE = 1e-5  # largest difference of a number; the vectors have length 1
# Takes the texts and prepares them, which is not timed; returns the call that is.
Provider = Callable[[list[str]], Callable[[], Any]]


def sentences(number: int) -> list[str]:
    """Real sentences, each once. Raises: ValueError if the data sets have fewer."""
    folder, listed = Path(os.environ["FASTENC_DATA"]), dict.fromkeys("")
    for file, column in (("sst2/train.tsv.gz", "sentence"), ("tatoeba/pairs.tsv.gz", "english")):
        text = gzip.decompress((folder / file).read_bytes()).decode()
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
        listed |= dict.fromkeys(row[column].strip() for row in rows)
    if number > len(listed):
        raise ValueError(f"--texts must be at most the {len(listed):,} sentences there are")
    return Random(0).sample([*listed], number)


def encoder_alone(encoder: Encoder) -> Provider:
    text_batches = TextBatches(encoder.own_tokenizer(), encoder.max_tokens, BATCH)

    def prepare(texts: list[str]) -> Callable[[], None]:
        batches = [batch for _, batch in text_batches.of(texts)]

        @torch.inference_mode()
        def run() -> None:
            for batch in batches:
                encoder(batch, pooled=False)

        return run

    return prepare


def from_file_to_file(encoder: Encoder, folder: Path) -> Provider:
    def prepare(texts: list[str]) -> Callable[[], np.ndarray]:
        (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        output = folder / "vectors.npy"

        def run() -> np.ndarray:
            embed_file(encoder, folder / "texts.txt", output, batch_size=BATCH, show_progress=False)
            return np.load(output, mmap_mode="r")

        return run

    return prepare


def call_of(encode: Callable) -> Provider:
    return lambda texts: partial(encode, texts, batch_size=BATCH)


def around(session: Callable, library: Any) -> Provider:
    """sentence-transformers' ``encode`` with another forward, from a padded batch to the last hidden states."""
    from transformers.modeling_outputs import BaseModelOutput

    model = library.SentenceTransformer(str(minilm_folder()), device="cpu")

    def forward(input_ids, attention_mask, token_type_ids, **unused):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        hidden = session(inputs | {"token_type_ids": token_type_ids})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))

    model[0].model.forward = forward
    return call_of(model.encode)


def providers(scratch: Path) -> dict[str, Provider | str]:
    folder, threads = str(minilm_folder()), torch.get_num_threads()
    encoder = freeze(Encoder.from_pretrained(folder))
    graph = export_onnx(Path(folder), scratch / "minilm.onnx")
    sessions = {
        "ONNX Runtime": OnnxRuntime(graph, HEADS, HIDDEN, threads),
        "OpenVINO": OpenVino(graph, threads),
    }
    load = lambda library: library.SentenceTransformer(folder, device="cpu").eval()
    made = {PEER: lambda library: call_of(load(library).encode)}
    made |= {f"{PEER}, {name}": partial(around, session) for name, session in sessions.items()}
    made[f"{PEER}, patched and frozen"] = lambda library: call_of(
        freeze(patch(load(library))).encode
    )
    return {
        **{name: peer("sentence_transformers", make) for name, make in made.items()},
        "fastenc": call_of(partial(encoder.encode, convert_to_numpy=True)),
        "fastenc embed, from file to file": from_file_to_file(encoder, scratch),
        ALONE: encoder_alone(encoder),
    }


def measure(case: str, texts: list[str], parts: int, scratch: Path) -> dict[str, dict]:
    rows: dict[str, dict] = {}
    alive: dict[str, Provider] = {}
    expected = None
    for name, provider in providers(scratch).items():
        if isinstance(provider, str):
            rows[name] = {"missing": provider}
            continue
        vectors = provider(texts[:CHECKED])()
        expected = vectors if expected is None else expected
        apart = 0.0 if vectors is None else float(np.abs(vectors - expected).max())
        rows[name] = {} if vectors is None else {"largest_difference": apart}
        if apart <= TOLERANCE:
            alive[name] = provider
        else:
            rows[name]["wrong"] = f"differs from {PEER} by {apart:.2g}"
    seconds: dict[str, list[float]] = {name: [] for name in alive}
    size = -(-len(texts) // parts)
    for start in range(0, len(texts), size):
        for name, provider in alive.items():
            call = provider(texts[start : start + size])
            time.sleep(PAUSE)
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
        print(f"{min(start + size, len(texts)):,} of {len(texts):,} sentences", flush=True)
    for name, of_parts in seconds.items():
        of_parts.sort()
        rows[name] |= {
            "median_ms": 1e3 * statistics.median(of_parts),
            "p20_ms": 1e3 * of_parts[len(of_parts) // 5],
            "p80_ms": 1e3 * of_parts[-1 - len(of_parts) // 5],
            "rounds": len(of_parts),
            "sentences_per_s": len(texts) / sum(of_parts),
            "percent_of_encoder": 100 * sum(seconds[ALONE]) / sum(of_parts),
        }
        if PEER in seconds:
            rows[name]["speedup"] = sum(seconds[PEER]) / sum(of_parts)
    return {case: rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=4_000)
    parser.add_argument("--parts", type=int, default=4)
    given = parser.parse_args()
    if ON_GPU or "FASTENC_DATA" not in os.environ:
        print("a benchmark of CPUs, on the data sets in FASTENC_DATA: nothing was measured")
        return
    with tempfile.TemporaryDirectory() as scratch:
        texts = sentences(given.texts)
        case = f"{given.texts:,} sentences"
        group = partial(measure, case, texts, given.parts, Path(scratch))
        run_groups("strings", {case: group})


if __name__ == "__main__":
    main()
