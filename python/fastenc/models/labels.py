"""Names of classes, as config.json keeps them."""

from collections.abc import Sequence
from typing import Any

from fastenc.models.pretrained import architecture_of


def check_names(names: Sequence[str] | None, num_labels: int | None) -> list[str]:
    """The names of the classes: those given, or LABEL_0, LABEL_1, … (two without ``num_labels``).

    Raises: ValueError when both are given and their numbers differ.
    """
    count = num_labels or (len(names) if names else 2)
    checked = [str(name) for name in names or (f"LABEL_{i}" for i in range(count))]
    if len(checked) != count:
        raise ValueError(f"label_names must name {count} labels, got {checked}")
    return checked


def names_to_build(architecture: str, hf_config: dict[str, Any], options: dict[str, Any]) -> None:
    """Put a checkpoint's own names into a constructor's options, unless those say what the labels are.

    Raises: ValueError when the checkpoint's head is of this kind and tells other labels apart.
    """
    stored = hf_config.get("id2label") or {}
    names = [stored[key] for key in sorted(stored, key=int)]
    if not options.get("num_labels") and not options.get("label_names"):
        options["label_names"] = names or None
    given = options.get("label_names")
    named = names and names != check_names(None, len(names))
    if named and given and architecture_of(hf_config) == architecture and list(given) != names:
        odd = [name for name in given if name not in names] or list(given)
        raise ValueError(
            f"the checkpoint's head tells {names} apart, the data has {list(given)} (look at {odd[0]!r}): give data "
            "with the checkpoint's labels, or begin from its encoder alone, saved by "
            "Encoder.from_pretrained(...).save_pretrained(...)"
        )


def config_of(names: Sequence[str]) -> dict[str, Any]:
    """The entries of config.json that name the classes."""
    return {
        "id2label": {str(place): name for place, name in enumerate(names)},
        "label2id": {name: place for place, name in enumerate(names)},
        "num_labels": len(names),
    }
