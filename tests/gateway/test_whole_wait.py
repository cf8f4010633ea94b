"""Answers that come as a whole: not cut while their upstream lives, asked for once, bounded in all."""

import asyncio
import json
import threading
import time
from functools import partial

import pytest

from patience import until, until_async
from splittime.gateway import breaks
from splittime.gateway.breaks import DEAD_AFTER, UpstreamPulse, UpstreamSilent
from splittime.gateway.relay import Relay
from splittime.gateway.upstream_connections import RoundTrips, UpstreamAnswer, UpstreamConnections
from splittime.gateway.upstreams import HUNG_AFTER
from splittime.wire.target import Target

from .conftest import SOON_SILENT, gateway_of, upstream
from .hostile import CHUNK, STREAM_HEAD, WHOLE, Hostile, chunk, event, whole
from .in_process import PATIENT, Saying, asked, counted, gateway_before
from .test_chaos import metric

QUIET_S = 0.15


class Writing(Hostile):
    """Writes whole answers for as long as it is held; its `/health` says what it is told to say."""

    def __init__(self) -> None:
        super().__init__()
        self.health: int | None = 200

    async def do_long(self, reader, writer, body) -> bool:
        if "/health" in body["line"]:
            if self.health is None:
                return await self._until_gone("long", reader)
            writer.write(whole(self.health, {"status": "ok"}))
            return False
        return await self.do_held(reader, writer, body)

    do_other = do_long

    def num_asked(self, name: str) -> int:
        return sum(bool(body) for _, body in self.asked[name])

    def num_polls(self) -> int:
        return len(self.asked["long"]) - self.num_asked("long")


@pytest.fixture(scope="module")
def writing():
    server = Writing()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def gateway(writing, tmp_path_factory):
    text = "[breaker]\nfailures = 1\n[retries]\nspare = 100\npause_s = 0.0\n"
    text += upstream("long", writing.url("long"), "m", first_byte_s=QUIET_S, between_s=QUIET_S, total_s=30.0)
    text += upstream("other", writing.url("other"), "m", first_byte_s=QUIET_S, max_in_flight=0)
    text += upstream("short", writing.url("long"), "short", first_byte_s=QUIET_S, whole_answer_s=0.6)
    with gateway_of(tmp_path_factory.mktemp("whole"), text) as started:
        yield started


@pytest.mark.parametrize("health", [200, 404, 401], ids=["well", "no such path", "another key"])
def test_a_long_answer_is_waited_for_while_its_upstream_lives(gateway, writing, health):
    """It takes many times `first_byte_s`; it is asked for once, and opens no breaker."""
    writing.hold.clear()
    writing.health = health
    asked, polls = writing.num_asked("long"), writing.num_polls()
    told = []
    asking = threading.Thread(target=lambda: told.append(gateway.ask("m", max_tokens=2000)))
    asking.start()
    until(lambda: writing.num_polls() >= polls + DEAD_AFTER + 2)
    writing.hold.set()
    asking.join()
    assert (told[0][0], json.loads(told[0][2])["usage"]["completion_tokens"]) == (200, 3)
    assert writing.num_asked("long") == asked + 1
    assert not any(one["is_open"] for one in gateway.get("/stats")["upstreams"])


def test_the_time_in_all_is_bounded_and_held_against_nobody(gateway, writing):
    writing.hold.clear()
    writing.health = 200
    asked = writing.num_asked("long")
    status, _, body = gateway.ask("short")
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (504, "upstream_whole_answer_timeout")
    assert "0.6 s (whole_answer_s of upstream 'short')" in error["message"]
    assert "stream" in error["hint"]
    assert writing.num_asked("long") == asked + 1  # nobody else is asked to write it again
    assert not any(one["is_open"] for one in gateway.get("/stats")["upstreams"])
    assert metric(gateway, "splittime_gateway_breaker_open") == {"long": 0, "other": 0, "short": 0}


@pytest.mark.parametrize("health", [None, 503], ids=["silent", "unwell"])
def test_one_that_does_not_live_is_given_up(writing, tmp_path, health):
    """Its breaker opens, and others are asked."""
    writing.hold.clear()
    writing.health = health
    text = "[breaker]\nfailures = 1\n[retries]\nmax_attempts = 1\n"
    text += upstream("long", writing.url("long"), "m", "only", first_byte_s=QUIET_S)
    text += upstream("spare", writing.url("fine"), "m", "fine")
    with gateway_of(tmp_path, text, SOON_SILENT) as gateway:
        status, _, body = gateway.ask("only")
        assert (status, json.loads(body)["error"]["code"]) == (504, "upstream_first_byte_timeout")
        assert [one["is_open"] for one in gateway.get("/stats")["upstreams"]] == [True, False]
        assert [gateway.ask("m")[0] for _ in range(3)] == [200] * 3
    writing.hold.set()


