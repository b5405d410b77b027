"""The tasks that the command line knows."""

from pathlib import Path

from fastenc.models import checkpoint
from fastenc.tasks.base import Task
from fastenc.tasks.classification import SequenceClassification
from fastenc.tasks.question_answering import QuestionAnswering
from fastenc.tasks.sentence_embedding import SentenceEmbedding
from fastenc.tasks.span_ner import SpanNer
from fastenc.tasks.tagging import TokenClassification
from fastenc.tasks.word_sense import WordSense

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        SequenceClassification,
        TokenClassification,
        SpanNer,
        QuestionAnswering,
        SentenceEmbedding,
        WordSense,
    )
}


def task_named(name: str) -> type[Task]:
    """Raises: ValueError listing the tasks there are."""
    if name not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {name}")
    return TASKS[name]


def task_of(model_name: str | Path) -> type[Task]:
    """The task that a checkpoint was fine-tuned for.

    Raises: ValueError for a checkpoint of none of them.
    """
    folder = checkpoint.resolve(model_name)
    values = checkpoint.read_config(folder)
    for task in TASKS.values():
        if task.model_class.stored_in(folder, values):
            return task
    held = (values.get("architectures") or ["no head"])[0]
    raise ValueError(
        f"{model_name} holds {held}, which predicts nothing: fine-tune it first with fastenc finetune "
        f"{model_name} --task {'|'.join(TASKS)}"
    )
