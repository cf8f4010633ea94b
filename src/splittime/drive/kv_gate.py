"""Blocks of a prompt that another server has are fetched beside the engine's loop: the request is held until they have
come, or until computing them would have been as quick.

    Submit ──▶ does fetching pay, as predicted? ──no──▶ the queue: it is computed
                │ yes: held
                kv_export ──first byte──▶ kv_transfer ──last byte──▶ kv_import ──▶ the queue, a longer prefix cached

Nothing hangs on it: a block that does not come, comes late, or is damaged (`core.engine`) is computed like any
other, and so is a request that comes while all threads that fetch are busy. What has come is put into the prefix cache
under its name, so only a request of the same tokens and the same salt finds it. The gate looks at the engine's index
from the receiving thread, to guess what is missing; that may be out of date, which costs a copy that is not wanted.

At its start an engine takes what its peers used latest (`_take_over`).

A server that is asked for blocks of KV cache: the asking, and what is known of how long it takes.

    predicted = time to its first byte + bytes x time for a byte       both measured, the latest counting most

One that does not answer is left alone for `REST_S`. How often it has what it is asked for counts too: a peer that never
has anything is not waited for.
"""

import http.client
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec

from splittime.core.engine import MAX_NAMES, MAX_TOLD_BYTES, OVERHEAD_BYTES, PATH, BlocksAsk, sound_blocks
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.drive.messages import Abort, BlocksArrived, Hold, Release, Submit, ToEngine
from splittime.kv.blocks import block_names, root_name
from splittime.kv.cache import KVCache
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


THREADS = 2
TAKE_OVER_S, TAKE_OVER_BYTES = 10.0, 128 << 20
Put = Callable[[ToEngine], None]


class Port(Protocol):
    """What the runner has for blocks on their way (`runner.kv_port.BlockPort`)."""

    block_bytes: int

    @property
    def layout(self) -> str:
        """Returns what a block's bytes depend on beside its tokens; empty: no more to be shared."""
        ...

    def read(self, block_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The bytes of blocks that nobody writes to."""
        ...

    def receive(self, blob: bytes) -> int | None:
        """Keeps a block's content for the `imports` of a plan; returns its number, None if there is no room."""
        ...

    def drop(self, numbers: Iterable[int]) -> None: ...


@dataclass(frozen=True)
class BlockSharing:
    """gives: whether other servers may have blocks. prefill_ns_per_token: what fetching is held against."""

    port: Port
    peers: tuple[Peer, ...]
    gives: bool
    prefill_ns_per_token: int


class KvGate:
    """put: gives the engine's loop a message, from any thread."""

    def __init__(self, sharing: BlockSharing | None, cache: KVCache, put: Put) -> None:
        self._sharing, self._cache, self._put = sharing, cache, put
        self._pool = ThreadPoolExecutor(THREADS, "kv-peers")
        self._waiting: dict[str, Request] = {}  # by id, which a client may use again
        self._num_fetches = 0  # under way
        self._lock = threading.Lock()
        if sharing is not None and sharing.peers:
            threading.Thread(target=partial(self._take_over, sharing), name="kv-take-over", daemon=True).start()

    def let_in(self, message: ToEngine) -> None:
        """Pass a message on; a request whose blocks are worth fetching, as one that is held for them."""
        if isinstance(message, Abort | Submit):  # whoever had this id has ended
            ended = message.request_id if isinstance(message, Abort) else message.request.request_id
            with self._lock:
                self._waiting.pop(ended, None)
        found = self._worth_fetching(message) if isinstance(message, Submit) else None
        if found is None:
            self._put(message)
            return
        assert isinstance(message, Submit)
        peer, names, computed_s = found
        with self._lock:
            self._waiting[message.request.request_id] = message.request
            self._num_fetches += 1
        self._put(Submit(message.request, Cause.KV_EXPORT))
        late = threading.Timer(computed_s, self._let_go, (message.request,))
        late.daemon = True
        late.start()
        self._pool.submit(self._fetch, message.request, peer, names, time.monotonic() + computed_s, late)

    def _worth_fetching(self, message: Submit) -> tuple[Peer, tuple[bytes, ...], float] | None:
        """Returns whom to ask for what, and how long computing it would take; None if it is to be computed."""
        sharing, cache = self._sharing, self._cache
        if sharing is None or not sharing.peers or message.held_for is not None or not cache.enable_prefix_caching:
            return None
        if self._num_fetches >= THREADS or not sharing.port.layout or message.request.sampling.computes_prompt:
            return None
        tokens = message.request.prompt_token_ids
        if len(tokens) <= cache.block_size:  # of the last token nothing is taken from the cache
            return None
        names = block_names(root_name(message.request.cache_salt), tokens[:-1], cache.block_size)
        at_once = max(1, min(MAX_NAMES, MAX_TOLD_BYTES // sharing.port.block_bytes))
        missing = tuple(names[cache.num_known(names) :][:at_once])
        computed_s = len(missing) * cache.block_size * sharing.prefill_ns_per_token / 1e9
        num_bytes = len(missing) * sharing.port.block_bytes
        up = [
            (peer.predicted_s(num_bytes) / peer.found, place) for place, peer in enumerate(sharing.peers) if peer.is_up
        ]
        if not missing or not up or min(up)[0] >= computed_s:
            return None
        return sharing.peers[min(up)[1]], missing, computed_s

    def _fetch(
        self, request: Request, peer: Peer, names: tuple[bytes, ...], deadline_s: float, late: threading.Timer
    ) -> None:
        """Whatever comes of it, the request goes on."""
        assert self._sharing is not None
        try:
            if self._waits(request) and time.monotonic() < deadline_s:
                ask = BlocksAsk(self._sharing.port.layout, names)
                blocks = peer.fetch(ask, self._sharing.port.block_bytes, deadline_s, partial(self._tell, request))
                self._take_in([(name, blocks[name]) for name in names if name in blocks])
        finally:
            late.cancel()
            with self._lock:
                self._num_fetches -= 1
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Have the engine go on with it, if it still waits."""
        with self._lock:
            if self._waits(request):
                del self._waiting[request.request_id]
                self._put(Release(request.request_id))

    def _waits(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def _tell(self, request: Request, cause: Cause) -> None:
        with self._lock:
            if self._waits(request):
                self._put(Hold(request.request_id, cause))

    def _take_in(self, blocks: Iterable[tuple[bytes, bytes]]) -> None:
        """Give contents to the runner, and their names to the engine."""
        assert self._sharing is not None
        numbered = [(name, self._sharing.port.receive(blob)) for name, blob in blocks]
        kept = [(name, number) for name, number in numbered if number is not None]
        if numbered:  # though there was no room: it may drop what nobody wants
            self._put(BlocksArrived(tuple(name for name, _ in kept), tuple(number for _, number in kept)))

    def _take_over(self, sharing: BlockSharing) -> None:
        """At the start: what each peer used latest, of half as many blocks as there are at most."""
        block_bytes, deadline_s = sharing.port.block_bytes, time.monotonic() + TAKE_OVER_S
        most = min(TAKE_OVER_BYTES // block_bytes, self._cache.num_blocks // 2) // len(sharing.peers)
        for peer in sharing.peers:
            found: dict[bytes, bytes] = {}
            while len(found) < most:
                num_before = len(found)
                found |= peer.fetch(BlocksAsk(sharing.port.layout, skip=num_before), block_bytes, deadline_s)
                if len(found) == num_before:
                    break
            self._take_in(reversed(found.items()))  # the latest comes last, as it is to be evicted last
