"""Runs, one after another, on the processes that torchrun starts.

    torchrun -m tests.helpers.parallel_runs '[[FOLDER, {...}], ...]'

``start`` executes each run with its options. The examples that a process computes are written down.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fastenc.train.processes import process_state
from tests.helpers.curves import without_curves
from tests.helpers.training_run import build_objective, build_task


def start(folder, *, resume=False, die_at=None, poison_at=None, full_disk=False, **options):
    """Train; returns the metrics, or None for a run that ended before step ``die_at``.

    poison_at: from this step on, AdamW is told that a gradient was not finite.
    full_disk: the second process cannot write; the error is returned.
    """
    if full_disk:
        return with_full_disk(partial(start, folder, **options))
    make = build_task if "task" in options else build_objective
    trainer = make(folder, **options)
    made, consumed, collate, step = [], [], trainer.collate, trainer._optimiser_step
    indices = {id(example): index for index, example in enumerate(trainer.examples)}

    def watched_collate(examples, serial):
        made.append((serial, [indices[id(example)] for example in examples]))
        return collate(examples, serial)

    def watched_step(window):
        if trainer.step == die_at:
            raise KeyboardInterrupt
        if trainer.step == poison_at:
            trainer.optimizer_step.found_inf.fill_(1)
        # Batches are made before their steps, so a run that ends early has made some that no step computes.
        consumed.extend(
            row for row in made if row[0] // trainer.schedule.micro_batches == trainer.step
        )
        step(window)

    trainer.collate, trainer._optimiser_step = watched_collate, watched_step
    if hasattr(collate, "items"):
        watched_collate.items = collate.items
    try:
        metrics = trainer.train(resume=resume)
    except KeyboardInterrupt:
        metrics = None
    name = f"consumed-{bool(resume):d}-{process_state().process_index}.json"
    (Path(folder) / name).write_text(json.dumps(consumed))
    return metrics


def with_full_disk(run):
    def write(*arguments):
        if process_state().process_index == 1:
            raise OSError("No space left")
        return real(*arguments)

    real, HuggingFaceStorageWriter.write_data = HuggingFaceStorageWriter.write_data, write
    try:
        run()
    except OSError as error:
        return str(error)
    finally:
        HuggingFaceStorageWriter.write_data = real


if __name__ == "__main__":
    state, results = process_state(), []
    with without_curves():
        for folder, options in json.loads(sys.argv[1]):
            results.append(start(folder, **options))
    group = torch.distributed.distributed_c10d._get_default_group()
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    own = {"index": state.process_index, "timeout": timeout, "results": results}
    print(json.dumps(own), flush=True)
    torch.distributed.barrier()
    # On a busy machine torch's communication threads can abort a process at its exit, when all its work is written.
    os._exit(0)
