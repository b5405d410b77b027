"""The training loop, over accelerate."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastenc._extras import require
from fastenc.data import BatchSampler
from fastenc.data.progress import progress_bar
from fastenc.train import checkpoint as checkpoints
from fastenc.train.config import TrainConfig, check_same
from fastenc.train.log import Log, plot_log
from fastenc.train.optimizer import build_optimizer, rate_factor

Collate = Callable[[Sequence[Any], int], dict[str, Any]]
Evaluate = Callable[[nn.Module], dict[str, float]]


class Trainer:
    """Trains a model that takes ``{"batch": PackedBatch, "labels": Tensor}`` and returns an output with ``.loss``.

    An optimiser step is the gradient of the mean loss over all labelled items of its micro-batches on all
    processes: each micro-batch counts by its number of labels that are not -100. Checkpoints hold the weights,
    AdamW's moments, the random generators and the place in the data, so that a run that was killed and resumed
    gives the weights of one that was not: bit for bit on a CPU with the same number of threads.

    Args:
        model: with ``from_pretrained`` and ``save_pretrained``.
        examples, lengths: the training set and the tokens of each example.
        collate: (examples, step) → model arguments; its random numbers may depend on ``step`` only, which is
            different for every micro-batch and process.
        evaluate: model → metrics, called on the main process.
        metric: the metric that chooses the best checkpoint; ``higher_is_better``: in which direction.
        show_progress: None asks whether stderr is a terminal.
    Files in ``config.output_dir``: checkpoint-*/, best.json, log.jsonl, curves.png and, at the end, the best model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        examples: Sequence[Any],
        lengths: Sequence[int],
        collate: Collate,
        *,
        evaluate: Evaluate | None = None,
        metric: str = "loss",
        higher_is_better: bool = False,
        show_progress: bool | None = None,
    ):
        accelerate = require("accelerate", extra="train")
        # Accelerate keeps the first run's precision for the process; a later Trainer may have another.
        accelerate.state.AcceleratorState._reset_state()
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if config.precision == "bf16" else "no"
        )
        self.config, self.output_dir = config, Path(config.output_dir)
        self.examples, self.collate = examples, collate
        self.evaluate, self.metric, self.higher_is_better = evaluate, metric, higher_is_better
        self.show_progress = show_progress
        processes = self.accelerator.num_processes
        self.sampler = BatchSampler(
            lengths,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            num_shards=processes,
            shard=self.accelerator.process_index,
        )
        self.steps_per_epoch = -(-len(self.sampler) // config.accumulation)
        self.total_steps = config.max_steps or config.epochs * self.steps_per_epoch
        self.warmup_steps = math.ceil(config.warmup * self.total_steps)
        # The seed below decides dropout; each process drops other units.
        torch.manual_seed(config.seed + self.accelerator.process_index)
        self.optimizer = build_optimizer(model, config)
        self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.step = 0
        self.decisive = {
            **config.decisive(),
            "examples": len(examples),
            "tokens": sum(lengths),
            "processes": processes,
        }

    @property
    def plain_model(self) -> nn.Module:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def train(self, resume: bool = False) -> dict[str, float]:
        """Run to the end and return the best evaluation's metrics (the last training loss without one).

        Args:
            resume: go on from the newest checkpoint in output_dir, or start if there is none.
        Raises: ValueError when output_dir holds a run and ``resume`` is False, or when the checkpoint's run had other
            settings; RuntimeError when the loss is not finite; OSError when a checkpoint cannot be written.
        """
        self._begin(resume)
        config, best_metrics, window = self.config, {}, _Window()
        main = self.accelerator.is_main_process
        show = False if not main else self.show_progress
        every = config.eval_every or self.steps_per_epoch
        bar = progress_bar(
            range(self.step, self.total_steps),
            "training",
            "step",
            show,
            initial=self.step,
            total=self.total_steps,
        )
        for step in bar:
            loss, norm, tokens = self._optimiser_step(step)
            self.step = step + 1
            window.add(loss, tokens)
            last = self.step == self.total_steps
            if main and (self.step % config.log_every == 0 or last):
                rate = self.optimizer.param_groups[0]["lr"]
                epoch = self.step / self.steps_per_epoch
                self.log.write(
                    step=self.step,
                    epoch=epoch,
                    learning_rate=rate,
                    grad_norm=norm,
                    **window.close(),
                )
            evaluates = self.step % every == 0 or last
            if evaluates:
                metrics = self._evaluate(loss)
                if self._save(metrics):
                    best_metrics = metrics
                window.restart_clock()
            elif config.save_every and self.step % config.save_every == 0:
                self._save(None)
        self._finish()
        return best_metrics or self._best_metrics()

    def _begin(self, resume: bool) -> None:
        found = checkpoints.latest_checkpoint(self.output_dir)
        if found is not None and not resume:
            raise ValueError(
                f"{self.output_dir} holds a run ({found.name}): resume it, or give another output_dir"
            )
        self.best: dict[str, Any] | None = None
        if found is not None:
            # Through the unwrapped optimiser: accelerate's wrapper shares its state.
            state, states = checkpoints.load_checkpoint(
                found, self.plain_model, self.optimizer.optimizer
            )
            check_same(state["settings"], self.decisive, str(found))
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
            self.log = Log(self.output_dir / "log.jsonl", self.step)

    def _optimiser_step(self, step: int) -> tuple[float, float, int]:
        """One update; returns the loss, the gradient's norm and the number of tokens, over all processes."""
        config, accelerator = self.config, self.accelerator
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * config.accumulation
        micro = [
            indices
            for indices, _ in zip(
                self.sampler.epoch(epoch, start), range(config.accumulation), strict=False
            )
        ]
        batches, items, tokens = [], [], 0
        for number, indices in enumerate(micro):
            serial = (step * config.accumulation + number) * accelerator.num_processes
            arguments = self.collate(
                [self.examples[i] for i in indices], serial + accelerator.process_index
            )
            batches.append(arguments)
            items.append(int((arguments["labels"] != -100).sum()))
            tokens += arguments["batch"].total_tokens
        device = accelerator.device
        totals = torch.tensor([float(sum(items)), float(tokens)], device=device)
        totals = accelerator.reduce(totals, "sum")
        share = accelerator.num_processes / max(1.0, totals[0].item())
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * rate_factor(
                step, self.warmup_steps, self.total_steps
            )
        self.model.train()
        loss = torch.zeros((), device=device)
        for number, (arguments, count) in enumerate(zip(batches, items, strict=True)):
            arguments = {name: value.to(device) for name, value in arguments.items()}
            with _sync(accelerator, self.model, number + 1 == len(batches)):
                part = self.model(**arguments).loss * (count * share)
                accelerator.backward(part)
            loss += part.detach()
        value = accelerator.reduce(loss, "mean").item()
        if not math.isfinite(value):
            raise RuntimeError(
                f"the loss is {value} at step {step + 1}: lower learning_rate, or look at this step's data. The newest "
                f"checkpoint is {checkpoints.latest_checkpoint(self.output_dir)}"
            )
        limit = config.max_grad_norm or math.inf
        norm = accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value, float(norm), int(totals[1])

    def _evaluate(self, loss: float) -> dict[str, float]:
        if self.evaluate is None:
            return {"loss": loss}
        metrics: list[dict[str, float] | None] = [None]
        if self.accelerator.is_main_process:
            before = torch.get_rng_state()
            model = self.plain_model.eval()
            metrics[0] = self.evaluate(model)
            torch.set_rng_state(before)
            self.log.write(
                step=self.step, **{f"eval_{name}": value for name, value in metrics[0].items()}
            )
        require("accelerate.utils", extra="train").broadcast_object_list(metrics)
        found = metrics[0]
        if self.metric not in found:
            raise ValueError(
                f"metric {self.metric!r} is not among the evaluation's {sorted(found)}"
            )
        return found

    def _save(self, metrics: dict[str, float] | None) -> bool:
        """Write a checkpoint; True if its metrics are the best so far."""
        better = False
        if metrics is not None:
            value = metrics[self.metric]
            sign = 1 if self.higher_is_better else -1
            better = self.best is None or sign * value > sign * self.best["value"]
            if better:
                self.best = {"value": value, "step": self.step, "metrics": metrics}
        utils = require("accelerate.utils", extra="train")
        own = {
            f"{self.accelerator.process_index}.{name}": state
            for name, state in checkpoints.random_state().items()
        }
        states = {k: v for part in utils.gather_object([own]) for k, v in part.items()}
        if self.accelerator.is_main_process:
            state = {"settings": self.decisive, "best": self.best}
            folder = checkpoints.save_checkpoint(
                self.output_dir,
                self.step,
                self.plain_model,
                self.optimizer.optimizer,
                states,
                state,
            )
            if better:
                checkpoints.write_best(self.output_dir, folder, self.best["value"])
            checkpoints.remove_old(self.output_dir, self.config.keep_checkpoints)
            plot_log(self.log.path, self.output_dir / "curves.png", self.metric)
        self.accelerator.wait_for_everyone()
        return better

    def _finish(self) -> None:
        """Put the best checkpoint's weights into the model and into output_dir itself."""
        best = checkpoints.read_best(self.output_dir)
        if best is not None:
            model = self.plain_model
            stored = type(model).from_pretrained(self.output_dir / best["checkpoint"]).state_dict()
            model.load_state_dict(stored)
        if self.accelerator.is_main_process:
            self.plain_model.save_pretrained(self.output_dir)
        self.plain_model.eval()
        self.accelerator.wait_for_everyone()

    def _best_metrics(self) -> dict[str, float]:
        return self.best["metrics"] if self.best else {}


class _Window:
    """Losses and tokens since the last line of the log."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens, self.seconds = 0, 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out the time of an evaluation."""
        self.since = time.perf_counter()

    def add(self, loss: float, tokens: int) -> None:
        now = time.perf_counter()
        self.losses.append(loss)
        self.tokens += tokens
        self.seconds += now - self.since
        self.since = now

    def close(self) -> dict[str, float]:
        line = {
            "loss": sum(self.losses) / len(self.losses),
            "tokens_per_s": self.tokens / max(self.seconds, 1e-9),
        }
        self.losses, self.tokens, self.seconds = [], 0, 0.0
        return line


def _sync(accelerator, model: nn.Module, last: bool):
    """Processes exchange gradients once an optimiser step, after its last micro-batch."""
    return nullcontext() if last else accelerator.no_sync(model)
