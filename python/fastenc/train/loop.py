"""The training loop. accelerate starts the processes, and provides autocast and reductions between processes."""

import json
import math
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fastenc._base.extras import require
from fastenc._base.files import write_text_atomically
from fastenc._base.prefetch import prefetch
from fastenc._base.seeds import derive_seed
from fastenc.data import BatchSampler, Group
from fastenc.models.pretrained import PretrainedModel, copy_parameters
from fastenc.nn.adamw import AdamW
from fastenc.packing import ModelArguments
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig, check_same, fine_tuning_lr
from fastenc.train.evaluations import Best, Evaluations
from fastenc.train.interruption import Interruption, TrainingInterrupted
from fastenc.train.model_card import CARD, Origin, model_card
from fastenc.train.optimizer import build_optimizer, lr_factor
from fastenc.train.optimizer_step import CollatedBatch, OptimizerStep
from fastenc.train.parallel import PARALLEL
from fastenc.train.processes import on_main_process, process_state, together
from fastenc.train.run_report import RunReport, duration
from fastenc.train.schedule import Schedule
from fastenc.train.step_statistics import StepStatistics
from fastenc.train.tracking import check_trackers

Collate = Callable[[Sequence[Any], int], ModelArguments]
Evaluate = Callable[[Any], dict[str, float]]
STEPS_TO_ESTIMATE = 5  # after this many steps the remaining time is estimated and printed


