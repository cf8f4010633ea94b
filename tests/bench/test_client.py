"""One request: every way in which it can end, told apart, and when what was read."""

import asyncio
import socket
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import until_async
from splittime.bench.alarm import Alarm, LoopTimer
from splittime.bench.book.records import Ending
from splittime.bench.client import body_of
from splittime.bench.mock_server import MockServer, Timings
from splittime.bench.schedule import Job, Planned
from splittime.core.errors import ConfigError
from splittime.wire.connection import Pool
from splittime.wire.sse import AnswerReader, EventLines, body_text
from splittime.wire.target import Target
from tests.bench.scripted import CHUNKED, chunk, client_of, event, scripted, whole

MS = 1_000_000
QUICK = Timings(ttft_ns=2 * MS, itl_ns=MS)
DONE = b"data: [DONE]\n\n"


async def ask(url, *planned, kind="mock", timeout_s=60.0, together=False, begin=True, begin_ns=None):
    """The outcomes of these requests, one after another or all at once; their instants are counted from `begin_ns`."""
    alarm = Alarm()
    client = client_of(Target(url=url), alarm, kind, timeout_s=timeout_s)
    client.begin_ns = begin_ns or time.monotonic_ns()
    if begin:
        await client.pool.look_up()
    try:
        work = [client.send(Job(p, 0, None), time.monotonic_ns()) for p in planned]
        if together:
            return await asyncio.gather(*work)
        return [await one for one in work]
    finally:
        client.pool.close()
        alarm.close()


def planned(index=0, **fields):
    return Planned(index=index, at_ns=None, **{"output_tokens": 5, "prompt": (1, 2, 3), **fields})


def outcome_of(*answers, **options):
    """What the client makes of a scripted answer."""

    async def main():
        async with scripted(*answers, closes=options.pop("closes", True)) as (url, _):
            # look_up leaves an idle connection, which the scripted server serves like any other
            return (await ask(url, planned(**options.pop("planned", {})), **options))[0]

    return asyncio.run(main())


async def test_a_whole_answer():
    async with MockServer(QUICK) as server:
        outcome = (await ask(server.url, planned()))[0]
    assert outcome.ending is Ending.COMPLETE
    assert outcome.chunk_tokens == (1,) * 5
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (3, 5, 0)
    assert outcome.finish_reason == "length"
    instants = [outcome.intended_ns, outcome.picked_up_ns, outcome.sent_ns, outcome.headers_ns, *outcome.chunk_ns]
    assert instants == sorted(instants)
    assert outcome.end_ns >= outcome.chunk_ns[-1]
    assert outcome.chunk_ns[0] - outcome.sent_ns >= QUICK.ttft_ns - MS


async def test_chats_and_chunks_of_several_tokens():
    async with MockServer(Timings(ttft_ns=MS, itl_ns=MS, tokens_per_chunk=3)) as server:
        chat = planned(messages=({"role": "user", "content": "one two"},), prompt=(), output_tokens=7)
        outcome = (await ask(server.url, chat))[0]
    assert outcome.ending is Ending.COMPLETE
    assert outcome.chunk_tokens == (3, 3, 1)


async def test_without_being_told_a_chunk_is_no_token():
    async with MockServer(Timings(ttft_ns=MS, itl_ns=MS, tokens_per_chunk=4)) as server:
        outcome = (await ask(server.url, planned(output_tokens=8), kind="unknown"))[0]
    assert len(outcome.chunk_ns) == 2
    assert outcome.chunk_tokens is None
    assert outcome.output_tokens == 8


@pytest.mark.parametrize(
    ("answer", "ending", "words"),
    [
        (whole(503, b'{"error":{"message":"full up"}}'), Ending.REFUSED, "full up"),
        (whole(422, b'{"detail":"no such field"}'), Ending.REFUSED, "no such field"),
        (whole(500, b"<html>oops</html>", "text/html"), Ending.REFUSED, "<html>oops</html>"),
        (whole(404, b""), Ending.REFUSED, "status 404"),
        (whole(200, b'{"choices":[]}'), Ending.FAILED, "no event stream"),
        (CHUNKED + chunk(event()) + chunk(DONE) + b"0\r\n\r\n", Ending.COMPLETE, None),
        (CHUNKED + chunk(event()) + b"0\r\n\r\n", Ending.FAILED, "without [DONE]"),
        (CHUNKED + chunk(event()), Ending.FAILED, "closed after 1 chunks"),
        (
            CHUNKED + chunk(event()) + chunk(b'data: {"error":{"message":"boom"}}\n\n') + b"0\r\n\r\n",
            Ending.FAILED,
            "boom",
        ),
        (CHUNKED + chunk(b'error: {"message":"old boom"}\n\n') + b"0\r\n\r\n", Ending.FAILED, "old boom"),
        (CHUNKED + chunk(b"data: {not json\n\n" + DONE) + b"0\r\n\r\n", Ending.FAILED, "cannot be read"),
        (CHUNKED + chunk(b"data: " + b"a" * (17 * 2**20)), Ending.FAILED, "longer than"),
        (whole(500, b"\x1b[31mred"), Ending.REFUSED, "\ufffd[31mred"),
        (b"this is no HTTP\r\n\r\n", Ending.FAILED, "not HTTP"),
        (b"", Ending.FAILED, "before an answer"),
    ],
)
def test_endings_are_told_apart(answer, ending, words):
    # a fresh connection each time: the first is idle from the look-up, and an idle one may be replaced
    outcome = outcome_of(*[answer] * 3)
    assert outcome.ending is ending
    assert outcome.error is None if words is None else words in outcome.error


