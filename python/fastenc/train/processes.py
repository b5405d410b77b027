"""What the processes of one run share."""

from collections.abc import Callable
from typing import TypeVar

from fastenc._extras import require

Value = TypeVar("Value")


def on_main_process(make: Callable[[], Value]) -> Value:
    """The main process's ``make()`` on every process, for what would come out differently on each of them."""
    main = require("accelerate", extra="train").PartialState().is_main_process
    values = [make() if main else None]
    require("accelerate.utils", extra="train").broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]
