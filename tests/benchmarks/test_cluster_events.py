"""What is to happen to a cluster under load, and does not."""

import asyncio
import itertools
import re
import threading

import pytest

from benchmarks.cluster.events import TWO, Happening, Load, Watched, felt, has_failed


def test_an_event_that_fails_in_its_timer_fails_the_run():
    def fail(cluster) -> None:
        raise LookupError("nobody listens on 1")

    watched = Watched(None, Happening(TWO, fail))
    watched.check()
    timer = threading.Timer(0, watched.happen)
    timer.start()
    timer.join()
    with pytest.raises(LookupError, match="nobody listens"):
        watched.check()


CHUNK = b'data: {"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": "x"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"


async def test_who_tries_again_loses_what_has_begun_and_nothing_else():
    """The first request is hung up on, the next one is answered, and the answer to the third breaks off: one of two
    has come again."""
    from benchmarks.cluster.trying_again import tried_again

    numbers = itertools.count(1)

    async def meet(reader, writer) -> None:
        number = next(numbers)  # of two that come at once, each has its own
        whole = CHUNK + b"data: [DONE]\n\n"
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]))  # who closes with something unread takes its answer back
        if number > 1:
            writer.write(HEAD % len(whole) + (whole if number == 2 else CHUNK))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(meet, "127.0.0.1", 0) as server:
        schedule = Load(rate=2.0, at_s=9.0, length_s=0.9, tokens=1).schedule(1)
        outcomes, num_lost = await tried_again(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", schedule)
    row = felt(outcomes, 0)
    assert (row["requests"], num_lost, row["lost"], row["broken"]) == (2, 1, 0, 1)
    assert not has_failed("kill-gateway-of-two", row)
    assert has_failed("kill-gateway-of-two", {**row, "lost": 1})
    assert has_failed("nothing", row)
