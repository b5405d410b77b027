"""fastenc finetune."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastenc._base.options import argument, documented, group, option, options_listed_by
from fastenc.adapt import add_adaptation, freeze_encoder, trained_parameters
from fastenc.cli.options import Command
from fastenc.cli.task_options import all_task_options
from fastenc.cli.training import INSTEAD, check_other_folder, run_trainer
from fastenc.models import Seq2Seq, checkpoint
from fastenc.models.adapters.adaptation_methods import LORA_TARGETS, METHODS, Lora
from fastenc.models.adapters.adaptations import encoder_of
from fastenc.tasks import TASKS, Task, make_task, task_named
from fastenc.tasks.base import MIX
from fastenc.train import TrainConfig, task_trainer
from fastenc.train.checkpoint import open_output
from fastenc.train.model_card import Origin
from fastenc.train.processes import process_state

if TYPE_CHECKING:
    from fastenc.models.pretrained import PretrainedModel


@documented
@dataclass(frozen=True)
class AdaptOptions:
    """Which of a model's weights are trained.

    Raises: ValueError for an unknown name, a size that is not positive, or options that do not fit ``adapt``.
    """

    freeze_layers: int | None = option(
        None, "Do not train the embeddings and this many of the lower layers."
    )
    adapt: str | None = option(
        None,
        "lora, adapters, prefix or prompt: freeze the encoder, add a few parameters to it, and train and save only "
        "these and the head. features: freeze the encoder, compute its outputs once, and train only the head on them.",
    )
    adapt_size: int | None = option(
        None, "Rank of LoRA, width of an adapter, or length of a prefix or prompt."
    )
    lora_target: tuple[str, ...] = option(
        (),
        f"Linear layer to which LoRA is added; repeat it for several: {', '.join(LORA_TARGETS)}. Default: query and "
        "value, or qkv in families with one layer for all three.",
    )
    feature_cache: Path | None = option(
        None,
        "Folder for the outputs that --adapt features computes; several runs can share it. Default: features in the "
        "output folder.",
    )
    half_features: bool = option(False, "Store these outputs as float16 instead of float32.")

    def __post_init__(self) -> None:
        self.adaptation()

    def adaptation(self) -> Any:
        """The adaptation that is added to the encoder, or None.

        Raises: ValueError as the class.
        """
        if self.adapt != "features" and (self.feature_cache or self.half_features):
            raise ValueError(
                f"--feature-cache and --half-features need --adapt features, got {self.adapt}: leave them out"
            )
        if self.adapt != "lora" and self.lora_target:
            raise ValueError(f"--lora-target needs --adapt lora, got {self.adapt}: leave it out")
        if self.adapt is None:
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt-size needs --adapt {'|'.join(METHODS)}, got {self.adapt_size}: leave it out"
                )
            return None
        if self.adapt not in (*METHODS, "features"):
            raise ValueError(
                f"--adapt must be one of {', '.join(METHODS)}, features, got {self.adapt}: give one of them"
            )
        if self.adapt_size is not None and self.adapt_size < 1:
            raise ValueError(f"--adapt-size must be at least 1, got {self.adapt_size}: give more")
        unknown = {*self.lora_target} - {*LORA_TARGETS}
        if unknown:
            raise ValueError(
                f"--lora-target must be of {', '.join(LORA_TARGETS)}, got {min(unknown)}: give one of them"
            )
        if self.freeze_layers is not None:
            raise ValueError("--adapt freezes the whole encoder: leave out --freeze-layers")
        if self.adapt == "features":
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt features adds no parameters, got --adapt-size {self.adapt_size}: leave it out"
                )
            return None
        if self.adapt == "lora":
            rank = Lora.rank if self.adapt_size is None else self.adapt_size
            # So that the scale alpha / rank is 2 for every rank.
            return Lora(rank, alpha=2.0 * rank, targets=self.lora_target or None)
        method = METHODS[self.adapt]
        return method() if self.adapt_size is None else method(self.adapt_size)

    def check_start(self, task: Task, model_name: str) -> None:
        """Raises: ValueError if the task's model cannot have what --adapt adds, or if the model has an adaptation."""
        if self.adapt in METHODS and issubclass(task.model_class, Seq2Seq):
            raise ValueError(
                f"--adapt {self.adapt} adds parameters to encoders, but {task.name} trains an encoder-decoder: leave "
                "it out, or give --adapt features to train the decoder alone"
            )
        if self.adapt == "features" and task.model_class.architecture == "Model":
            raise ValueError(
                f"--adapt features trains a head on a frozen encoder's outputs, but {task.name} has no head: give "
                f"--adapt {'|'.join(METHODS)}, or leave it out"
            )
        if self.adapt == "features" and task.layers == MIX:
            raise ValueError(
                f"--layers {MIX} needs every layer's output, but --adapt features stores one: give --freeze-layers or "
                f"--adapt {'|'.join(METHODS)}"
            )
        if self.adapt not in METHODS:
            return
        if not task.trains_by_steps:
            raise ValueError(
                f"--adapt {self.adapt} adds parameters that training steps learn, but {task.name} takes no steps: "
                "leave it out"
            )
        folder = checkpoint.resolve(model_name)
        if (folder / checkpoint.ADAPTER_CONFIG).exists():
            raise ValueError(
                f"{model_name} already has an adaptation, got --adapt {self.adapt}: leave it out to train the existing "
                f"one further, or give {checkpoint.without_head(folder)}"
            )

    def apply(self, model: "PretrainedModel") -> None:
        """Freeze the weights that are not trained, and add the adaptation."""
        if self.freeze_layers is not None or self.adapt == "features":
            freeze_encoder(model, self.freeze_layers)
        if (adaptation := self.adaptation()) is not None:
            add_adaptation(model, adaptation)


