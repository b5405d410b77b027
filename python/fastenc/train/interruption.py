"""SIGINT and SIGTERM during training: the first asks for a checkpoint, a second one stops at once."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """Training ended at a signal, after a checkpoint was written."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Interruption:
    """Notes the first signal; a context manager. In another thread than the main one signals act as before.

    Attributes:
        signal: the one that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.__exit__()
            signal.raise_signal(number)
            return
        self.signal = number
        name = signal.Signals(number).name
        print(
            f"\n{name}: a checkpoint follows this step; a second signal stops at once",
            file=sys.stderr,
            flush=True,
        )
