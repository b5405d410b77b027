import threading

import pytest

from fastenc._base.prefetch import prefetch


def test_items_come_in_order_and_are_made_ahead_by_one_other_thread():
    threads, made = set(), []

    def make(item):
        threads.add(threading.get_ident())
        made.append(item)
        return item * item

    ahead = prefetch(make, iter(range(50)), ahead=3)
    assert next(ahead) == 0
    assert list(ahead) == [i * i for i in range(1, 50)] and made == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_no_more_is_drawn_than_ahead():
    source = iter(range(50))
    ahead = prefetch(str, source, ahead=3)
    next(ahead)
    ahead.close()
    assert next(source) == 4
    assert threading.active_count() == 1 or not any(
        thread.name.startswith("prefetch") for thread in threading.enumerate()
    )


def test_an_error_comes_in_its_place():
    ahead = prefetch(lambda item: 6 // item, [3, 2, 0, 1])
    assert [next(ahead), next(ahead)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    assert list(prefetch(str, [])) == []
