"""A server that is asked for blocks of KV cache: the asking, and what is known of how long it takes.

    predicted = time to its first byte + bytes x time for a byte       both measured, the latest counting most

One that does not answer is left alone for `REST_S`. How often it has what it is asked for counts too: a peer that never
has anything is not waited for.
"""

import http.client
import io
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.kv_blocks import MAX_NAMES, MAX_TOLD_BYTES, OVERHEAD_BYTES, PATH, BlocksAsk, sound_blocks
from splittime.ledger.stages import Cause

FIRST_BYTE_S, BYTE_S = 0.002, 1e-9  # until measured
WEIGHT = 0.25  # of the latest in a mean
LEAST_FOUND = 0.05  # what a peer had once it may have again
REST_S = 5.0
PIECE_BYTES = 1 << 18


class Peer:
    """url: as `kv_peers` has it. Raises `ConfigError` for what is none. Several threads may use it."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = _parts(url)
        self._headers = {"content-type": "application/msgpack"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.first_byte_s, self.byte_s, self.found = FIRST_BYTE_S, BYTE_S, 1.0
        self._rests_until_s = 0.0
        self._lock = threading.Lock()

    @property
    def is_up(self) -> bool:
        """Returns whether it has not failed lately."""
        return time.monotonic() >= self._rests_until_s

    def predicted_s(self, num_bytes: int) -> float:
        """Returns how long so many bytes would take."""
        return self.first_byte_s + num_bytes * self.byte_s

    def fetch(
        self, ask: BlocksAsk, block_bytes: int, deadline_s: float, tell: Callable[[Cause], None] = lambda cause: None
    ) -> dict[bytes, bytes]:
        """Returns the blocks that it has, by name; none of a peer that fails or answers later than `deadline_s` (of
        `time.monotonic`). tell: told what is waited for from now on, when the first byte is here, and the last."""
        begin_s = time.monotonic()
        try:
            raw, first_s = self._post(msgspec.msgpack.encode(ask), deadline_s, tell)
            tell(Cause.KV_IMPORT)
            blocks = sound_blocks(raw, ask, block_bytes)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError):
            self._rests_until_s = time.monotonic() + REST_S
            self._learn(time.monotonic() - begin_s, 0.0, 0, 0, ask)
            return {}
        self._learn(first_s - begin_s, time.monotonic() - first_s, len(raw), len(blocks), ask)
        return blocks

    def _post(self, body: bytes, deadline_s: float, tell: Callable[[Cause], None]) -> tuple[bytes, float]:
        """Returns an answer of 200, and when its first byte was here. Raises OSError or HTTPException for any other."""
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_left_s(deadline_s))
        connection.response_class = partial(_answer_by, deadline_s)  # type: ignore[assignment]
        try:
            connection.request("POST", self._url.path.rstrip("/") + PATH, body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}")
            first_s = time.monotonic()
            tell(Cause.KV_TRANSFER)
            return _read(answer), first_s
        finally:
            connection.close()

    def _learn(self, first_byte_s: float, rest_s: float, num_bytes: int, num_found: int, ask: BlocksAsk) -> None:
        with self._lock:
            self.first_byte_s += WEIGHT * (first_byte_s - self.first_byte_s)
            if num_found:
                self.byte_s += WEIGHT * (rest_s / num_bytes - self.byte_s)
            if ask.names:
                self.found = max(LEAST_FOUND, self.found + WEIGHT * (num_found / len(ask.names) - self.found))


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment or parts.username is not None:
        hint = "such as http://127.0.0.1:8001; its key goes into kv_peer_key"
        raise ConfigError(f"kv_peers has {url!r}, which is no server's address", param="kv_peers", hint=hint)
    return parts


class TimedReader(io.RawIOBase):
    """What a socket receives, until the deadline: one that sends a byte now and then gains no time by it."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline_s: float) -> None:
        self._raw, self._sock, self._deadline_s = raw, sock, deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._deadline_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _answer_by(deadline_s: float, sock: socket.socket, *args: Any, **names: Any) -> http.client.HTTPResponse:
    """Returns an answer that is read until then at most, from its first byte to its last."""
    answer = http.client.HTTPResponse(sock, *args, **names)
    answer.fp = io.BufferedReader(TimedReader(answer.fp.detach(), sock, deadline_s), PIECE_BYTES)
    return answer


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Raises OSError for one that is too long or too late."""
    pieces, num_bytes = [], 0
    while piece := answer.read1(PIECE_BYTES):
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > MAX_TOLD_BYTES + MAX_NAMES * OVERHEAD_BYTES:
            raise OSError("the answer is too long")
    return b"".join(pieces)


def _left_s(deadline_s: float) -> float:
    """Raises TimeoutError where nothing is left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("too late")
    return left_s
