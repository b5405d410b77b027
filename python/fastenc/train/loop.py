"""The training loop, over accelerate."""

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.data import BatchSampler
from fastenc.data.progress import progress_bar
from fastenc.models import LossPart
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives.parts import count_items, loss_parts, weighted_sum
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig, check_same
from fastenc.train.log import Log
from fastenc.train.optimizer import build_optimizer, rate_factor
from fastenc.train.plot import plot_log
from fastenc.train.processes import on_main_process, process_state

Collate = Callable[[Sequence[Any], int], dict[str, Any]]
Evaluate = Callable[[Any], dict[str, float]]


class Trainer:
    """Trains a model that takes ``{"batch": PackedBatch, "labels": Tensor}`` and returns an output with ``.loss``.

    An optimiser step is the gradient of the mean loss over all labelled items of its micro-batches on all
    processes: each micro-batch counts by its number of labels that are not -100. A loss of several parts
    (``output.parts``) is the weighted sum of such means, each over its own items, which ``collate.items(arguments)``
    counts. Checkpoints hold the weights, AdamW's moments, the random generators and the place in the data, so that a
    run that was killed and resumed gives the weights of one that was not: bit for bit on a CPU with the same number
    of threads.

    On a GPU a step waits for nothing: losses stay there until a line of the log, an evaluation or a checkpoint reads
    them. A step whose loss or gradient is not finite changes no weights, nor does any after it, and the next reading
    raises.

    Args:
        model: one of ``fastenc.models``; its weights on entry are the first ones.
        examples, lengths: the training set and the tokens of each example.
        collate: (examples, step) → model arguments; its random numbers may depend on ``step`` only, which is
            different for every micro-batch and process.
        evaluate: model → metrics, called on the main process while the others wait; None keeps the last weights.
        calibrate: (model with its final weights) → metrics that take the place of those of its evaluation, or {};
            may set what ``save_pretrained`` writes beside the weights. Called on the main process.
        metric: the metric that chooses the best checkpoint; ``higher_is_better``: in which direction.
        settings: what else the result depends on (masking, names of the labels), as JSON values; like the
            configuration, a resumed run must have the same.
        show_progress: None asks whether stderr is a terminal.
    Files in ``config.output_dir``: checkpoint-*/, log.jsonl, curves.png and, at the end, the best model and its
    metrics.json.
    """

    def __init__(
        self,
        model: PretrainedModel,
        config: TrainConfig,
        examples: Sequence[Any],
        lengths: Sequence[int],
        collate: Collate,
        *,
        evaluate: Evaluate | None = None,
        calibrate: Evaluate | None = None,
        metric: str = "loss",
        higher_is_better: bool = False,
        settings: dict[str, Any] | None = None,
        show_progress: bool | None = None,
    ):
        accelerate = require("accelerate", extra="train")
        require("matplotlib", extra="train")  # missed now, not at the first checkpoint
        process_state()
        # Accelerate keeps the first run's precision for the process; a later Trainer may have another.
        accelerate.state.AcceleratorState._reset_state()
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if config.precision == "bf16" else "no"
        )
        self.config, self.output_dir = config, Path(config.output_dir)
        self.examples, self.collate = examples, collate
        self.evaluate, self.metric, self.higher_is_better = evaluate, metric, higher_is_better
        self.calibrate = calibrate
        self.show_progress = show_progress
        processes = self.accelerator.num_processes
        self.sampler = BatchSampler(
            lengths,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            num_shards=processes,
            shard=self.accelerator.process_index,
            max_tokens=config.batch_tokens,
        )
        self.steps_per_epoch = -(-len(self.sampler) // config.accumulation)
        self.total_steps = config.max_steps or config.epochs * self.steps_per_epoch
        self.warmup_steps = math.ceil(config.warmup * self.total_steps)
        # The seed below decides dropout; each process drops other units.
        torch.manual_seed(config.seed + self.accelerator.process_index)
        # Accelerate's wrapper shares the state of the optimiser in it.
        self.adamw = build_optimizer(model, config)
        self.model, self.optimizer = self.accelerator.prepare(model, self.adamw)
        device = self.accelerator.device
        # AdamW's kernel changes nothing while this is 1, which is how torch's GradScaler skips a step.
        self.broken = self.adamw.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self.reads_every_step = device.type == "cpu"  # where it costs nothing
        self.step = 0
        self.best: dict[str, Any] | None = None
        decisive = {
            **config.decisive(),
            **{f"model.{name}": value for name, value in _model_settings(model).items()},
            **(settings or {}),
            "metric": metric,
            "trained parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "data": f"{len(examples)} examples of {sum(lengths)} tokens (checksum "
            f"{zlib.crc32(repr(list(lengths)).encode()):08x})",
            "processes": processes,
        }
        self.decisive = json.loads(json.dumps(decisive))

    @property
    def plain_model(self) -> PretrainedModel:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def train(self, resume: bool = False) -> dict[str, float]:
        """Run to the end and return the best evaluation's metrics ({} without ``evaluate``).

        Args:
            resume: go on from the newest checkpoint in output_dir, or start if there is none.
        Raises: ValueError when output_dir holds a run and ``resume`` is False, or when the checkpoint's run had other
            settings; FloatingPointError when the loss or its gradient is not finite; OSError when a checkpoint cannot
            be written.
        """
        self._begin(resume)
        config, self.window = self.config, _Window()
        main = self.accelerator.is_main_process
        every = config.eval_every or self.steps_per_epoch
        bar = progress_bar(
            islice(self._windows(), self.total_steps - self.step),
            "training",
            "step",
            self.show_progress if main else False,
            initial=self.step,
            total=self.total_steps,
        )
        for indices in bar:
            self._optimiser_step(indices)
            self.step += 1
            last = self.step == self.total_steps
            logs = self.step % config.log_every == 0 or last
            evaluates = self.step % every == 0 or last
            saves = evaluates or (config.save_every and self.step % config.save_every == 0)
            if logs or saves:
                self._read_window()
            if logs:
                line = self.window.close()
            if logs and main:
                if hasattr(bar, "set_postfix"):
                    bar.set_postfix({name: f"{value:.4g}" for name, value in line.items()})
                self.log.write(
                    step=self.step,
                    epoch=self.step / self.steps_per_epoch,
                    learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
                    **line,
                )
            if evaluates:
                self._evaluate()
                if main:
                    plot_log(self.log.path, self.output_dir / "curves.png", self.metric)
            if saves:
                self._save()
                self.window.restart_clock()
        self._finish()
        return self.best["metrics"] if self.best else {}

    def _windows(self) -> Iterator[list[list[int]]]:
        """The micro-batches of each optimiser step from ``self.step`` on, without end; none crosses an epoch."""
        first, place = divmod(self.step, self.steps_per_epoch)
        start = place * self.config.accumulation
        for epoch in count(first):
            batches = self.sampler.epoch(epoch, start if epoch == first else 0)
            while window := list(islice(batches, self.config.accumulation)):
                yield window

    def _begin(self, resume: bool) -> None:
        found = checkpoints.check_free(self.output_dir, resume)
        if found is not None:
            state = checkpoints.read_state(found)
            check_same(state["settings"], self.decisive, str(found))
            states = checkpoints.load_checkpoint(found, self.plain_model, self.adamw)
            own = f"{self.accelerator.process_index}."
            checkpoints.restore_random_state(
                {
                    key.removeprefix(own): value
                    for key, value in states.items()
                    if key.startswith(own)
                }
            )
            self.step, self.best = state["step"], state["best"]
        if self.accelerator.is_main_process:
            self._remove_old()
            self.log = Log(self.output_dir / "log.jsonl", self.step)

    def _optimiser_step(self, window: list[list[int]]) -> None:
        """One update; the window gets its losses, gradient norm and number of tokens, over all processes."""
        config, accelerator = self.config, self.accelerator
        batches, items, tokens = [], [], 0
        for number, indices in enumerate(window):
            serial = (self.step * config.accumulation + number) * accelerator.num_processes
            arguments = self.collate(
                [self.examples[i] for i in indices], serial + accelerator.process_index
            )
            batches.append(arguments)
            items.append(count_items(self.collate, arguments))
            tokens += arguments["batch"].total_tokens
        device = accelerator.device
        names = list(items[0])
        sums = [sum(counts[name] for counts in items) for name in names]
        totals = torch.tensor([*sums, tokens], dtype=torch.float64)
        totals = accelerator.reduce(totals.to(device, non_blocking=True), "sum")
        for group in self.optimizer.param_groups:
            factor = rate_factor(self.step, self.warmup_steps, self.total_steps)
            group["lr"] = config.learning_rate * group["rate_scale"] * factor
        self.model.train()
        shares = accelerator.num_processes / totals[:-1].clamp(min=1)
        means = torch.zeros_like(shares)
        for number, (arguments, counts) in enumerate(zip(batches, items, strict=True)):
            arguments = {
                name: value if isinstance(value, int) else value.to(device, non_blocking=True)
                for name, value in arguments.items()
            }
            with _sync(accelerator, self.model, number + 1 == len(batches)):
                parts = loss_parts(self.model(**arguments))
                scaled = {
                    name: LossPart(parts[name].mean * (counts[name] * share), parts[name].weight)
                    for name, share in zip(names, shares.unbind(), strict=True)
                }
                # accelerator.backward would divide by the launcher's own accumulation setting
                weighted_sum(scaled).backward()
            means += torch.stack([part.mean for part in scaled.values()]).detach()
        means = accelerator.reduce(means, "mean")
        weights = [part.weight for part in scaled.values()]
        # Products by host numbers: a tensor of the weights would be copied to the device, and waited for.
        loss = torch.stack([m * w for m, w in zip(means.unbind(), weights, strict=True)]).sum()
        limit = config.max_grad_norm or math.inf
        norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        figures = torch.stack((loss, norm.double(), totals[-1], *means.unbind()))
        self.broken.logical_or_(~figures.isfinite().all())
        self.window.add(self.step + 1, names, figures)
        if self.reads_every_step:
            self._read_window()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _read_window(self) -> None:
        """Read the losses of the steps since the last reading: on a GPU the one place that waits for it.

        Raises: FloatingPointError for the first step whose loss or gradient is not finite.
        """
        for step, loss, norm in self.window.read():
            for what, result in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(result):
                    last = checkpoints.latest_checkpoint(self.output_dir) or "none yet"
                    raise FloatingPointError(
                        f"the {what} is {result} at step {step}: lower learning_rate, or look at this step's data. "
                        f"Last good checkpoint: {last}"
                    )

    def _evaluate(self) -> None:
        """Log the metrics, and note this step if they are the best so far."""
        if self.evaluate is None:
            return
        before = checkpoints.random_state()
        metrics = on_main_process(partial(self.evaluate, self.plain_model.eval()))
        checkpoints.restore_random_state(before)
        if self.accelerator.is_main_process:
            values = {f"eval_{name}": value for name, value in metrics.items()}
            self.log.write(step=self.step, **values)
        if self.metric not in metrics:
            raise ValueError(
                f"metric {self.metric!r} is not among the evaluation's {sorted(metrics)}"
            )
        sign = 1 if self.higher_is_better else -1
        if self.best is None or sign * metrics[self.metric] > sign * self.best["value"]:
            self.best = {"value": metrics[self.metric], "step": self.step, "metrics": metrics}

    def _save(self) -> None:
        utils = require("accelerate.utils", extra="train")
        own = {
            f"{self.accelerator.process_index}.{name}": state
            for name, state in checkpoints.random_state().items()
        }
        states = {k: v for part in utils.gather_object([own]) for k, v in part.items()}
        if self.accelerator.is_main_process:
            state = {"settings": self.decisive, "best": self.best}
            checkpoints.save_checkpoint(
                self.output_dir,
                self.step,
                self.plain_model,
                self.adamw,
                states,
                state,
            )
            self._remove_old()
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        """Put the best checkpoint's weights into the model, and them and their metrics into output_dir itself."""
        # The model leaves without the autocast that accelerate put around its forward.
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False).eval()
        if (folder := self._best_folder()) is not None:
            checkpoints.load_weights(folder, model)
        if self.calibrate is not None and self.best is not None:
            metrics = on_main_process(partial(self.calibrate, model))
            self.best = {**self.best, "metrics": {**self.best["metrics"], **metrics}}
        if self.accelerator.is_main_process:
            model.save_pretrained(self.output_dir)
            best = self.best or {"step": self.step, "metrics": {}}
            text = json.dumps({"step": best["step"], **best["metrics"]}, indent=1)
            write_atomically(self.output_dir / "metrics.json", lambda path: path.write_text(text))
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        keep = self.config.keep_checkpoints
        checkpoints.remove_old(self.output_dir, keep, self._best_folder())

    def _best_folder(self) -> Path | None:
        return checkpoints.folder_of(self.output_dir, self.best["step"]) if self.best else None


class _Window:
    """Losses, gradient norms and tokens of the steps since the last line of the log."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, list[str], torch.Tensor]] = []
        self._clear()
        self.restart_clock()

    def _clear(self) -> None:
        self.losses: list[dict[str, float]] = []
        self.norm, self.tokens, self.seconds = 0.0, 0.0, 0.0

    def restart_clock(self) -> None:
        """Leave out the time of evaluations and checkpoints."""
        self.since = time.perf_counter()

    def add(self, step: int, names: list[str], figures: torch.Tensor) -> None:
        """figures: float64 (loss, norm, tokens, each part's loss) on the training device, where they stay."""
        self.unread.append((step, names, figures))

    def read(self) -> list[tuple[int, float, float]]:
        """(step, loss, norm) of the steps not read yet; waits for the device."""
        unread, self.unread = self.unread, []
        values = torch.stack([figures for _, _, figures in unread]).tolist() if unread else []
        read = []
        for (step, names, _), (loss, norm, tokens, *parts) in zip(unread, values, strict=True):
            self.losses.append(dict(zip(names, parts, strict=True)) | {"loss": loss})
            self.norm = norm
            self.tokens += tokens
            read.append((step, loss, norm))
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now
        return read

    def close(self) -> dict[str, float]:
        """The log's line of what has been read."""
        line = {
            "grad_norm": self.norm,
            **{n: sum(step[n] for step in self.losses) / len(self.losses) for n in self.losses[0]},
            "tokens_per_s": self.tokens / max(self.seconds, 1e-9),
        }
        self._clear()
        return line


def _sync(accelerator, model: nn.Module, last: bool):
    """Processes exchange gradients once an optimiser step, after its last micro-batch."""
    return nullcontext() if last else accelerator.no_sync(model)


def _model_settings(model: PretrainedModel) -> dict[str, Any]:
    """The fields of the model's configuration that describe what it computes."""
    config = model.config
    return {field.name: getattr(config, field.name) for field in fields(config) if field.compare}
