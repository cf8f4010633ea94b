"""Who reads what a client sent: the loop's own thread what is short, one thread what is long, another the giants."""

import asyncio
import threading

import pytest

from splittime.web.short_turns import GIANT_BYTES, SHORT_BYTES, read_beside


def reader_of(num_bytes: int) -> str:
    return asyncio.run(read_beside(num_bytes, lambda: threading.current_thread().name))


@pytest.mark.parametrize(
    ("num_bytes", "reader"),
    [
        (0, "MainThread"),
        (SHORT_BYTES, "MainThread"),
        (SHORT_BYTES + 1, "reading-bodies_0"),
        (GIANT_BYTES, "reading-bodies_0"),
        (GIANT_BYTES + 1, "reading-giants_0"),
        (2**30, "reading-giants_0"),
    ],
)
def test_a_body_is_read_where_it_keeps_nobody_waiting(num_bytes: int, reader: str):
    assert reader_of(num_bytes) == reader
    assert reader_of(num_bytes) == reader  # a thread stays


def test_what_the_reading_raises_is_raised():
    def fails() -> None:
        raise ValueError("no such text")

    for num_bytes in (0, SHORT_BYTES + 1):
        with pytest.raises(ValueError, match="no such text"):
            asyncio.run(read_beside(num_bytes, fails))


def test_a_long_body_is_read_while_a_giant_is():
    read, let_go = threading.Event(), threading.Event()

    async def both() -> None:
        giant = asyncio.ensure_future(read_beside(GIANT_BYTES + 1, let_go.wait, 20))
        await read_beside(SHORT_BYTES + 1, read.set)
        assert not giant.done()
        let_go.set()
        assert await giant

    asyncio.run(both())
    assert read.is_set()
