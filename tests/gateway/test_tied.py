"""Tied requests: a stream of which no byte has come is sent to a second upstream, and one of them has the client.

`second` is asked second, as it has something to do: it keeps a request of the model `kept`.
"""

import asyncio
import signal
import time
import uuid
from contextlib import contextmanager
from itertools import takewhile
from types import SimpleNamespace

import aiohttp
import pytest

from patience import until
from splittime.gateway.config import TiedConfig
from splittime.gateway.tied import LEAST_SEEN, WINDOW, TiedRace, TiedRequests
from splittime.ledger.account_json import account_from_json
from splittime.ledger.stages import Stage

from .conftest import SHORT, SOON_SILENT, gateway_of, hostile_process, upstream
from .test_chaos import metric, sums
from .test_endings import assert_nothing_is_left, send
from .test_relay import events

AFTER_NS = 0.098e9  # as `after_s`, by a timer that is a millisecond coarse
PATIENT = "[breaker]\nfailures = 1000\nmax_backoff_s = 0.01\n"
MANY = "[retries]\nspare = 1000\nmax_attempts = 2\npause_s = 0.01\n"


@contextmanager
def two(hostile, folder, retries: str, *firsts: str, **more):
    """Yields a gateway with a model for each way to misbehave, that of its first upstream; all have the second."""
    text = f"[tied]\nafter_s = 0.1\n{retries}{PATIENT}"
    for way in firsts:
        limit_s = 0.4 if way == "stalling" else 300.0
        text += upstream(way, hostile.url("slow" if way == "stalling" else way), first_byte_s=limit_s)
    text += upstream("second", hostile.url("keeping"), "kept", *firsts, first_byte_s=300.0, **more)
    with gateway_of(folder, text, SOON_SILENT) as gateway:
        asked = len(hostile.asked["keeping"])
        _, connection = send(gateway, "kept", stream=True)
        until(lambda: len(hostile.asked["keeping"]) > asked)
        yield gateway
        connection.close()
        assert_nothing_is_left(gateway)


@pytest.fixture(scope="module")
def tied(hostile, tmp_path_factory):
    ways = ("slow", "halfopen", "held", "pausing", "stalling")
    with two(hostile, tmp_path_factory.mktemp("tied"), MANY, *ways) as gateway:
        yield gateway


@contextmanager
def counted(gateway, result: str, retries: int = 1):
    """What happens within it is one tie that ends so, and so many of the budget's retries."""
    before = metric(gateway, "splittime_gateway_tied_total"), gateway.get("/stats")["retries"]
    yield
    after = metric(gateway, "splittime_gateway_tied_total"), gateway.get("/stats")["retries"]
    assert after[0] == before[0] | ({result: before[0][result] + 1} if result else {})
    assert after[1] == before[1] + retries


def ask(gateway, model: str, stream: bool = True, **body):
    """Returns status, headers and events of an answer, and the account, whose stages sum."""
    request_id = uuid.uuid4().hex
    status, headers, told = gateway.ask(model, {"x-request-id": request_id}, stream=stream, **body)
    account = account_from_json(gateway.account(request_id))
    sums(account)
    return status, headers, events(told), account


def in_flight(gateway, name: str) -> int:
    return next(one["requests"] for one in gateway.get("/stats")["upstreams"] if one["name"] == name)


def ends(account) -> list[tuple[str, str]]:
    return [(attempt.upstream, attempt.error) for attempt in account.attempts]


# ---- who wins


@pytest.mark.parametrize("way", ["slow", "halfopen"])
def test_the_second_has_a_byte_first(tied, hostile, way):
    gone, lost_before = len(hostile.gone_s[way]), metric(tied, "splittime_gateway_tied_lost_tokens_total")
    with counted(tied, "second"):
        status, headers, told, account = ask(tied, way, pause_s=0.01)
    assert (status, headers["x-splittime-upstream"], told[-1]) == (200, "second", b"[DONE]")
    assert ends(account) == [(way, "tied_lost"), ("second", "")]
    lost, won = account.attempts
    assert (lost.tied_to, won.tied_to) == (won.request_id, lost.request_id)
    assert lost.first_byte_ns is None
    assert lost.end_ns <= won.end_ns
    assert lost.lost_tokens > 0 == won.lost_tokens
    waited_ns = won.begin_ns - lost.begin_ns
    assert waited_ns >= AFTER_NS
    upstream_ns = sum(one.duration_ns for one in account.intervals if one.stage is Stage.UPSTREAM)
    assert upstream_ns >= waited_ns
    until(lambda: len(hostile.gone_s[way]) == gone + 1)  # its connection is cut
    lost_after = metric(tied, "splittime_gateway_tied_lost_tokens_total")
    assert lost_after[way] == lost_before.get(way, 0) + lost.lost_tokens
    assert metric(tied, "splittime_gateway_tied_lost_seconds_total")[way] * 1e9 >= AFTER_NS


