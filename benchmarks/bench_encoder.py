"""A real checkpoint (MiniLM, 6 x 384) on a CPU: sentences per second over whole corpora of texts of real lengths.

Every provider encodes the same token ids in batches of 32. "Hugging Face" takes the batches in the corpus's order;
"sorted" sorts the corpus by length first, as the peers recommend and as fastenc's ``encode`` does. Before anything is
timed, results are compared with Hugging Face's at every real token.

To measure a processor with bfloat16 units as one without them:
FASTENC_ISA=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE python -m benchmarks.run encoder
"""

import gzip
import os
import random
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks._compare import compare
from benchmarks._device import ON_GPU
from benchmarks._formats import EMULATED, emulates_slowly
from benchmarks._peers import OnnxRuntime, OpenVino, export_onnx, hugging_face, padded
from benchmarks._products import FLOOR, Products
from benchmarks._results import run_groups
from fastenc import freeze, patch
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.packing import pack_sequences

BATCH = 32
HEADS, HIDDEN = 12, 384


def sst2_lengths(tokenizer) -> list[list[int]] | None:
    folder = os.environ.get("FASTENC_DATA")
    if not folder:
        return None
    with gzip.open(Path(folder) / "sst2" / "dev.tsv.gz", "rt", encoding="utf-8") as file:
        header = next(file).rstrip("\n").split("\t")
        column = header.index("sentence") if "sentence" in header else header.index("text")
        texts = [line.rstrip("\n").split("\t")[column] for line in file]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts[: 10 * BATCH])]


def uniform_lengths(low: int, high: int, count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [
        [101, *(draw.randrange(1000, 29000) for _ in range(draw.randint(low, high) - 2)), 102]
        for _ in range(count)
    ]


def corpora(folder: Path) -> dict[str, list[list[int]]]:
    """{name: token ids of its texts}, by the tokenizer of the checkpoint in ``folder``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    sst2 = sst2_lengths(tokenizer)
    if sst2 is None:
        print("FASTENC_DATA is not set: the SST-2 lengths are left out")
    return {
        **({} if sst2 is None else {"lengths of SST-2": sst2}),
        "lengths 10 to 256": uniform_lengths(10, 256, 4 * BATCH),
        "all 128 tokens": uniform_lengths(128, 128, 2 * BATCH),
        "one text of 20 tokens": uniform_lengths(20, 20, 1),
    }


def batches(sequences, by_length):
    order = sorted(sequences, key=len) if by_length else sequences
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: models measures whole models on a GPU")
        return
    folder = minilm_folder()
    threads = torch.get_num_threads()
    model = hugging_face(folder)
    model_bf16 = hugging_face(folder).bfloat16()
    patched = patch(hugging_face(folder))
    ours = Encoder.from_pretrained(folder).eval()
    # Weights packed once in advance instead of in every call.
    frozen = freeze(Encoder.from_pretrained(folder))
    patched_frozen = freeze(patch(hugging_face(folder)))
    products = Products(ours)
    ours_bf16 = Encoder.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as scratch:
        graph = export_onnx(folder, Path(scratch) / "minilm.onnx")
        onnx = OnnxRuntime(graph, HEADS, HIDDEN, threads)
        openvino = OpenVino(graph, threads)
        openvino_bf16 = OpenVino(graph, threads, "bf16")

    def measure(corpus: str, sequences: list[list[int]]) -> dict[str, dict]:
        plain = [padded(batch) for batch in batches(sequences, False)]
        by_length = [padded(batch) for batch in batches(sequences, True)]
        packed = [pack_sequences(batch) for batch in batches(sequences, False)]
        packed_by_length = [pack_sequences(batch) for batch in batches(sequences, True)]

        def run_padded(forward, inputs):
            return lambda: [(forward(x), x["attention_mask"].bool()) for x in inputs]

        def run_cpu_inference(encoder, inputs):
            return lambda: [
                (encoder(batch, pooled=False).last_hidden_state, None) for batch in inputs
            ]

        def real_tokens(outputs):
            rows = [
                torch.as_tensor(y) if mask is None else torch.as_tensor(y)[mask]
                for y, mask in outputs
            ]
            return torch.cat(rows).float()

        hf = lambda x: model(**x).last_hidden_state
        hf_bf16 = lambda x: model_bf16(**x).last_hidden_state
        providers = {
            "Hugging Face sdpa": run_padded(hf, plain),
            "Hugging Face sdpa, sorted": run_padded(hf, by_length),
            "ONNX Runtime fused, sorted": run_padded(onnx, by_length),
            "OpenVINO, sorted": run_padded(openvino, by_length),
            "Hugging Face, patched by fastenc": run_padded(
                lambda x: patched(**x).last_hidden_state, plain
            ),
            "Hugging Face, patched and frozen": run_padded(
                lambda x: patched_frozen(**x).last_hidden_state, plain
            ),
            "fastenc": run_cpu_inference(ours, packed),
            "fastenc, frozen": run_cpu_inference(frozen, packed),
            "fastenc, sorted": run_cpu_inference(ours, packed_by_length),
            "Hugging Face sdpa bf16, sorted": EMULATED
            if emulates_slowly()
            else run_padded(hf_bf16, by_length),
            "OpenVINO bf16, sorted": run_padded(openvino_bf16, by_length),
            "fastenc bf16": run_cpu_inference(ours_bf16, packed),
            FLOOR: lambda: [products(batch.total_tokens) for batch in packed],
        }
        with torch.inference_mode():
            truth = {
                False: real_tokens(run_padded(hf, plain)()),
                True: real_tokens(run_padded(hf, by_length)()),
            }

            def check(name, result):
                if name == FLOOR:
                    return None
                error = (real_tokens(result) - truth["sorted" in name]).abs().max().item()
                # Hidden states are of order 1; bf16 keeps 8 bits through 6 layers.
                allowed = 0.15 if "bf16" in name else 1e-4
                return f"differs from Hugging Face by {error:.2g}" if not error < allowed else None

            rows = compare(providers, baseline="Hugging Face sdpa", check=check, seconds=40)
        for row in rows.values():
            if "median_ms" in row:
                row["sentences_per_s"] = len(sequences) / row["median_ms"] * 1e3
        return {corpus: rows}

    texts = corpora(folder)
    run_groups("encoder", {name: partial(measure, name, each) for name, each in texts.items()})


if __name__ == "__main__":
    main()