# ---- an engine that hangs behind a server that lives

HANGING = "[breaker]\nfailures = 1\nopen_s = 30.0\n[retries]\nmax_attempts = 1\n"
WAITS = [STREAM_HEAD, *[chunk(b": wait\n\n")] * 200]


@pytest.mark.parametrize(
    ("said", "limits", "code"),
    [
        ([b""] * 200, {"whole_answer_s": 0.5}, "upstream_whole_answer_timeout"),
        ([b""] * 200, {"total_s": 0.5}, "upstream_total_timeout"),
        (WAITS, {"total_s": 0.5}, "upstream_total_timeout"),
    ],
    ids=["whole", "total", "comments"],
)
async def test_several_in_a_row_without_a_byte_are_held_against_it(said, limits, code):
    """Each may have been too long by itself, and nobody had a piece of an answer meanwhile."""
    one = Saying(said, models=whole(200, {"data": []}))
    async with gateway_before({"one": one}, HANGING, first_byte_s=0.2, between_s=5.0, **limits) as (app, gateway):
        for number in range(HUNG_AFTER):
            assert gateway.router.upstreams[0].breaker.is_well
            assert (await asked(app, stream=said is WAITS)).code == code
            assert counted(gateway, "verdicts_total", whose="health") == (number == HUNG_AFTER - 1)
        assert (await asked(app)).code == "no_upstream"


async def test_who_leaves_or_has_no_time_shuts_no_upstream_for_others():
    """However long each waited: whoever may ask could do so."""
    async with gateway_before({"one": Saying([b""] * 200)}, HANGING, first_byte_s=0.2) as (app, gateway):
        for _ in range(HUNG_AFTER):
            assert (await asked(app, {"x-request-deadline-ms": "300"})).code == "deadline_exceeded"
            leaves = asyncio.Event()
            asyncio.get_running_loop().call_later(0.3, leaves.set)
            await asked(app, leaves=leaves)
        assert not gateway.router.upstreams[0].breaker.is_open


@pytest.mark.parametrize("headers", [{}, {"x-request-deadline-ms": "300"}])
async def test_others_are_asked_before_one_that_all_left(headers):
    """Nobody had a byte of it: its engine may hang. It is asked where no other has room, and trusted once it writes."""
    hangs, fine = Saying([b""] * 200, models=whole(200, {"data": []})), Saying(whole(200, WHOLE))
    async with gateway_before({"hangs": hangs, "fine": fine}, PATIENT, first_byte_s=0.2) as (app, gateway):
        suspect, other = gateway.router.upstreams
        while not suspect.in_flight.is_suspect(time.monotonic_ns()):
            leaves, before = asyncio.Event(), len(hangs.asked)
            asking = asyncio.create_task(asked(app, headers, leaves=leaves))
            await until_async(lambda: len(hangs.asked) > before)  # noqa: B023 -- it ends here
            await asyncio.sleep(0.3)
            leaves.set()
            await asking
        assert (len(hangs.asked), suspect.breaker.is_well) == (HUNG_AFTER, True)
        assert [(await asked(app)).status for _ in range(20)] == [200] * 20
        assert len(hangs.asked) == HUNG_AFTER
        chosen = partial(gateway.router.choose, "m", time.monotonic_ns())
        other.enter(0, places=other.limit)
        assert chosen().upstream is suspect
        other.leave(0, places=other.limit)
        assert chosen().upstream is other
        suspect.in_flight.note_heard(time.monotonic_ns())
        assert chosen().upstream is suspect  # with least to do


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_that_writes_for_others_meanwhile_does_not_hang(is_stream):
    """By a stream that goes on, or by an answer after each: the others are too long."""

    def said(body: bytes) -> list[bytes]:
        if b"quick" in body:
            return [whole(200, WHOLE)]
        return [STREAM_HEAD, *[chunk(event(CHUNK))] * 500] if b"stream" in body else [b""] * 500

    one = Saying(said)
    async with gateway_before({"one": one}, HANGING, first_byte_s=0.2, whole_answer_s=0.3) as (app, gateway):
        leaves = asyncio.Event()
        streams = [asyncio.create_task(asked(app, leaves=leaves, stream=True)) for _ in range(is_stream)]
        while is_stream and not one.asked:
            await asyncio.sleep(0.001)
        for _ in range(2 * HUNG_AFTER):
            assert (await asked(app)).code == "upstream_whole_answer_timeout"
            assert is_stream or (await asked(app, user="quick")).status == 200
        assert gateway.router.upstreams[0].breaker.is_well
        leaves.set()
        await asyncio.gather(*streams)


