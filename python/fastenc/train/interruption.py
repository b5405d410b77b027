"""SIGINT and SIGTERM during training: the first signal requests a checkpoint, a second one ends the process at once."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended training after a checkpoint was written."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Interruption:
    """A context manager that records the first signal. Outside the main thread it changes nothing.

    Attributes:
        signal: number of the signal that was received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.__exit__()
            signal.raise_signal(number)
            return
        self.signal = number
        name = signal.Signals(number).name
        print(
            f"\n{name}: training stops after this step with a checkpoint; a second signal stops it at once",
            file=sys.stderr,
            flush=True,
        )
