"""Work done ahead of who needs it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Iterable[Item], ahead: int = 2) -> Iterator[Made]:
    """``map(make, items)``, made in a thread up to ``ahead`` before they are asked for; errors come in their place.

    ``items`` are drawn by the caller's thread, and ``make`` never runs twice at once.
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