# ---- the pulse itself


class NoConnection:
    def cut(self) -> None:
        """Nothing is to be cut."""


def watched(answers: list[bool], waits: int, monkeypatch, limit_s: float = 0.2) -> list[str]:
    """Returns what became of so many answers, of an upstream that lives as `answers` say, and then for good."""
    told = iter(answers)
    asked = []

    async def status(*_, **__):
        asked.append(1)
        if next(told, True):
            return 200, b""
        raise OSError("it is silent")

    monkeypatch.setattr(breaks, "ask_whole", status)

    async def run() -> list[str]:
        pulse = UpstreamPulse(Target(url="http://127.0.0.1:1").address, None, 0.004)
        connections = UpstreamConnections(RoundTrips())
        waiting = [UpstreamAnswer(NoConnection()) for _ in range(waits)]
        for answer in waiting:
            pulse.watch(answer, connections)
        ends = await asyncio.gather(*(one.piece(limit_s) for one in waiting), return_exceptions=True)
        for answer in waiting:
            pulse.leave(answer)
        await until_async(lambda: pulse._asking is None)  # nobody waits, nobody asks
        return [type(one).__name__ for one in ends]

    ends = asyncio.run(run())
    assert len(asked) < 60  # once for all who wait
    return ends


def test_silence_is_several_times_in_a_row(monkeypatch):
    few = [False] * (DEAD_AFTER - 1)
    assert watched([*few, True, *few, True], 3, monkeypatch) == ["TimeoutError"] * 3
    assert watched([*few, False], 20, monkeypatch, limit_s=100.0) == [UpstreamSilent.__name__] * 20


def test_one_that_says_nothing_for_long_is_silent_and_a_slow_one_is_not(monkeypatch):
    """A server whose `/health` takes as long as its answers do has more time for it than the next question comes in."""

    def ends(lasts_s: float) -> str:
        async def run() -> BaseException:
            async def status(*_, within_s, **__):
                async with asyncio.timeout(within_s):
                    await asyncio.sleep(lasts_s)
                return 200, b""

            monkeypatch.setattr(breaks, "ask_whole", status)
            pulse, answer = (
                UpstreamPulse(Target(url="http://127.0.0.1:1").address, None, 0.01),
                UpstreamAnswer(NoConnection()),
            )
            pulse.watch(answer, UpstreamConnections(RoundTrips()))
            (end,) = await asyncio.gather(answer.piece(0.25), return_exceptions=True)
            pulse.leave(answer)
            return end

        return type(asyncio.run(run())).__name__

    assert ends(0.05) == "TimeoutError"  # five periods
    assert ends(5.0) == UpstreamSilent.__name__


def test_who_left_is_not_asked_for(monkeypatch):
    assert watched([], 0, monkeypatch) == []


async def test_an_answer_that_has_been_read_is_watched_no_more(monkeypatch):
    """Its client may take it for long, and its connection is another's meanwhile."""
    give, watched_then = Relay.give_answer, []
    async with gateway_before({"one": Saying(whole(200, WHOLE))}) as (app, gateway):

        async def given(relay, answer):
            watched_then.append(len(gateway.router.upstreams[0].pulse._due_s))
            await give(relay, answer)

        monkeypatch.setattr(Relay, "give_answer", given)
        assert (await asked(app)).status == 200
    assert watched_then == [0]


async def test_an_upstreams_key_is_in_no_account(monkeypatch):
    told = {**WHOLE, "choices": [{**WHOLE["choices"][0], "finish_reason": "sk-12345678"}]}
    reasons = []
    monkeypatch.setenv("UPSTREAM_KEY", "sk-12345678")
    async with gateway_before({"one": Saying(whole(200, told))}, key_env="UPSTREAM_KEY") as (app, gateway):
        assert (await asked(app)).status == 200
        reasons.extend(one.finish_reason for one in gateway.ledger.accounts())
    assert reasons == ["***"]
