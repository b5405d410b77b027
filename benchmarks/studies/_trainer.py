"""transformers' Trainer with fastenc's settings, on the same batches in the same order, for each task."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies._crf_peer import TaggerWithCrf
from benchmarks.studies._span_peer import PlainSpanClassifier, collate
from fastenc.data import BatchSampler, collate_spans
from fastenc.data.questions import question_windows
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import QuestionAnswering, SpanNer, Task, TokenClassification
from fastenc.tasks.metrics import classification_metrics, regression_metrics, tagging_metrics
from fastenc.tasks.span_decoding import best_null_offset
from fastenc.text import load_tokenizer
from fastenc.train import TrainConfig


class Peer(ABC):
    """What the Trainer needs of a task: its model, made from the checkpoint ``start``, its rows, collator and score."""

    architecture: str

    def __init__(self, task: Any, train: Any, tokenizer: Any, start: Path | None = None):
        self.task, self.tokenizer, self.start = task, tokenizer, start or minilm_folder()
        self.names = getattr(train, "label_names", [])

    def model_options(self) -> dict[str, Any]:
        return {"num_labels": len(self.names) or 1}

    def model(self) -> Any:
        import transformers

        automatic = getattr(transformers, f"AutoModelFor{self.architecture}")
        return automatic.from_pretrained(self.start, **self.model_options())

    def collator(self) -> Callable:
        import transformers

        return transformers.DataCollatorWithPadding(self.tokenizer)

    @abstractmethod
    def rows(self, data: Any) -> list[dict]:
        """``input_ids`` and labels of every example."""

    @abstractmethod
    def score(self, data: Any, prediction: Any) -> dict[str, float]:
        """The task's metrics of the Trainer's prediction for all rows of the data."""

    def calibrate(self, dev: Any, prediction: Any) -> None:  # noqa: B027
        """Choose after training what a task chooses on the dev set; most tasks choose nothing."""


class Texts(Peer):
    architecture = "SequenceClassification"

    def model_options(self) -> dict[str, Any]:
        return {**super().model_options(), "problem_type": self.task.problem_type}

    def rows(self, data: Any) -> list[dict]:
        texts = [text if isinstance(text, tuple) else (text,) for text in data.texts]
        columns = [list(column) for column in zip(*texts, strict=True)]
        longest = self.task.long_texts().max_length
        encoded = self.tokenizer(*columns, truncation=True, max_length=longest)
        return [
            {**{name: encoded[name][i] for name in encoded}, "labels": label}
            for i, label in enumerate(data.labels)
        ]

    def score(self, data: Any, prediction: Any) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids.tolist()
        if self.task.regression:
            return regression_metrics(logits[:, 0].tolist(), labels)
        return classification_metrics(logits.argmax(1).tolist(), labels, logits.shape[1])


class Tags(Peer):
    architecture = "TokenClassification"

    def collator(self) -> Callable:
        import transformers

        return transformers.DataCollatorForTokenClassification(self.tokenizer)

    def rows(self, data: Any) -> list[dict]:
        words = [each.words for each in data.sentences]
        options = dict(truncation=True, max_length=self.task.max_length)
        encoded = self.tokenizer(words, is_split_into_words=True, **options)
        examples = []
        for position, (ids, each) in enumerate(
            zip(encoded["input_ids"], data.sentences, strict=True)
        ):
            of_token = encoded.word_ids(position)
            labels = [
                -100 if word is None or word == before else self.names.index(each.tags[word])
                for word, before in zip(of_token, [None, *of_token], strict=False)
            ]
            examples.append({"input_ids": ids, "labels": labels})
        return examples

    def score(self, data: Any, prediction: Any) -> dict[str, float]:
        labels = torch.as_tensor(prediction.label_ids)
        real = labels != -100
        named = lambda rows: [[self.names[tag] for tag in row] for row in rows]
        predicted = named(self.paths(torch.as_tensor(prediction.predictions), real))
        gold = named(row[chosen] for row, chosen in zip(labels, real, strict=True))
        return tagging_metrics(predicted, gold, entities=any("-" in name for name in self.names))

    def paths(self, logits: torch.Tensor, real: torch.Tensor) -> list:
        """The tags of each sentence's words; ``real`` is True where a word begins."""
        return [row[chosen] for row, chosen in zip(logits.argmax(-1), real, strict=True)]


class TagsWithCrf(Tags):
    def model(self) -> Any:
        self.tagger = TaggerWithCrf(super().model())
        return self.tagger

    def paths(self, logits: torch.Tensor, real: torch.Tensor) -> list:
        return self.tagger.decode(logits, real)


