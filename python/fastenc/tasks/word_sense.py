"""The task of word sense disambiguation: a word has the sense with the nearest mean vector."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc._base.progress import progress_bar
from fastenc._base.transfer import send_arguments
from fastenc.data.senses import (
    SenseData,
    SenseExample,
    collate_senses,
    encode_senses,
    in_sense_parts,
    read_senses,
)
from fastenc.data.writers import lines_of
from fastenc.models.embedding.states import resolve_layers
from fastenc.models.embedding.word_vectors import LAYERS
from fastenc.models.heads.sense_model import SenseInventory, WordSenseModel, nearest
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.packing import ModelArguments, length_sorted_batches
from fastenc.tasks.base import Task


class SensePrediction(NamedTuple):
    """The predicted sense of a target.

    Fields:
        sense: None for a lemma that is not in the training set.
        scores: {sense: cosine similarity} of the lemma's senses that have a vector.
    """

    sense: str | None
    scores: dict[str, float]


@dataclass(frozen=True)
class WordSense(Task[WordSenseModel, SenseData, SenseExample, Sequence[SensePrediction]]):
    """The sense of a word in its sentence.

    The model is not trained by steps. The vector of a sense is the mean of the vectors of its labelled words. Among the
    senses of a word's lemma, the one whose vector has the highest cosine similarity with the word's vector is
    predicted. The layers of the word vectors are chosen on the dev set: a single layer, or the mean of the last four.
    Raises: ValueError for ``word_layers`` that are not numbers, or ``min_examples`` below 1.
    Source: Loureiro et al. 2021, arXiv:2008.11608; Peters et al. 2018, arXiv:1802.05365.
    """

    name = "word-sense"
    model_class = WordSenseModel
    trains_by_steps = False

    max_length: int = option(
        512,
        "Longest sentence in tokens; of a longer one, the tokens around the word are read.",
        predict=True,
    )
    sense: str = option("sense", "Column of the sense in a table.")
    sense_column: int | None = option(
        None, "Column of the senses in a file in columns, from 1. Default: the last."
    )
    word_layers: str | None = option(
        None,
        "Layers that are averaged to a word's vector, such as -4,-3,-2,-1. Default: chosen on --dev, else the last "
        "four.",
    )
    min_examples: int = option(
        1,
        "Senses with fewer labelled words get no vector. If no sense of a lemma has one, its most frequent sense is "
        "predicted.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_examples < 1:
            raise ValueError(f"min_examples must be at least 1, got {self.min_examples}: give more")
        self._layers()

    def read(self, path: str | Path, train: SenseData | WordSenseModel | None = None) -> SenseData:
        return read_senses(path, self.sense, self.sense_column)

    def read_inputs(self, path: str | Path) -> SenseData:
        return read_senses(path, self.sense, labelled=False)

    def input_parts(self, path: str | Path, size: int) -> Iterator[SenseData]:
        yield from in_sense_parts(self.read_inputs(path), size)

    def model_options(self, train: SenseData) -> JsonObject:
        return {}

    def metrics(self, data: SenseData) -> tuple[str, ...]:
        return ("f1", "accuracy", "macro_accuracy")

    def encode(self, data: SenseData, model: WordSenseModel) -> list[SenseExample]:
        return encode_senses(data, model.own_tokenizer(), self.room(model))

    def collate(self, examples: Sequence[SenseExample]) -> ModelArguments:
        return collate_senses(examples)

    def logits_of(self, arguments: ModelArguments) -> list[int] | None:
        starts = arguments["spans"][::2].contiguous()
        counts = torch.bucketize(arguments["batch"].cu_seqlens, starts).diff()
        return counts.tolist()

    def fit(
        self,
        model: WordSenseModel,
        train: SenseData,
        dev: SenseData | None,
        batch_size: int = 32,
        show_progress: bool | None = None,
        metric: str | None = None,
    ) -> dict[str, float]:
        candidates = self._candidates(model, dev)
        senses: dict[str, list[str]] = {}
        for target in train.targets:
            known = senses.setdefault(target.lemma, [])
            known += [sense for sense in target.senses if sense not in known]
        total = sum(map(len, senses.values()))
        width = model.config.hidden_size
        empty = SenseInventory(senses, torch.zeros(total, dtype=torch.int64), torch.empty(0, width))
        rows = empty.rows()
        sums = torch.zeros(len(candidates), total, width)
        examples = self.encode(train, model)
        for indices, vectors in _vectors(model, examples, candidates, batch_size, show_progress):
            pairs = [
                (i, rows[target.lemma][senses[target.lemma].index(sense)])
                for i, index in enumerate(indices)
                for target in [train.targets[index]]
                for sense in target.senses
            ]
            of_vector, of_sense = torch.tensor(pairs).T
            empty.counts.index_add_(0, of_sense, torch.ones_like(of_sense))
            sums.index_add_(1, of_sense, vectors[of_vector].transpose(0, 1))
        means = sums / empty.counts[:, None]
        if int(empty.counts.max()) < self.min_examples:
            raise ValueError(
                f"{train.path}: no sense has {self.min_examples} examples, the most frequent has "
                f"{int(empty.counts.max())}: lower min_examples"
            )
        inventories = [
            SenseInventory(senses, empty.counts, mean.clone(), self.min_examples) for mean in means
        ]
        best, metrics = 0, {}
        if dev is not None:
            held_out = self.encode(dev, model)
            metrics_of = self._compare(model, dev, held_out, candidates, inventories, batch_size)
            chosen_by = metric or self.metrics(dev)[0]
            best = max(range(len(candidates)), key=lambda index: metrics_of[index][chosen_by])
            metrics = metrics_of[best]
        model.inventory, model.layers = inventories[best], list(candidates[best])
        return metrics

    def decode(
        self,
        model: WordSenseModel,
        data: SenseData,
        examples: Sequence[SenseExample],
        logits: list[Tensor],
    ) -> list[SensePrediction]:
        inventory = _inventory(model)
        rows = inventory.rows()
        predictions: dict[int, SensePrediction] = {}
        for example, vectors in zip(examples, logits, strict=True):
            for index, vector in zip(example.targets, vectors, strict=True):
                predictions[index] = _predict(inventory, rows, data.targets[index].lemma, vector)
        return [predictions[index] for index in range(len(data.targets))]

    def score(
        self, model: WordSenseModel, data: SenseData, predictions: Sequence[SensePrediction]
    ) -> dict[str, float]:
        return sense_metrics(data, predictions)

    def lines(
        self,
        model: WordSenseModel,
        data: SenseData,
        predictions: Sequence[SensePrediction],
        suffix: str,
    ) -> Iterable[str]:
        rows = []
        for target, (sense, scores) in zip(data.targets, predictions, strict=True):
            row: dict[str, object] = {"lemma": target.lemma, "sense": sense or ""}
            row |= {"score": scores.get(sense, 0.0) if sense else 0.0}
            if suffix == ".jsonl":
                words = data.sentences[target.sentence]
                row |= {"sentence": " ".join(words), "index": target.word, "scores": scores}
            rows.append(row)
        return lines_of(rows, suffix)

    def _layers(self) -> list[int] | None:
        if self.word_layers is None:
            return None
        try:
            return [int(number) for number in self.word_layers.split(",")]
        except ValueError:
            raise ValueError(
                f"word_layers must be numbers separated by commas, got {self.word_layers!r}: write them like "
                "-4,-3,-2,-1"
            ) from None

    def _candidates(self, model: WordSenseModel, dev: SenseData | None) -> list[list[int]]:
        """The lists of layers that are compared on the dev set; one if there is nothing to choose."""
        depth = model.config.num_layers
        if (given := self._layers()) is not None:
            return [resolve_layers(given, depth, "word_layers")]
        if dev is None:
            return [model.layers]
        last = [resolve_layers(LAYERS, depth)] if depth >= len(LAYERS) else []
        return [*last, *([layer] for layer in range(depth + 1))]

    def _compare(
        self,
        model: WordSenseModel,
        data: SenseData,
        examples: Sequence[SenseExample],
        candidates: Sequence[Sequence[int]],
        inventories: Sequence[SenseInventory],
        batch_size: int,
    ) -> list[dict[str, float]]:
        """The metrics of each candidate list of layers."""
        rows = inventories[0].rows()
        predictions_of: list[list[Any]] = [[None] * len(data.targets) for _ in candidates]
        for indices, vectors in _vectors(model, examples, candidates, batch_size):
            for index, of_candidates in zip(indices, vectors, strict=True):
                lemma = data.targets[index].lemma
                for predictions, inventory_of, vector in zip(
                    predictions_of, inventories, of_candidates, strict=True
                ):
                    predictions[index] = _predict(inventory_of, rows, lemma, vector)
        return [sense_metrics(data, predictions) for predictions in predictions_of]


def sense_metrics(data: SenseData, predictions: Sequence[SensePrediction]) -> dict[str, float]:
    """The metrics of word sense disambiguation.

    Returns: accuracy: share of right targets among all targets (recall). macro_accuracy: mean of the lemmas'
        accuracies. f1: harmonic mean of recall and precision, the share of right targets among those with a predicted
        sense.
    """
    by_lemma = accuracy_by_lemma(data, predictions)
    right = sum(share * count for share, count in by_lemma.values())
    attempted = sum(p.sense is not None for p in predictions)
    recall, precision = right / len(data.targets), right / max(attempted, 1)
    return {
        "f1": 2 * precision * recall / max(precision + recall, 1e-12),
        "accuracy": recall,
        "macro_accuracy": sum(share for share, _ in by_lemma.values()) / len(by_lemma),
    }


def accuracy_by_lemma(
    data: SenseData, predictions: Sequence[SensePrediction]
) -> dict[str, tuple[float, int]]:
    """{lemma: (share of right predictions, number of targets)}."""
    right: dict[str, list[bool]] = {}
    for target, predicted in zip(data.targets, predictions, strict=True):
        right.setdefault(target.lemma, []).append(predicted.sense in target.senses)
    return {lemma: (sum(each) / len(each), len(each)) for lemma, each in right.items()}


def _predict(
    inventory: SenseInventory, rows: dict[str, range], lemma: str, vector: Tensor
) -> SensePrediction:
    if lemma not in rows:
        return SensePrediction(None, {})
    rows_of = slice(rows[lemma].start, rows[lemma].stop)
    scores = nearest(
        vector, inventory.vectors[rows_of], inventory.counts[rows_of], inventory.min_examples
    )
    named = dict(zip(inventory.senses[lemma], scores.tolist(), strict=True))
    enough = (inventory.counts[rows_of] >= inventory.min_examples).tolist()
    cosines = {sense: named[sense] for sense, has in zip(named, enough, strict=True) if has}
    return SensePrediction(max(named, key=named.__getitem__), cosines)


def _inventory(model: WordSenseModel) -> SenseInventory:
    if model.inventory is None:
        raise ValueError(
            "the model must have vectors of senses, got none: train it with fastenc finetune --task word-sense"
        )
    return model.inventory


@torch.inference_mode()
def _vectors(
    model: WordSenseModel,
    examples: Sequence[SenseExample],
    candidates: Sequence[Sequence[int]],
    batch_size: int,
    show_progress: bool | None = False,
) -> Iterator[tuple[list[int], Tensor]]:
    """(indices of targets, their vectors: float32 (targets, candidates, hidden_size)) of each batch."""
    device = next(model.parameters()).device
    batches = length_sorted_batches([len(each.input_ids) for each in examples], batch_size)
    with evaluation_mode(model):
        for indices in progress_bar(batches, "senses", "batch", show_progress):
            chosen = [examples[index] for index in indices]
            arguments = send_arguments(collate_senses(chosen), device)
            logits = model(**arguments, candidates=candidates).logits
            yield [index for example in chosen for index in example.targets], logits.float().cpu()
