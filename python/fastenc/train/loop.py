"""The training loop, over accelerate."""

import json
import math
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc._progress import progress_bar
from fastenc._seeds import derive_seed
from fastenc._transfer import send, send_arguments
from fastenc.data import BatchSampler, Group
from fastenc.data.prefetch import prefetch
from fastenc.models import LossTerm
from fastenc.models.graph_training import RecordedSteps, training_recorder
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives.loss_terms import count_items, loss_terms, weighted_sum
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig, check_same, fine_tuning_lr
from fastenc.train.interruption import Interruption, TrainingInterrupted
from fastenc.train.log import Log
from fastenc.train.model_card import write_card
from fastenc.train.optimizer import build_optimizer, lr_factor
from fastenc.train.parallel import PARALLEL
from fastenc.train.plot import plot_log
from fastenc.train.processes import on_main_process, process_state
from fastenc.train.tracking import check_trackers, start_trackers, stop_trackers

Collate = Callable[[Sequence[Any], int], dict[str, Any]]
Evaluate = Callable[[Any], dict[str, float]]
# Steps after which the time that the rest will take is told.
STEPS_TO_ESTIMATE = 5


class Trainer:
    """Trains a model that takes ``{"batch": PackedBatch, "labels": Tensor}`` and returns an output with ``.loss``.

    An optimiser step is the gradient of the mean loss over all labelled items of its micro-batches on all
    processes: each micro-batch counts by its number of labels that are not -100. A loss of several parts
    (``output.terms``) is the weighted sum of such means, each over its own items, which ``collate.items(arguments)``
    counts. Checkpoints hold the weights, AdamW's moments, the random generators and the position in the data, so that a
    run that was killed and resumed gives the weights of one that was not: bit for bit on a CPU with the same number
    of threads and processes. With another number of processes the micro-batches are the same if a step has the same
    number of them; the weights then differ by rounding, and by dropout, as random generators belong to processes.

    With ``parallel="fsdp"`` the model given becomes a shard of itself and stays one: load the result from the folder.

    On a GPU a step waits for nothing: losses stay there until a line of the log, an evaluation or a checkpoint reads
    them. A step whose loss or gradient is not finite changes no weights, nor does any after it, and the next reading
    raises.

    Args:
        model: one of ``fastenc.models``; its weights on entry are the first ones.
        examples, lengths: the training set and the tokens of each example.
        collate: (examples, step) → model arguments, called in a thread ahead of the steps; its random numbers may
            depend on ``step`` only, which is different for every micro-batch and process.
        groups: groups of examples, such as languages, each with its share of an epoch (``BatchSampler``).
        evaluate: model → metrics, called on the main process while the others wait; None keeps the last weights.
        calibrate: (model with its final weights) → metrics that take the place of those of its evaluation, or {};
            may set what ``save_pretrained`` writes beside the weights. Called on the main process.
        metric: the metric that chooses the best checkpoint; ``higher_is_better``: in which direction.
        settings: what else the result depends on (masking, names of the labels), as JSON values; like the
            configuration, a resumed run must have the same.
        summary: lines about the data, told before the first step.
        titles: what to call a metric whose name alone leaves open what it measures.
        show_progress: None: a bar if stderr is a terminal, else the log's lines there; False: neither.
    Files in ``config.output``: checkpoint-*/, log.jsonl (its ``epoch`` counts the passes over the data that are
    done, 3.0 at the end of three), curves.png (with
    matplotlib) and, at the end, the best model, its metrics.json and its model card.
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
        settings: dict[str, Any] | None = None,
        summary: Sequence[str] = (),
        titles: Mapping[str, str] | None = None,
        show_progress: bool | None = None,
    ):
        accelerate = require("accelerate", extra="train")
        check_trackers(config.track)
        process_state(config.device)
        # Accelerate keeps the first run's precision for the process; a later Trainer may have another.
        accelerate.state.AcceleratorState._reset_state()
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            log_with=list(config.track) or None,
            project_dir=config.output,
            # The cache would hand a graph casts of weights that it frees on its exit.
            kwargs_handlers=[accelerate.utils.AutocastKwargs(cache_enabled=not config.graph)],
        )
        self.learning_rate = config.learning_rate or fine_tuning_lr(model.config.hidden_size)
        config = replace(config, learning_rate=self.learning_rate)
        self.config, self.output_dir = config, Path(config.output)
        self.examples, self.collate = examples, collate
        self.evaluate, self.metric, self.higher_is_better = evaluate, metric, higher_is_better
        self.calibrate = calibrate
        self.show_progress, self.summary, self.titles = show_progress, summary, titles
        self.processes = self.accelerator.num_processes
        lengths = torch.as_tensor(lengths)
        # One order for all processes, so that another number of them goes through the same batches.
        self.sampler = BatchSampler(
            lengths,
            config.batch_size,
            batch_tokens=config.batch_tokens,
            groups=groups,
            shuffle=True,
            seed=config.seed,
        )
        self.micro_batches = config.micro_batches(self.processes) * self.processes
        self.total_steps = config.max_steps or sum(map(self._steps, range(config.epochs)))
        self.warmup_steps = config.warmup_of(self.total_steps)
        # The seed below decides dropout; each process drops other units.
        torch.manual_seed(config.seed + self.accelerator.process_index)
        self.kind = type(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        build = partial(build_optimizer, config=config)
        self.parallel = PARALLEL[config.parallel](self.accelerator, model, build)
        self.model, self.optimizer = self.parallel.model, self.parallel.optimizer
        self.adamw = self.parallel.adamw
        device = self.accelerator.device
        # AdamW's kernel changes nothing while this is 1. torch's GradScaler skips a step in the same way.
        self.found_inf = self.adamw.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self.recorded_steps = self._record_steps() if config.graph else None
        self.reads_every_step = device.type == "cpu"  # where it costs nothing
        self.step = 0
        self._epoch = self._epoch_start = 0
        self.best: dict[str, Any] | None = None
        self.evaluations_since_best = 0
        self.interruption = Interruption()
        fingerprint = {
            **config.fingerprint(),
            **{f"model.{name}": value for name, value in _model_settings(model).items()},
            **(settings or {}),
            "metric": metric,
            "trained parameters": trained,
            "data": f"{len(examples)} examples of {int(lengths.sum())} tokens (checksum {_checksum(lengths):08x})",
            "micro-batches a step (accumulation * processes)": self.micro_batches,
        }
        self.fingerprint = json.loads(json.dumps(fingerprint))

    def _record_steps(self) -> RecordedSteps:
        if self.processes > 1:
            raise ValueError(
                f"a CUDA graph holds the steps of one process, got graph=True and {self.processes} processes: leave it "
                "out, or start one"
            )
        parts = (self._micro_batch, self._finish_gradient)
        recorder = training_recorder(self.accelerator.device)
        steps = RecordedSteps(self.plain_model, self.adamw, *parts, recorder)
        self.found_inf = steps.found_inf
        return steps

    @property
    def plain_model(self) -> PretrainedModel:
        """The model without accelerate's wrappers."""
        return self.parallel.plain_model

    def train(self, resume: bool = False) -> dict[str, float]:
        """Run to the end and return the best evaluation's metrics ({} without ``evaluate``).

        Args:
            resume: go on from the newest checkpoint in the output folder; start if the folder has none yet.
        Raises: ValueError when the output folder holds a run and ``resume`` is False, does not exist and ``resume`` is
            True, is used by another process, or holds a checkpoint of other settings; FloatingPointError when the loss
            or its gradient is not finite; OSError when a checkpoint cannot be written; TrainingInterrupted after
            SIGINT or SIGTERM, when a checkpoint of the last step is written.
        """
        with checkpoints.open_output(self.output_dir, resume) as found:
            self._begin(found)
            try:
                with self.interruption:
                    self._run()
            finally:
                stop_trackers(self.accelerator)
            self._finish()
        return self.best["metrics"] if self.best else {}

    def _run(self) -> None:
        config, self.statistics = self.config, _Statistics()
        main, first = self.accelerator.is_main_process, self.step
        steps_left = islice(self._batches_of_steps(), self.total_steps - self.step)
        bar = progress_bar(
            prefetch(self._collate_step, enumerate(steps_left, self.step)),
            "training",
            "step",
            self.show_progress if main else False,
            initial=self.step,
            total=self.total_steps,
        )
        self._tell("\n".join([*self.summary, f"{self.total_steps:,} optimiser steps"]))
        shows_bar = hasattr(bar, "set_postfix")
        self.prints_lines = self.show_progress is None and not shows_bar
        for batches in bar:
            self._optimiser_step(batches)
            self.step += 1
            last = self.step == self.total_steps
            epoch, done = self._position()
            steps = self._steps(epoch)
            logs = self.step % config.log_every == 0 or last
            evaluates = config.evaluation_due(self.step, done, steps) or last
            saves = evaluates or (config.save_every and self.step % config.save_every == 0)
            if logs or saves:
                self._read_statistics()
            if logs:
                line = self.statistics.close()
            if logs and main:
                if shows_bar:
                    bar.set_postfix({name: _short(value) for name, value in line.items()})
                self._write(
                    f"left {_duration(self._time_left())}",
                    epoch=epoch + done / steps,
                    # That of the weights; a mix of layers has a higher one.
                    learning_rate=max(
                        float(group["lr"]) / max(group["lr_scale"], 1.0)
                        for group in self.optimizer.param_groups
                    ),
                    **line,
                )
            if evaluates:
                self._evaluate()
                if main:
                    plot_log(self.log.path, self.output_dir / "curves.png", self.metric)
            stops = self._interrupted()
            if saves or stops:
                self._save()
                self.statistics.restart_clock()
            if stops and not last:
                self._raise_interrupted()
            if config.patience and self.evaluations_since_best >= config.patience:
                self._tell(
                    f"stopped at step {self.step:,}: {config.patience} evaluations without a better one"
                )
                return
            if self.step - first == STEPS_TO_ESTIMATE and self.statistics.steps and not last:
                self._tell(f"about {_duration(self._time_left())} to go")

    def _interrupted(self) -> bool:
        """Whether a signal came: to this process, or, of several, to any, as the last read statistics tell them all."""
        if self.processes == 1:
            return self.interruption.signal is not None
        return self.statistics.stop_votes > 0

    def _raise_interrupted(self) -> None:
        folder = checkpoints.folder_of(self.output_dir, self.step)
        message = (
            f"stopped at step {self.step:,} of {self.total_steps:,}, which is kept in {folder}: the same command with "
            "--resume goes on from there"
        )
        raise TrainingInterrupted(message, self.interruption.signal or signal.SIGTERM)

    def _time_left(self) -> float:
        """Seconds that the steps left take, at the speed so far, without evaluations and checkpoints."""
        return self.statistics.seconds_a_step() * (self.total_steps - self.step)

    def _tell(self, text: str) -> None:
        """A word to the user, from the main process."""
        if self.accelerator.is_main_process and self.show_progress is not False:
            print(text, file=sys.stderr, flush=True)

    def _batches_of_steps(self) -> Iterator[list[list[int]]]:
        """The micro-batches of each optimiser step from ``self.step`` on, those of all processes, without end.

        No step crosses the end of an epoch, whose last step may have fewer.
        """
        first, done = self._position()
        start = done * self.micro_batches
        for epoch in count(first):
            batches = self.sampler.epoch(epoch, start if epoch == first else 0)
            while of_step := list(islice(batches, self.micro_batches)):
                yield of_step

    def _steps(self, epoch: int) -> int:
        """Optimiser steps of an epoch."""
        return -(-self.sampler.count(epoch) // self.micro_batches)

    def _position(self) -> tuple[int, int]:
        """The epoch of the last step, and how many of the epoch's steps are done: all, at its end."""
        while self.step > self._epoch_start + self._steps(self._epoch):
            self._epoch_start += self._steps(self._epoch)
            self._epoch += 1
        return self._epoch, self.step - self._epoch_start

    def _collate_step(
        self, numbered: tuple[int, list[list[int]]]
    ) -> list[tuple[dict[str, Any], bool]]:
        """This process's micro-batches of a step and its number: the model's arguments, and whether they count.

        The processes take turns with the micro-batches. Where there are too few, at the end of an epoch, a process
        computes another's again with weight 0, because every process has to take part in gradient synchronisation.
        """
        step, batches = numbered
        local = []
        turns = _round_up(len(batches), self.processes)
        for turn in range(self.accelerator.process_index, turns, self.processes):
            index = min(turn, len(batches) - 1)
            chosen = [self.examples[i] for i in batches[index]]
            local.append((self.collate(chosen, step * self.micro_batches + index), index == turn))
        return local

    def _begin(self, found: Path | None) -> None:
        """Take up the checkpoint found, or start."""
        if found is not None:
            state = checkpoints.read_state(found)
            check_same(state["settings"], self.fingerprint, str(found))
            self.parallel.load(checkpoints.read_weights(found, self.kind))
            states = checkpoints.load_optimizer(found, self.plain_model, self.adamw)
            self._restore_random_states(states, state["step"])
            self.step, self.best = state["step"], state["best"]
            self.evaluations_since_best = state.get("evaluations since best", 0)
        if self.accelerator.is_main_process:
            self._remove_old()
            self.log = Log(self.output_dir / "log.jsonl", self.step)
        start_trackers(self.accelerator, self.output_dir, self.step, self.fingerprint)

    def _restore_random_states(self, states: dict[str, torch.Tensor], step: int) -> None:
        """Those of this process; with another number of processes than the checkpoint's, new ones begin."""
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

    def _optimiser_step(self, batches: list[tuple[dict[str, Any], bool]]) -> None:
        """One update; the statistics get its losses, gradient norm and number of tokens, over all processes."""
        accelerator = self.accelerator
        items, tokens = [], 0
        for arguments, counted in batches:
            counts = count_items(self.collate, arguments)
            items.append(counts if counted else dict.fromkeys(counts, 0))
            tokens += arguments["batch"].total_tokens if counted else 0
        device = accelerator.device
        names = list(items[0])
        sums = [sum(counts[name] for counts in items) for name in names]
        stop_vote = self.interruption.signal is not None
        totals = torch.tensor([*sums, tokens, stop_vote], dtype=torch.float64)
        totals = accelerator.reduce(send(totals, device), "sum")
        for group in self.optimizer.param_groups:
            factor = lr_factor(self.step, self.warmup_steps, self.total_steps)
            group["lr"] = self.learning_rate * group["lr_scale"] * factor
        self.model.train()
        self.terms = names
        numbers = torch.tensor([list(counts.values()) for counts in items], dtype=torch.float64)
        # Each micro-batch's share of each term's items.
        factors = send(numbers, device) * (self.processes / totals[:-2].clamp(min=1))
        of_micro_batches = [arguments for arguments, _ in batches]
        if self.recorded_steps is not None:
            figures = self.recorded_steps(of_micro_batches, factors)
        else:
            means = torch.zeros_like(factors[0])
            for number, (arguments, row) in enumerate(zip(of_micro_batches, factors, strict=True)):
                arguments = send_arguments(arguments, device)
                with self.parallel.gradient_sync(number + 1 == len(batches)):
                    means += self._micro_batch(arguments, row)
            figures = self._finish_gradient(accelerator.reduce(means, "mean"))
        loss_and_norm, means = figures[:2], figures[2:]
        self.statistics.add(self.step + 1, names, torch.cat((loss_and_norm, totals[-2:], means)))
        if self.reads_every_step:
            self._read_statistics()
        if self.recorded_steps is None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, arguments: Mapping[str, Any], factors: torch.Tensor) -> torch.Tensor:
        """Add a micro-batch's gradient; returns the mean of each term of its loss times its factor."""
        with self.accelerator.autocast():
            terms = loss_terms(self.model(**arguments))
        scaled = {
            name: LossTerm(terms[name].mean * factor, terms[name].weight)
            for name, factor in zip(self.terms, factors.unbind(), strict=True)
        }
        # accelerator.backward would divide by the launcher's own accumulation setting
        weighted_sum(scaled).backward()
        self.term_weights = [part.weight for part in scaled.values()]
        return torch.stack([part.mean for part in scaled.values()]).detach()

    def _finish_gradient(self, means: torch.Tensor) -> torch.Tensor:
        """Clip the gradient, and forbid updates where it or the loss is not finite.

        Returns: float64 (loss, gradient norm, each term's loss).
        """
        # Products by host numbers: a tensor of the weights would be copied to the device, and waited for.
        pairs = zip(means.unbind(), self.term_weights, strict=True)
        loss = torch.stack([mean * weight for mean, weight in pairs]).sum()
        limit = self.config.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        figures = torch.cat((torch.stack((loss, norm.double())), means))
        self.found_inf.logical_or_(~figures.isfinite().all())
        return figures

    def _read_statistics(self) -> None:
        """Read the losses of the steps since the last reading: on a GPU only this waits for it.

        Raises: FloatingPointError for the first step whose loss or gradient is not finite.
        """
        for step, loss, norm in self.statistics.read():
            for what, result in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(result):
                    last = checkpoints.latest_checkpoint(self.output_dir) or "none yet"
                    raise FloatingPointError(
                        f"the {what} is {result} at step {step}: lower learning_rate, or look at this step's data. "
                        f"Last good checkpoint: {last}"
                    )

    def _write(self, note: str = "", **values: float) -> None:
        """A line of the log, of the trackers and, with the note and where there is no bar, of stderr."""
        self.log.write(step=self.step, **values)
        self.accelerator.log(values, step=self.step)
        if self.prints_lines:
            shown = {name: value for name, value in values.items() if name != "steps_per_day"}
            words = [f"step {self.step:,} of {self.total_steps:,}"]
            words += [f"{name} {_short(value)}" for name, value in shown.items()]
            print("  ".join(filter(None, [*words, note])), file=sys.stderr, flush=True)

    def _evaluate(self) -> None:
        """Log the metrics, and note this step if they are the best so far."""
        if self.evaluate is None:
            return
        before = checkpoints.random_state()
        model = self.parallel.whole_model()
        with self.accelerator.autocast():
            metrics = on_main_process(partial(self._measure, self.evaluate, model))
        checkpoints.restore_random_state(before)
        if self.accelerator.is_main_process:
            values = {f"eval_{name}": value for name, value in metrics.items()}
            self._write("", **values)
        if self.metric not in metrics:
            raise ValueError(
                f"metric {self.metric!r} is not among the evaluation's {sorted(metrics)}"
            )
        sign = 1 if self.higher_is_better else -1
        self.evaluations_since_best += 1
        if self.best is None or sign * metrics[self.metric] > sign * self.best["value"]:
            self.best = {"value": metrics[self.metric], "step": self.step, "metrics": metrics}
            self.evaluations_since_best = 0

    def _measure(self, function: Evaluate, model: PretrainedModel | None) -> dict[str, float]:
        """``function`` of the whole model, on the training device for so long."""
        assert model is not None
        device = next(model.parameters()).device
        metrics = function(model.to(self.accelerator.device).eval())
        model.to(device)
        return metrics

    def _save(self) -> None:
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
            {
                "settings": self.fingerprint,
                "best": self.best,
                "evaluations since best": self.evaluations_since_best,
            },
        )
        if self.accelerator.is_main_process:
            self._remove_old()
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        """Put the best checkpoint's weights into the model, and write them and their metrics."""
        self.parallel.finish()
        if (folder := self._best_folder()) is not None:
            self.parallel.load(checkpoints.read_weights(folder, self.kind))
        model = self.parallel.whole_model()
        if self.calibrate is not None and self.best is not None:
            metrics = on_main_process(partial(self._measure, self.calibrate, model))
            self.best = {**self.best, "metrics": {**self.best["metrics"], **metrics}}
        if self.accelerator.is_main_process:
            assert model is not None
            model.save_pretrained(self.output_dir)
            best = self.best or {"step": self.step, "metrics": {}}
            text = json.dumps({"step": best["step"], **best["metrics"]}, indent=1)
            write_atomically(self.output_dir / "metrics.json", lambda path: path.write_text(text))
            about = self.fingerprint, self.summary, best["metrics"], self.titles
            write_card(self.output_dir, model, *about)
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        keep = self.config.keep_checkpoints
        checkpoints.remove_old(self.output_dir, keep, self._best_folder())

    def _best_folder(self) -> Path | None:
        return checkpoints.folder_of(self.output_dir, self.best["step"]) if self.best else None