class Trainer:
    """Trains a model that takes ``{"batch": PackedBatch, "labels": Tensor}`` and returns an output with ``.loss``.

    An optimiser step uses the gradient of the mean loss over all labelled items of its micro-batches on all processes.
    So the weight of a micro-batch is its number of labels that are not -100. A loss with several terms
    (``output.terms``) is the weighted sum of such means. Each term has a separate number of items, which
    ``collate.items(arguments)`` counts.

    Checkpoints contain the weights, AdamW's moments, the states of the random generators and the position in the data.
    So a run that is killed and resumed gives the same weights as an uninterrupted run, bit for bit on a CPU with the
    same number of threads and processes. With another number of processes, the micro-batches are the same if a step has
    the same number of them. The weights then differ by rounding and by dropout, because each process has a separate
    random generator.

    With ``parallel="fsdp"`` the given model is sharded and stays so. Load the result from the output folder.

    On a GPU, the host does not wait for a step. Losses stay on the device until a line of the log, an evaluation or a
    checkpoint reads them. If the loss or the gradient of a step is not finite, this step and all later ones change no
    weights, and the next reading raises.

    Files in ``config.output``: checkpoint-*/, log.jsonl (its ``epoch`` is the number of passes over the data so far,
    3.0 at the end of the third), curves.png (if matplotlib is installed) and, at the end, the best model, metrics.json
    and a model card.

    Args:
        model: one of ``fastenc.models``; training starts from its weights.
        config: settings of the run.
        examples: the training set.
        lengths: number of tokens of each example.
        collate: function of (examples, step) that returns the model's arguments. It is called in a thread ahead of the
            steps. Its random numbers may depend on ``step`` only, a number that differs between all micro-batches.
        groups: groups of examples, such as languages, each with a share of an epoch (``BatchSampler``).
        evaluate: function of the model that returns metrics. It is called on the main process while the others wait.
            None: the last weights are the result.
        calibrate: function of the model with its final weights. It may set values that ``save_pretrained`` writes
            beside the weights. It returns metrics that replace those of the evaluation, or {}. It is called on the main
            process.
        metric: the metric that chooses the best checkpoint.
        higher_is_better: whether a larger value of the metric is better.
        settings: other settings that the result depends on (masking, label names), as JSON values. A resumed run must
            have the same settings and configuration.
        summary: lines about the data, which are printed before the first step.
        titles: {metric: title} of metrics whose name alone does not say what they measure.
        origin: the first weights and the files of the data, for the model card.
        held_out: number of items on which ``evaluate`` measures, for the model card.
        show_progress: None: a bar if stderr is a terminal, else the lines of the log. False: neither.
    Raises: ValueError for settings that the model, the device or the number of processes does not support.
    """

    def __init__(
        self,
        model: PretrainedModel,
        config: TrainConfig,
        examples: Sequence[Any],
        lengths: Sequence[int] | torch.Tensor,
        collate: Collate,
        *,
        groups: Sequence[Group] | None = None,
        evaluate: Evaluate | None = None,
        calibrate: Evaluate | None = None,
        metric: str = "loss",
        higher_is_better: bool = False,
        settings: Mapping[str, object] | None = None,
        summary: Sequence[str] = (),
        titles: Mapping[str, str] | None = None,
        origin: Origin | None = None,
        held_out: int | None = None,
        show_progress: bool | None = None,
    ):
        if config.patience is not None and evaluate is None:
            raise ValueError(
                f"patience={config.patience} counts evaluations, got no data for them: give dev data, or leave out "
                "patience"
            )
        check_trackers(config.track)
        process_state(config.device)
        self.accelerator = _accelerator(config)
        self.learning_rate = config.learning_rate or fine_tuning_lr(model.config.hidden_size)
        config = replace(config, learning_rate=self.learning_rate)
        self.config, self.output_dir = config, Path(config.output)
        self.examples, self.collate = examples, collate
        self.evaluate, self.calibrate = evaluate, calibrate
        self.evaluations = Evaluations(metric, higher_is_better)
        self.summary, self.titles = summary, titles
        self.report = RunReport(self.accelerator, self.output_dir, show_progress)
        self.origin, self.held_out = origin, held_out
        self.processes = self.accelerator.num_processes
        lengths = torch.as_tensor(lengths)
        sampler = BatchSampler(
            lengths,
            config.batch_size,
            batch_tokens=config.batch_tokens,
            groups=groups,
            shuffle=True,
            seed=config.seed,
        )
        self.schedule = Schedule(sampler, config.micro_batches(self.processes) * self.processes)
        self.total_steps = config.max_steps or sum(map(self.schedule.steps, range(config.epochs)))
        self.warmup_steps = config.warmup_of(self.total_steps)
        # This seed decides dropout. Each process drops other units.
        torch.manual_seed(config.seed + self.accelerator.process_index)
        self.model_class = type(model)
        # The last bits of PyTorch's sums depend on a weight's alignment in memory, which differs between a new model
        # and one that is loaded from a checkpoint.
        copy_parameters(model)
        self.fingerprint = self._fingerprint(model, lengths, settings or {})
        build = partial(build_optimizer, config=config, device=self.accelerator.device)
        self.parallel = PARALLEL[config.parallel](self.accelerator, model, build)
        self.model, self.optimizer = self.parallel.model, self.parallel.optimizer
        self.adamw = self.parallel.adamw
        self.optimizer_step = OptimizerStep(self.accelerator, self.parallel, collate, config)
        # There is no device to wait for.
        self.reads_every_step = self.accelerator.device.type == "cpu"
        self.step = 0
        self.interruption = Interruption()

    def _fingerprint(
        self, model: PretrainedModel, lengths: torch.Tensor, settings: Mapping[str, object]
    ) -> dict[str, object]:
        """What the result depends on, as JSON values. A resumed run must have the same."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        data = f"{len(self.examples)} examples of {int(lengths.sum())} tokens"
        fingerprint = {
            **self.config.fingerprint(),
            **{f"model.{name}": value for name, value in _model_settings(model).items()},
            **settings,
            "metric": self.metric,
            "trained parameters": trained,
            "data": f"{data} (checksum {_checksum(lengths):08x})",
            "micro-batches a step (accumulation * processes)": self.schedule.micro_batches,
        }
        return json.loads(json.dumps(fingerprint))

    @property
    def plain_model(self) -> PretrainedModel:
        """The model without accelerate's wrappers."""
        return self.parallel.plain_model

    @property
    def metric(self) -> str:
        """The metric that chooses the best checkpoint."""
        return self.evaluations.metric

    @property
    def best(self) -> Best | None:
        """The best evaluation so far."""
        return self.evaluations.best

    def train(self, resume: bool = False, overwrite: bool = False) -> dict[str, float]:
        """Train to the end, and write the result.

        Args:
            resume: continue from the newest checkpoint in the output folder; if the folder has none, start.
            overwrite: delete the run that the output folder has, and start.
        Returns: the metrics of the best evaluation; {} without ``evaluate``.
        Raises: ValueError if the output folder has a checkpoint and neither ``resume`` nor ``overwrite`` is True, has a
            model without a checkpoint and ``overwrite`` is False, does not exist and ``resume`` is True, is used by
            another process, or has a checkpoint of other settings.
            FloatingPointError if the loss or the gradient is not finite. OSError if a checkpoint cannot be written.
            TrainingInterrupted after SIGINT or SIGTERM, when a checkpoint of the last step has been written.
        """
        with checkpoints.open_output(self.output_dir, resume, overwrite) as checkpoint_folder:
            if overwrite:
                together(self._remove_earlier_run)
            self._begin(checkpoint_folder)
            try:
                with self.interruption:
                    self._run()
            finally:
                self.report.close()
            self._finish()
        return self.best["metrics"] if self.best else {}

    def _remove_earlier_run(self) -> None:
        if self.accelerator.is_main_process:
            checkpoints.remove_run(self.output_dir)

    def _run(self) -> None:
        if self._out_of_patience():  # a run that was resumed after its end
            return
        config, self.statistics, first = self.config, StepStatistics(), self.step
        remaining = islice(self.schedule.batches_from(self.step), self.total_steps - self.step)
        collated = prefetch(self._collate_step, enumerate(remaining, self.step))
        steps_with_bar = self.report.bar(collated, self.step, self.total_steps)
        self.report.print("\n".join([*self.summary, f"{self.total_steps:,} optimiser steps"]))
        for micro_batches in steps_with_bar:
            self._optimiser_step(micro_batches)
            self.step += 1
            last = self.step == self.total_steps
            epoch, done = self.schedule.position(self.step)
            steps = self.schedule.steps(epoch)
            logs = self.step % config.log_every == 0 or last
            evaluates = config.evaluation_due(self.step, done, steps) or last
            saves = evaluates or (config.save_every and self.step % config.save_every == 0)
            if logs or saves:
                self._read_statistics()
            if logs:
                self._log(epoch + done / steps)
            if evaluates:
                self._evaluate()
                self.report.plot_if_due(**self._about_curves())
            stops = self._interrupted()
            if saves or stops:
                self._save()
                self.statistics.restart_clock()
                # An evaluation may change weights in a way that the optimiser does not see.
                if isinstance(self.adamw, AdamW):
                    self.adamw.forget_copies()
            if stops and not last:
                self.report.plot(**self._about_curves())
                self._raise_interrupted()
            if self._out_of_patience():
                return
            if self.step - first == STEPS_TO_ESTIMATE and self.statistics.steps and not last:
                self.report.print(f"about {duration(self._time_left())} left")

    def _out_of_patience(self) -> bool:
        """Whether to stop because the evaluations no longer improve."""
        patience = self.config.patience
        if patience is None or self.evaluations.since_best < patience:
            return False
        self.report.print(
            f"stopped at step {self.step:,}: {patience} evaluations without an improvement"
        )
        return True

    def _log(self, epoch: float) -> None:
        """Write the line for the steps since the last one, and show it in the bar."""
        line = self.statistics.close()
        self.report.show(line)
        # That of the weights, without the factor for a mix of layers.
        learning_rate = max(
            float(group["lr"]) / max(group["lr_scale"], 1.0)
            for group in self.optimizer.param_groups
        )
        note = f"left {duration(self._time_left())}"
        self.report.write(self.step, note, epoch=epoch, learning_rate=learning_rate, **line)

    def _interrupted(self) -> bool:
        """Whether to stop because of a signal. With several processes, all decide by the votes that were read last."""
        if self.processes == 1:
            return self.interruption.signal is not None
        return self.statistics.stop_votes > 0

    def _raise_interrupted(self) -> None:
        folder = checkpoints.folder_of(self.output_dir, self.step)
        message = (
            f"stopped at step {self.step:,} of {self.total_steps:,} with the checkpoint {folder}: the same again with "
            "resume=True continues from there"
        )
        raise TrainingInterrupted(message, self.interruption.signal or signal.SIGTERM)

    def _time_left(self) -> float:
        """Seconds that the remaining steps take at the speed so far, evaluations and checkpoints excluded."""
        return self.statistics.seconds_per_step() * (self.total_steps - self.step)

    def _collate_step(self, numbered: tuple[int, list[list[int]]]) -> list[CollatedBatch]:
        """This process's micro-batches in a step.

        Process p takes the micro-batches p, p + processes, and so on. The last step of an epoch may have too few for
        all processes. Then a process computes another one's micro-batch again with weight 0, because every process has
        to take part in gradient synchronisation.

        ``numbered``: (step, the step's micro-batches as example indices).
        """
        step, batches = numbered
        local = []
        slots = -(-len(batches) // self.processes) * self.processes
        for slot in range(self.accelerator.process_index, slots, self.processes):
            index = min(slot, len(batches) - 1)
            chosen = [self.examples[i] for i in batches[index]]
            number = step * self.schedule.micro_batches + index
            local.append(CollatedBatch(self.collate(chosen, number), is_counted=index == slot))
        return local

    def _begin(self, folder: Path | None) -> None:
        """Load the checkpoint from which the run continues, if there is one, and open the log."""
        if folder is not None:
            state = checkpoints.read_state(folder)
            check_same(state["settings"], self.fingerprint, str(folder))
            self.evaluations.restore(state)
            self._check_best_folder()
            self.parallel.load(checkpoints.read_weights(folder, self.model_class))
            states = checkpoints.load_optimizer(folder, self.plain_model, self.adamw)
            self._restore_random_states(states, state["step"])
            self.step = state["step"]
        if self.accelerator.is_main_process:
            self._remove_old()
        self.report.open(self.step, self.fingerprint)

    def _restore_random_states(self, states: dict[str, torch.Tensor], step: int) -> None:
        """Restore this process's random states. If the number of processes has changed, seed new ones."""
        index = self.accelerator.process_index
        if len({key.partition(".")[0] for key in states}) != self.processes:
            torch.manual_seed(derive_seed(self.config.seed, step, index))
            return
        local = {
            key.removeprefix(f"{index}."): value
            for key, value in states.items()
            if key.startswith(f"{index}.")
        }
        checkpoints.restore_random_state(local)

    def _optimiser_step(self, micro_batches: list[CollatedBatch]) -> None:
        """Update the weights once. The statistics get the losses, gradient norm and tokens of all processes."""
        factor = lr_factor(self.step, self.warmup_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"] * factor
        self.model.train()
        stop_vote = self.interruption.signal is not None
        names, results = self.optimizer_step.gradient(micro_batches, stop_vote)
        self.statistics.add(self.step + 1, names, results)
        if self.reads_every_step:
            self._read_statistics()
        self.optimizer_step.update()

    def _read_statistics(self) -> None:
        """Read the losses of the steps since the last reading. On a GPU, only this waits for the device.

        Raises: FloatingPointError for the first step whose loss or gradient is not finite.
        """
        for step, loss, norm in self.statistics.read():
            for what, result in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(result):
                    last = checkpoints.latest_checkpoint(self.output_dir) or "none yet"
                    raise FloatingPointError(
                        f"the {what} must be finite, got {result} at step {step}: lower learning_rate, or look at this "
                        f"step's data. Last good checkpoint: {last}"
                    )

    def _about_curves(self) -> dict[str, Any]:
        """The metric, the best step and the title of curves.png."""
        files = self.origin.train if self.origin else ()
        data = ", ".join(Path(name).name for name in files) or f"{len(self.examples):,} examples"
        return {
            "metric": self.metric,
            "best": self.best["step"] if self.best else None,
            "title": f"{self.output_dir.name}, trained on {data}",
        }

    def _evaluate(self) -> None:
        """Evaluate the model, log the metrics, and record this step if it is the best so far."""
        if self.evaluate is None:
            return
        before = checkpoints.random_state()
        model = self.parallel.whole_model()
        with self.accelerator.autocast():
            metrics = on_main_process(partial(self._measure, self.evaluate, model))
        checkpoints.restore_random_state(before)
        values = {f"eval_{name}": value for name, value in metrics.items()}
        self.report.write(self.step, "", **values)
        self.evaluations.add(self.step, metrics)

    def _measure(self, function: Evaluate, model: PretrainedModel | None) -> dict[str, float]:
        """Call ``function`` with the whole model, which is on the training device during the call."""
        assert model is not None
        device = next(model.parameters()).device
        metrics = function(model.to(self.accelerator.device).eval())
        model.to(device)
        return metrics

    def _save(self) -> None:
        """Write a checkpoint."""
        utils = require("accelerate.utils", extra="train")
        local = {
            f"{self.accelerator.process_index}.{name}": state
            for name, state in checkpoints.random_state().items()
        }
        states = {
            k: v for of_process in utils.gather_object([local]) for k, v in of_process.items()
        }
        checkpoints.save_checkpoint(
            self.output_dir,
            self.step,
            self.parallel.whole_model(),
            checkpoints.flat_optimizer(self.plain_model, self.adamw),
            states,
            {"settings": self.fingerprint, **self.evaluations.state()},
        )
        if self.accelerator.is_main_process:
            self._remove_old()
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        """Load the best checkpoint's weights into the model, and write the model, its metrics, curves and card."""
        self.parallel.finish()
        if isinstance(self.adamw, AdamW):
            self.adamw.release()
        if (folder := self._best_folder()) is not None:
            self.parallel.load(checkpoints.read_weights(folder, self.model_class))
        model = self.parallel.whole_model()
        if self.calibrate is not None and self.best is not None:
            metrics = on_main_process(partial(self._measure, self.calibrate, model))
            self.best["metrics"] = {**self.best["metrics"], **metrics}
        if self.accelerator.is_main_process:
            assert model is not None
            model.save_pretrained(self.output_dir)
            metrics = self.best["metrics"] if self.best else {}
            step = self.best["step"] if self.best else self.step
            text = json.dumps({"step": step, **metrics}, indent=1)
            write_text_atomically(self.output_dir / checkpoints.METRICS, text)
            about = self.fingerprint, self.summary, metrics, self.titles
            card = model_card(self.output_dir, model, *about, self.origin, self.held_out)
            write_text_atomically(self.output_dir / CARD, card)
            self.report.plot(**self._about_curves())
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        keep = self.config.keep_checkpoints
        checkpoints.remove_old(self.output_dir, keep, self._best_folder())

    def _check_best_folder(self) -> None:
        """Raises: ValueError if the best checkpoint so far is missing, whose weights may be the result."""
        folder = self._best_folder()
        if folder is not None and not folder.is_dir():
            raise ValueError(
                f"{folder} must be there, the best checkpoint of the run that is resumed, got no such folder: put it "
                "back, or start again with overwrite=True"
            )

    def _best_folder(self) -> Path | None:
        return checkpoints.folder_of(self.output_dir, self.best["step"]) if self.best else None


def _accelerator(config: TrainConfig) -> Any:
    accelerate = require("accelerate", extra="train")
    # Accelerate stores the first Trainer's precision for the whole process, but a later Trainer may have another.
    accelerate.state.AcceleratorState._reset_state()
    return accelerate.Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(config.track) or None,
        project_dir=config.output,
        # Autocast's cache frees the casts of weights when its context ends, but a recorded graph would still read them.
        kwargs_handlers=[accelerate.utils.AutocastKwargs(cache_enabled=not config.graph)],
    )


def _checksum(lengths: torch.Tensor) -> int:
    """CRC-32 of the lengths as int64. It is computed in blocks, because the tensor may be larger than the memory."""
    checksum = 0
    for block in lengths.split(2**20):
        checksum = zlib.crc32(block.long().contiguous().numpy(), checksum)
    return checksum


def _model_settings(model: PretrainedModel) -> dict[str, object]:
    """{name: value} of the configuration's fields that affect what the model computes."""
    config = model.config
    return {field.name: getattr(config, field.name) for field in fields(config) if field.compare}
