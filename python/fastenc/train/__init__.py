"""Training: configuration, loop, checkpoints, log."""

from fastenc.train.config import TrainConfig
from fastenc.train.loop import Trainer

__all__ = ["TrainConfig", "Trainer"]
