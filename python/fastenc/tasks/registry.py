"""The tasks that the command line knows."""

from dataclasses import fields
from pathlib import Path
from typing import Any

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


def make_task(task: type[Task], options: dict[str, Any]) -> Task:
    """Raises: ValueError for an option that belongs to other tasks, or to none."""
    known = {field.name for field in fields(task)}
    for name in options:
        if name not in known:
            owners = [t.name for t in TASKS.values() if name in {field.name for field in fields(t)}]
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of {', '.join(owners) or 'no task'}, not of {task.name}: "
                "leave it out, or check the task"
            )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return task(**values)


def task_of_model(model_name: str | Path, options: dict[str, Any]) -> Task:
    """A fine-tuned model's task, with the options of its training where none are given."""
    kind = task_of(model_name)
    kept = kind.options_kept(checkpoint.read_config(checkpoint.resolve(model_name)))
    return make_task(kind, {**kept, **options})
