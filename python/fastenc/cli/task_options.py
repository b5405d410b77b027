"""Options of commands that are made from the fields of the tasks."""

from dataclasses import fields
from typing import get_type_hints

from fastenc.cli.options import Option, option_of
from fastenc.tasks import TASKS

GROUP = "Options of the tasks"


def all_task_options() -> list[Option]:
    """An option for every field of every task."""
    return [_merged(takers) for takers in _options(predict=False).values()]


def prediction_options() -> list[Option]:
    """An option for every field of a task that prediction uses."""
    return [_merged(takers) for takers in _options(predict=True).values()]


def _options(predict: bool) -> dict[str, dict[str, Option]]:
    """{field: {task: its option}}."""
    by_task: dict[str, dict[str, Option]] = {}
    for name, task in TASKS.items():
        hints = get_type_hints(task)
        for field in fields(task):
            if field.metadata["predict"] or not predict:
                by_task.setdefault(field.name, {})[name] = option_of(field, hints[field.name])
    return by_task


def _merged(takers: dict[str, Option]) -> Option:
    """One option for all tasks that have it. Tasks with the same help text share it.

    ``takers``: {task: its option}.
    """
    tasks_by_help: dict[str, list[str]] = {}
    for name, option in takers.items():
        tasks_by_help.setdefault(option.full_help, []).append(name)
    text = " ".join(f"[{', '.join(names)}] {help}" for help, names in tasks_by_help.items())
    first = next(iter(takers.values()))
    return first._replace(default=None, help=text, group=GROUP)
