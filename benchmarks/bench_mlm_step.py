"""One masked-LM training step of a 6-layer, 384-wide model: batch 16 x 128 tokens, vocabulary 30,522, no padding.

Forward, backward and AdamW. Hugging Face computes logits of every token, fastenc of the labelled ones. Both start from
the same weights and read the same tokens and labels. Before anything is timed, the losses must agree; dropout is off in
that comparison and on while timing. The memory of the head is the growth of the process's largest resident size over
the head's forward and backward, with the gradient of the decoder's weights in both cases.
"""

import json
import resource
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.nn.functional as F

from benchmarks._compare import compare
from benchmarks._device import ON_GPU
from benchmarks._formats import their_autocast
from benchmarks._results import write
from fastenc.models import MaskedLM
from fastenc.ops import linear_masked_cross_entropy
from fastenc.packing import pack

BATCH, LENGTH, VOCABULARY = 16, 128, 30522


def hugging_face():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return BertForMaskedLM(config)


def head_memory(provider: str) -> float:
    """MB, in a process of its own."""
    model = hugging_face()
    hidden = torch.randn(BATCH * LENGTH, 384, requires_grad=True)
    labels = torch.where(torch.rand(BATCH * LENGTH) < 0.15, 7, -100)
    decoder = model.cls.predictions.decoder
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if provider == "fastenc":
        rows = (labels != -100).nonzero().flatten()
        chosen = model.cls.predictions.transform(hidden[rows])
        linear_masked_cross_entropy(chosen, decoder.weight, decoder.bias, labels[rows]).backward()
    else:
        F.cross_entropy(model.cls(hidden), labels).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def measure_head_memory() -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_mlm_step"]
    run = lambda name: subprocess.run([*command, name], capture_output=True, text=True, check=True)
    return {name: json.loads(run(name).stdout) for name in ("Hugging Face", "fastenc")}


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: models measures whole models on a GPU")
        return
    if len(sys.argv) > 1:
        print(head_memory(sys.argv[1]))
        return
    # Before anything else: the largest resident size of a process starts at its parent's.
    memory = measure_head_memory()
    theirs = hugging_face()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = MaskedLM.from_pretrained(folder)
    input_ids = torch.randint(1000, VOCABULARY, (BATCH, LENGTH))
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.15, input_ids, -100)
    batch, packed_labels = pack(input_ids), labels.flatten()

    def step_of(model, loss_of):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(autocast: bool):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    loss_theirs = lambda: theirs(input_ids=input_ids, labels=labels).loss
    loss_ours = lambda: ours(batch, packed_labels).loss
    for model in (theirs, ours):
        model.eval()
    first = {"fastenc": loss_ours().item(), "Hugging Face sdpa": loss_theirs().item()}
    if abs(first["fastenc"] - first["Hugging Face sdpa"]) > 1e-4:
        raise SystemExit(f"the losses differ, nothing was timed: {first}")
    for model in (theirs, ours):
        model.train()
    step_theirs, step_ours = step_of(theirs, loss_theirs), step_of(ours, loss_ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = compare(
            {
                "Hugging Face sdpa": lambda: step_theirs(False),
                "fastenc": lambda: step_ours(False),
                "Hugging Face sdpa, bf16 autocast": their_autocast(lambda: step_theirs(True)),
                "fastenc, bf16 autocast": lambda: step_ours(True),
            },
            baseline="Hugging Face sdpa",
            seconds=60,
        )
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = BATCH * LENGTH / row["median_ms"] * 1e3
    write("mlm_step", {"6 x 384, batch 16 x 128": rows, "head memory, MB": memory})


if __name__ == "__main__":
    main()
