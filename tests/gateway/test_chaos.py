"""Everything goes wrong at once, with real processes: each request ends once, each account sums exactly, nothing is
tried again after its first byte, and breakers and budgets hold."""

import asyncio
import json
import random
import re
import socket
import time
import uuid
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from splittime.ledger.account_json import account_from_json
from splittime.ledger.store import open_readonly
from splittime.web.http import LINGER_S

from .conftest import DEAD, SHORT, gateway_of, upstream
from .test_endings import AT_ONCE, assert_nothing_is_left, send
from .test_relay import events

RETRYABLE = re.compile(
    r"upstream_(unreachable|connect_timeout|first_byte_timeout|broke_off|bad_answer|died|429|500|502|503|504)"
)
STORM = (
    *("fine", "broken", "away", "busy", "strict", "redirect", "lying", "garbage", "hangup", "dying", "polite"),
    *("lingering", "claiming", "slow", "halfopen", "stalling", "endless", "overlong", "badchunk", "headlong"),
)
QUICK = SHORT | {"total_s": 1.0}


def sums(account) -> None:
    account.verify()
    assert sum(one.duration_ns for one in account.intervals) == account.end_ns - account.start_ns


def kept(path: Path, limit: int = 10_000) -> dict[str, list]:
    """The accounts of a ledger file by request."""
    ledger, found = open_readonly(path), {}
    for account in ledger.accounts(limit=limit):
        found.setdefault(account.request_id, []).append(account)
    ledger.close()
    return found


def metric(gateway, name: str) -> dict[str, float]:
    """The samples of a metric by the value of its label."""
    url = gateway.url.removeprefix("http://")
    with socket.create_connection((url.split(":")[0], int(url.split(":")[1]))) as connection:
        connection.sendall(f"GET /metrics HTTP/1.0\r\nhost: {url}\r\n\r\n".encode())
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return {label: float(value) for label, value in re.findall(rf'^{name}(?:{{.*?"(.*?)"}})? (\S+)$', text, re.M)}


def breakers(gateway) -> dict[str, bool]:
    return {one["name"]: one["is_open"] for one in gateway.get("/stats")["upstreams"]}


# ---- a storm


def storm_config(hostile, folder) -> str:
    text = f'ledger_file = "{folder}/ledger.sqlite"\nmax_body_bytes = 20000\n'
    text += "[breaker]\nfailures = 3\nopen_s = 0.1\nmax_backoff_s = 0.05\n[retries]\nspare = 2\npause_s = 0.01\n"
    for name in STORM:
        kind = {"kind": "splittime"} if name == "claiming" else {}
        text += upstream(name, hostile.url(name), **QUICK, **kind) + upstream(
            f"{name}-of-all", hostile.url(name), "all", **QUICK
        )
    return text + upstream("dead", DEAD, "dead", "all", **QUICK)


async def one_of_the_storm(session, url: str, draw: random.Random) -> tuple[str, str]:
    """Returns the id of a request and how it ended for its client."""
    request_id, leaves_s = uuid.uuid4().hex, draw.choice([None, None, 0.0, 0.02, 0.2])
    model, stream = draw.choice([*STORM, "dead", *["all"] * 6]), draw.random() < 0.7
    body = {"model": model, "messages": [], "stream": stream, "pause_s": 0.01}
    body |= {"filling": "x" * 30_000} if draw.random() < 0.1 else {}
    begin_s = time.monotonic()
    try:
        async with asyncio.timeout(leaves_s):
            headers = {"x-request-id": request_id}
            async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as answer:
                told = await answer.read()
    except TimeoutError:
        return request_id, "left"
    except aiohttp.ClientOSError:
        # only who was refused by its head (413) may be cut, if it takes longer for the rest than the gateway reads on
        assert "filling" in body
        assert time.monotonic() - begin_s > LINGER_S
        return request_id, "refused"
    assert ("filling" in body) == (answer.status == 413)
    if answer.content_type != "text/event-stream":
        return request_id, "whole" if json.loads(told) else "nothing"
    ends = [data for data in events(told) if data == b"[DONE]" or b'"error"' in data]
    assert len(ends) == 1, told[-1000:]
    assert events(told)[-1] == ends[0]
    return request_id, "stream"


async def the_storm(url: str, number: int) -> dict[str, str]:
    """Sixty at once; connections are kept, for less long than the gateway keeps them."""
    draw, places = random.Random(5), asyncio.Semaphore(60)

    async def one() -> tuple[str, str]:
        async with places:
            return await one_of_the_storm(session, url, draw)

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        return dict(await asyncio.gather(*(one() for _ in range(number))))


