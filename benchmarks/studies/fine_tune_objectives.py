"""What the checkpoints of train_objectives are worth on SST-2, fine-tuned by fastenc and by transformers' Trainer.

python -m benchmarks.studies.fine_tune_objectives NAME=CHECKPOINT ... [--seeds 0 1 2]    (needs FASTENC_DATA)

8,000 phrases, 2 epochs; the same batches in the same order and the same settings as in train_tasks. The scores stand
beside the spread of the checkpoint's last hidden states on the dev set before training: their mean distance from their
mean, divided by their mean length. If it is near 0, every token has the same state.

The discriminator from MiniLM is what "python -m benchmarks.studies.train_objectives electra" leaves; its control is
MiniLM itself (fastenc.demo.checkpoint.minilm_folder). The discriminator from random weights is checkpoint-00002100 of
the following run, and its control is the initial weights of this run:

fastenc pretrain wikipedia_en/train.txt.gz --objective electra --tokenizer build/train_objectives --layers 2
    --hidden 128 --dropout 0 --block-size 64 --batch-size 32 --lr 2e-3 --warmup 0.1 --max-steps 3000 --eval-every 300
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies._runs import Run, collect
from benchmarks.studies.task_sets import SETS
from benchmarks.studies.train_tasks import OURS, THEIRS, ours, theirs
from fastenc.models import EncoderConfig
from fastenc.models.checkpoint import read_config
from fastenc.train import TrainConfig, fine_tuning_lr

RESULT, PHRASES, EPOCHS = "fine_tune_objectives", 8000, 2
SET = replace(SETS["sst2"], most=PHRASES)


def one_run(checkpoint: str, provider: str, seed: int) -> dict:
    """{"dev", "spread", "seconds", "cpu_seconds"} of a checkpoint."""
    start = Path(checkpoint)
    train, dev, _ = SET.read()
    rate = fine_tuning_lr(EncoderConfig.from_hf(read_config(start)).hidden_size)
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(scratch, epochs=EPOCHS, seed=seed, learning_rate=rate)
        data = (SET.task, train, dev, None, SET.metric, config)
        result = ours(*data, start) if provider == OURS else theirs(*data, start=start)
    return result | {"spread": spread(start, train, dev)}


@torch.inference_mode()
def spread(start: Path, train: Any, dev: Any) -> float:
    """mean |x - mean x| / mean |x|, where x are the last states of all tokens of ``dev``."""
    model = SET.task.load(start, train).eval()
    batch = SET.task.collate(SET.task.encode(dev, model))["batch"]
    states = model.encoder(batch).last_hidden_state
    return ((states - states.mean(0)).norm(dim=1).mean() / states.norm(dim=1).mean()).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    named = [each.split("=", 1) for each in options.checkpoints]
    runs = (
        Run(f"{name}, seed {seed}", provider, SET.metric, one_run, (checkpoint, provider, seed))
        for provider in (OURS, THEIRS)
        for seed in options.seeds
        for name, checkpoint in named
    )
    collect(RESULT, runs, None)


if __name__ == "__main__":
    main()
