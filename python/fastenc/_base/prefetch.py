"""Computes the items of an iteration in a thread before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Iterable[Item], ahead: int = 2) -> Iterator[Made]:
    """``map(make, items)``, computed in another thread up to ``ahead`` items before the caller takes them.

    ``make`` runs for one item at a time, in order. Its error is raised when the caller takes that item. ``items`` is
    iterated over in the caller's thread.
    """
    waiting: deque = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as worker:
        try:
            for item in items:
                waiting.append(worker.submit(make, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            worker.shutdown(cancel_futures=True)
