"""Training: configuration, loop, checkpoints, log."""

from fastenc.train.config import TrainConfig, fine_tuning_lr
from fastenc.train.finetuning import task_trainer
from fastenc.train.loop import Trainer
from fastenc.train.new_model import NewModel
from fastenc.train.objective_options import ObjectiveOptions
from fastenc.train.pretraining import PretrainConfig, objective_trainer

__all__ = [
    "NewModel",
    "ObjectiveOptions",
    "PretrainConfig",
    "TrainConfig",
    "Trainer",
    "fine_tuning_lr",
    "objective_trainer",
    "task_trainer",
]
