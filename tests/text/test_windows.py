import pytest

from fastenc.text.windows import cut_windows


@pytest.mark.parametrize(
    "room,stride",
    [*((room, None) for room in (1, 2, 3, 8, 9)), (1, 0), (8, 0), (8, 1), (9, 3), (9, 7), (8, 7)],
)
@pytest.mark.parametrize("length", [*range(30), 64, 65])
def test_each_token_is_owned_by_the_window_in_which_it_is_most_central(length, room, stride):
    windows = cut_windows(length, room, stride)
    owners = [i for i, w in enumerate(windows) for _ in range(w.own_start, w.own_stop)]
    assert [w.own_start for w in windows] == [0, *(w.own_stop for w in windows[:-1])]
    assert windows[-1].own_stop == len(owners) == length
    for token, owner in enumerate(owners):
        centrality = [
            min(token - w.start, w.stop - 1 - token) if w.start <= token < w.stop else -1
            for w in windows
        ]
        assert owner == centrality.index(max(centrality))
    assert all(w.stop - w.start == min(room, length) for w in windows)
    if length <= room:
        assert len(windows) == 1
    shared = [a.stop - b.start for a, b in zip(windows, windows[1:], strict=False)]
    assert all(n == (room // 2 if stride is None else stride) for n in shared[:-1])
    assert all(n >= (room // 2 if stride is None else stride) for n in shared)
