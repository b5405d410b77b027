"""An epoch of a classifier's head over frozen MiniLM: from the encoder, and from its outputs on disk.

python -m benchmarks.train_features [--examples N] [--threads N]    (needs FASTENC_DATA)

SST-2's first phrases, batches of 32. An epoch is half the difference between runs of three and of one, so that loading,
hashing and writing checkpoints are no part of it; CPU time of the process, which other work on the machine leaves as it
is, beside the time that passed.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.task_sets import SETS
from fastenc.adapt import freeze_encoder
from fastenc.data import LabelledData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SequenceClassification
from fastenc.train import TrainConfig, task_trainer


def run(data: LabelledData, epochs: int, features: Path | None) -> tuple[float, float]:
    """(CPU seconds, seconds) of a whole run."""
    task = SequenceClassification()
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(
            scratch, epochs=epochs, eval_every=10**9
        )  # a checkpoint at the end alone
        model = task.load(minilm_folder(), data)
        freeze_encoder(model)
        begin = time.process_time(), time.perf_counter()
        task_trainer(task, model, data, config, features=features).train()
        return time.process_time() - begin[0], time.perf_counter() - begin[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data, _, _ = SETS["sst2"].read(options.examples)
    with tempfile.TemporaryDirectory() as kept:
        first = run(data, 1, Path(kept))
        print(f"first run, one epoch, outputs computed: {first[0]:.2f} s CPU, {first[1]:.2f} s")
        for name, folder in (("from the encoder", None), ("from its outputs on disk", Path(kept))):
            one, three = (run(data, epochs, folder) for epochs in (1, 3))
            cpu, passed = ((after - before) / 2 for before, after in zip(one, three, strict=True))
            print(f"an epoch {name}: {cpu:.3f} s CPU, {passed:.3f} s")


if __name__ == "__main__":
    main()
