"""Gateways that tell each other by a Valkey or Redis what their tenants have used."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from patience import until_async
from splittime.core.errors import ConfigError, Refused
from splittime.gateway import shared_counters, shared_limits, valkey_connection
from splittime.gateway.budget_stores import BudgetsInValkey
from splittime.gateway.config_file import config_of
from splittime.gateway.exchanges import Exchanges
from splittime.gateway.shared_counters import SharedCounters
from splittime.gateway.shared_limits import SharedLimits
from splittime.gateway.valkey_connection import ValkeyConnection, address_of
from splittime.web.quota import Quota
from splittime.web.tenants import Tenant

from .conftest import gateway_of, upstream
from .test_limits import bearer

NOWHERE = "redis://127.0.0.1:9"


@pytest.fixture
def empty(valkey, monkeypatch):
    monkeypatch.setattr(shared_limits, "EXCHANGE_S", 0.005)
    connection = ValkeyConnection(*address_of(valkey, "limits_valkey"))
    connection.ask(b"FLUSHALL")
    yield valkey
    connection.close()


def quota(**limits: int) -> Quota:
    return Quota(Tenant(name="a", **limits))


def used(one: Quota, requests: int, tokens: int = 0) -> None:
    for _ in range(requests):
        one.enter(time.monotonic_ns())
    one.use_tokens(tokens, time.monotonic_ns())


def refusal(one: Quota) -> str | None:
    try:
        one.check(time.monotonic_ns())
    except Refused as caught:
        return caught.reason
    return None


@asynccontextmanager
async def exchanging(url: str, *quotas: Quota):
    """Gateways with these quotas exchange meanwhile."""
    gateways = [SharedLimits(url, lambda own=own: {"a": own}) for own in quotas]
    for gateway in gateways:
        gateway.open()
    await until_async(lambda: all(gateway.is_shared for gateway in gateways))
    yield
    for gateway in gateways:
        await gateway.close()


async def test_requests_and_tokens_count_at_every_gateway(empty):
    one, other = (quota(requests_per_minute=10, tokens_per_minute=1000) for _ in range(2))
    async with exchanging(empty, one, other):
        used(one, 6, 100)
        await until_async(lambda: other._requests.level < 5)
        used(other, 5)
        assert refusal(other) == "requests_per_minute"
        await until_async(lambda: refusal(one) == "requests_per_minute")
        assert -2 < one._requests.level < 0
        assert one._tokens.level == pytest.approx(900, abs=2), "no gateway takes its own use twice"
        assert other._tokens.level == pytest.approx(900, abs=20)


async def test_what_is_reserved_at_one_gateway_is_reserved_at_all(empty):
    one, other = quota(tokens_per_minute=1000), quota(tokens_per_minute=1000)
    async with exchanging(empty, one, other):
        use = one.enter(time.monotonic_ns())
        use.reserve(1000, time.monotonic_ns())
        await until_async(lambda: refusal(other) == "tokens_per_minute")
        use.settle(300, time.monotonic_ns())
        await until_async(lambda: other._tokens.level > 600)
        assert other._tokens.level == pytest.approx(700, abs=20)
        assert one._tokens.level == pytest.approx(700, abs=20)


async def test_what_was_used_before_a_gateway_came_is_not_taken(empty):
    early = quota(requests_per_minute=10)
    async with exchanging(empty, early):
        used(early, 9)
        await asyncio.sleep(0.1)
    late = quota(requests_per_minute=10)
    async with exchanging(empty, late):
        await asyncio.sleep(0.1)
    assert late._requests.level == 10


async def test_a_store_that_is_emptied_gives_and_takes_nothing(empty):
    one, other = quota(tokens_per_minute=1000), quota(tokens_per_minute=1000)
    connection = ValkeyConnection(*address_of(empty, "limits_valkey"))
    async with exchanging(empty, one, other):
        used(one, 1, 300)
        await until_async(lambda: other._tokens.level < 800)
        connection.ask(b"FLUSHALL")
        await asyncio.sleep(0.1)
        assert other._tokens.level == pytest.approx(700, abs=20)
        used(one, 1, 200)
        await until_async(lambda: other._tokens.level < 600)
        assert one._tokens.level == pytest.approx(500, abs=20)
    connection.close()


async def test_what_others_use_is_seen_below_nothing_too(empty):
    """What was reserved before a store was emptied is given back to nothing: its total is below 0."""
    one, other = quota(tokens_per_minute=1000), quota(tokens_per_minute=1000)
    connection = ValkeyConnection(*address_of(empty, "limits_valkey"))
    async with exchanging(empty, one, other):
        use = one.enter(time.monotonic_ns())
        use.reserve(500, time.monotonic_ns())
        await until_async(lambda: other._tokens.level < 600)
        connection.ask(b"FLUSHALL")
        await asyncio.sleep(0.05)
        use.settle(0, time.monotonic_ns())
        await until_async(lambda: connection.ask(b"HGET", shared_limits.HASH.encode(), b"tokens a") == b"-500")
        await asyncio.sleep(0.05)
        used(other, 1, 200)
        await until_async(lambda: one._tokens.level < 850)
        assert one._tokens.level == pytest.approx(800, abs=20)
    connection.close()


def test_what_was_used_long_ago_is_not_waited_for():
    """A store that was away for an hour tells of an hour's use at once."""
    one = quota(tokens_per_minute=60)
    one.use_elsewhere(0, 3600, time.monotonic_ns())
    assert one._tokens.level == pytest.approx(-60, abs=1)
    one.use_tokens(100, time.monotonic_ns())
    one.use_elsewhere(0, 50, time.monotonic_ns())
    assert one._tokens.level == pytest.approx(-160, abs=1), "what it used itself is"


