"""What a resumed run must have again."""

from collections.abc import Mapping
from pathlib import Path


def check_begun_with(
    begun: Mapping[str, object], settings: Mapping[str, object], path: Path, remedy: str
) -> None:
    """Compare the settings of a resumed run with those with which it was begun. Both are JSON values.

    Args:
        path: what the run writes, for the message.
        remedy: what the user can do instead of giving the same value.
    Raises: ValueError for the first setting that is another one.
    """
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{path} was begun with {name}={begun.get(name)}, got {value}: use the same value, or {remedy}"
            )
