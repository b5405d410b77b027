"""The settings of a training run."""

import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from fastenc._base.options import REQUIRED, documented, option

PRECISIONS = ("fp32", "bf16")
PARALLEL = ("ddp", "fsdp")
# A resumed run may change these fields, because the weights do not depend on them.
NOT_IN_FINGERPRINT = {"output", "log_every", "save_every", "keep_checkpoints", "track", "device"}
# A resumed run may change these fields too, if ``micro_batches`` * processes stays the same. They decide how the work
# of a step is divided. The result changes by rounding and dropout only.
SPLIT = {"accumulation", "global_batch_size", "parallel", "graph"}
# Epochs with at least this many optimiser steps are evaluated and checkpointed four times instead of once. Dodge et al.
# 2020 (arXiv:2002.06305) evaluate ten times in each; four cost less if the dev set is large.
LONG_EPOCH = 500
# Factors on fine-tuning's learning rate. Weights that are added to a pretrained model are far from their final values.
# LoRA's authors use about ten times fine-tuning's learning rate (Hu et al. 2021, appendix D). A head alone gets the
# same factor. The few parameters of a prefix or a prompt have to change even more.
LR_FACTORS = {
    None: 1.0,
    "lora": 10.0,
    "adapters": 10.0,
    "features": 10.0,
    "prefix": 100.0,
    "prompt": 100.0,
}


def fine_tuning_lr(hidden_size: int, adapt: str | None = None, steps: int = 0) -> float:
    """The default learning rate of fine-tuning.

        5e-5 * 768 / hidden_size * LR_FACTORS[adapt],  times (1000 / steps)^0.32 for runs of more than 1,000 steps

    Args:
        hidden_size: the model's width.
        adapt: a key of ``LR_FACTORS``, what is trained; None: all weights.
        steps: optimiser steps of the run; 0: at most 1,000.
    Source: 5e-5 is the largest learning rate that Devlin et al. 2018 (arXiv:1810.04805) recommend for BERT-base's width
        of 768. With Adam the best learning rate is inversely proportional to the width (Yang et al. 2022,
        arXiv:2203.03466), and falls with this power of the run's length (Bjorck et al. 2024, arXiv:2409.19913).
    """
    length = min(1.0, (1000 / steps) ** 0.32) if steps else 1.0
    return 5e-5 * 768 / hidden_size * length * LR_FACTORS[adapt]


