"""A training step of a T5 v1.1 on pairs of texts: fastenc, fastenc.patch and transformers.

On a CPU: 4 + 4 layers of width 512, 16 pairs, forward and backward in float32. On a GPU: T5-base v1.1, 64 pairs,
forward, backward and AdamW, by autocast to bfloat16 over float32 weights. All have the same weights and dropout 0.1.
"real lengths" are drawn from log-normal distributions, and transformers pads them to the longest; pairs of equal
lengths need no padding. Tokens a second count the real tokens of both sides. Before anything is timed, the losses
without dropout must be those of transformers in float32.
"""

import copy
import random
from functools import partial

import torch

from benchmarks._compare import compare
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import run_groups
from benchmarks._t5 import VOCABULARY, fastencs, hugging_face, mask_of, padded
from fastenc import patch
from fastenc.packing import pack_sequences, pack_targets

TABLES = {"seq2seq_step": "A training step of a T5 v1.1"}
NOTE = (
    "On a CPU 4 + 4 layers of width 512, forward and backward in float32; on a GPU T5-base, with AdamW, in bfloat16. "
    "Random weights, vocabulary 32,128, dropout 0.1."
)
PAIRS = 64 if ON_GPU else 16
# T5's span corruption makes 512 and 114 tokens of a text.
EQUAL = (512, 114) if ON_GPU else (64, 32)
MODEL = dict(layers=12, heads=12, width=768, inner=2048) if ON_GPU else dict(layers=4, heads=6)
AUTOCAST = OPTIMIZER = ON_GPU
TOLERANCE = 2e-2 if ON_GPU else 1e-5  # of the loss, relative


def real_lengths() -> list[tuple[int, int]]:
    generator = random.Random(0)
    draw = lambda mean, spread, most: min(most, int(generator.lognormvariate(mean, spread)) + 3)
    return [(draw(3.7, 0.8, 256), draw(2.5, 0.6, 64)) for _ in range(PAIRS)]


def batches(lengths: list[tuple[int, int]]) -> tuple[dict, dict]:
    """(transformers' arguments, ours) for pairs of random tokens."""
    torch.manual_seed(0)
    draw = lambda length: [*torch.randint(5, VOCABULARY - 5, (length - 1,)).tolist(), 1]
    pairs = [(draw(source), draw(target)) for source, target in lengths]
    sources, targets = zip(*pairs, strict=True)
    inputs, labels = pack_targets(targets, 0)
    arguments = {
        "input_ids": padded(sources),
        "attention_mask": mask_of(sources),
        "labels": padded(targets, -100),
    }
    packed = {"batch": pack_sequences(sources), "target": inputs, "labels": labels}
    on_device = lambda batch: {name: value.to(DEVICE) for name, value in batch.items()}
    return on_device(arguments), on_device(packed)


def step_of(model, arguments: dict):
    """One training step; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True) if OPTIMIZER else None

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=AUTOCAST):
            loss = model(**arguments).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


def measure(models: dict, name: str, lengths: list[tuple[int, int]]) -> dict[str, dict]:
    padded_batch, packed = batches(lengths)
    steps = {
        provider: step_of(model, packed if provider == "fastenc" else padded_batch)
        for provider, model in models.items()
    }
    with torch.no_grad():
        truth = models["transformers"].eval()(**padded_batch).loss.item()

    def check(provider: str, loss) -> str | None:
        close = abs(loss.item() / truth - 1) < TOLERANCE
        return None if close else f"loss {loss.item():.5f} instead of {truth:.5f}"

    for model in models.values():
        model.eval()
    rows = compare(steps, baseline="", check=check, end_to_end=True, seconds=0.0, min_rounds=1)
    for model in models.values():
        model.train()
    right = {provider: step for provider, step in steps.items() if "median_ms" in rows[provider]}
    seconds = None if ON_GPU else 15
    rows |= compare(right, baseline="transformers", end_to_end=True, seconds=seconds)
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = sum(map(sum, lengths)) / (row["median_ms"] / 1e3)
    return {f"{PAIRS} pairs, {name}": rows}


def main() -> None:
    theirs = hugging_face(**MODEL)
    models = {
        "transformers": theirs,
        "fastenc.patch": patch(copy.deepcopy(theirs), labelled_logits_only=True),
        "fastenc": fastencs(theirs),
    }
    for model in models.values():
        model.to(DEVICE)
    cases = {
        "real lengths": real_lengths(),
        "{} and {} tokens".format(*EQUAL): [EQUAL] * PAIRS,
    }
    groups = {name: partial(measure, models, name, lengths) for name, lengths in cases.items()}
    run_groups("seq2seq_step", groups)


if __name__ == "__main__":
    main()