class _Statistics:
    """Losses, gradient norms and tokens of the steps since the last line of the log."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, list[str], torch.Tensor]] = []
        self.steps, self.all_seconds, self.stop_votes = 0, 0.0, 0.0
        self._clear()
        self.restart_clock()

    def _clear(self) -> None:
        self.losses: list[dict[str, float]] = []
        self.norm, self.tokens, self.seconds = 0.0, 0.0, 0.0

    def seconds_a_step(self) -> float:
        """The mean over all steps read."""
        return self.all_seconds / max(self.steps, 1)

    def restart_clock(self) -> None:
        """Leave out the time of evaluations and checkpoints."""
        self.since = time.perf_counter()

    def add(self, step: int, names: list[str], figures: torch.Tensor) -> None:
        """figures: float64 (loss, norm, tokens, votes to stop, each term's loss), which stay on the training device."""
        self.unread.append((step, names, figures))

    def read(self) -> list[tuple[int, float, float]]:
        """(step, loss, norm) of the steps not read yet; waits for the device."""
        unread, self.unread = self.unread, []
        values = torch.stack([figures for _, _, figures in unread]).tolist() if unread else []
        read = []
        for (step, names, _), (loss, norm, tokens, votes, *terms) in zip(
            unread, values, strict=True
        ):
            self.steps, self.stop_votes = self.steps + 1, self.stop_votes + votes
            self.losses.append(dict(zip(names, terms, strict=True)) | {"loss": loss})
            self.norm = norm
            self.tokens += tokens
            read.append((step, loss, norm))
        now = time.perf_counter()
        self.seconds += now - self.since
        self.all_seconds += now - self.since
        self.since = now
        return read

    def close(self) -> dict[str, float]:
        """The log's line of what has been read."""
        line = {
            "grad_norm": self.norm,
            **{n: sum(step[n] for step in self.losses) / len(self.losses) for n in self.losses[0]},
            "tokens_per_s": self.tokens / max(self.seconds, 1e-9),
            "steps_per_day": len(self.losses) * 86400 / max(self.seconds, 1e-9),
        }
        self._clear()
        return line


def _checksum(lengths: torch.Tensor) -> int:
    """Of a tensor that may be memory-mapped, and larger than the memory."""
    checksum = 0
    for part in lengths.split(2**20):
        checksum = zlib.crc32(part.long().contiguous().numpy(), checksum)
    return checksum


def _duration(seconds: float) -> str:
    """Such as 3h20m, 5m10s or 12s."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _model_settings(model: PretrainedModel) -> dict[str, Any]:
    """The fields of the model's configuration that describe what it computes."""
    config = model.config
    return {field.name: getattr(config, field.name) for field in fields(config) if field.compare}
