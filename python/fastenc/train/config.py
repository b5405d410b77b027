"""What a training run is: every number that its result depends on."""

from dataclasses import asdict, dataclass
from typing import Any

PRECISIONS = ("fp32", "bf16")
# Fields that a resumed run may change, because no weight depends on them.
FREE = {"output_dir", "log_every", "save_every", "keep_checkpoints"}


def fine_tuning_rate(hidden_size: int) -> float:
    """A learning rate to start from: 5e-5 at BERT-base's 768, the largest that Devlin et al. 2018 (arXiv:1810.04805)
    recommend, and in inverse proportion to the width, as Adam's steps transfer (Yang et al. 2022, arXiv:2203.03466).
    """
    return 5e-5 * 768 / hidden_size


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; the defaults fine-tune a BERT-base.

    Fields:
        output_dir: folder of checkpoints, log, plot and the final model.
        epochs: passes over the data; max_steps: optimiser steps, counts instead if given.
        batch_size: examples a process and micro-batch; accumulation: micro-batches an optimiser step.
        batch_tokens: most tokens of a micro-batch, which then may have fewer examples; None: no limit.
        learning_rate: peak of AdamW's rate, after a linear warm-up over the first ``warmup`` share of the steps and
            before a linear decay to 0.
        layer_decay: factor on the rate from each layer to the one below it, 1 for the same rate everywhere.
        weight_decay: on matrices; never on biases and norms.
        max_grad_norm: the gradient is scaled down to this Euclidean norm; 0 switches it off.
        precision: "fp32", or "bf16" for autocast over fp32 weights.
        eval_every: optimiser steps between evaluations, each with a checkpoint; None: at the end of each epoch.
        save_every: optimiser steps between further checkpoints, or None.
        keep_checkpoints: newest checkpoints to keep, beside the best.
        log_every: optimiser steps between lines of the log.
    Raises: ValueError naming the field, the rule and the value.
    """

    output_dir: str
    epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 32
    batch_tokens: int | None = None
    accumulation: int = 1
    learning_rate: float = 5e-5
    warmup: float = 0.06
    layer_decay: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    eval_every: int | None = None
    save_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "max_steps",
            "batch_size",
            "batch_tokens",
            "accumulation",
            "eval_every",
            "save_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")
        if self.weight_decay < 0 or self.max_grad_norm < 0:
            raise ValueError(
                "weight_decay and max_grad_norm must not be negative, "
                f"got {self.weight_decay} and {self.max_grad_norm}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")

    def decisive(self) -> dict[str, Any]:
        """The fields that the weights depend on."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def check_same(stored: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Raises: ValueError naming the first setting in which a checkpoint's run and this one differ."""
    for name in {**stored, **current}:
        if stored.get(name) != current.get(name):
            raise ValueError(
                f"{where} was written with {name}={stored.get(name)!r}, this run has {current.get(name)!r}: resuming "
                "would give other weights than an uninterrupted run. Use the same settings and data, or another "
                "output_dir"
            )