@dataclass(frozen=True, kw_only=True)
class Finetune(Command):
    """Fine-tune an encoder, or an encoder-decoder, on a task.

    Examples:
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2
    fastenc finetune runs/small mrpc.tsv --dev dev.tsv -t sentence1 -t sentence2 -o runs/mrpc --metric f1
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-lora --adapt lora --adapt-size 8
    fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-head --adapt features --epochs 20
    fastenc finetune runs/small reviews.tsv --dev dev.tsv -o runs/reviews --max-length 512 --chunks mean --stride 64
    fastenc finetune runs/small stsb.tsv --dev dev.tsv -t sentence1 -t sentence2 --label score --regression -o runs/sts
    fastenc finetune runs/small train.conll --task token-classification --crf --dev dev.conll -o runs/ner
    fastenc finetune runs/small train.conll --task span-ner --inner-tag-column 3 --dev dev.conll -o runs/nested
    fastenc finetune runs/t5 train.tsv --task seq2seq --source sentence --target label --dev dev.tsv -o runs/labels
    fastenc finetune runs/small ranking.jsonl --task rerank --loss listnet --dev dev.jsonl -o runs/reranker
    fastenc finetune runs/small pairs.tsv --task sentence-embedding -t text -t partner --dev dev.tsv -o runs/vectors
    """

    instead: ClassVar[dict[str, str]] = INSTEAD

    model: str = argument("Checkpoint folder, or name on the hub.")
    train: str = argument(
        "Labelled data: .tsv, .csv, .jsonl (also .gz) or a data set. For token-classification: CoNLL columns or "
        ".conllu. For span-ner: CoNLL columns, or .jsonl with tokens and entities. For question-answering: SQuAD's "
        ".json, or .jsonl with id, question, context and answers."
    )
    training: TrainConfig = group("Training")
    task: str = option("sequence-classification", f"Task to learn: {', '.join(TASKS)}.")
    dev: str | None = option(None, "Labelled data on which the best checkpoint is chosen.")
    metric: str | None = option(
        None,
        "Metric that chooses the best checkpoint, such as accuracy, f1, pearson or loss. Default: the task's main "
        "metric.",
    )
    adapt_options: AdaptOptions = group("Weights that are trained")
    resume: bool = option(False, "Continue from the newest checkpoint in the output folder.")
    overwrite: bool = option(
        False, "Delete the run that the output folder has, when the new one starts."
    )
    task_options: dict[str, Any] = options_listed_by(all_task_options)

    def run(self) -> None:
        task, config = make_task(task_named(self.task), self.task_options), self.training
        check_other_folder(config.output, self.model)
        self.adapt_options.check_start(task, self.model)
        process_state(config.device)
        with open_output(Path(config.output), self.resume, self.overwrite):
            self._run(task, config)

    def _run(self, task: Task, config: TrainConfig) -> None:
        train = task.read(self.train)
        dev = None if self.dev is None else task.read(self.dev, train)
        torch.manual_seed(config.seed)
        model = task.load(self.model, train)
        self.adapt_options.apply(model)
        features = None
        if self.adapt_options.adapt == "features":
            features = self.adapt_options.feature_cache or Path(config.output) / "features"
        trained, total = trained_parameters(model)
        trainer = task_trainer(
            task,
            model,
            train,
            config,
            dev=dev,
            metric=self.metric,
            features=features,
            features_dtype=torch.float16 if self.adapt_options.half_features else torch.float32,
            origin=Origin(self.model, (self.train,), self.dev),
        )
        if trainer.accelerator.is_main_process and task.trains_by_steps:
            print(f"training {trained:,} of {total:,} parameters")
        run_trainer(trainer, self.resume, self.overwrite, task.metric_titles(model))
        mix = encoder_of(model).mix
        if mix is not None and trainer.accelerator.is_main_process:
            print(f"mix of layers: {mix.describe()}")
