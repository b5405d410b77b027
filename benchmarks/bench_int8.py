"""MiniLM (6 x 384) and BERT-base in 8 bits on a CPU: whole corpora of texts of real lengths, and how near vectors are.

Every provider encodes the same token ids in batches of 32. Batches are sorted by length, but Hugging Face's first row
takes the corpus's order. A result must be near Hugging Face's states before it is timed. The case "accuracy" has for
each provider Spearman's correlation with the scores of STS-B's test pairs, and the cosines of the texts' vectors with
those of float32. Peers: OpenVINO's int8 with ranges that nncf measures on 300 texts of SST-2, and with ranges measured
in the call; ONNX Runtime's dynamic int8; sentence-transformers' recipe of it for AVX512-VNNI. BERT-base has random
weights, so only its speed is measured, beside OpenVINO.
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
from benchmarks._compare import compare
from benchmarks._device import ON_GPU
from benchmarks._peers import export_onnx, hugging_face, padded
from benchmarks._results import run_groups
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
ROUNDS = 3  # at least, of every provider
# Callables from a list of token ids to their states, one after the other.
States = Callable[[list[list[int]]], torch.Tensor]


def table(path: str) -> list[dict[str, str]]:
    file = Path(os.environ["FASTENC_DATA"], path)
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=False)) for line in lines[1:]]


def of_padded(forward) -> States:
    def states(ids: list[list[int]]) -> torch.Tensor:
        batch = padded(ids)
        return torch.as_tensor(forward(batch))[batch["attention_mask"].bool()].float()

    return states


def of_packed(encoder: Encoder) -> States:
    return lambda ids: encoder(pack_sequences(ids), pooled=False).last_hidden_state.float()


def vectors(states: States, ids: list[list[int]]) -> torch.Tensor:
    """The texts' mean vectors, in the given order."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    means = torch.empty(len(ids), HIDDEN)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        rows = states([ids[i] for i in chosen]).split([len(ids[i]) for i in chosen])
        means[chosen] = torch.stack([row.mean(0) for row in rows])
    return F.normalize(means, dim=1)


def accuracy(providers: dict, tokenizer) -> dict[str, dict]:
    rows = table("stsb/en_test.tsv.gz")
    first, second = (
        [each.ids[:512] for each in tokenizer.encode_batch([row[name] for row in rows])]
        for name in ("sentence1", "sentence2")
    )
    scores = torch.tensor([float(row["score"]) for row in rows])
    exact, results = vectors(providers[BASELINE], first + second), {}
    for name, states in providers.items():
        if isinstance(states, str):
            results[name] = {"missing": states}
            continue
        given = vectors(states, first + second)
        cosines, (a, b) = (given * exact).sum(1), given.chunk(2)
        results[name] = {
            "spearman": 100 * float(spearmanr((a * b).sum(1), scores).statistic),
            "worst_cosine": cosines.min().item(),
            "mean_cosine": cosines.mean().item(),
        }
    return {"accuracy": results}


def speed(
    name: str, providers: dict, sequences: list[list[int]], seconds: float
) -> dict[str, dict]:
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

    rows = compare(calls, baseline=BASELINE, check=check, seconds=seconds, min_rounds=ROUNDS)
    for row in rows.values():
        if "median_ms" in row:
            row["sentences_per_s"] = len(sequences) / row["median_ms"] * 1e3
    return {name: rows}


def ours(folder: Path) -> dict[str, States]:
    bfloat16 = Encoder.from_pretrained(folder, dtype=torch.bfloat16)
    return {
        FLOATS: of_packed(freeze(Encoder.from_pretrained(folder))),
        "fastenc bf16, frozen": of_packed(freeze(bfloat16)),
        "fastenc int8": of_packed(Encoder.from_pretrained(folder, dtype="int8")),
    }


def beside(folder: Path, peers: dict) -> dict:
    """All providers of a checkpoint, Hugging Face first."""
    model = hugging_face(folder)
    states = {
        name: each if isinstance(each, str) else of_padded(each) for name, each in peers.items()
    }
    exact = of_padded(lambda batch: model(**batch).last_hidden_state)
    return {BASELINE: exact, **states, **ours(folder)}


@torch.inference_mode()
def bert_base(corpora: dict[str, list[list[int]]], samples: list[list[int]]) -> dict[str, dict]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        BertModel(BertConfig()).save_pretrained(folder)
        graph = export_onnx(folder, folder / "float32.onnx")
        peers = _int8_peers.openvino(graph, torch.get_num_threads(), samples)
        providers = beside(folder, peers)
    results: dict[str, dict] = {}
    for name, ids in corpora.items():
        results |= speed(f"BERT-base, {name}", providers, ids, seconds=20)
    return results


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
    texts = [row["sentence"] for row in table("sst2/train_sentences.tsv.gz")]
    encoded = tokenizer.encode_batch(texts[: _int8_peers.CALIBRATION_TEXTS])
    samples = [each.ids for each in encoded]
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        graph = export_onnx(folder, Path(scratch) / "float32.onnx")
        peers = _int8_peers.openvino(graph, threads, samples)
        peers |= _int8_peers.onnx_runtime(graph, HEADS, HIDDEN, threads)
        providers = beside(folder, peers)
    short, mixed = sst2_lengths(tokenizer), uniform_lengths(10, 256, 4 * BATCH)
    corpora = {
        "lengths of SST-2": (short, 40),
        "lengths 10 to 256": (mixed, 60),
        "one text of 20 tokens": (uniform_lengths(20, 20, 1), 30),
    }
    of_bert = {"lengths of SST-2": short[: 3 * BATCH], "lengths 10 to 256": mixed[:BATCH]}
    with torch.inference_mode():
        groups = {
            name: partial(speed, name, providers, ids, seconds)
            for name, (ids, seconds) in corpora.items()
        }
        # Random weights have no ranges that are worth more texts.
        groups["BERT-base"] = partial(bert_base, of_bert, samples[:10])
        run_groups("int8", {"accuracy": partial(accuracy, providers, tokenizer), **groups})


if __name__ == "__main__":
    main()
