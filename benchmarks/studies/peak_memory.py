"""Peak memory of inference on a CPU: 16,384 tokens through BERT-base, float32, random weights.

python -m benchmarks.studies.peak_memory

Each provider runs in a process of its own. The memory after a call of eight tokens, which includes the weights, is
subtracted. A hidden state of the batch, 16,384 × 768 in float32, takes 48 MiB.
"""

import resource
from pathlib import Path

import torch

from benchmarks._peers import padded
from benchmarks._process import isolated
from benchmarks._results import write
from fastenc import patch
from fastenc.models import Encoder, EncoderConfig
from fastenc.packing import pack_sequences

TOKENS = 16384
LENGTHS = (128, 512)
PROVIDERS = (
    "Hugging Face sdpa",
    "Hugging Face, patched by fastenc",
    "fastenc",
    "fastenc, output_hidden_states=True",
)


def resident() -> float:
    """MiB that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run(provider: str, length: int) -> dict:
    """Run the batch; returns the MiB that the process held before it."""
    if provider.startswith("fastenc"):
        encoder = Encoder(EncoderConfig(pooler=False)).eval()
        states = "hidden_states" in provider
        read = lambda texts: encoder(pack_sequences(texts), output_hidden_states=states)
    else:
        import transformers

        model = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).eval()
        if "patched" in provider:
            model = patch(model)
        read = lambda texts: model(**padded(texts))
    with torch.inference_mode():
        read([[5] * 8])
        before = resident()
        read([[5] * length] * (TOKENS // length))
    return {"before": before}


def main() -> None:
    cases: dict[str, dict] = {}
    for length in LENGTHS:
        rows = cases[f"{TOKENS // length:,} texts of {length} tokens"] = {}
        for provider in PROVIDERS:
            measured = isolated(run, provider, length)
            rows[provider] = {"MiB_above_weights": measured["peak_memory"] - measured["before"]}
            print(f"{provider}, {length}: {rows[provider]['MiB_above_weights']:,.0f} MiB")
    write("peak_memory", cases)


if __name__ == "__main__":
    main()