@documented
@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    The learning rate rises linearly during the warm-up and then falls linearly to 0. A micro-batch is the batch that a
    process computes at a time. An optimiser step uses one or several micro-batches of each process.
    Raises: ValueError for a value out of range.
    """

    output: str = option(
        REQUIRED, "Folder for checkpoints, log, plot of the losses and the model.", "-o"
    )
    epochs: int = option(3, "Number of passes over the data.")
    max_steps: int | None = option(None, "Number of optimiser steps, instead of epochs.")
    batch_size: int | None = option(32, "Largest number of sequences in a micro-batch.")
    batch_tokens: int | None = option(
        None, "Largest number of tokens in a micro-batch, which may then have fewer sequences."
    )
    accumulation: int = option(1, "Number of micro-batches of each process in an optimiser step.")
    global_batch_size: int | None = option(
        None,
        "Number of sequences in an optimiser step, over all processes, instead of the accumulation.",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate of AdamW. Default: 5e-5 * 768 / the model's width, less in runs of more than 1,000 steps, "
        "and 10 or 100 times as much with --adapt.",
        "--lr",
    )
    warmup: float = option(0.06, "Share of the steps during which the learning rate rises.")
    warmup_steps: int | None = option(None, "Number of these steps, instead of their share.")
    layer_decay: float = option(
        1.0, "Factor on the learning rate from each layer to the one below it."
    )
    weight_decay: float = option(0.01, "Weight decay of matrices; biases and norms have none.")
    betas: tuple[float, float] = option((0.9, 0.999), "Decay rates of AdamW's two moments.")
    adam_eps: float = option(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = option(
        1.0, "A gradient with a larger Euclidean norm is scaled to this norm; 0: no clipping."
    )
    parallel: str = option(
        "ddp",
        "What each process has: ddp (the whole model) or fsdp (a shard of weights, gradients and moments).",
    )
    graph: bool = option(
        False,
        "On a GPU, run steps as CUDA graphs, one for each bucket of batch sizes. It helps if models and batches are so "
        "small that launching kernels takes most of the time. Only with one process, and with objectives and tasks "
        "that have one label for each token or sequence.",
    )
    precision: str = option("fp32", "fp32, or bf16 for autocast with fp32 weights.")
    device: str | None = option(None, "cpu or cuda. Default: a GPU if there is one.")
    seed: int = option(0, "Seed of initial weights, data order, masks and dropout.")
    eval_every: int | None = option(
        None,
        "Optimiser steps between evaluations. A checkpoint is written at each. Default: once in every epoch; four "
        f"times in epochs of {LONG_EPOCH} steps or more.",
    )
    patience: int | None = option(
        None, "Stop after this many evaluations in succession without an improvement."
    )
    save_every: int | None = option(None, "Optimiser steps between additional checkpoints.")
    keep_checkpoints: int = option(
        2, "Number of newest checkpoints that are kept, beside the best one."
    )
    log_every: int = option(10, "Optimiser steps between lines of the log.")
    track: tuple[str, ...] = option(
        (), "Also log to tensorboard or wandb, beside log.jsonl; may be repeated."
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
            "log_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}: give more")
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("give batch_size, batch_tokens or both, got neither")
        if self.batch_size is None and self.global_batch_size is not None:
            raise ValueError(
                "global_batch_size counts sequences, but with batch_tokens alone their number varies, got "
                f"{self.global_batch_size} and {self.batch_tokens}: give accumulation instead"
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate must be positive and finite, got {self.learning_rate}: leave it out for the default"
            )
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")
        if not 0 < self.adam_eps < math.inf:
            # With 0, a parameter whose gradients are 0 becomes 0 / 0.
            raise ValueError(
                f"adam_eps must be positive and finite, got {self.adam_eps}: 1e-8 is usual"
            )
        for name in ("weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}: give another number"
                )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.parallel not in PARALLEL:
            raise ValueError(f"parallel must be one of {PARALLEL}, got {self.parallel!r}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")

    def micro_batches(self, processes: int) -> int:
        """Number of micro-batches of each process in an optimiser step, for this number of processes.

        Raises: ValueError if ``global_batch_size`` is not a multiple of ``batch_size`` * processes.
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
        """Number of optimiser steps of a run over this number of examples.

        It is an estimate if ``batch_tokens`` limits the batches, or if long texts become several examples.
        """
        step = (self.batch_size or 32) * self.micro_batches(processes) * processes
        return self.max_steps or self.epochs * math.ceil(examples / step)

    def warmup_of(self, total_steps: int) -> int:
        """Number of warm-up steps. Raises: ValueError if the run has fewer steps than ``warmup_steps``."""
        if self.warmup_steps is None:
            return math.ceil(self.warmup * total_steps)
        if self.warmup_steps > total_steps:
            raise ValueError(
                f"warmup_steps must be at most the run's {total_steps} steps, got {self.warmup_steps}: give fewer"
            )
        return self.warmup_steps

    def evaluation_due(self, step: int, done: int, steps: int) -> bool:
        """Whether an evaluation follows this step, with which ``done`` of its epoch's ``steps`` are done."""
        if self.eval_every is not None:
            return step % self.eval_every == 0
        evaluations = 4 if steps >= LONG_EPOCH else 1
        return done * evaluations // steps > (done - 1) * evaluations // steps

    def fingerprint(self) -> dict[str, object]:
        """{field: value} of the fields that must be the same in a resumed run."""
        excluded = NOT_IN_FINGERPRINT | SPLIT
        return {name: value for name, value in asdict(self).items() if name not in excluded}


def tokens_checksum(sequences: Iterable[Sequence[int]]) -> str:
    """A checksum of all token ids, by which a resumed run is compared with its checkpoint."""
    checksum = 0
    for ids in sequences:
        checksum = zlib.crc32(array("i", ids), checksum)
    return f"checksum {checksum:08x}"


def examples_checksum(examples: Iterable[object]) -> str:
    """A checksum of examples, labels included, by which a resumed run is compared with its checkpoint.

    Args:
        examples: of numbers, texts and lists of them, whose ``repr`` is exact.
    """
    checksum = 0
    for example in examples:
        checksum = zlib.crc32(repr(example).encode(), checksum)
    return f"checksum {checksum:08x}"


def check_same(stored: dict[str, object], current: dict[str, object], where: str) -> None:
    """Raises: ValueError with the first setting in which a checkpoint's run and this one differ.

    ``where``: the checkpoint, for the message.
    """
    # The learning rate comes last, because its default follows from other settings, such as the adaptation.
    for name in sorted({**stored, **current}, key=lambda name: name == "learning_rate"):
        if stored.get(name) != current.get(name):
            raise ValueError(
                f"{where} was written with {name}={stored.get(name)!r}, this run has {current.get(name)!r}. Resuming "
                "would give other weights than an uninterrupted run: use the same settings and data, or another "
                "output folder"
            )
