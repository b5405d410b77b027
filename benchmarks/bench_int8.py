"""MiniLM (6 x 384) in 8 bits on a CPU: whole corpora of texts of real lengths, and how near its vectors are.

Every provider encodes the same token ids in batches of 32. Batches are sorted by length, but Hugging Face's first row
takes the corpus's order. A result must be near Hugging Face's states before it is timed. The case "accuracy" has for
each provider Spearman's correlation with the scores of STS-B's test pairs, and the cosines of the texts' vectors with
those of float32. Peers: OpenVINO's int8 with ranges that nncf measures on 300 texts of SST-2, and with ranges measured
in the call; ONNX Runtime's dynamic int8; sentence-transformers' recipe of it for AVX512-VNNI.
"""

import gzip
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from benchmarks import _int8_peers
from benchmarks._harness import ON_GPU, compare, run_groups
from benchmarks._peers import hugging_face, padded
from benchmarks.bench_encoder import (
    BATCH,
    HEADS,
    HIDDEN,
    batches,
    sst2_lengths,
    uniform_lengths,
)
from fastenc import freeze
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.packing import pack_sequences

BASELINE, FLOATS = "Hugging Face sdpa", "fastenc float32, frozen"
# The least mean cosine of the tokens' states with Hugging Face's. Ranges of whole tensors are rough.
LEAST = {"fastenc int8": 0.99, "peers": 0.8}
# Callables from a list of token ids to their states, one after the other.
States = Callable[[list[list[int]]], torch.Tensor]


def table(path: str) -> list[dict[str, str]]:
    file = Path(os.environ["FASTENC_DATA"], path)
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=False)) for line in lines[1:]]


def of_padded(call) -> States:
    def states(ids: list[list[int]]) -> torch.Tensor:
        batch = padded(ids)
        return torch.as_tensor(call(batch))[batch["attention_mask"].bool()].float()

    return states


def of_packed(encoder: Encoder) -> States:
    return lambda ids: encoder(pack_sequences(ids)).last_hidden_state.float()


def vectors(states: States, ids: list[list[int]]) -> torch.Tensor:
    """The texts' mean vectors, in the given order."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = torch.empty(len(ids), HIDDEN)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        rows = states([ids[i] for i in chosen]).split([len(ids[i]) for i in chosen])
        found[chosen] = torch.stack([row.mean(0) for row in rows])
    return F.normalize(found, dim=1)


def accuracy(providers: dict, tokenizer) -> dict[str, dict]:
    rows = table("stsb/en_test.tsv.gz")
    first, second = (
        [each.ids[:512] for each in tokenizer.encode_batch([row[name] for row in rows])]
        for name in ("sentence1", "sentence2")
    )
    scores = torch.tensor([float(row["score"]) for row in rows])
    exact, found = vectors(providers[BASELINE], first + second), {}
    for name, states in providers.items():
        if isinstance(states, str):
            found[name] = {"missing": states}
            continue
        given = vectors(states, first + second)
        cosines, (a, b) = (given * exact).sum(1), given.chunk(2)
        found[name] = {
            "spearman": 100 * float(spearmanr((a * b).sum(1), scores).statistic),
            "worst_cosine": cosines.min().item(),
            "mean_cosine": cosines.mean().item(),
        }
    return {"accuracy": found}


def speed(name: str, providers: dict, sequences: list[list[int]]) -> dict[str, dict]:
    by_length, as_given = batches(sequences, True), batches(sequences, False)

    def run(provider, states):
        if isinstance(states, str):
            return states
        chosen = as_given if provider == BASELINE else by_length
        return lambda: [states(ids) for ids in chosen]

    sorted_by = "Hugging Face sdpa, sorted"
    calls = {provider: run(provider, states) for provider, states in providers.items()}
    calls = {BASELINE: calls[BASELINE], sorted_by: run(sorted_by, providers[BASELINE]), **calls}
    truth = torch.cat(calls[sorted_by]())

    def check(provider, result):
        if provider == BASELINE:
            return None
        mean = F.cosine_similarity(torch.cat(result), truth).mean().item()
        least = LEAST["fastenc int8" if provider.startswith("fastenc") else "peers"]
        return None if mean > least else f"mean cosine {mean:.3f}"

    rows = compare(calls, baseline=BASELINE, check=check, seconds=60)
    for row in rows.values():
        if "median_ms" in row:
            row["sentences_per_s"] = len(sequences) / row["median_ms"] * 1e3
    return {name: rows}


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs")
        return
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    from tokenizers import Tokenizer

    folder, threads = minilm_folder(), torch.get_num_threads()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = hugging_face(folder)
    texts = [row["sentence"] for row in table("sst2/train_sentences.tsv.gz")]
    encoded = tokenizer.encode_batch(texts[: _int8_peers.CALIBRATION_TEXTS])
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        peers = _int8_peers.providers(
            folder, Path(scratch), HEADS, HIDDEN, threads, [each.ids for each in encoded]
        )
        providers = {
            BASELINE: of_padded(lambda batch: model(**batch).last_hidden_state),
            **{name: p if isinstance(p, str) else of_padded(p) for name, p in peers.items()},
            FLOATS: of_packed(freeze(Encoder.from_pretrained(folder))),
            "fastenc bf16, frozen": of_packed(
                freeze(Encoder.from_pretrained(folder, dtype=torch.bfloat16))
            ),
            "fastenc int8": of_packed(Encoder.from_pretrained(folder, dtype="int8")),
        }
        corpora = {
            "lengths of SST-2": sst2_lengths(tokenizer),
            "lengths 10 to 256": uniform_lengths(10, 256, 4 * BATCH),
            "one text of 20 tokens": uniform_lengths(20, 20, 1),
        }
        groups = {name: partial(speed, name, providers, ids) for name, ids in corpora.items()}
        run_groups("int8", {"accuracy": partial(accuracy, providers, tokenizer), **groups})


if __name__ == "__main__":
    main()