def test_an_answer_that_ends_by_closing_is_whole():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert outcome_of([head, event(), DONE]).ending is Ending.COMPLETE
    assert outcome_of([head, event()]).ending is Ending.FAILED


async def test_nobody_there():
    async with scripted() as (url, _):
        pass
    with pytest.raises(ConfigError, match="cannot connect"):
        await ask(url, planned())


async def test_a_request_whose_connection_is_closed_on_it_is_sent_again_and_says_so():
    """The server closes a little after each answer but says nothing of it, when the next request has come already."""
    answer = CHUNKED + chunk(event()) + chunk(DONE) + b"0\r\n\r\n"
    async with scripted(answer, answer, answer) as (url, seen):
        outcomes = await ask(url, planned(0), planned(1), planned(2))
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETE] * 3
    assert [outcome.resent for outcome in outcomes] == [0, 1, 1]
    assert len({head.split(b"X-Request-Id: ")[1].split(b"\r\n")[0] for head, _ in seen}) == 3


async def test_a_connection_closed_while_idle_is_replaced_before_anything_is_sent():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pool = Pool(Target(url=f"http://127.0.0.1:{listening.getsockname()[1]}"))
        await pool.look_up()
        open_still, _ = await pool.take()
        pool.give_back(open_still, is_reusable=True)
        assert await pool.take() == (open_still, 0)
        pool.give_back(open_still, is_reusable=True)
        listening.accept()[0].close()  # the kernel knows at once, and our loop has not turned since
        other, connect_ns = await pool.take()
        pool.close()
        assert other is not open_still
        assert connect_ns > 0


async def test_out_of_time():
    async with MockServer(Timings(ttft_ns=MS, itl_ns=1000 * MS)) as server:
        outcome = (await ask(server.url, planned(output_tokens=1000), timeout_s=0.1))[0]
        await until_async(lambda: server.in_service == 0)  # the server noticed
    assert outcome.ending is Ending.TIMED_OUT
    assert "0.1 s" in outcome.error
    assert outcome.end_ns - outcome.picked_up_ns >= 100 * MS


async def test_hanging_up_as_planned():
    async with MockServer(Timings(ttft_ns=MS, itl_ns=20 * MS, slots=1)) as server:
        hung_up, whole_before = await ask(
            server.url,
            planned(0, output_tokens=100_000, cancel_after_ns=300 * MS),
            planned(1, output_tokens=2, cancel_after_ns=80_000 * MS),
            timeout_s=90,
        )
        await until_async(lambda: server.in_service == 0)
    assert hung_up.ending is Ending.CANCELLED
    assert hung_up.error is None
    assert hung_up.end_ns - hung_up.sent_ns >= 300 * MS
    assert len(hung_up.chunk_ns) < 100_000
    assert whole_before.ending is Ending.COMPLETE  # the slot was free: the server had noticed


async def test_a_slow_reader_stops_reading():
    """All is written at once; the reader takes it in pieces with a wait before each, and the server feels it."""
    timings = Timings(ttft_ns=MS, itl_ns=0)
    async with MockServer(timings) as server:
        quick = (await ask(server.url, planned(output_tokens=400)))[0]
        slow = (await ask(server.url, planned(output_tokens=400, read_delay_ns=10 * MS)))[0]
    assert slow.ending is Ending.COMPLETE
    assert slow.output_tokens == quick.output_tokens == 400
    assert slow.end_ns - slow.sent_ns > 50 * MS  # 400 events are many buffers full
    assert len(set(slow.chunk_ns)) > 5


def test_more_at_once_than_any_default_limit():
    """Nobody is answered before all are there."""

    async def main():
        async with MockServer(Timings(ttft_ns=100_000 * MS, itl_ns=0)) as server:
            many = (planned(i, output_tokens=1) for i in range(150))
            asking = asyncio.create_task(ask(server.url, *many, together=True, timeout_s=100))
            await until_async(lambda: server.in_service == 150)
            asking.cancel()
            await asyncio.wait([asking])
            return server.most_in_service

    assert asyncio.run(main()) == 150


@pytest.mark.parametrize("kind", ["splittime", "vllm", "sglang", "llama.cpp", "tgi", "unknown"])
def test_what_a_server_does_not_know_is_not_sent(kind):
    body = msgspec.json.decode(body_of(planned(body={"temperature": 0}), kind, "m"))
    assert body["max_tokens"] == 5
    assert body["temperature"] == 0
    assert body["stream_options"]["include_usage"] is True
    assert ("ignore_eos" in body) == (kind not in ("tgi", "unknown"))
    assert ("return_token_ids" in body) == (kind == "splittime")
    assert ("continuous_usage_stats" in body["stream_options"]) == (kind in ("vllm", "sglang"))
    assert "ignore_eos" not in msgspec.json.decode(body_of(planned(exact_output=False), kind, "m"))


