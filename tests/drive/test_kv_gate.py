"""Blocks that are fetched beside the loop: who waits for them, what becomes of peers that fail, lie or dawdle, and that
the request goes on whatever they do."""

import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from splittime.core.engine import MAX_TOLD_BYTES, BlocksAsk, BlocksTold, sound_blocks, with_digests
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.kv_gate import LEAST_FOUND, BlockSharing, KvGate, Peer
from splittime.drive.messages import Abort, BlocksArrived, Hold, Release, Submit
from splittime.kv.blocks import block_names, root_name
from splittime.kv.cache import KVCache
from splittime.ledger.stages import Cause

SIZE, BLOCK_BYTES, LAYOUT = 4, 8, "layout"
PROMPT = tuple(range(13))
NAMES = tuple(block_names(root_name("tenant"), PROMPT, SIZE))
BLOBS = {name: bytes([place]) * BLOCK_BYTES for place, name in enumerate(NAMES)}
SLOW_NS = 10**9  # of a prompt's token: anything that is fetched pays


class FakePort:
    block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        self.layout, self.received, self.room = LAYOUT, {}, 100

    def receive(self, blob):
        if len(self.received) == self.room:
            return None
        number = len(self.received)
        self.received[number] = blob
        return number


@pytest.fixture
def peer_of():
    """A server that answers with what a function of the ask says; returns its url, and what it was asked."""
    servers = []

    def make(answer):
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                asked.append((self.path, self.headers["authorization"], msgspec.msgpack.decode(raw, type=BlocksAsk)))
                status, body = answer(asked[-1][2])
                with suppress(OSError):  # whoever asked would not wait
                    self.send_response(status)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/base/", asked

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def told_of(blobs: dict[bytes, bytes], layout: str = LAYOUT) -> bytes:
    return with_digests(layout, BlocksTold(tuple(blobs), tuple(blobs.values())))


def honest(ask: BlocksAsk):
    return 200, told_of({name: BLOBS[name] for name in ask.names or ()})


class Gate:
    """A gate with what it has told the loop."""

    def __init__(self, url: str, ns_per_token: int = SLOW_NS, asks: bool = True) -> None:
        self.told, self.port, self.cache = [], FakePort(), KVCache(16, SIZE)
        self._news = threading.Condition()
        self.peer = Peer(url, "key")
        self.gate = KvGate(BlockSharing(self.port, (self.peer,), False, ns_per_token), self.cache, self._put)
        if not asks:
            return
        self.gate.let_in(Submit(request_of("r")))

    def _put(self, message) -> None:
        with self._news:
            self.told.append(message)
            self._news.notify_all()

    def wait(self) -> list:
        """Until the request goes on; returns all that was told since it came."""
        with self._news:
            assert self._news.wait_for(lambda: Release("r") in self.told, 20)
            return self.told

    def wait_for(self, kind: type) -> object:
        """Returns the first of this kind that was told."""
        with self._news:
            assert self._news.wait_for(lambda: any(isinstance(each, kind) for each in self.told), 20)
            return next(each for each in self.told if isinstance(each, kind))


def request_of(name: str) -> Request:
    sampling = SamplingParams(max_tokens=2, seed=0)
    return Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, submitted_ns=0, cache_salt="tenant")


def test_it_is_held_until_its_blocks_are_there_with_its_causes(peer_of) -> None:
    url, asked = peer_of(honest)
    gate = Gate(url)
    told = [each for each in gate.wait() if not isinstance(each, BlocksArrived)]
    assert told[0] == Submit(request_of("r"), Cause.KV_EXPORT)
    assert told[1:] == [Hold("r", Cause.KV_TRANSFER), Hold("r", Cause.KV_IMPORT), Release("r")]
    arrived = next(each for each in gate.told if isinstance(each, BlocksArrived))
    assert gate.told.index(arrived) < gate.told.index(Release("r"))
    assert {name: gate.port.received[n] for name, n in zip(arrived.names, arrived.numbers, strict=True)} == BLOBS
    assert ("/base/kv/blocks", "Bearer key", BlocksAsk(LAYOUT, NAMES)) in asked


