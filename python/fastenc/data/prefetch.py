"""Computes items in a thread before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Iterable[Item], ahead: int = 2) -> Iterator[Made]:
    """``map(make, items)``, computed in one thread, up to ``ahead`` items before they are asked for.

    An error of ``make`` is raised when its item is asked for. The caller's thread iterates over ``items``. ``make``
    runs for one item at a time, in order.
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
