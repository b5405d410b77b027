"""Training: configuration, loop, checkpoints, log."""

from fastenc.train.config import TrainConfig, fine_tuning_rate
from fastenc.train.finetuning import task_trainer
from fastenc.train.loop import Trainer

__all__ = ["TrainConfig", "Trainer", "fine_tuning_rate", "task_trainer"]
