"""The tasks by name, and the task of a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastenc.data.rows import MissingColumn
from fastenc.models import checkpoint
from fastenc.tasks.base import Task
from fastenc.tasks.classification import SequenceClassification
from fastenc.tasks.question_answering import QuestionAnswering
from fastenc.tasks.reranking import Reranking
from fastenc.tasks.sentence_embedding import SentenceEmbedding
from fastenc.tasks.sequence_to_sequence import SequenceToSequence
from fastenc.tasks.span_ner import SpanNer
from fastenc.tasks.sparse_embedding import SparseEmbedding
from fastenc.tasks.tagging import TokenClassification
from fastenc.tasks.word_sense import WordSense

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Reranking,  # its checkpoints are also those of a SequenceClassification
        SequenceClassification,
        TokenClassification,
        SpanNer,
        QuestionAnswering,
        SentenceEmbedding,
        SparseEmbedding,
        WordSense,
        SequenceToSequence,
    )
}


def task_named(name: str) -> type[Task]:
    """The class of a task. Raises: ValueError for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name}: give one of them")
    return TASKS[name]


def task_of(model_name: str | Path) -> type[Task]:
    """The class of the task that a checkpoint was fine-tuned for.

    Raises: ValueError if the checkpoint has no task's head.
    """
    folder = checkpoint.resolve(model_name)
    values = checkpoint.read_config(folder)
    for task in TASKS.values():
        if task.model_class.stored_in(folder, values):
            return task
    head = (values.get("architectures") or ["no head"])[0]
    raise ValueError(
        f"{model_name} must have the head of a task, got {head}: {_fine_tune_first(model_name)}"
    )


def _fine_tune_first(model_name: str | Path) -> str:
    return f"fine-tune it first with fastenc finetune {model_name} --task {'|'.join(TASKS)}"


@contextmanager
def columns_for(model_name: str | Path) -> Iterator[None]:
    """A context in which data for a checkpoint are read. If a column is missing and the checkpoint was not fine-tuned
    for a task, the error says so: a sentence-transformers folder has a task, the similarity of pairs, but no head.
    """
    try:
        yield
    except MissingColumn as error:
        if checkpoint.read_config(checkpoint.resolve(model_name)).get("task_options"):
            raise
        raise ValueError(
            f"{model_name} has no fine-tuned head. It gives vectors of texts, so only the similarity of pairs of texts "
            f"can be predicted, but {error}; or write the vectors with fastenc embed; or, for another task, "
            f"{_fine_tune_first(model_name)}"
        ) from error


def make_task(task: type[Task], options: Mapping[str, object]) -> Task:
    """The task with these options. Raises: ValueError for an option that this task does not have."""
    known = {field.name for field in fields(task)}
    for name in options:
        if name not in known:
            owners = [t.name for t in TASKS.values() if name in {field.name for field in fields(t)}]
            raise ValueError(
                f"{name}= is an option of {', '.join(owners) or 'no task'}, not of {task.name}: "
                "leave it out, or check the task"
            )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return task(**values)


def task_of_model(model_name: str | Path, options: Mapping[str, object]) -> Task:
    """The task of a fine-tuned model, with its training's options and, above these, ``options``."""
    task = task_of(model_name)
    kept = task.options_kept(checkpoint.read_config(checkpoint.resolve(model_name)))
    return make_task(task, {**kept, **options})