@pytest.mark.parametrize(
    ("then", "end"), [("slow", "tied_lost"), ("away", "upstream_503"), ("hangup", "upstream_broke_off")]
)
def test_the_first_has_a_byte_after_all(tied, hostile, then, end):
    """The second says nothing yet, refuses, or breaks off: none of it is the client's."""
    asked = len(hostile.asked["keeping"])
    hostile.hold.clear()
    with counted(tied, "first"):
        try:
            request_id, connection = send(tied, "held", stream=True, then=then)
            until(lambda: len(hostile.asked["keeping"]) > asked)
            until(lambda: then == "slow" or in_flight(tied, "second") == 1)  # the other one failed
            hostile.hold.set()
            account = account_from_json(tied.account(request_id))
        finally:
            hostile.hold.clear()
    connection.close()
    sums(account)
    assert account.error is None
    assert ends(account) == [("second", end), ("held", "")]


def test_both_fail(tied):
    with counted(tied, "neither"):
        status, _, _, account = ask(tied, "stalling", then="away")
    assert (status, account.error.code) == (504, "upstream_first_byte_timeout")
    assert ends(account) == [("second", "upstream_503"), ("stalling", "upstream_first_byte_timeout")]


def test_a_client_that_leaves_ends_both(tied, hostile):
    asked, gone = len(hostile.asked["keeping"]), len(hostile.gone_s["slow"])
    with counted(tied, "cancelled"):
        request_id, connection = send(tied, "slow", stream=True, then="slow")
        until(lambda: len(hostile.asked["keeping"]) > asked)
        connection.close()
        account = account_from_json(tied.account(request_id))
    sums(account)
    assert account.finish_reason == "abort"
    assert ends(account) == [("slow", "cancelled"), ("second", "cancelled")]
    until(lambda: len(hostile.gone_s["slow"]) == gone + 2)  # the second's way is `slow` too


# ---- when nothing is sent twice


def test_never_after_the_first_byte(tied):
    with counted(tied, "", retries=0):
        status, _, told, account = ask(tied, "pausing")
    assert (status, told[-1], ends(account)) == (200, b"[DONE]", [("pausing", "")])


def test_an_answer_that_is_no_stream_is_not_tied(tied):
    with counted(tied, ""):  # it is tried again
        status, _, _, account = ask(tied, "stalling", stream=False)
    assert (status, ends(account)) == (200, [("stalling", "upstream_first_byte_timeout"), ("second", "")])
    assert {attempt.tied_to for attempt in account.attempts} == {""}


def test_within_the_budget_of_retries(hostile, tmp_path):
    with two(hostile, tmp_path, "[retries]\nratio = 0\nspare = 1\n", "stalling") as gateway:
        assert [ask(gateway, "stalling")[0] for _ in range(2)] == [200, 200]
        stats = gateway.get("/stats")
        assert (sum(stats["tied"].values()), stats["retries"]) == (1, 2)  # the second was a retry after the time-out


def test_only_where_there_is_room(hostile, tmp_path):
    """And what is not sent is not taken from the budget."""
    with two(hostile, tmp_path, "[retries]\nratio = 0\n", "stalling", max_in_flight=1) as gateway:
        request_id, connection = send(gateway, "stalling", stream=True)
        time.sleep(0.3)  # three times as long as what has had no byte is left alone
        stats = gateway.get("/stats")
        assert (stats["retries"], [one["requests"] for one in stats["upstreams"]]) == (0, [1, 1])
        connection.close()
        assert ends(account_from_json(gateway.account(request_id))) == [("stalling", "cancelled")]


# ---- how long it waits


def test_a_quantile_of_the_waits_that_were_seen():
    tied = TiedRequests(TiedConfig(quantile=0.9))
    for wait_s in range(1, LEAST_SEEN + 1):
        assert tied.after_s("m") is None
        tied.note_wait("m", wait_s * 10**9)
    assert tied.after_s("m") == 18
    assert tied.after_s("another") is None
    for _ in range(WINDOW):
        tied.note_wait("m", 10**9)
    assert tied.after_s("m") == 1  # what is old is forgotten
    assert TiedRequests(TiedConfig(after_s=0.5)).after_s("m") == 0.5
    assert TiedRequests(None, tied.results).results is tied.results  # of another config's
    assert TiedRequests(None).after_s("m") is None