def spoilt(what: str):
    """An answer of which no block may be taken."""

    def answer(ask: BlocksAsk):
        good = {name: BLOBS[name] for name in ask.names or ()}
        if ask.names is None:  # at the gate's start
            return 200, told_of({})
        if what == "status":
            return 404, told_of(good)
        if what == "other model":
            return 200, told_of(good, "another layout")
        if what == "not asked for":
            return 200, told_of({bytes(16): bytes(BLOCK_BYTES)})
        if what == "wrong size":
            return 200, told_of({name: blob[1:] for name, blob in good.items()})
        if what == "swapped names":
            whole = msgspec.msgpack.decode(told_of(good), type=BlocksTold)
            return 200, msgspec.msgpack.encode(msgspec.structs.replace(whole, names=(*whole.names[1:], whole.names[0])))
        if what == "no digests":
            return 200, msgspec.msgpack.encode(BlocksTold(tuple(good), tuple(good.values())))
        if what == "cut short":
            return 200, told_of(good)[:-9]
        if what == "too long":
            return 200, bytes(MAX_TOLD_BYTES + (1 << 20))
        assert what == "no answer of ours"
        return 200, b"<html>"

    return answer


@pytest.mark.parametrize(
    "what",
    [
        *("status", "other model", "not asked for", "wrong size", "swapped names", "no digests", "cut short"),
        *("too long", "no answer of ours"),
    ],
)
def test_what_is_not_the_right_block_is_computed(peer_of, what: str) -> None:
    gate = Gate(peer_of(spoilt(what))[0])
    gate.wait()
    assert not [each for each in gate.told if isinstance(each, BlocksArrived)]
    assert gate.port.received == {}


def test_of_an_answer_with_one_bad_block_the_others_are_taken(peer_of) -> None:
    def one_bad(ask: BlocksAsk):
        raw = msgspec.msgpack.decode(honest(ask)[1], type=BlocksTold)
        return 200, msgspec.msgpack.encode(msgspec.structs.replace(raw, blobs=(b"\xff" * BLOCK_BYTES, *raw.blobs[1:])))

    gate = Gate(peer_of(one_bad)[0])
    gate.wait()
    assert sorted(gate.port.received.values()) == [BLOBS[NAMES[1]], BLOBS[NAMES[2]]]


def test_a_late_one_is_not_waited_for_longer_than_computing_takes(peer_of) -> None:
    may_end = threading.Event()

    def late(ask: BlocksAsk):
        may_end.wait(20)
        return honest(ask)

    gate = Gate(peer_of(late)[0], ns_per_token=20_000_000)  # a quarter of a second
    gate.wait()
    assert not [each for each in gate.told if isinstance(each, BlocksArrived)]
    deadline_s = time.monotonic() + 20
    while gate.peer.is_up:  # until the thread that asked has given it up too
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    gate.gate.let_in(Submit(request_of("next")))
    assert gate.told[-1] == Submit(request_of("next"))  # computed at once
    may_end.set()