def test_a_key_is_sent_and_a_bad_one_refused():
    async def main():
        async with scripted(whole(200, b"{}"), whole(200, b"{}")) as (url, seen):
            alarm = Alarm()
            target = Target(url=url + "/base/v1/", api_key="secret")
            client = client_of(target, alarm, "vllm", "m", 60)
            await client.pool.look_up()
            await client.send(Job(planned(), 0, None), 0)
            client.pool.close()
            alarm.close()
            return seen[0][0]

    head = asyncio.run(main())
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in head
    with pytest.raises(ConfigError):
        asyncio.run(_with_key("schlüssel\u2603"))


async def _with_key(key):
    alarm = Alarm()
    try:
        client_of(Target(url="http://h", api_key=key), alarm, "vllm")
    finally:
        alarm.close()


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_bad_urls(url):
    with pytest.raises(ConfigError):
        _ = Target(url=url).address


def test_urls():
    assert Target(url="http://h:1/v1/").address == (False, "h", 1, "")
    assert Target(url="https://h/x/v1").address == (True, "h", 443, "/x")
    assert Target(url="h:8000").address == (False, "h", 8000, "")
    assert Target(url="http://[::1]:80").address.authority == "[::1]"


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.data(),
)
def test_events_come_out_however_the_bytes_come_in(texts, line_end, data):
    whole_stream = "".join(f": note{line_end}data: {text}{line_end}{line_end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole_stream)), max_size=10)))
    lines = EventLines()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(whole_stream)], strict=True):
        found += lines.feed(whole_stream[begin:end])
    assert [event.decode() for event in found] == texts


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([{"text": "a", "token_ids": [1, 2]}, {"text": "b", "token_ids": [3]}], (2, 1)),
        ([{"text": "", "token_ids": [1]}, {"text": "b", "token_ids": [3]}], (1, 1)),
        ([{"text": "a"}, {"text": "b"}], None),
        ([{"text": "a", "token_ids": [1]}, {"text": "b"}], None),
    ],
)
def test_tokens_of_chunks(events, expected):
    reading = AnswerReader()
    for at_ns, choice in enumerate(events):
        reading.take(msgspec.json.encode({"choices": [choice]}), at_ns)
    assert reading.chunk_tokens == expected


def test_tokens_of_chunks_by_running_usage():
    """Tokens that make no text yet belong to the chunk that brings it."""
    reading = AnswerReader()
    for at_ns, (text, so_far) in enumerate([("", 0), ("a", 1), ("", 2), ("bc", 4), ("d", 5)]):
        usage = {"prompt_tokens": 3, "completion_tokens": so_far}
        chunk = {"choices": [{"delta": {"content": text}}], "usage": usage}
        reading.take(msgspec.json.encode(chunk), at_ns)
    assert reading.chunk_tokens == (1, 3, 1)
    assert reading.chunk_ns == [1, 3, 4]
    assert reading.output_tokens == 5


@given(st.binary(max_size=200))
def test_any_error_body_gives_a_text(body):
    assert isinstance(body_text(body), str)


@given(st.binary(max_size=100))
def test_any_event_is_survived(data):
    reading = AnswerReader()
    reading.take(data, 0)
    assert reading.error is None or isinstance(reading.error, str)


@pytest.mark.parametrize("without_timerfd", [False, True])
async def test_the_alarm_rings_in_order_and_never_early(without_timerfd, monkeypatch):
    if without_timerfd:
        monkeypatch.setattr("splittime.bench.alarm.make_timer", LoopTimer)
    alarm = Alarm()
    begin_ns = time.monotonic_ns()
    rung = []
    for delay in (30, 10, 20, 10):
        alarm.call_at(begin_ns + delay * MS, lambda d=delay: rung.append((d, time.monotonic_ns() - begin_ns)))
    alarm.call_at(begin_ns + 15 * MS, lambda: rung.append((0, 0))).cancel()
    await alarm.sleep_until(begin_ns + 40 * MS)
    alarm.close()
    assert [delay for delay, _ in rung] == [10, 10, 20, 30]
    assert all(at_ns >= delay * MS for delay, at_ns in rung)


@pytest.mark.parametrize("tokens", [-5, 10**30, 2**62])
def test_impossible_numbers_of_tokens_count_as_not_told(tokens):
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}' % (
        (tokens,) * 3
    )
    last = b'data: {"choices":[{"text":"b","finish_reason":"stop"}],"usage":' + usage + b"}\n\n"
    outcome = outcome_of(*[CHUNKED + chunk(event() + last + DONE) + b"0\r\n\r\n"] * 2)
    assert outcome.ending is Ending.COMPLETE
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (None, None, None)
    assert outcome.chunk_tokens is None
