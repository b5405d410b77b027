"""fastenc finetune."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastenc._options import argument, documented, group, option, options_listed_by
from fastenc.adapt import add_adaptation, freeze_encoder, trained_parameters
from fastenc.cli.options import Command
from fastenc.cli.task_options import all_task_options
from fastenc.cli.training import run_trainer
from fastenc.models import checkpoint
from fastenc.models.adaptations import LORA_TARGETS, METHODS, Lora, encoder_of
from fastenc.tasks import TASKS, Task, make_task, task_named
from fastenc.tasks.base import MIX
from fastenc.train import TrainConfig, task_trainer
from fastenc.train.checkpoint import open_output
from fastenc.train.processes import process_state


@documented
@dataclass(frozen=True)
class AdaptOptions:
    """Which of a model's weights are trained.

    Raises: ValueError for an unknown name, or a size that is not positive or belongs to nothing.
    """

    freeze_layers: int | None = option(
        None, "Leave the embeddings and this many lower layers as they are."
    )
    adapt: str | None = option(
        None,
        "Train small additions to a frozen encoder, and save them alone: lora, adapters, prefix or prompt; "
        "or features, the head alone on outputs of the encoder that are computed once.",
    )
    adapt_size: int | None = option(
        None, "LoRA's rank, units of an adapter, or length of a prefix or prompt."
    )
    lora_target: tuple[str, ...] = option(
        (),
        f"Linear layer that LoRA is added to, given once for each: {', '.join(LORA_TARGETS)}. "
        "Default: query and value, or qkv where a family has them in one.",
    )
    feature_cache: Path | None = option(
        None,
        "Folder of --adapt features' vectors, which runs can share. Default: features in the output folder.",
    )
    half_features: bool = option(False, "Keep these vectors as 2-byte numbers (float16).")

    def __post_init__(self) -> None:
        self.adaptation()

    def adaptation(self) -> Any:
        """What is added to the encoder, or None."""
        if self.adapt != "features" and (self.feature_cache or self.half_features):
            raise ValueError(
                f"--feature-cache and --half-features need --adapt features, got {self.adapt}"
            )
        if self.adapt != "lora" and self.lora_target:
            raise ValueError(f"--lora-target needs --adapt lora, got {self.adapt}")
        if self.adapt is None:
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt-size needs --adapt {'|'.join(METHODS)}, got {self.adapt_size}"
                )
            return None
        if self.adapt not in (*METHODS, "features"):
            raise ValueError(
                f"--adapt must be one of {', '.join(METHODS)}, features, got {self.adapt}"
            )
        if self.freeze_layers is not None:
            raise ValueError("--adapt freezes the whole encoder: leave out --freeze-layers")
        if self.adapt == "features":
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt features adds nothing, got --adapt-size {self.adapt_size}"
                )
            return None
        if self.adapt == "lora":
            rank = Lora.rank if self.adapt_size is None else self.adapt_size
            # The usual scale, whatever the rank.
            return Lora(rank, alpha=2.0 * rank, targets=self.lora_target or None)
        method = METHODS[self.adapt]
        return method() if self.adapt_size is None else method(self.adapt_size)

    def check_start(self, task: Task, model_name: str) -> None:
        """Raises: ValueError for a task without a head to train alone, or a model that is adapted already."""
        if self.adapt == "features" and task.model_class.architecture == "Model":
            raise ValueError(
                f"--adapt features trains a head on a frozen encoder's outputs, and {task.name} has none: give "
                f"--adapt {'|'.join(METHODS)}, or leave it out"
            )
        if self.adapt == "features" and task.layers == MIX:
            raise ValueError(
                f"--layers {MIX} needs every layer's output, and --adapt features keeps one: give --freeze-layers or "
                f"--adapt {'|'.join(METHODS)}"
            )
        if self.adapt not in METHODS:
            return
        folder = checkpoint.resolve(model_name)
        if (folder / checkpoint.ADAPTER_CONFIG).exists():
            raise ValueError(
                f"{model_name} holds an adaptation already, got --adapt {self.adapt}: leave it out to train that one "
                f"further, or give {checkpoint.without_head(folder)}"
            )

    def apply(self, model: Any) -> None:
        """Freeze what is not trained, and add what is."""
        if self.freeze_layers is not None or self.adapt == "features":
            freeze_encoder(model, self.freeze_layers)
        if (adaptation := self.adaptation()) is not None:
            add_adaptation(model, adaptation)


@dataclass(frozen=True, kw_only=True)
class Finetune(Command):
    """Fine-tune an encoder on a task.

    Examples:
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2
    fastenc finetune runs/small mrpc.tsv --dev dev.tsv -t sentence1 -t sentence2 -o runs/mrpc --metric f1
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-lora --adapt lora --adapt-size 8
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-head --adapt features --epochs 20
    fastenc finetune runs/small reviews.tsv --dev dev.tsv -o runs/reviews --max-length 512 --chunks mean --stride 64
    fastenc finetune runs/small stsb.tsv --dev dev.tsv -t sentence1 -t sentence2 --label score --regression -o runs/sts
    fastenc finetune runs/small train.conll --task token-classification --crf --dev dev.conll -o runs/ner
    fastenc finetune runs/small train.conll --task span-ner --inner-tag-column 3 --dev dev.conll -o runs/nested
    fastenc finetune runs/small pairs.tsv --task sentence-embedding -t text -t partner --dev dev.tsv -o runs/vectors
    """

    model: str = argument("Checkpoint folder or hub name.")
    train: str = argument(
        "Labelled data: .tsv, .csv, .jsonl (.gz) or a data set; CoNLL columns or .conllu for tokens; columns or .jsonl "
        "with tokens and entities for spans."
    )
    training: TrainConfig = group("Training")
    task: str = option("sequence-classification", f"What to learn: {', '.join(TASKS)}.")
    dev: str | None = option(None, "Labelled data to choose the best checkpoint by.")
    metric: str | None = option(
        None,
        "What chooses the best checkpoint, such as accuracy, f1, pearson or loss. Default: the task's first.",
    )
    ways: AdaptOptions = group("Weights that are trained")
    resume: bool = option(False, "Go on from the newest checkpoint in the output folder.")
    task_options: dict[str, Any] = options_listed_by(all_task_options)

    def run(self) -> None:
        task, config = make_task(task_named(self.task), self.task_options), self.training
        self.ways.check_start(task, self.model)
        process_state(config.device)
        with open_output(Path(config.output), self.resume):
            self._run(task, config)

    def _run(self, task: Task, config: TrainConfig) -> None:
        train = task.read(self.train)
        dev = None if self.dev is None else task.read(self.dev, train)
        torch.manual_seed(config.seed)
        model = task.load(self.model, train)
        self.ways.apply(model)
        features = None
        if self.ways.adapt == "features":
            features = self.ways.feature_cache or Path(config.output) / "features"
        trained, everything = trained_parameters(model)
        trainer = task_trainer(
            task,
            model,
            train,
            config,
            dev=dev,
            metric=self.metric,
            features=features,
            features_dtype=torch.float16 if self.ways.half_features else torch.float32,
        )
        if trainer.accelerator.is_main_process:
            print(f"training {trained:,} of {everything:,} parameters")
        run_trainer(trainer, self.resume, task.metric_titles(model))
        mix = encoder_of(model).mix
        if mix is not None and trainer.accelerator.is_main_process:
            print(f"mix of layers: {mix.describe()}")
