"""The task of sequence-to-sequence models: a target text is generated from a source text."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc._base.progress import progress_bar
from fastenc._base.transfer import send_arguments
from fastenc.data.readers import in_parts
from fastenc.data.text_to_text import (
    TextToTextData,
    TextToTextExample,
    collate_text_to_text,
    encode_text_to_text,
    iterate_sources,
    joined,
    read_text_to_text,
)
from fastenc.data.writers import json_lines, table_lines
from fastenc.models import Seq2Seq
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.objectives.loss_terms import labelled_items
from fastenc.packing import ModelArguments, length_sorted_batches
from fastenc.tasks.base import MIX, Task
from fastenc.tasks.inference import Fill
from fastenc.tasks.metrics import generation_metrics, numbers_of, require_generation_metrics
from fastenc.tasks.report import MISTAKES, Report
from fastenc.tasks.shared_options import QUOTING
from fastenc.tasks.summary import SHOWN, count_labels

TARGET_LENGTH = 128  # default of max_target_length


@dataclass(frozen=True)
class SequenceToSequence(Task[Seq2Seq, TextToTextData, TextToTextExample, list[str]]):
    """A text for a text: summaries, translations, questions and answers, or classes written as text (T5).

    Predictions are texts, generated greedily or by beam search. The loss of evaluations has no label smoothing.

    Raises: ValueError without a source column, for a ``label_smoothing`` outside [0, 1), and for a length, number of
        beams or ``round_targets`` that is not positive and finite.
    """

    name = "seq2seq"
    model_class = Seq2Seq

    max_length: int | None = option(
        512, "Longest source in tokens; longer ones are cut.", predict=True
    )
    source: tuple[str, ...] = option(
        ("source",),
        "Column of the source text. Repeat it for several, which are joined as 'name: text name: text'.",
        predict=True,
    )
    target: str = option("target", "Column of the target text.")
    quoting: str | None = option(None, QUOTING, predict=True)
    prefix: str = option("", "Text before each source, such as 'summarize: '.", predict=True)
    max_target_length: int | None = option(
        None,
        f"Longest target in tokens, also of a prediction. Default: {TARGET_LENGTH}.",
        predict=True,
    )
    num_beams: int = option(1, "Number of beams of the search; 1: greedy.", predict=True)
    label_smoothing: float = option(0.0, "Share of the uniform distribution in the labels.")
    round_targets: float | None = option(
        None,
        "Learn targets that are numbers as multiples of this, as T5 does with 0.2 for similarities.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == MIX:
            raise ValueError(
                f'{self.name} reads the last layer of the encoder, got layers="{MIX}": leave it out'
            )
        if not self.source:
            raise ValueError("source must name at least one column, got none: leave it out")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be in [0, 1), got {self.label_smoothing}: 0.1 is usual"
            )
        for name in ("max_target_length", "num_beams", "round_targets"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}: give another")

    def read(
        self, path: str | Path, train: TextToTextData | Seq2Seq | None = None
    ) -> TextToTextData:
        if train is not None:  # the data are for metrics, which are missed before the training
            require_generation_metrics()
        return read_text_to_text(path, self.source, self.target, self.quoting)

    def read_inputs(self, path: str | Path) -> TextToTextData:
        return TextToTextData(list(iterate_sources(path, self.source, self.quoting)), [])

    def input_parts(self, path: str | Path, size: int) -> Iterator[TextToTextData]:
        for sources in in_parts(iterate_sources(path, self.source, self.quoting), size):
            yield TextToTextData(sources, [])

    def data_of(self, inputs: Sequence[object]) -> TextToTextData:
        """The data of source texts, or of one text for each source column."""
        sources = []
        for index, each in enumerate(inputs):
            columns = each if isinstance(each, list | tuple) else (each,)
            texts = [text for text in columns if isinstance(text, str)]
            if not len(texts) == len(columns) == len(self.source):
                expected = "a text" if len(self.source) == 1 else f"{len(self.source)} texts"
                raise ValueError(f"input {index} must be {expected}, got {each!r}")
            sources.append(joined(texts, self.source))
        return TextToTextData(sources, [])

    def model_options(self, train: TextToTextData) -> JsonObject:
        return {}

    def metrics(self, data: TextToTextData) -> tuple[str, ...]:
        numbers = ("pearson", "spearman") if numbers_of(data.targets) is not None else ()
        return ("rouge_l", "chrf", "exact_match", *numbers, "loss")

    def metric_titles(self, model: Seq2Seq) -> dict[str, str]:
        return {"chrf": "chrf (of 100)"}

    def describe_labels(self, data: TextToTextData) -> str:
        few = len(set(data.targets)) <= SHOWN
        return f"{self.target}: {count_labels(data.targets)}" if few else ""

    def encode(self, data: TextToTextData, model: Seq2Seq) -> list[TextToTextExample]:
        if self.round_targets is not None:
            rounded = [_rounded(text, self.round_targets) for text in data.targets]
            data = TextToTextData(data.sources, rounded, data.where)
        return encode_text_to_text(
            data,
            model.own_tokenizer(),
            self.room(model),
            self.target_room(model),
            model.decoder_start_token_id,
            prefix=self.prefix,
        )

    def target_room(self, model: Seq2Seq) -> int:
        """Largest number of tokens of a target.

        Raises: ValueError if ``max_target_length`` is above the model's number of positions.
        """
        positions = model.positions
        if self.max_target_length is None:
            return min(TARGET_LENGTH, positions)
        if self.max_target_length > positions:
            raise ValueError(
                f"max_target_length must be at most {positions}, the model's number of positions, got "
                f"{self.max_target_length}: give less"
            )
        return self.max_target_length

    def collate(self, examples: Sequence[TextToTextExample]) -> ModelArguments:
        arguments = collate_text_to_text(examples)
        if self.label_smoothing and "labels" in arguments:
            arguments["label_smoothing"] = self.label_smoothing
        return arguments

    def compute(
        self,
        model: Seq2Seq,
        examples: Sequence[TextToTextExample],
        batch_size: int = 32,
        show_progress: bool | None = False,
        fill: Fill | None = None,
    ) -> tuple[list[Tensor], float]:
        """(generated token ids of each example: int64, in their order; mean loss over all labels, 0 without labels)."""
        device = next(model.parameters()).device
        generated: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(examples)
        total, items = torch.zeros((), dtype=torch.float64, device=device), 0
        batches = length_sorted_batches([len(each.input_ids) for each in examples], batch_size)
        most = self.target_room(model)
        with torch.inference_mode(), evaluation_mode(model):
            for chosen in progress_bar(batches, "generating", "batch", show_progress):
                arguments = collate_text_to_text([examples[i] for i in chosen])
                if fill is not None:
                    arguments["batch"] = fill(arguments["batch"], chosen)
                arguments = send_arguments(arguments, device)
                if "labels" in arguments:
                    number = labelled_items(arguments["labels"])
                    total, items = total + model(**arguments).loss * number, items + number
                ids = model.generate_ids(
                    arguments["batch"], max_new_tokens=most, num_beams=self.num_beams
                )
                for index, tokens in zip(chosen, ids, strict=True):
                    generated[index] = torch.as_tensor(tokens)
        return generated, total.item() / max(items, 1)

    def decode(
        self,
        model: Seq2Seq,
        data: TextToTextData,
        examples: Sequence[TextToTextExample],
        logits: list[Tensor],
    ) -> list[str]:
        tokenizer = model.own_tokenizer()
        return [tokenizer.decode(ids.tolist()).strip() for ids in logits]

    def score(
        self, model: Seq2Seq, data: TextToTextData, predictions: list[str]
    ) -> dict[str, float]:
        return generation_metrics(predictions, data.targets)

    def report(self, model: Seq2Seq, data: TextToTextData, predictions: list[str]) -> Report:
        """The predictions that are not exactly the target."""
        where = data.where or range(1, len(data) + 1)
        rows = zip(where, data.sources, data.targets, predictions, strict=True)
        wrong = (
            {"where": place, "source": source, "true": target, "prediction": prediction}
            for place, source, target, prediction in rows
            if prediction != target
        )
        return {MISTAKES: json_lines(wrong)}

    def lines(
        self, model: Seq2Seq, data: TextToTextData, predictions: list[str], suffix: str
    ) -> Iterable[str]:
        if suffix == ".tsv":
            # Line n belongs to input n, so there are no tabs and line breaks.
            return table_lines([{"prediction": " ".join(text.split())} for text in predictions])
        rows = zip(data.sources, predictions, strict=True)
        return json_lines([{"source": source, "prediction": text} for source, text in rows])


def _rounded(text: str, step: float) -> str:
    """A number as the nearest multiple of ``step``, with as many digits as it has; other texts as they are."""
    number = numbers_of([text])
    if number is None:
        return text
    exponent = Decimal(str(step)).as_tuple().exponent
    digits = max(0, -exponent) if isinstance(exponent, int) else 0
    return f"{round(number[0] / step) * step:.{digits}f}"