class Questions(Peer):
    """Windows and the choice of answers are fastenc's, so that only the training differs."""

    architecture = "QuestionAnswering"

    def model_options(self) -> dict[str, Any]:
        return {}

    def _windows(self, data: Any) -> list:
        tokenizer = load_tokenizer(self.start)
        return question_windows(data, tokenizer, self.task.max_length, self.task.stride)

    def rows(self, data: Any) -> list[dict]:
        return [
            {
                "input_ids": window.input_ids,
                "token_type_ids": window.token_type_ids,
                "start_positions": window.start,
                "end_positions": window.end,
            }
            for window in self._windows(data)
        ]

    def score(self, data: Any, prediction: Any) -> dict[str, float]:
        windows = self._windows(data)
        both = torch.stack([torch.as_tensor(each) for each in prediction.predictions], -1)
        logits = [row[: len(w.input_ids)] for row, w in zip(both, windows, strict=True)]
        return self.task.score(None, data, self.task.decode(None, data, windows, logits))


class Entities(Peer):
    """A head from torch's functions on transformers' encoder, because transformers has no model of spans. Windows,
    spans and decoding are fastenc's, so that only the training differs."""

    def __init__(self, task: Any, train: Any, tokenizer: Any, start: Path | None = None):
        super().__init__(task, train, tokenizer, start)
        self.ours = task.load(self.start, train)

    def model(self) -> Any:
        import transformers

        encoder = transformers.AutoModel.from_pretrained(self.start, add_pooling_layer=False)
        return PlainSpanClassifier(encoder, self.ours.head)

    def collator(self) -> Callable:
        return collate

    def rows(self, data: Any) -> list[dict]:
        rows = []
        for example in self.task.encode(data, self.ours):
            alone = collate_spans([example])
            rows.append(
                {
                    "input_ids": torch.tensor(example.input_ids),
                    "words": alone["word_rows"],
                    "spans": torch.stack([alone["starts"], alone["ends"]], 1),
                    "labels": alone["labels"],
                }
            )
        return rows

    def score(self, data: Any, prediction: Any) -> dict[str, float]:
        predicted = self.task.decode(self.ours, data, *self._examples_and_logits(data, prediction))
        return self.task.score(self.ours, data, predicted)

    def calibrate(self, dev: Any, prediction: Any) -> None:
        candidates = self.task.candidates(
            self.ours, dev, *self._examples_and_logits(dev, prediction)
        )
        self.ours.null_offset = best_null_offset(candidates, dev.entities)

    def _examples_and_logits(self, data: Any, prediction: Any) -> tuple[list, list[torch.Tensor]]:
        padded = zip(prediction.predictions, prediction.label_ids, strict=True)
        logits = [torch.as_tensor(row[labels != -100]) for row, labels in padded]
        return self.task.encode(data, self.ours), logits


def peer_of(task: Task) -> type[Peer]:
    if isinstance(task, TokenClassification):
        return TagsWithCrf if task.crf else Tags
    if isinstance(task, SpanNer):
        return Entities
    return Questions if isinstance(task, QuestionAnswering) else Texts


class EpochAfterEpoch:
    """A BatchSampler as torch's DataLoader needs it: each iteration is the next epoch."""

    def __init__(self, sampler: BatchSampler):
        self.sampler, self.epoch = sampler, -1

    def __len__(self) -> int:
        return self.sampler.count(0)

    def __iter__(self):
        self.epoch += 1
        return self.sampler.epoch(self.epoch)


def transformers_trainer(
    model: Any,
    config: TrainConfig,
    train: list[dict],
    dev: list[dict],
    collate: Callable,
    compute_metrics: Callable,
    metric: str,
) -> Any:
    """A Trainer that evaluates when fastenc does and keeps the best model by ``metric``; rows: ``input_ids`` and
    labels."""
    import transformers

    arguments = transformers.TrainingArguments(
        config.output,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup,  # below 1: a share of the steps
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    lengths = [len(row["input_ids"]) for row in train]
    sampler = BatchSampler(lengths, config.batch_size, shuffle=True, seed=config.seed)

    class SameBatches(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(
                train, batch_sampler=EpochAfterEpoch(sampler), collate_fn=self.data_collator
            )

    class WithinEpochs(transformers.TrainerCallback):
        """The evaluations within an epoch; the Trainer itself makes the one at the end."""

        def on_step_end(self, args, state, control, **_):
            steps = state.max_steps // config.epochs
            done = state.global_step % steps
            if done and config.evaluation_due(state.global_step, done, steps):
                control.should_evaluate = control.should_save = True

    return SameBatches(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=collate,
        compute_metrics=compute_metrics,
        callbacks=[WithinEpochs()],
    )
