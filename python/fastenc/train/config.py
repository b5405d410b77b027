"""What a training run is: every number that its result depends on."""

import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PRECISIONS = ("fp32", "bf16")
PARALLEL = ("ddp", "fsdp")
# Fields that a resumed run may change, because no weight depends on them.
FREE = {"output_dir", "log_every", "save_every", "keep_checkpoints", "track"}
# Optimiser steps from which an epoch is too long to see nothing, and to keep nothing, before its end. Dodge et al. 2020
# (arXiv:2002.06305) evaluate ten times in each; four keep the cost low where the dev set is large.
LONG_EPOCH = 500
# How a step's work is split. Its result depends on ``micro_batches`` * processes alone, but for rounding and dropout.
SPLIT = {"accumulation", "global_batch_size", "parallel"}


# Added weights start far from useful: LoRA's authors take about ten times fine-tuning's rate (Hu et al. 2021, appendix
# D), a head alone stands about as far, and the few numbers of a prefix or a prompt have further to go.
RATE_FACTORS = {
    None: 1.0,
    "lora": 10.0,
    "adapters": 10.0,
    "features": 10.0,
    "prefix": 100.0,
    "prompt": 100.0,
}


def fine_tuning_rate(hidden_size: int, adapt: str | None = None, steps: int = 0) -> float:
    """A learning rate to start from; steps: optimiser steps of the run, 0 if there are few.

        5e-5 * 768 / hidden_size * (1000 / steps)^0.32 beyond 1,000 steps

    5e-5 is the largest that Devlin et al. 2018 (arXiv:1810.04805) recommend for BERT-base's width of 768, the best rate
    is in inverse proportion to the width, as Adam's steps transfer (Yang et al. 2022, arXiv:2203.03466), and falls with
    the length of the run by that power (Bjorck et al. 2024, arXiv:2409.19913). For a way to adapt so many times as
    ``RATE_FACTORS`` says.
    """
    length = min(1.0, (1000 / steps) ** 0.32) if steps else 1.0
    return 5e-5 * 768 / hidden_size * length * RATE_FACTORS[adapt]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; the defaults fine-tune a BERT-base.

    Fields:
        output_dir: folder of checkpoints, log, plot and the final model.
        epochs: passes over the data; max_steps: optimiser steps, counts instead if given.
        batch_size: sequences a process and micro-batch, at most; accumulation: micro-batches an optimiser step.
        batch_tokens: tokens of a micro-batch, at most, so that it may have fewer sequences; with batch_size=None it
            has as many as that holds.
        global_batch_size: sequences an optimiser step on all processes together; counts instead of ``accumulation``
            if given.
        learning_rate: peak of AdamW's rate, after a linear warm-up over the first ``warmup`` share of the steps and
            before a linear decay to 0; warmup_steps: their number, counts instead if given.
        layer_decay: factor on the rate from each layer to the one below it, 1 for the same rate everywhere.
        weight_decay: on matrices; never on biases and norms.
        max_grad_norm: the gradient is scaled down to this Euclidean norm; 0 switches it off.
        parallel: "ddp", the whole model on each process, or "fsdp", a shard of it.
        precision: "fp32", or "bf16" for autocast over fp32 weights.
        eval_every: optimiser steps between evaluations, each with a checkpoint; None: at the end of each epoch, and of
            each quarter of one that has at least ``LONG_EPOCH`` steps.
        save_every: optimiser steps between further checkpoints, or None.
        keep_checkpoints: newest checkpoints to keep, beside the best.
        log_every: optimiser steps between lines of the log.
        track: where else the log's lines go: "tensorboard", "wandb".
    Raises: ValueError naming the field, the rule and the value.
    """

    output_dir: str
    epochs: int = 3
    max_steps: int | None = None
    batch_size: int | None = 32
    batch_tokens: int | None = None
    accumulation: int = 1
    global_batch_size: int | None = None
    learning_rate: float = 5e-5
    warmup: float = 0.06
    warmup_steps: int | None = None
    layer_decay: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    parallel: str = "ddp"
    precision: str = "fp32"
    seed: int = 0
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int = 10
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "max_steps",
            "batch_size",
            "batch_tokens",
            "accumulation",
            "global_batch_size",
            "eval_every",
            "save_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("give batch_size, batch_tokens or both, got neither")
        if self.batch_size is None and self.global_batch_size is not None:
            raise ValueError(
                "global_batch_size counts sequences, and batch_tokens alone leaves their number open, got "
                f"{self.global_batch_size} and {self.batch_tokens}: give accumulation instead"
            )
        for name in ("log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")
        if self.weight_decay < 0 or self.max_grad_norm < 0:
            raise ValueError(
                "weight_decay and max_grad_norm must not be negative, "
                f"got {self.weight_decay} and {self.max_grad_norm}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.parallel not in PARALLEL:
            raise ValueError(f"parallel must be one of {PARALLEL}, got {self.parallel!r}")

    def micro_batches(self, processes: int) -> int:
        """Micro-batches of an optimiser step on each of so many processes.

        Raises: ValueError unless whole micro-batches make ``global_batch_size``.
        """
        if self.global_batch_size is None:
            return self.accumulation
        number, rest = divmod(self.global_batch_size, self.batch_size * processes)  # type: ignore[operator]
        if rest or not number:
            raise ValueError(
                f"global_batch_size must be a multiple of batch_size * processes, got {self.global_batch_size} and "
                f"{self.batch_size} * {processes}: change one of them"
            )
        return number

    def steps_over(self, examples: int, processes: int = 1) -> int:
        """Optimiser steps of a run over so many examples; an estimate where tokens limit the batches, or where a long
        example becomes several."""
        step = (self.batch_size or 32) * self.micro_batches(processes) * processes
        return self.max_steps or self.epochs * math.ceil(examples / step)

    def warmup_of(self, total_steps: int) -> int:
        """Steps with rising learning rate. Raises: ValueError when the run has fewer."""
        if self.warmup_steps is None:
            return math.ceil(self.warmup * total_steps)
        if self.warmup_steps > total_steps:
            raise ValueError(
                f"warmup_steps must be at most the run's {total_steps} steps, got {self.warmup_steps}: give fewer"
            )
        return self.warmup_steps

    def evaluation_due(self, step: int, done: int, steps: int) -> bool:
        """Whether an evaluation follows a step, which ends ``done`` of its epoch's ``steps``."""
        if self.eval_every is not None:
            return step % self.eval_every == 0
        parts = 4 if steps >= LONG_EPOCH else 1
        return done * parts // steps > (done - 1) * parts // steps

    def decisive(self) -> dict[str, Any]:
        """The fields that the weights depend on."""
        return {name: value for name, value in asdict(self).items() if name not in FREE | SPLIT}


def tokens_checksum(sequences: Iterable[Sequence[int]]) -> str:
    """A checksum of all token ids, for the settings that a resumed run must share."""
    checksum = 0
    for ids in sequences:
        checksum = zlib.crc32(array("i", ids), checksum)
    return f"checksum {checksum:08x}"


def check_same(stored: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Raises: ValueError naming the first setting in which a checkpoint's run and this one differ."""
    for name in {**stored, **current}:
        if stored.get(name) != current.get(name):
            raise ValueError(
                f"{where} was written with {name}={stored.get(name)!r}, this run has {current.get(name)!r}: resuming "
                "would give other weights than an uninterrupted run. Use the same settings and data, or another "
                "output_dir"
            )
