"""Answers that are compressed though they were asked not to be: decoded in bounded pieces, whole or an error."""

import asyncio
import gzip
import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.gateway.decoded_answer import MAX_PIECE_BYTES, begun

TEXT = b"an answer " * 100


class Pieces:
    """Does as an answer that comes in these pieces."""

    status, content_type = 200, "application/json"

    def __init__(self, pieces: list[bytes], coding: bytes) -> None:
        self._pieces, self.headers, self.is_closed = list(pieces), {b"content-encoding": coding}, False

    async def piece(self, within_s: float) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def close(self) -> None:
        self.is_closed = True


def decoded(pieces: list[bytes], coding: bytes = b"gzip") -> list[bytes]:
    async def read() -> list[bytes]:
        answer, first = await begun(Pieces(pieces, coding), 1.0)
        found = [first] if first else []
        while first and (piece := await answer.piece(1.0)):
            found.append(piece)
        return found

    return asyncio.run(read())


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 80), max_size=6), coding=st.sampled_from([b"gzip", b"x-gzip", b"deflate", b" GZip "])
)
def test_whatever_the_pieces(cuts, coding):
    coded = zlib.compress(TEXT) if coding == b"deflate" else gzip.compress(TEXT)
    places = sorted({0, len(coded), *(min(cut, len(coded)) for cut in cuts)})
    assert b"".join(decoded([coded[a:b] for a, b in itertools.pairwise(places)], coding)) == TEXT


def test_what_grows_comes_in_bounded_pieces():
    """A thousand times as long as it was: nobody has more of it than a piece at once."""
    coded = gzip.compress(bytes(20 * MAX_PIECE_BYTES + 7))
    assert len(coded) < MAX_PIECE_BYTES / 40
    pieces = decoded([coded])
    assert max(map(len, pieces)) <= MAX_PIECE_BYTES
    assert sum(map(len, pieces)) == 20 * MAX_PIECE_BYTES + 7


@pytest.mark.parametrize(
    ("pieces", "coding", "error"),
    [
        ([gzip.compress(TEXT)[:-1]], b"gzip", ConnectionError),
        ([gzip.compress(TEXT)[:20]], b"gzip", ConnectionError),
        ([gzip.compress(TEXT) + b"more"], b"gzip", ValueError),
        ([gzip.compress(TEXT), b"more"], b"gzip", ValueError),
        ([TEXT], b"gzip", ValueError),
        ([TEXT], b"br", ValueError),
        ([gzip.compress(TEXT)], b"gzip, gzip", ValueError),
        ([b""], b"gzip", ConnectionError),
    ],
)
def test_what_is_not_what_it_says_is_an_error(pieces, coding, error):
    with pytest.raises(error):
        decoded(pieces, coding)


@pytest.mark.parametrize("coding", [b"", b"identity", b" Identity"])
async def test_what_has_no_coding_is_left_as_it_is(coding):
    answer = Pieces([TEXT], coding)
    assert await begun(answer, 1.0) == (answer, TEXT)
