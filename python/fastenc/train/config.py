"""What a training run is: every number that its result depends on."""

import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastenc._options import REQUIRED, documented, option

PRECISIONS = ("fp32", "bf16")
PARALLEL = ("ddp", "fsdp")
# Fields that a resumed run may change, because no weight depends on them.
NOT_IN_FINGERPRINT = {"output", "log_every", "save_every", "keep_checkpoints", "track", "device"}
# How a step's work is split. Its result depends on ``micro_batches`` * processes alone, but for rounding and dropout.
SPLIT = {"accumulation", "global_batch_size", "parallel", "graph"}
# Epochs with at least this many optimiser steps are evaluated and checkpointed four times instead of once. Dodge et al.
# 2020 (arXiv:2002.06305) evaluate ten times in each; four keep the cost low where the dev set is large.
LONG_EPOCH = 500
# Factors on fine-tuning's learning rate. Added weights start far from useful: LoRA's authors take about ten times
# fine-tuning's rate (Hu et al. 2021, appendix D), a head alone stands about as far, and the few numbers of a prefix or
# a prompt have further to go.
LR_FACTORS = {
    None: 1.0,
    "lora": 10.0,
    "adapters": 10.0,
    "features": 10.0,
    "prefix": 100.0,
    "prompt": 100.0,
}


def fine_tuning_lr(hidden_size: int, adapt: str | None = None, steps: int = 0) -> float:
    """The default learning rate of fine-tuning; steps: optimiser steps of the run, 0 if there are few.

        5e-5 * 768 / hidden_size * (1000 / steps)^0.32 beyond 1,000 steps

    5e-5 is the largest that Devlin et al. 2018 (arXiv:1810.04805) recommend for BERT-base's width of 768. The best
    rate is in inverse proportion to the width, as Adam's steps transfer (Yang et al. 2022, arXiv:2203.03466), and falls
    with the length of the run by that power (Bjorck et al. 2024, arXiv:2409.19913). Each way to adapt has its factor
    in ``LR_FACTORS``.
    """
    length = min(1.0, (1000 / steps) ** 0.32) if steps else 1.0
    return 5e-5 * 768 / hidden_size * length * LR_FACTORS[adapt]


@documented
@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    The learning rate rises linearly over the warm-up and then falls linearly to 0. A micro-batch is what a process
    takes through the model at a time; an optimiser step takes one or several on each process.
    Raises: ValueError naming the field, the rule and the value.
    """

    output: str = option(REQUIRED, "Folder for checkpoints, log, curves and the model.", "-o")
    epochs: int = option(3, "Passes over the data.")
    max_steps: int | None = option(None, "Optimiser steps; replaces the epochs.")
    batch_size: int | None = option(32, "Most sequences of a micro-batch.")
    batch_tokens: int | None = option(
        None, "Most tokens of a micro-batch, which may then have fewer sequences."
    )
    accumulation: int = option(1, "Micro-batches of an optimiser step on each process.")
    global_batch_size: int | None = option(
        None, "Sequences of an optimiser step on all processes; replaces the accumulation."
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate of AdamW. Default: 5e-5 * 768 / the model's width, less beyond 1,000 steps, and 10 or "
        "100 times that where small additions are trained.",
        "--lr",
    )
    warmup: float = option(0.06, "Share of the steps with rising learning rate.")
    warmup_steps: int | None = option(None, "Their number; replaces the share.")
    layer_decay: float = option(
        1.0, "Factor on the learning rate from each layer to the one below it."
    )
    weight_decay: float = option(0.01, "Weight decay of matrices; biases and norms have none.")
    betas: tuple[float, float] = option((0.9, 0.999), "Decay rates of AdamW's two moments.")
    adam_eps: float = option(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = option(
        1.0, "The gradient is scaled down to this Euclidean norm; 0 leaves it as it is."
    )
    parallel: str = option(
        "ddp",
        "What each process holds: ddp, the whole model, or fsdp, a shard of weights, gradients and moments.",
    )
    graph: bool = option(
        False,
        "On a GPU, run steps as CUDA graphs, one for each bucket of batch sizes: for models and batches so small that "
        "launching their kernels takes the time. One process; objectives and tasks with one label a token or sequence.",
    )
    precision: str = option("fp32", "fp32, or bf16 for autocast over fp32 weights.")
    device: str | None = option(None, "cpu or cuda. Default: a GPU if there is one.")
    seed: int = option(0, "Seed of initial weights, data order, masks and dropout.")
    eval_every: int | None = option(
        None,
        "Optimiser steps between evaluations, each with a checkpoint. Default: every epoch, four times in one of "
        f"{LONG_EPOCH} steps or more.",
    )
    patience: int | None = option(None, "Stop after this many evaluations without a better one.")
    save_every: int | None = option(None, "Optimiser steps between further checkpoints.")
    keep_checkpoints: int = option(2, "Newest checkpoints to keep, beside the best.")
    log_every: int = option(10, "Optimiser steps between lines of the log.")
    track: tuple[str, ...] = option(
        (), "Where the log goes beside log.jsonl: tensorboard or wandb; may be repeated."
    )

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "max_steps",
            "batch_size",
            "batch_tokens",
            "accumulation",
            "global_batch_size",
            "eval_every",
            "patience",
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
        if self.learning_rate is not None and not self.learning_rate > 0:
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
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")

    def micro_batches(self, processes: int) -> int:
        """Micro-batches of an optimiser step on each process, for this number of processes.

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
        """Optimiser steps of a run over examples; an estimate where tokens limit the batches, or where a long
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
        evaluations = 4 if steps >= LONG_EPOCH else 1
        return done * evaluations // steps > (done - 1) * evaluations // steps

    def fingerprint(self) -> dict[str, Any]:
        """The fields that the weights depend on."""
        free = NOT_IN_FINGERPRINT | SPLIT
        return {name: value for name, value in asdict(self).items() if name not in free}


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
                "output folder (-o)"
            )