class AnAttempt:
    """Stands in a race for one that has a byte so many turns of the event loop after it was begun."""

    def __init__(self, turns: int) -> None:
        self.begin_ns, self.relay = time.monotonic_ns(), SimpleNamespace(first_byte_ns=None)
        self._turns = turns
        self.endings: list[str] = []

    async def open(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self.relay.first_byte_ns = time.monotonic_ns()

    def give_up(self, ending: str) -> None:
        self.endings.append(ending)


async def raced(first: AnAttempt, turns: int):
    """Returns who won, the second, and the waits that were noted; the second is begun after 10 ms."""
    tied, seconds = TiedRequests(TiedConfig(after_s=0.01)), []

    async def send_second(_: AnAttempt) -> AnAttempt:
        seconds.append(AnAttempt(turns))
        return seconds[0]

    race = TiedRace(tied, "m", first, send_second)
    await race.run()
    return race.decisive, seconds[0], list(tied._waits_ns["m"])


def test_of_a_first_that_lost_the_wait_is_known_to_have_been_longer():
    first = AnAttempt(10**9)
    winner, second, waits_ns = asyncio.run(raced(first, 5))
    assert (winner, first.endings, second.endings) == (second, ["tied_lost"], [])
    assert len(waits_ns) == 2
    assert waits_ns[0] < waits_ns[1]


def test_by_a_quantile_once_enough_were_seen(hostile, tmp_path):
    text = f"[tied]\nquantile = 0.9\n{MANY}{PATIENT}" + upstream("one", hostile.url("fine"), "m")
    text += upstream("two", hostile.url("halfopen"), "m", first_byte_s=0.1)
    with gateway_of(tmp_path, text) as gateway:
        told = (ask(gateway, "m")[-1].attempts for _ in range(20 * LEAST_SEEN))
        before = list(takewhile(lambda attempts: not attempts[0].tied_to, told))
    assert LEAST_SEEN <= sum(attempts[-1].error == "" for attempts in before) < 20 * LEAST_SEEN


# ---- with real processes


async def streams_of(url: str, number: int) -> dict[str, tuple[int, bytes]]:
    async def one(session: aiohttp.ClientSession, request_id: str) -> tuple[int, bytes]:
        body = {"model": "m", "messages": [], "stream": True, "pause_s": 0.01}
        headers = {"x-request-id": request_id}
        async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.read()

    names = [uuid.uuid4().hex for _ in range(number)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return dict(zip(names, await asyncio.gather(*(one(session, name) for name in names)), strict=True))


def test_a_process_that_hangs_and_one_that_is_killed(tmp_path):
    """Of two processes one is stopped, goes on, and the other is killed: each stream has one end, from one of them."""
    text = f"[tied]\nafter_s = 0.1\n{MANY}{PATIENT}"
    with hostile_process() as (one, port), hostile_process() as (other, other_port):
        for name, number in (("one", port), ("other", other_port)):
            text += upstream(name, f"http://127.0.0.1:{number}/fine", "m", **{**SHORT, "first_byte_s": 30.0})
        with gateway_of(tmp_path, text) as gateway:
            one.send_signal(signal.SIGSTOP)
            told = asyncio.run(streams_of(gateway.url, 30))
            one.send_signal(signal.SIGCONT)
            other.kill()
            told |= asyncio.run(streams_of(gateway.url, 10))
            accounts = [account_from_json(gateway.account(name)) for name in told]
            retries, ties = gateway.get("/stats")["retries"], gateway.get("/stats")["tied"]
            assert_nothing_is_left(gateway)
    for status, body in told.values():
        assert (status, body.count(b"[DONE]"), body.count(b" tick")) == (200, 1, 3)
    for account in accounts:
        sums(account)
        *lost, won = account.attempts
        assert (won.error, len(lost) <= 1) == ("", True)
        assert all(attempt.first_byte_ns is None for attempt in lost)
    assert sum(len(account.attempts) - 1 for account in accounts) == retries
    lost = [attempt for account in accounts for attempt in account.attempts if attempt.error == "tied_lost"]
    assert len(lost) == ties["second"] + ties["first"] >= 10  # half of the first thirty were sent to the one that hung
    assert ties["neither"] == ties["cancelled"] == 0
