"""How a step's texts are shared out among threads."""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from splittime.kernels.native.library import LibraryMissing, library
from splittime.runner.encoder import LEAST_TOKENS, PART_TOKENS, TextParts, parts_of


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[1], [5, 5], [250, 240, 9, 8], [30] * 40, list(range(1, 60)), [512, 3]])
def test_each_text_is_in_one_part(sizes: list[int], num_threads: int) -> None:
    parts = parts_of(sizes, num_threads)
    assert sorted(place for part in parts for place in part) == list(range(len(sizes)))
    assert all(parts)
    assert len(parts) <= max(1, sum(sizes) // LEAST_TOKENS)


def test_threads_have_as_much_to_do_as_each_other() -> None:
    assert parts_of([20, 120, 100], 2) == [[1], [2, 0]]
    parts = parts_of([40] * 32, 2)
    tokens = [sum(40 for _ in part) for part in parts]
    assert max(tokens) - min(tokens) <= 40
    assert max(tokens) < 2 * PART_TOKENS
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "num_threads"),
    [([300], 2), ([300, 20], 2), ([90] * 40, 1), ([90, 5, 5], 4), ([5, 5], 2), ([8] * 8, 8), ([32, 32], 2)],
)
def test_few_tokens_and_what_one_thread_would_be_left_with_are_done_together(
    sizes: list[int], num_threads: int
) -> None:
    assert parts_of(sizes, num_threads) == [list(range(len(sizes)))]


class NotedThreads:
    """In the place of an encoder of native kernels: the states of a text are its tokens. A token below 0 fails."""

    ops, head = SimpleNamespace(name="native"), None

    def __init__(self) -> None:
        self.begun, self.ended, self.barrier = list[str](), list[str](), threading.Barrier(2, timeout=20)

    def forward(self, texts: Sequence[Sequence[int]], *, are_pairs: bool) -> tuple[Tensor, ...]:
        self.begun.append(name := threading.current_thread().name)
        if len(texts) < 4:
            self.barrier.wait()  # two threads are here at a time, or it fails
        if min(map(min, texts)) < 0:
            raise ValueError("below 0")
        time.sleep(0.05)  # so that who fails is done first
        self.ended.append(name)
        return tuple(torch.tensor(text) for text in texts)


@pytest.fixture
def encoder() -> NotedThreads:
    try:
        library()
    except LibraryMissing as error:
        pytest.skip(str(error))
    return NotedThreads()


def test_each_thread_computes_texts_and_few_tokens_are_the_callers(encoder: NotedThreads) -> None:
    parts, texts = TextParts(encoder, 2), [[number] * 60 for number in range(4)]
    assert [states.tolist() for states in parts.forward(texts)] == texts
    assert sorted(encoder.begun) == ["encoder_0", "encoder_1"]
    parts.forward([[1] * 5] * 4)
    assert encoder.begun[2:] == [threading.current_thread().name]


def test_an_error_is_raised_when_no_thread_computes_any_more(encoder: NotedThreads) -> None:
    with pytest.raises(ValueError, match="below 0"):
        TextParts(encoder, 2).forward([[-1] * 70, [1] * 69])
    assert (len(encoder.begun), len(encoder.ended)) == (2, 1)
