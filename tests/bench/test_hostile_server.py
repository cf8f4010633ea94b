"""A server that is broken or means harm: the client keeps its memory and its terminal, and errors say what is."""

import asyncio
import re
import socket

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from client_runs import outcome, run
from rich.table import Table
from rich.text import Text

from splittime.bench import client as client_module
from splittime.bench import servers
from splittime.bench.alarm import Alarm
from splittime.bench.book.records import Ending, load_run, save
from splittime.bench.event_loop import run_loop
from splittime.bench.schedule import Job
from splittime.cli import options
from splittime.core.errors import ConfigError, EngineError
from splittime.wire import connection, scrape
from splittime.wire.connection import Pool
from splittime.wire.sse import EventLines
from splittime.wire.target import Target
from tests.bench.scripted import CHUNKED, chunk, client_of, event, whole
from tests.bench.test_client import DONE, outcome_of, planned

MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}


def opened(answers, **fields):
    """The arm of a server that answers as said: a value as JSON, a text as it is, or a response."""

    async def answer(request):
        found = answers.get(request.path)
        if callable(found):
            return found(request)
        if found is None:
            return web.json_response({}, status=404)
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            target = Target(url=str(server.make_url("")), **fields)
            arm = await servers.open_arm(session, target)
            gauges = await servers.sample(session, arm, target)
            return await servers.close_arm(session, arm, target, []), gauges

    return asyncio.run(main())


# ---- what it says of itself


@pytest.mark.parametrize("name", [7, ["a"], {"a": 1}, "x" * 10_000, True])
def test_a_model_without_a_name_is_a_note_and_the_run_can_be_read_again(name, tmp_path):
    arm, _ = opened({"/v1/models": {"data": [{"id": name, "owned_by": "vllm"}]}, "/metrics": "vllm:a 1\n"})
    assert arm.model is None
    assert any("--model" in note for note in arm.notes)
    assert all(len(note) < 1000 for note in arm.notes)
    save(run([outcome()], arms=(arm,)), tmp_path / "run.json")
    assert load_run(tmp_path / "run.json").arms == (arm,)


def test_a_model_without_a_name_does_not_matter_to_who_names_one():
    arm, _ = opened({"/v1/models": {"data": [{"id": 7, "owned_by": "vllm"}]}, "/metrics": "vllm:a 1\n"}, model="mine")
    assert (arm.model, arm.notes) == ("mine", ())


@pytest.mark.parametrize("odd", ["text", [], {}, True, -1, 1e300])
def test_odd_gauges_count_as_not_told(odd, tmp_path):
    stats = {"engine": {"num_waiting": odd, "num_running": odd, "blocks_total": odd, "blocks_used": odd}}
    answers = {"/v1/models": {"data": [{"id": "m", "owned_by": "splittime", "max_model_len": odd}]}, "/stats": stats}
    arm, gauges = opened(answers)
    assert gauges == servers.ServerGauges()
    assert arm.max_model_len is None


def test_metrics_without_a_value_are_left_out_of_the_book(tmp_path):
    """JSON has no word for them: the file could not be read again."""
    arm, _ = opened({"/v1/models": MODELS, "/metrics": 'vllm:a{q="0.5"} NaN\nvllm:b +Inf\nvllm:c 1\n'})
    assert arm.metrics_before == arm.metrics_after == {"vllm:c": 1.0}
    save(run([outcome()], arms=(arm,)), tmp_path / "run.json")
    assert load_run(tmp_path / "run.json").arms == (arm,)


# ---- where it leads


def redirect(place):
    return lambda request: web.Response(status=307, headers={"Location": place})


@pytest.mark.parametrize(
    "place", ["/v1/models", "http://127.0.0.1:1/v1/models", "http://[", "//", "file:///etc/passwd"]
)
def test_a_redirect_in_a_circle_or_away_is_named(place):
    with pytest.raises(EngineError, match="redirect") as refused:
        opened({"/v1/models": redirect(place)})
    assert place in refused.value.info.message
    assert "follows no redirects" in refused.value.info.hint


def test_redirects_on_the_server_itself_are_followed():
    answers = {"/v1/models": redirect("/v1/models/"), "/v1/models/": MODELS, "/metrics": redirect("metrics/")}
    arm, _ = opened({**answers, "/metrics/": "vllm:a 1\n"})
    assert (arm.kind, arm.metrics_before) == ("vllm", {"vllm:a": 1.0})


