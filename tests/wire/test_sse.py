"""Events are the same however their bytes come: one that comes in one piece takes another way."""

import pytest

from splittime.wire import sse
from splittime.wire.sse import EventLines


@pytest.mark.parametrize("said", [b"data: x\n\n", b"data: x\r\n\n", b"data: x\r\r\n\n", b"data: \n\n"])
def test_an_event_in_one_piece_is_the_same_as_byte_by_byte(said: bytes) -> None:
    whole, pieces = EventLines(), EventLines()
    events = [one for at in range(len(said)) for one in pieces.feed(said[at : at + 1])]
    assert whole.feed(said) == events
    assert len(events) == 1


@pytest.mark.parametrize(
    ("said", "data"),
    [
        (b"out of memory", b'{"error":"out of memory"}'),
        (b'{"message": "x"}', b'{"error":{"message": "x"}}'),
        (b'{"type": "error"}', b'{"type": "error"}'),
        (b"[" * 5000, b'{"error":"' + b"[" * 5000 + b'"}'),
    ],
)
def test_an_event_that_is_named_an_error_says_so_itself(said: bytes, data: bytes) -> None:
    lines = EventLines()
    assert lines.feed(b"event: error\ndata: " + said + b"\n\nevent: x\ndata: y\n\n") == [data, b"y"]
    assert lines.feed(b"data: z\n\n") == [b"z"]


def test_what_was_fed_before_an_event_is_over_with_it(monkeypatch) -> None:
    """Lines without data count for the length of the event that ends behind them, and of no other."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    lines = EventLines()
    for _ in range(10):
        assert lines.feed(b"event: " + b"x" * 80 + b"\n") == []
        assert lines.feed(b"data: y\n\n") == [b"y"]
        assert not lines.is_too_long
