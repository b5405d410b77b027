"""The task of extractive question answering: an answer is a span of the context."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.json_values import JsonObject
from fastenc._base.options import option
from fastenc.data.questions import Question, QuestionWindow, question_windows, read_questions
from fastenc.data.writers import json_lines
from fastenc.models import QuestionAnswerer
from fastenc.packing import ModelArguments, pack_sequences
from fastenc.tasks.answers import AnswerPrediction, extract_answers
from fastenc.tasks.base import Task
from fastenc.tasks.inference import Fill
from fastenc.tasks.squad import best_threshold, squad_metrics


@dataclass(frozen=True)
class QuestionAnswering(
    Task[QuestionAnswerer, Sequence[Question], QuestionWindow, Sequence[AnswerPrediction]]
):
    """Answers to questions about contexts of any length, as in SQuAD v1.1, and v2.0 with unanswerable questions.

    Contexts that are too long are read in overlapping windows. If some questions of labelled data have no answer and
    ``no_answer_threshold`` is not given, the metrics are computed with the threshold of the highest F1, which is
    reported among them. The threshold of the dev set is stored in the model's ``task_options``.
    """

    name = "question-answering"
    model_class = QuestionAnswerer
    per_token = True
    outputs = (".json", ".jsonl")

    max_length: int = option(384, "Longest window in tokens, including the question.", predict=True)
    stride: int = option(128, "Number of tokens that neighbouring windows share.", predict=True)
    max_answer_tokens: int = option(30, "Longest answer in tokens.", predict=True)
    no_answer_threshold: float | None = option(
        None,
        "A question is left unanswered if the score of 'no answer' is this much above that of the best span. Default: "
        "the best value on the dev set if it has unanswerable questions; else all questions are answered.",
        predict=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 0:
            raise ValueError(f"stride must be at least 0, got {self.stride}: give more")
        if self.max_answer_tokens < 1:
            raise ValueError(
                f"max_answer_tokens must be at least 1, got {self.max_answer_tokens}: give more"
            )

    def read(
        self, path: str | Path, train: Sequence[Question] | QuestionAnswerer | None = None
    ) -> list[Question]:
        return read_questions(path)

    def read_inputs(self, path: str | Path) -> list[Question]:
        return read_questions(path, answers=False)

    def data_of(self, inputs: Sequence[object]) -> list[Question]:
        """The data of dictionaries with "question", "context" and optionally "id"."""
        questions, names = [], set()
        for index, each in enumerate(inputs):
            row: dict[str, Any] = each if isinstance(each, dict) else {}
            question, context = row.get("question"), row.get("context")
            if not isinstance(question, str) or not isinstance(context, str):
                raise ValueError(
                    f"input {index} must be a dictionary with the texts question and context, got {each!r}: correct it"
                )
            name = str(row.get("id", index))
            if name in names:
                raise ValueError(
                    f"every question needs an id of its own, got {name!r} again at input {index}: without an id, a "
                    "question has its index"
                )
            names.add(name)
            questions.append(Question(name, question, context, []))
        return questions

    def describe_labels(self, data: Sequence[Question]) -> str:
        unanswered = sum(not question.answers for question in data)
        return f"{len(data) - unanswered:,} with an answer, {unanswered:,} without"

    def model_options(self, train: Sequence[Question]) -> JsonObject:
        return {}

    def metrics(self, data: Sequence[Question]) -> tuple[str, ...]:
        return ("f1", "exact", "loss")

    def encode(self, data: Sequence[Question], model: QuestionAnswerer) -> list[QuestionWindow]:
        return question_windows(data, model.own_tokenizer(), self.room(model), self.stride)

    def collate(self, examples: Sequence[QuestionWindow]) -> ModelArguments:
        batch = pack_sequences(
            [example.input_ids for example in examples],
            [example.token_type_ids for example in examples],
        )
        labels = [(example.start, example.end) for example in examples]
        return {"batch": batch, "labels": torch.tensor(labels, dtype=torch.int64).view(-1, 2)}

    def decode(
        self,
        model: QuestionAnswerer,
        data: Sequence[Question],
        examples: Sequence[QuestionWindow],
        logits: list[Tensor],
    ) -> list[AnswerPrediction]:
        return extract_answers(data, examples, logits, max_answer_tokens=self.max_answer_tokens)

    def score(
        self,
        model: QuestionAnswerer,
        data: Sequence[Question],
        predictions: Sequence[AnswerPrediction],
    ) -> dict[str, float]:
        threshold, chosen = self.no_answer_threshold, {}
        if threshold is None and not all(question.answers for question in data):
            scores = {prediction.id: prediction.no_answer_score for prediction in predictions}
            threshold = best_threshold(data, {p.id: p.text for p in predictions}, scores)
            chosen = {"no_answer_threshold": threshold}
        answers = {prediction.id: prediction.answer(threshold) for prediction in predictions}
        return squad_metrics(data, answers) | chosen

    def calibrate(
        self,
        model: QuestionAnswerer,
        data: Sequence[Question],
        examples: Sequence[QuestionWindow],
        batch_size: int = 32,
        fill: Fill | None = None,
    ) -> dict[str, float]:
        if self.no_answer_threshold is not None or all(question.answers for question in data):
            return {}
        metrics = self.evaluate(model, data, examples, batch_size, fill)
        model.task_options["no_answer_threshold"] = metrics["no_answer_threshold"]
        return metrics

    def lines(
        self,
        model: QuestionAnswerer,
        data: Sequence[Question],
        predictions: Sequence[AnswerPrediction],
        suffix: str,
    ) -> Iterable[str]:
        answers = {p.id: p.answer(self.no_answer_threshold) for p in predictions}
        if suffix == ".json":
            return [json.dumps(answers, ensure_ascii=False, indent=1)]
        rows = []
        for question, prediction in zip(data, predictions, strict=True):
            answer = answers[prediction.id]
            candidate = next((c for c in prediction.candidates if c.text == answer), None)
            rows.append(
                {
                    "id": prediction.id,
                    "question": question.question,
                    "answer": answer,
                    "start": candidate.start if candidate else 0,
                    "end": candidate.end if candidate else 0,
                    "probability": candidate.probability if candidate else 0.0,
                    "no_answer_score": prediction.no_answer_score,
                    "candidates": [c._asdict() for c in prediction.candidates],
                }
            )
        return json_lines(rows)