async def test_a_tenant_that_comes_back_begins_anew_and_its_use_is_not_told_twice(empty):
    """A config without it ends its quota; a later one with it has another."""
    mine, other = [quota(tokens_per_minute=1000)], quota(tokens_per_minute=1000)
    gateways = [SharedLimits(empty, lambda: {"a": mine[-1]}), SharedLimits(empty, lambda: {"a": other})]
    for gateway in gateways:
        gateway.open()
    await until_async(lambda: all(gateway.is_shared for gateway in gateways))
    used(mine[-1], 1, 200)
    await until_async(lambda: other._tokens.level < 850)
    mine.append(quota(tokens_per_minute=2000))
    used(mine[-1], 1, 100)
    await until_async(lambda: other._tokens.level < 750)
    await asyncio.sleep(0.05)
    assert other._tokens.level == pytest.approx(700, abs=30)
    assert mine[-1]._tokens.level == pytest.approx(1900, abs=30)
    for gateway in gateways:
        await gateway.close()


def test_budgets_in_a_valkey_are_added_up(empty):
    periods = ("2026-11-27", "2026-11")
    one, other = BudgetsInValkey(empty), BudgetsInValkey(empty)
    assert one.add(Counter(), periods) == Counter()
    one.add(Counter({("a", periods[0]): 5, ("a", periods[1]): 5, ("b", periods[1]): 1}), periods)
    told = other.add(Counter({("a", periods[0]): 7, ("c", "2026-11-26"): 1}), periods)
    assert told == Counter({("a", periods[0]): 12, ("a", periods[1]): 5, ("b", periods[1]): 1})
    connection = ValkeyConnection(*address_of(empty, "limits_valkey"))
    assert connection.ask(b"TTL", b"splittime:budget:1:2026-11") > 31 * 86_400
    assert connection.ask(b"TTL", b"splittime:budget:1:2026-11-26") > 0, "also that of a day that is over"
    for each in (one, other, connection):
        each.close()


