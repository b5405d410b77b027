"""Masked-LM pretraining on wikipedia_en: fastenc and transformers from the same weights on the same batches.

python -m benchmarks.train_mlm [--steps N]    (needs FASTENC_DATA; about three minutes on two cores)

A BERT of 4 layers, 256 wide; blocks of 128 tokens, batches of 16, the same masks and the same AdamW. Dropout is on
and each model's own. Writes both held-out losses at the same steps, and draws them.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch

from benchmarks._harness import RESULTS, folder_of_device, write
from fastenc.data import BatchSampler, full_sentence_blocks, read_texts, train_tokenizer
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import MlmCollator
from fastenc.ops import unpack
from fastenc.tasks import evaluate_masked_lm
from fastenc.train import TrainConfig
from fastenc.train.optimizer import build_optimizer, rate_factor

BLOCK, BATCH, EVERY = 128, 16, 50


def padded(example: dict) -> dict:
    """The same batch as Hugging Face takes it."""
    batch = example["batch"]
    ids = unpack(batch.input_ids, batch)
    return {
        "input_ids": ids,
        "attention_mask": unpack(torch.ones_like(batch.input_ids), batch),
        "labels": unpack(example["labels"], batch, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if "FASTENC_DATA" not in os.environ:
        raise SystemExit("set FASTENC_DATA to the folder of data sets")
    import transformers

    folder = Path(os.environ["FASTENC_DATA"]) / "wikipedia_en"
    documents = read_texts(folder / "train.txt.gz")[:2500]
    tokenizer = train_tokenizer(documents, vocab_size=8000)
    blocks = full_sentence_blocks(documents, tokenizer, BLOCK)
    held_out = full_sentence_blocks(read_texts(folder / "valid.txt.gz")[:60], tokenizer, BLOCK)
    torch.manual_seed(0)
    ours = MaskedLM(
        EncoderConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=256,
            num_layers=4,
            num_heads=4,
            intermediate_size=1024,
            max_positions=BLOCK,
        )
    )
    with tempfile.TemporaryDirectory() as scratch:
        ours.save_pretrained(scratch)
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(scratch)
    collator, held_out_collator = MlmCollator(tokenizer), MlmCollator(tokenizer, seed=1)
    config = TrainConfig("unused", max_steps=steps, learning_rate=1e-3, warmup=0.1)
    optimizers = [build_optimizer(model, config) for model in (ours, theirs)]
    sampler = BatchSampler([len(block) for block in blocks], BATCH, shuffle=True)
    curves: dict[str, list] = {"fastenc": [], "transformers": []}

    @torch.inference_mode()
    def evaluate_theirs() -> float:
        theirs.eval()
        total = count = 0
        for step, places in enumerate(
            BatchSampler([1] * len(held_out), 32, shuffle=False).epoch(0)
        ):
            example = held_out_collator([held_out[place] for place in places], step)
            masked = int((example["labels"] != -100).sum())
            total += theirs(**padded(example)).loss.item() * masked
            count += masked
        return total / count

    batches = (indices for epoch in range(10**6) for indices in sampler.epoch(epoch))
    for step in range(steps + 1):
        if step % EVERY == 0 or step == steps:
            curves["fastenc"].append(
                (step, evaluate_masked_lm(ours, held_out, held_out_collator)["loss"])
            )
            curves["transformers"].append((step, evaluate_theirs()))
            print(
                f"step {step:5}: " + "  ".join(f"{n} {c[-1][1]:.4f}" for n, c in curves.items()),
                flush=True,
            )
        if step == steps:
            break
        example = collator([blocks[i] for i in next(batches)], step)
        for name, model, optimizer in zip(curves, (ours, theirs), optimizers, strict=True):
            model.train()
            arguments = example if name == "fastenc" else padded(example)
            model(**arguments).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate_factor(step, steps // 10, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    write("train_mlm", {"held-out loss": {n: {"curve": c} for n, c in curves.items()}})
    draw(curves)


def draw(curves: dict[str, list]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for (name, points), style in zip(curves.items(), ("-", "--"), strict=True):
        axis.plot(*zip(*points, strict=True), style, label=name)
    axis.set(
        xlabel="step",
        ylabel="held-out masked-LM loss (nats)",
        title="wikipedia_en, same weights and batches",
    )
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(RESULTS / folder_of_device() / "train_mlm.png", dpi=120)


if __name__ == "__main__":
    main()
