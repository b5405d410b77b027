"""Options of commands made from the fields of the tasks, so that a new task needs none here."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from fastenc.tasks import TASKS, Task

PANEL = "Options of the tasks"


def with_task_options(*, predict: bool) -> Callable[[Callable], Callable]:
    """Give a command an option for every field of every task, and the values given as its argument ``options``.

    Args:
        predict: only the fields that matter to prediction.
    """

    def decorate(command: Callable) -> Callable:
        signature = inspect.signature(command)
        own = [p for name, p in signature.parameters.items() if name != "options"]
        added = {name: _parameter(name, takers) for name, takers in _takers(predict).items()}

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in added}
            # An option left out is None, or an empty list.
            options = {name: value for name, value in given.items() if value not in (None, [])}
            command(**values, options=options)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=[*own, *added.values()])  # type: ignore[attr-defined]
        return run

    return decorate


def make_task(task: type[Task], options: dict[str, Any]) -> Task:
    """Raises: ValueError for an option that belongs to other tasks."""
    known = {field.name for field in fields(task)}
    for name in options:
        if name not in known:
            owners = ", ".join(t.name for t in _takers(predict=False)[name])
            raise ValueError(
                f"{_flag(name)} is an option of {owners}, not of {task.name}: leave it out, or check the task"
            )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return task(**values)


def _takers(predict: bool) -> dict[str, list[type[Task]]]:
    """Which tasks have each option."""
    found: dict[str, list[type[Task]]] = {}
    for task in TASKS.values():
        for field in fields(task):
            if field.metadata["predict"] or not predict:
                found.setdefault(field.name, []).append(task)
    return found


def _parameter(name: str, takers: list[type[Task]]) -> inspect.Parameter:
    field = next(field for field in fields(takers[0]) if field.name == name)
    hint = get_type_hints(takers[0])[name]
    hint = list[str] if get_origin(hint) is tuple else hint
    info = typer.Option(
        _flag(name), *field.metadata["flags"], help=_help(name, takers), rich_help_panel=PANEL
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[hint | None, info])


def _help(name: str, takers: list[type[Task]]) -> str:
    """Help that tasks share is said once, with each task's default."""
    said: dict[str, list[str]] = {}
    for task in takers:
        field = next(field for field in fields(task) if field.name == name)
        default = ", ".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "" if default in (None, False) else f" Default: {default}."
        said.setdefault(f"{field.metadata['help']}{shown}", []).append(task.name)
    return " ".join(f"[{', '.join(names)}] {text}" for text, names in said.items())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
