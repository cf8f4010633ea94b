"""How a step's texts are shared out among threads."""

import pytest

from splittime.runner.text_parts import PART_TOKENS, parts_of


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[1], [5, 5], [250, 240, 9, 8], [30] * 40, list(range(1, 60)), [512, 3]])
def test_each_text_is_in_one_part(sizes: list[int], num_threads: int) -> None:
    parts = parts_of(sizes, num_threads)
    assert sorted(place for part in parts for place in part) == list(range(len(sizes)))
    assert all(parts)


def test_threads_have_as_much_to_do_as_each_other() -> None:
    assert parts_of([10, 60, 50], 2) == [[1], [2, 0]]
    parts = parts_of([40] * 32, 2)
    tokens = [sum(40 for _ in part) for part in parts]
    assert max(tokens) - min(tokens) <= 40
    assert max(tokens) < 2 * PART_TOKENS
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(("sizes", "num_threads"), [([300], 2), ([300, 20], 2), ([90] * 40, 1), ([90, 5, 5], 4)])
def test_what_one_thread_would_be_left_with_is_done_together(sizes: list[int], num_threads: int) -> None:
    assert parts_of(sizes, num_threads) == [list(range(len(sizes)))]