def test_the_first_question_says_why_nothing_came():
    async def ask(**fields):
        async with aiohttp.ClientSession() as session:
            await scrape.ask_first(session, Target(**fields))

    with pytest.raises(EngineError, match=r"nothing answers at http://127\.0\.0\.1:1: .*[Cc]onnect"):
        asyncio.run(ask(url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="no header can have"):
        asyncio.run(ask(url="http://127.0.0.1:1", api_key="a\r\nX-Evil: 1"))


# ---- how much it sends


def test_long_bodies_are_not_read(monkeypatch):
    monkeypatch.setattr(scrape, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(scrape.ask, "__defaults__", (1000,))
    monkeypatch.setattr(scrape.get, "__defaults__", (5.0, 1000))
    arm, _ = opened({"/v1/models": MODELS, "/metrics": "vllm:a 1\n" * 1000})
    assert arm.metrics_before == {}
    assert sum("/metrics is longer than" in note for note in arm.notes) == 1
    with pytest.raises(EngineError, match="more than"):
        opened({"/v1/models": "x" * 2000})


async def test_an_endless_body_ends_the_question():
    written = []

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"a 1\n" * 10_000)
            written.append(40_000)

    app = web.Application()
    app.router.add_get("/metrics", endless)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        answer = await scrape.get(session, Target(url=str(server.make_url(""))), "/metrics", max_bytes=10**6)
        assert answer.is_too_long
        assert (answer.body, answer.json) == (b"", None)
        assert sum(written) < 5 * 10**7, "a megabyte, and what lies between us"


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"X-A: ", *[b"a" * 2**16] * 20],
        [HEAD, *[b"X-A: a\r\n" * 2**13] * 20],
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 2**12] * 20,
        [CHUNKED + chunk(event()), b"1;", *[b"a" * 2**16] * 20],
        [CHUNKED + chunk(event()), b"0\r\nX-A: ", *[b"a" * 2**16] * 20],
    ],
    ids=["one", "many", "informational", "extension", "trailer"],
)
def test_endless_headers_end_the_request(pieces):
    found = outcome_of(*[pieces] * 3)
    assert found.ending is Ending.FAILED
    assert f"header is longer than {connection.MAX_HEAD_BYTES:,} bytes" in found.error or "not HTTP" in found.error


def test_a_long_body_is_no_long_header():
    pieces = [CHUNKED + chunk(event()), *[chunk(b": " + b"a" * 2**16 + b"\n\n")] * 40, chunk(DONE) + b"0\r\n\r\n"]
    assert outcome_of(*[pieces] * 3).ending is Ending.COMPLETE


def test_an_endless_answer_ends_the_request(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_CHUNKS", 100)
    found = outcome_of(*[[CHUNKED, *[chunk(event() * 50)] * 3]] * 3)
    assert found.ending is Ending.FAILED
    assert "more than 100 chunks" in found.error


def test_an_event_of_empty_lines_is_too_long_one_day(monkeypatch):
    monkeypatch.setattr("splittime.wire.sse.MAX_EVENT_BYTES", 2**16)
    lines = EventLines()
    lines.feed(b"data:\n" * 2**10)
    assert not lines.is_too_long
    for _ in range(20):
        lines.feed(b"data:\n" * 2**12)
    assert lines.is_too_long


def test_what_comes_behind_a_whole_answer_is_nobodys():
    answer = CHUNKED + chunk(event()) + chunk(DONE) + b"0\r\n\r\n"
    assert outcome_of(*[answer + whole(500, b"more")] * 3).ending is Ending.COMPLETE


# ---- when it keeps silent


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_handshake_without_an_end_is_out_of_time(monkeypatch, stands_still):
    """The server takes connections and says nothing: TLS would wait for a minute. The event loop's clock, by which the
    time-out ends, may be ahead of ours by a moment, or by any time where ours stands still."""
    if stands_still:
        instant_ns = client_module.now_ns()
        monkeypatch.setattr(client_module, "now_ns", lambda: instant_ns)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            alarm = Alarm()
            target = Target(url=f"https://127.0.0.1:{silent.getsockname()[1]}")
            client = client_of(target, alarm, timeout_s=0.2)
            client.pool.use((socket.AF_INET, silent.getsockname()))
            try:
                return await client.send(Job(planned(), 0, None), 0)
            finally:
                client.pool.close()
                alarm.close()

    for loop in (asyncio.run, run_loop):
        found = loop(main())
        assert found.ending is Ending.TIMED_OUT
        assert "no connection within" in found.error
        assert found.sent_ns is None


def test_looking_up_has_an_end_too(monkeypatch):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await Pool(Target(url=f"https://127.0.0.1:{silent.getsockname()[1]}")).look_up()

    monkeypatch.setattr("splittime.wire.connection.CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"no connection within 0\.1 s"):
        asyncio.run(main())


def test_a_ledger_that_keeps_silent_is_not_asked_for_hours(monkeypatch):
    """200 accounts are missing, and no question is answered: patience ends within the first round of questions."""
    asked = []

    async def silent(session, target, request_id):
        asked.append(request_id)
        return []

    monkeypatch.setattr(servers, "_one", silent)
    monkeypatch.setattr(servers, "PATIENCE_S", 0.0)

    async def main():
        outcomes = [msgspec.structs.replace(outcome(i), request_id=f"r-{i}") for i in range(200)]
        async with aiohttp.ClientSession() as session:
            target = Target(url="http://127.0.0.1:1")
            return await servers.fetch(session, servers.Arm(url=target.url, kind="splittime"), target, outcomes)

    assert "200 of 200" in asyncio.run(main()).notes[0]
    assert len(asked) == servers.AT_ONCE


# ---- what reaches the terminal


@pytest.mark.parametrize("console", ["talk", "wide"])
def test_a_terminal_obeys_nobody_but_us(console, monkeypatch, capsys):
    """In a table, in a text, as a plain word; the colours are ours and stay."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = getattr(options, console)()
    evil = "name\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    table = Table(evil)
    table.add_row(evil)
    for one in (table, Text(evil), evil):
        shown.print(one, style="red", markup=False)
    said = "".join(capsys.readouterr())
    assert "\x1b[31m" in said
    assert re.sub(r"\x1b\[[0-9;]*m", "", said).count("name") == 4
    assert not set(re.sub(r"\x1b\[[0-9;]*m", "", said)) & set("\x1b\x07\x9b\u202e")
