"""A stream that breaks off goes on at another upstream: exactly, in front of our own servers that are killed."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager

import pytest

from benchmarks.server_process import free_port, wait_until_ready
from patience import until
from splittime.gateway.forwarded import forwarded
from splittime.gateway.resume import TEXT, TOKEN_IDS, Splicer, StreamRecorder, StreamStory, continued, prompt_of
from splittime.ledger.account_json import account_from_json

from .conftest import SHORT, gateway_of, upstream
from .hostile import STREAM_HEAD, chunk, event, text_chunk
from .in_process import Saying, asked, gateway_before
from .test_chaos import metric, sums
from .test_endings import assert_nothing_is_left
from .test_relay import events

OURS = "splittime-code"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "def fibonacci(n):"}]},
    COMPLETIONS: {"prompt": "def fibonacci(n):\n"},
}


class OwnServers:
    """Our own servers with the packaged model: one for each test that kills one, and one more."""

    def __init__(self, number: int) -> None:
        self.ports = [free_port() for _ in range(number)]
        self.processes = [self._start(port) for port in self.ports]

    def _start(self, port: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        for port, process in zip(self.ports, self.processes, strict=True):
            wait_until_ready(f"http://127.0.0.1:{port}", process, 110)

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].wait()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def servers():
    several = OwnServers(len(ASKED) + 1)
    try:
        several.wait()
        yield several
    finally:
        several.stop()


@pytest.fixture
def resuming(servers, tmp_path):
    text = "[breaker]\nfailures = 100\n"
    for number, port in enumerate(servers.ports):
        if servers.processes[number].poll() is None:
            text += upstream(f"ours{number}", f"http://127.0.0.1:{port}", OURS, kind="splittime", resume=True)
    with gateway_of(tmp_path, text) as gateway:
        yield gateway


@contextmanager
def stream_of(gateway, path: str, **body):
    """Yields the id of a greedy stream of 200 tokens, and its answer as it comes."""
    told = {"model": OURS, "stream": True, "max_tokens": 200, "temperature": 0, "ignore_eos": True, **ASKED[path]}
    told |= {"stream_options": {"include_usage": True}, **body}
    request_id, connection = uuid.uuid4().hex, http.client.HTTPConnection(gateway.url.removeprefix("http://"))
    connection.request("POST", path, json.dumps(told), {"x-request-id": request_id})
    yield request_id, connection.getresponse()
    connection.close()


def text_of(told: list[bytes]) -> str:
    choices = [choice for data in told[:-1] for choice in json.loads(data)["choices"]]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)


def undisturbed(gateway, path: str) -> list[bytes]:
    with stream_of(gateway, path) as (_, answer):
        return events(answer.read())


@pytest.mark.slow  # three servers
@pytest.mark.parametrize("path", ASKED)
def test_the_answer_is_the_undisturbed_one(resuming, servers, path):
    whole = undisturbed(resuming, path)
    with stream_of(resuming, path) as (request_id, answer):
        begun = b"".join(answer.readline() for _ in range(24))
        number = int(answer.headers["x-splittime-upstream"][-1])
        servers.kill(number)
        told = events(begun + answer.read())
    assert told.count(b"[DONE]") == 1
    assert told[-1] == b"[DONE]"
    assert text_of(told) == text_of(whole)
    chunks, last = [json.loads(data) for data in told[:-1]], json.loads(whole[-2])
    assert len({tuple(chunk[key] for key in ("id", "object", "model", "created")) for chunk in chunks}) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 200
    assert chunks[-1]["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert b'token_ids":' not in b"".join(told)  # the gateway alone asked for them
    assert [reason for chunk in chunks for one in chunk["choices"] if (reason := one["finish_reason"])] == ["length"]
    (mark,) = [chunk["resumed"] for chunk in chunks if "resumed" in chunk]
    assert mark["upstream"] != f"ours{number}"
    assert mark["by"] == "token_ids"
    account = account_from_json(resuming.account(request_id))
    sums(account)
    first, second = account.attempts
    assert (first.error, first.resumed_by) == ("upstream_died", "")
    assert (second.error, second.resumed_by, second.resumed_after) == ("", "token_ids", mark["after_tokens"])
    assert second.nested
    assert (account.finish_reason, account.output_tokens) == ("length", 200)
    assert metric(resuming, "splittime_gateway_resumes_total") == {"token_ids": 1}
    assert resuming.get("/stats")["retries"] == 0


# ---- other servers, by text


@pytest.fixture(scope="module")
def foreign(hostile, tmp_path_factory):
    text = "[breaker]\nfailures = 100\n"
    for name in ("telling", "ending"):
        text += upstream(name, hostile.url(name), "m", resume=True, **SHORT)
        text += upstream(f"{name}-as-ours", hostile.url(name), "ours", kind="splittime", resume=True, **SHORT)
    with gateway_of(tmp_path_factory.mktemp("foreign"), text) as gateway:
        yield gateway


def asked_until_resumed(gateway, path: str, **body):
    """Returns an answer whose first upstream was the one that dies."""
    for _ in range(60):
        told = {"model": "m", "stream": True, "max_tokens": 10, "stream_options": {"include_usage": True}, **body}
        request_id = uuid.uuid4().hex
        _, headers, answer = gateway.ask("m", {"x-request-id": request_id}, path, raw=json.dumps(told).encode())
        if headers["x-splittime-upstream"].startswith("telling"):
            account = account_from_json(gateway.account(request_id))
            sums(account)
            return events(answer), account
    raise AssertionError("the one that dies was never asked first")


def test_another_server_goes_on_from_the_text(foreign, hostile):
    told, account = asked_until_resumed(foreign, COMPLETIONS, prompt="Count: ", stop=["9"])
    assert text_of(told) == "1 2 3 4"
    assert told[-1] == b"[DONE]"
    asked = json.loads(hostile.asked["ending"][-1][1])
    assert (asked["prompt"], asked["max_tokens"], asked["stop"]) == ("Count: 1 2", 8, ["9"])
    chunks = [json.loads(data) for data in told[:-1]]
    assert {chunk["id"] for chunk in chunks} == {"telling"}
    assert [chunk["resumed"] for chunk in chunks if "resumed" in chunk] == [
        {"upstream": "ending", "by": "text", "after_tokens": 2}
    ]
    assert chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert [(one.error, one.resumed_by) for one in account.attempts] == [("upstream_died", ""), ("", "text")]
    assert (account.prompt_tokens, account.output_tokens) == (4, 4)


def test_a_chat_of_another_server_does_not_go_on(foreign):
    told, account = asked_until_resumed(foreign, CHAT, messages=[{"role": "user", "content": "x"}])
    assert "where in its template" in json.loads(told[-1])["error"]["message"]
    assert len(account.attempts) == 1


def test_an_upstream_that_refuses_to_go_on_ends_the_stream(hostile, tmp_path):
    """What it says is no second head of an answer: the stream ends with an error event."""
    text = "".join(upstream(name, hostile.url(name), "m", resume=True) for name in ("telling", "strict"))
    with gateway_of(tmp_path, text) as gateway:
        told, account = asked_until_resumed(gateway, COMPLETIONS, prompt="Count: ")
    assert text_of([*told[:-1], b""]) == "1 2"
    assert json.loads(told[-1])["error"]["code"] == "upstream_400"
    assert [attempt.status for attempt in account.attempts] == [200, 400]


async def test_an_error_first_of_who_should_go_on_ends_the_stream():
    """It is no event of the answer that the client has, and has not been told."""
    first = Saying(STREAM_HEAD + chunk(event(text_chunk("a", "1 "))), hangs_up=True)
    second = Saying(STREAM_HEAD + chunk(event({"error": {"message": "oom", "code": 500}})))
    async with gateway_before({"first": first, "second": second}, resume=True) as (app, _):
        told = await asked(app, path=COMPLETIONS, prompt="Count: ", stream=True)
        assert (told.status, told.code, told.body.count(b'"1 "')) == (200, "upstream_error_event", 1)
        assert (len(first.asked), len(second.asked)) == (1, 1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"stop": ["zzz"]}, "'stop'"),
        ({"seed": 1, "temperature": 1.0}, "seed"),
        ({"seed": 1, "temperature": 0}, "did not tell where it stood"),
        ({"presence_penalty": 0.5}, "'presence_penalty'"),
        ({"logprobs": 3}, "'logprobs'"),
        ({"n": 2}, "several answers"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"max_tokens": None}, "no max_tokens"),
        ({"max_tokens": 2, "presence_penalty": 0}, "did not tell where it stood"),
        ({"something": "new"}, "'something'"),
    ],
)
def test_what_would_not_be_the_same_ends_as_an_error(foreign, more, why):
    told, account = asked_until_resumed(foreign, COMPLETIONS, **{"model": "ours", "prompt": "Count: ", **more})
    error = json.loads(told[-1])["error"]
    assert error["code"] == "upstream_died"
    assert why in error["message"]
    assert why in account.error.message
    assert len(account.attempts) == 1


def test_where_nobody_can_go_on_the_stream_ends_with_an_error(hostile, tmp_path):
    """The other one that would have to is dead, and the first has a breaker that is open."""
    text = "[breaker]\nfailures = 1\n" + upstream("telling", hostile.url("telling"), "m", resume=True)
    with gateway_of(tmp_path, text) as gateway:
        told, account = asked_until_resumed(gateway, COMPLETIONS, prompt="Count: ")
    assert text_of([*told[:-1], b""]) == "1 2"
    assert json.loads(told[-1])["error"]["code"] == "upstream_died"
    assert [one.error for one in account.attempts] == ["upstream_died"]


def test_one_that_may_not_go_on_is_not_asked_to(hostile, tmp_path):
    """The second upstream does not resume, or is of another kind: the stream ends with an error."""
    text = "[breaker]\nfailures = 1\n" + upstream("telling", hostile.url("telling"), "m", resume=True)
    text += upstream("ending", hostile.url("ending"), "m") + upstream(
        "fine", hostile.url("fine"), "m", kind="splittime"
    )
    with gateway_of(tmp_path, text) as gateway:
        told, account = asked_until_resumed(gateway, COMPLETIONS, prompt="Count: ")
        assert json.loads(told[-1])["error"]["code"] == "upstream_died"
        assert len(account.attempts) == 1
        assert_nothing_is_left(gateway)


def test_a_stream_that_waits_to_go_on_is_told_so(hostile, tmp_path):
    """Comments follow its tokens, and no second head; then the rest comes."""
    hostile.hold.clear()
    text = "[queue]\nsign_of_life_s = 0.05\n[breaker]\nfailures = 100\n"
    text += upstream("telling", hostile.url("telling"), "m", resume=True)
    text += upstream("ending", hostile.url("ending"), "m", "held", resume=True, max_in_flight=1)
    with gateway_of(tmp_path, text) as gateway:
        holding = threading.Thread(target=gateway.ask, args=("held", None, COMPLETIONS), kwargs={"stream": True})
        holding.start()
        until(lambda: gateway.get("/stats")["upstreams"][1]["requests"] == 1)
        letting_go = threading.Timer(0.4, hostile.hold.set)
        letting_go.start()
        told = json.dumps({"model": "m", "prompt": "Count: ", "max_tokens": 10, "stream": True}).encode()
        _, headers, answer = gateway.ask("m", {"x-request-id": "waits"}, COMPLETIONS, raw=told)
        holding.join()
        sums(account_from_json(gateway.account("waits")))
    assert headers["x-splittime-upstream"] == "telling"
    assert 2 <= answer.count(b": queued;") <= 20
    assert answer.index(b'"2"') < answer.index(b": queued;") < answer.index(b'" 3"')
    assert b"HTTP/1.1" not in answer
    assert text_of(events(answer)) == "1 2 3 4"


@pytest.mark.parametrize(
    ("deltas", "goes_on"),
    [
        ([{"content": "a"}], True),
        ([{"reasoning_content": "a"}], False),
        ([{}], False),  # half a mark
        ([{"reasoning_content": "a"}, {}, {"content": "b"}], True),
    ],
)
def test_a_chat_that_has_not_begun_its_content_does_not_go_on(deltas: list[dict], goes_on: bool) -> None:
    story = StreamStory(CHAT, TOKEN_IDS, None, False)
    story.note({"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant"}, "prompt_token_ids": [1]}]})
    for at, delta in enumerate(deltas):
        story.note({"choices": [{"index": 0, "delta": delta, "token_ids": [at]}]})
    assert story.is_known == goes_on
    if goes_on:  # what another upstream says is content
        story.note({"choices": [{"index": 0, "text": "c", "token_ids": [9]}]})
        assert story.is_known


# ---- how many tokens there were, by text


def words(number: int, **more) -> dict:
    return {"id": "x", "choices": [{"index": 0, "text": "w " * number}], **more}


def broken_story(*chunks: dict) -> StreamStory:
    story = StreamStory(COMPLETIONS, TEXT, "Count: ", False)
    recorder = StreamRecorder(story)
    for one in chunks:
        recorder.edit(b"data: " + json.dumps(one).encode() + b"\n\n")
    return story


def counted(tokens: int) -> dict:
    return {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        ([words(10)] * 5, 50),  # events of ten tokens counted as five
        ([words(1)] * 7, 7),
        ([words(3, **counted(12)), words(3, **counted(24))], 24),
        ([words(3, **counted(12)), words(2)], 14),
        ([words(3, usage=None), words(3, timings={"predicted_n": 9})], 9),
        ([{"id": "x", "choices": [{"index": 0, "text": "x" * 400}]}], 100),
        ([{"id": "x", "choices": [{"index": 0, "text": ""}]}], 0),
    ],
)
def test_tokens_by_text_are_those_that_are_told_or_seem_to_be_there(chunks, tokens):
    story = broken_story(*chunks)
    assert story.num_tokens == tokens
    body = {"model": "m", "prompt": "Count: ", "max_tokens": 100}
    request = forwarded(COMPLETIONS, json.dumps(body).encode(), 16)
    asked = json.loads(continued(request, body, TEXT, prompt_of(story), story.num_tokens).body)
    assert asked["max_tokens"] == 100 - tokens or tokens == 100


@pytest.mark.parametrize(
    ("chunks", "usage", "whole"),
    [
        ([words(10)] * 5, (55, 48), (5, 98)),
        ([words(10)] * 5, (10, 48), (10, 98)),  # it counts nobody's tokens but its own: not 0
        ([words(10, **counted(20))], (30, 4), (5, 24)),  # the first one said how long the prompt is
    ],
)
def test_usage_counts_what_both_wrote(chunks, usage, whole):
    story = broken_story(*chunks)
    told = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    splicer = Splicer(story, {})
    end = splicer.edit(b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n")
    assert json.loads(end.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": whole[0],
        "completion_tokens": whole[1],
        "total_tokens": sum(whole),
    }


def test_a_third_upstream_goes_on_after_both():
    story = broken_story(words(4, **counted(6)))
    splicer = Splicer(story, {})
    splicer.edit(b"data: " + json.dumps(words(2, usage={"completion_tokens": 3})).encode() + b"\n\n")
    assert story.num_tokens == 9
    Splicer(story, {})
    assert story.num_tokens == 9