def test_a_file_and_a_valkey_are_one_too_many_and_an_address_is_checked():
    told = {"upstream": [{"name": "u", "url": "http://h:1", "models": ["m"]}]}
    for more, param in (
        ({"limits_valkey": NOWHERE, "budget_file": "b"}, "budget_file"),
        ({"limits_valkey": "http://h"}, "limits_valkey"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(told | more)
        assert caught.value.info.param == param


class ReplyLoser:
    """Stands before a store: hands on what it is sent, and the replies only while `is_muted` is not set."""

    def __init__(self, url: str) -> None:
        self._target = address_of(url, "limits_valkey")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_muted = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                store = socket.create_connection(self._target)
                threading.Thread(target=self._pass, args=(client, store, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(store, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(65536):
                if not (is_reply and self.is_muted):
                    target.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_what_is_carried_out_without_a_reply_counts_once(empty, monkeypatch):
    monkeypatch.setattr(valkey_connection, "PAUSE_S", 0.0)
    monkeypatch.setattr(shared_counters, "TIMEOUT_S", 0.3)
    loser, direct = ReplyLoser(empty), SharedCounters(empty)
    counters = SharedCounters(loser.url)
    assert counters.exchange({("h", "f"): 1}, ["h"]) == {"h": {"f": 1}}
    loser.is_muted = True
    for amount in (10, 100, 1000):
        with pytest.raises(OSError, match="does not answer"):
            counters.exchange({("h", "f"): amount}, ["h"])
    assert direct.exchange({}, ["h"]) == {"h": {"f": 11}}, "the first was carried out, and only that"
    loser.is_muted = False
    assert counters.exchange({("h", "g"): 5}, ["h"]) == {"h": {"f": 1111, "g": 5}}
    for one in (loser, counters, direct):
        one.close()


def test_a_field_that_is_no_number_hinders_no_other(empty):
    connection = ValkeyConnection(*address_of(empty, "limits_valkey"))
    connection.ask(b"HSET", b"h", b"bad", b"1.5")
    connection.ask(b"HSET", b"h", b"word", b"-")
    counters = SharedCounters(empty)
    assert counters.exchange({("low", "f"): -7}, ["low"]) == {"low": {"f": -7}}
    for total in (1, 2):
        assert counters.exchange({("h", "bad"): 1, ("h", "good"): 1}, ["h"]) == {"h": {"good": total}}
    connection.close()
    counters.close()


LIES = [
    b"+x\r\n",
    b"*1\r\n$1\r\nx\r\n",
    b"*1\r\n" * 5000,
    b":" + b"9" * 400 + b"\r\n",
    b"$-1\r\n",
    b"x" * 70000,
    b"-ERR no\r\n",
    b"",
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: repr(lie[:6]))
def test_whatever_a_store_answers_is_an_error_and_soon(lie, monkeypatch):
    monkeypatch.setattr(shared_counters, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            client, _ = listener.accept()
            with contextlib.suppress(OSError), client:
                client.recv(65536)
                client.sendall(lie)
                while client.recv(65536):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        counters = SharedCounters(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(OSError, match="store"):
            counters.exchange({}, ["h"])
        counters.close()


def test_a_store_that_drips_is_left_in_time(monkeypatch):
    monkeypatch.setattr(shared_counters, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = threading.Event()

        def drip():
            client, _ = listener.accept()
            with contextlib.suppress(OSError), client:
                for _ in range(600):
                    client.sendall(b"*")
                    time.sleep(0.05)
                    if gone.is_set():
                        return

        threading.Thread(target=drip, daemon=True).start()
        counters, begin_s = SharedCounters(f"redis://127.0.0.1:{listener.getsockname()[1]}"), time.monotonic()
        with pytest.raises(OSError, match="store"):
            counters.exchange({}, ["h"])
        assert time.monotonic() - begin_s < 20  # it would take thirty seconds
        gone.set()
        counters.close()


async def test_what_a_store_answers_ends_no_sharing(caplog):
    """The exchange fails in a way that nobody foresaw; the next one is tried."""
    tries = []

    def send(told):
        tries.append(told)
        if len(tries) < 3:
            raise TypeError("unforeseen")
        return told

    exchange = Exchanges(0.001, lambda: 1, send, lambda kept: None)
    exchange.begin("trouble")
    await until_async(lambda: exchange.succeeded)
    await exchange.end()
    assert caplog.text.count("trouble: unforeseen") == 1


TENANTS = """
[[tenant]]
name = "ops"
key_env = "OPS"
operator = true
[[tenant]]
name = "a"
key_env = "A"
tokens_per_day = 35
requests_per_minute = 100
"""
KEYS = {"OPS": "of-ops", "A": "of-a"}


def asked(gateway) -> tuple[int, str]:
    status, _, body = gateway.ask("fine", bearer("of-a"))
    return status, json.loads(body).get("error", {}).get("reason", "") if status != 200 else ""


def metric(gateway, name: str) -> float:
    asked = urllib.request.Request(gateway.url + "/metrics", headers={"authorization": "Bearer of-ops"})
    with urllib.request.urlopen(asked, timeout=30) as response:
        lines = response.read().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)))


def test_two_gateways_share_limits_and_budgets(hostile, tmp_path, empty):
    text = f'limits_valkey = "{empty}"\n' + upstream("fine", hostile.url("fine")) + TENANTS
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        gateway_of(tmp_path / "one", text, **KEYS) as one,
        gateway_of(tmp_path / "other", text, **KEYS) as other,
    ):
        deadline_s = time.monotonic() + 20
        while not (metric(one, "splittime_gateway_limits_shared") and metric(other, "splittime_gateway_limits_shared")):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert [asked(one)[0] for _ in range(4)] == [200] * 4  # ten tokens each
        while (told := asked(other)) == (200, ""):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert told == (429, "tokens_per_day")
    connection = ValkeyConnection(*address_of(empty, "limits_valkey"))
    assert int(connection.ask(b"HGET", b"splittime:use:1", b"requests a")) >= 4
    connection.close()


def test_without_its_store_a_gateway_keeps_its_own_limits_and_says_so(hostile, tmp_path):
    text = f'limits_valkey = "{NOWHERE}"\n' + upstream("fine", hostile.url("fine")) + TENANTS
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        assert metric(gateway, "splittime_gateway_limits_shared") == 0
        answers = [asked(gateway) for _ in range(6)]
        assert answers[0] == (200, "")
        assert answers[-1] == (429, "tokens_per_day")
    words = (tmp_path / "words").read_text()
    assert words.count("limits by the minute are this gateway's own") == 1
    assert words.count("budgets are counted and not written to redis://127.0.0.1:9") == 1
