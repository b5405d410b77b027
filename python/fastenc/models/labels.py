"""Names of classes, which are stored in config.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fastenc._base.json_values import JsonObject
from fastenc.models import checkpoint


def check_names(names: Sequence[str] | None, num_labels: int | None) -> list[str]:
    """The names of the classes: the given ones, or LABEL_0, LABEL_1, … (two classes if ``num_labels`` is None).

    Raises: ValueError if the number of names is not ``num_labels``.
    """
    count = num_labels or (len(names) if names else 2)
    checked = [str(name) for name in names or (f"LABEL_{i}" for i in range(count))]
    if len(checked) != count:
        raise ValueError(
            f"label_names must have a name for each of the {count} labels, got {checked}: give both for the same labels"
        )
    return checked


def names_to_build(hf_config: JsonObject, options: dict[str, Any]) -> None:
    """Set ``label_names`` in a constructor's options to the checkpoint's names, unless the options give the labels."""
    if not options.get("num_labels") and not options.get("label_names"):
        options["label_names"] = _stored_names(hf_config) or None


def check_labels(folder: Path, hf_config: JsonObject, options: dict[str, Any]) -> None:
    """Raise ValueError if the labels in a constructor's options are not those of the folder's head."""
    given = list(options.get("label_names") or [])
    wanted = options.get("num_labels") or len(given)
    if not wanted:
        return
    names = check_names(_stored_names(hf_config), None)
    remedy = f"give data that the head is for, or begin from {checkpoint.without_head(folder)}"
    if given and given != names and names != check_names(None, len(names)):
        odd = [name for name in given if name not in names] or given
        raise ValueError(
            f"{folder}: its head has the labels {names}, the data has {given} (look at {odd[0]!r}): {remedy}"
        )
    if wanted != len(names):
        problem_type = options.get("problem_type") or "classification"
        raise ValueError(
            f"{folder}: its head has {len(names)} outputs, for {names}; {problem_type} asks for {wanted}: {remedy}"
        )


def _stored_names(hf_config: JsonObject) -> list[str]:
    stored = cast(dict[str, str | int], hf_config.get("id2label") or {})
    numbers = sorted(map(int, stored))
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"config.json: id2label must number the labels from 0 without gaps, got {numbers}: give each label the "
            "number of its output of the head"
        )
    return [str(stored[key]) for key in sorted(stored, key=int)]


def config_of(names: Sequence[str]) -> JsonObject:
    """The entries of config.json that name the classes."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        "num_labels": len(names),
    }