def test_a_peer_that_drips_bytes_is_given_no_more_time_than_one_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told, may_end = threading.Event(), threading.Event()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not may_end.wait(0.02):
                    connection.sendall(b"x")  # of a header that never ends
                    told.set()

        threading.Thread(target=drip, daemon=True).start()
        peer = Peer(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        fetching = threading.Thread(
            target=peer.fetch, args=(BlocksAsk(LAYOUT, NAMES), BLOCK_BYTES, time.monotonic() + 0.3), daemon=True
        )
        fetching.start()
        assert told.wait(20)
        fetching.join(20)
        assert not fetching.is_alive()
        assert not peer.is_up
        may_end.set()


def test_none_is_held_behind_others_or_longer_than_computing_takes(peer_of, monkeypatch) -> None:
    url, _ = peer_of(honest)
    may_end = threading.Event()
    gate = Gate(url, ns_per_token=20_000_000, asks=False)  # a quarter of a second
    monkeypatch.setattr(gate.peer, "fetch", lambda *told: may_end.wait(60) and {})  # a name that is not resolved, say
    for name in ("r", "second", "third"):
        gate.gate.let_in(Submit(request_of(name)))
    held = {each.request.request_id: each.held_for for each in gate.told if isinstance(each, Submit)}
    assert held == {"r": Cause.KV_EXPORT, "second": Cause.KV_EXPORT, "third": None}
    gate.wait()  # though the thread has not come back
    assert not may_end.is_set()
    may_end.set()


def test_a_request_that_takes_nothing_from_the_cache_is_not_held(peer_of) -> None:
    url, _ = peer_of(honest)
    gate = Gate(url, asks=False)
    whole = msgspec.structs.replace(request_of("r"), sampling=SamplingParams(seed=0, prompt_logprobs=1))
    gate.gate.let_in(Submit(whole))
    assert gate.told == [Submit(whole)]


def test_nobody_is_asked_where_computing_is_quicker_or_all_is_cached(peer_of) -> None:
    url, asked = peer_of(honest)
    quick = Gate(url, ns_per_token=1)
    assert quick.told[-1] == Submit(request_of("r"))
    slow = Gate(url)
    slow.wait()
    slow.cache.adopt(NAMES, range(3))
    slow.gate.let_in(Submit(request_of("again")))
    slow.port.layout = ""
    slow.gate.let_in(
        Submit(Request(request_id="other", prompt_token_ids=PROMPT[1:], sampling=SamplingParams(), submitted_ns=0))
    )
    assert [each.held_for for each in slow.told[-2:]] == [None, None]
    assert sum(ask.names is not None for _, _, ask in asked) == 1


def test_a_client_that_has_gone_is_not_told_of_and_its_id_may_come_again(peer_of) -> None:
    may_end, url = threading.Event(), ""

    def late(ask: BlocksAsk):
        may_end.wait(20)
        return honest(ask)

    url, _ = peer_of(late)
    gate = Gate(url)
    gate.gate.let_in(Abort("r"))
    may_end.set()
    gate.gate.let_in(Submit(request_of("r")))
    told = gate.wait()
    assert told.count(Release("r")) == 1
    assert [each for each in told if isinstance(each, Submit | Abort)][1:] == [
        Abort("r"),
        Submit(request_of("r"), Cause.KV_EXPORT),
    ]


def test_an_id_that_comes_again_is_not_released_by_what_was_fetched_for_the_last(peer_of) -> None:
    """The engine may have ended that one by itself, for its deadline: no abort came. The next waits for its form."""
    may_end = threading.Event()

    def late(ask: BlocksAsk):
        may_end.wait(20)
        return honest(ask)

    url, _ = peer_of(late)
    gate = Gate(url)
    again = Submit(request_of("r"), Cause.GRAMMAR)
    gate.gate.let_in(again)
    num_told = len(gate.told)
    may_end.set()
    gate.gate._pool.shutdown()
    assert gate.told[num_told - 1] == again
    assert {type(each) for each in gate.told[num_told:]} <= {BlocksArrived}


def test_no_more_is_kept_than_there_is_room_for(peer_of) -> None:
    url, _ = peer_of(honest)
    gate = Gate(url)
    gate.port.room = 2
    gate.wait()
    assert len(gate.port.received) <= 3
    gate.port.room = len(gate.port.received)
    gate.gate.let_in(Submit(request_of("next")))
    arrived = BlocksArrived((), ())  # so that the engine drops what nobody wants
    with gate._news:
        assert gate._news.wait_for(lambda: arrived in gate.told, 20)


def test_one_that_never_has_anything_is_asked_less_and_less(peer_of) -> None:
    url, _ = peer_of(lambda ask: (200, told_of({})))
    peer = Peer(url, None)
    for _ in range(30):
        assert peer.fetch(BlocksAsk(LAYOUT, NAMES), BLOCK_BYTES, time.monotonic() + 20) == {}
    assert peer.found == LEAST_FOUND
    assert peer.is_up


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://user@host", "http://a/?b=c", "http://a:b"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no server's address"):
        Peer(url, None)


def test_the_sound_blocks_of_an_answer_are_those_that_were_asked_for() -> None:
    raw = told_of(BLOBS)
    assert sound_blocks(raw, BlocksAsk(LAYOUT, NAMES[:1]), BLOCK_BYTES) == {NAMES[0]: BLOBS[NAMES[0]]}
    assert sound_blocks(raw, BlocksAsk(LAYOUT), BLOCK_BYTES) == BLOBS
    assert sound_blocks(raw, BlocksAsk("other"), BLOCK_BYTES) == {}


def test_at_its_start_it_takes_what_a_peer_used_latest_in_as_many_answers_as_it_needs(peer_of) -> None:
    def one_at_a_time(ask: BlocksAsk):
        latest = () if ask.names is not None else tuple(reversed(NAMES))[ask.skip : ask.skip + 1]
        return 200, told_of({name: BLOBS[name] for name in latest})

    url, asked = peer_of(one_at_a_time)
    gate = Gate(url)
    arrived = gate.wait_for(BlocksArrived)
    assert arrived.names == NAMES  # the latest last, as it is to be evicted last
    assert [ask.skip for _, _, ask in asked if ask.names is None] == [0, 1, 2, 3]