def test_a_storm(hostile, tmp_path):
    number = 500
    asked_before = {name: len(hostile.asked[name]) for name in STORM}
    with gateway_of(tmp_path, storm_config(hostile, tmp_path)) as gateway:
        ended = asyncio.run(the_storm(gateway.url, number))
        assert_nothing_is_left(gateway)
        retries = gateway.get("/stats")["retries"]
        answered = metric(gateway, "splittime_gateway_requests_total")
        assert metric(gateway, "splittime_gateway_invalid_accounts_total") == {"": 0}
    assert {"left", "whole", "stream"} <= set(ended.values())
    found = kept(tmp_path / "ledger.sqlite")
    never_seen = set(ended) - set(found)  # they left before they were sent
    assert all(ended[request_id] == "left" for request_id in never_seen)
    assert sum(answered.values()) == len(found)
    assert set(found) <= set(ended)
    accounts = [account for many in found.values() for account in many]
    assert len(accounts) == len(found)
    for account in accounts:
        sums(account)
        for attempt in account.attempts[:-1]:
            assert RETRYABLE.fullmatch(attempt.error), attempt
            assert attempt.num_events == 0, attempt
    assert sum(max(0, len(account.attempts) - 1) for account in accounts) <= retries
    assert_each_attempt_is_asked_once(hostile, accounts, asked_before)


def assert_each_attempt_is_asked_once(hostile, accounts, before) -> None:
    known = {attempt.request_id for account in accounts for attempt in account.attempts}
    heads = [head for name in STORM for head, _ in hostile.asked[name][before[name] :]]
    asked = Counter(head["x-request-id"] for head in heads if "x-request-id" in head)  # a breaker's checks have none
    assert max(asked.values()) <= 2
    twice = {name for name in STORM for h, _ in hostile.asked[name][before[name] :] if asked[h.get("x-request-id")] > 1}
    assert twice <= {"hangup"}  # on a connection that was kept, which it closes without a byte
    assert set(asked) <= known


# ---- upstreams that lie


@pytest.mark.parametrize("lie", ["gap", "backwards", "late", "huge", "words", "none"])
def test_an_account_that_lies_is_not_nested(lying, lie):
    request_id = uuid.uuid4().hex
    status, *_ = lying.ask("gappy", {"x-request-id": request_id}, lie=lie)
    assert status == 200  # the answer itself is good
    account = account_from_json(lying.account(request_id))
    sums(account)
    assert account.attempts[0].nested == ()
    assert account.attempts[0].nested_fault


@pytest.fixture(scope="module")
def lying(hostile, tmp_path_factory):
    text = "[breaker]\nfailures = 1000\n[retries]\nmax_attempts = 1\n"
    text += upstream("gappy", hostile.url("gappy"), kind="splittime")
    for name in ("overlong", "badchunk", "unending", "headlong"):
        text += upstream(name, hostile.url(name), **SHORT)
    with gateway_of(tmp_path_factory.mktemp("lying"), text) as gateway:
        yield gateway


def test_what_comes_behind_an_answer_is_nobodys(lying):
    """An upstream that sends more than its content-length does not answer the next request with it."""
    told = [lying.ask("overlong") for _ in range(6)]
    assert all(b"of another" not in body for *_, body in told)
    assert any(status == 200 for status, *_ in told)


@pytest.mark.parametrize(
    ("model", "codes"),
    [
        ("badchunk", {"upstream_died", "upstream_broke_off"}),  # as its bytes come
        ("unending", {"upstream_bad_answer"}),
        ("headlong", {"upstream_broke_off"}),
    ],
)
def test_bytes_that_are_no_answer_end_it(lying, model, codes):
    request_id = uuid.uuid4().hex
    _, _, body = lying.ask(model, {"x-request-id": request_id}, stream=True)
    account = account_from_json(lying.account(request_id))
    sums(account)
    assert account.error.code in codes
    assert b"[DONE]" not in body
    rss_pages = int(Path(f"/proc/{lying.process.pid}/statm").read_text().split()[1])
    assert rss_pages * 4096 < 500 * 2**20


# ---- clients


def test_slow_readers_keep_nobody_waiting(hostile, tmp_path):
    text = "slow_reader_s = 0.5\n" + upstream("torrent", hostile.url("torrent")) + upstream("fine", hostile.url("fine"))
    with gateway_of(tmp_path, text, AT_ONCE) as gateway:
        pages = Path(f"/proc/{gateway.process.pid}/statm")
        before = int(pages.read_text().split()[1])
        slow = [send(gateway, "torrent", stream=True) for _ in range(6)]
        assert all(gateway.ask("fine", stream=True)[0] == 200 for _ in range(10))
        for request_id, connection in slow:
            account = account_from_json(gateway.account(request_id, tries=1000))
            sums(account)
            assert account.finish_reason == "abort"
            connection.close()
        grown = (int(pages.read_text().split()[1]) - before) * 4096
        assert grown < 6 * 4 * 2**20  # each has its send buffer and a piece, not what the upstream would send


def test_oversized_prompts_speak_against_nobody(hostile, tmp_path):
    text = "max_body_bytes = 10000\nbody_timeout_s = 0.3\n[breaker]\nfailures = 2\n"
    text += upstream("strict", hostile.url("strict")) + upstream("fine", hostile.url("fine"))
    with gateway_of(tmp_path, text) as gateway:
        before = len(hostile.asked["fine"])
        for _ in range(20):
            status, _, body = gateway.ask("fine", filling="x" * 20_000)
            assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")
        assert len(hostile.asked["fine"]) == before  # refused here
        assert [gateway.ask("strict")[0] for _ in range(10)] == [400] * 10  # refused there
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:  # never all there
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: 9000\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            assert b" 408 " in connection.recv(65536)
        assert breakers(gateway) == {"strict": False, "fine": False}
        assert gateway.ask("fine")[0] == 200
