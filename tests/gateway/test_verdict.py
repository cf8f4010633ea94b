"""What an upstream does, and what comes of it: for the client, with and without another upstream, for the breaker, and
in the metrics. A row says all of it."""

import gzip
import json
import time
from typing import NamedTuple

import pytest

from .hostile import CHUNK, LAST, STREAM_HEAD, USAGE, WHOLE, chunk, event, whole
from .in_process import Saying, asked, counted, gateway_before

KEY, SECRET = "sk-of-the-upstream", "account 4711"
GOOD_BODY = json.dumps(WHOLE).encode()


def http(status: int, body: bytes, *headers: str, kind: str = "application/json", length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-type: {kind}",
        f"content-length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


def stream(*events, end: bytes = b"0\r\n\r\n", head: bytes = STREAM_HEAD) -> bytes:
    return head + b"".join(chunk(event(one)) for one in events) + end


def error(message: str = "no", **more) -> dict:
    return {"error": {"message": message, **more}}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
OK_EVENTS = (CHUNK, LAST, USAGE, b"[DONE]")
EMPTY = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]}
OTHERS = {"choices": [{"index": 1, "delta": {"role": "assistant"}, "finish_reason": None}]}
FILTERS = {"choices": [], "prompt_filter_results": []}
NOT_FOR_CLIENTS = {b"set-cookie", b"location", b"content-encoding", b"upgrade"}
NOT_FOR_CLIENTS |= {b"www-authenticate", b"proxy-authenticate"}
LATE = error(type="deadline_exceeded_error", code="deadline_exceeded")
OOM = error("CUDA OOM", type="server_error", code=500)
GZIP = "content-encoding: gzip"
ZIPPED_HEAD = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
BOMB = gzip.compress(b" " * 2**22 + GOOD_BODY)


NAMED = STREAM_HEAD + chunk(event(CHUNK)) + chunk(b"event: error\ndata: out of memory\n\n") + chunk(event(b"[DONE]"))


class Row(NamedTuple):
    """An upstream that says this; what a client has where it is alone, by status and code (None: the answer); whose
    doing it is; and whether another upstream answers in its place."""

    name: str
    said: bytes
    status: int
    code: str | None
    whose: str
    is_elsewhere: bool = True
    is_stream: bool = False
    hangs_up: bool = False


STATUSES = [
    Row(
        "400 of the prompt",
        whole(400, error(code="context_length_exceeded")),
        400,
        "context_length_exceeded",
        "request",
        False,
    ),
    Row("401", whole(401, error(f"Incorrect key {KEY}", code="invalid_api_key")), 502, "upstream_401", "key"),
    Row("401 without a word", http(401, b""), 502, "upstream_401", "key"),
    Row("402", whole(402, error()), 502, "upstream_402", "key"),
    Row("403", whole(403, error(type="permission_error")), 502, "upstream_403", "key"),
    Row("402 in words", whole(402, {"detail": f"{SECRET}: pay for {KEY}"}), 502, "upstream_402", "health"),
    Row("403, a page", http(403, b"<html>blocked", kind="text/html"), 502, "upstream_403", "health"),
    Row("403 without a word", http(403, b""), 502, "upstream_403", "health"),
    Row("403 of a proxy", whole(403, {"message": SECRET}, "set-cookie: a=b"), 502, "upstream_403", "health"),
    Row("407, a page", http(407, b"<html>", kind="text/html"), 502, "upstream_407", "health"),
    Row("407 in words", whole(407, {"message": SECRET}, "proxy-authenticate: Basic"), 502, "upstream_407", "health"),
    Row("421", whole(421, error(SECRET)), 502, "upstream_421", "health"),
    Row("426", whole(426, error(SECRET), "upgrade: h2c"), 502, "upstream_426", "health"),
    Row("451 of a border", whole(451, {"message": SECRET}), 502, "upstream_451", "health"),
    Row("451 of a text", whole(451, error(code="x")), 451, "x", "request", False),
    Row("511", whole(511, error(SECRET), "www-authenticate: Basic"), 502, "upstream_511", "health"),
    Row("403 of a text", whole(403, error(code="x", metadata={"flagged_input": "y"})), 403, "x", "request", False),
    Row("400 of the key", whole(400, error(code="API_KEY_INVALID")), 502, "upstream_400", "key"),
    Row(
        "404 of the model, vLLM",
        whole(404, error("The model `m` does not exist.", code=404)),
        502,
        "upstream_lacks_model",
        "model",
    ),
    Row("404 of the model, OpenAI", whole(404, error(code="model_not_found")), 502, "upstream_lacks_model", "model"),
    Row(
        "404 of the model, Anthropic",
        whole(404, {"type": "error", **error("model: claude-x", type="not_found_error")}),
        502,
        "upstream_lacks_model",
        "model",
    ),
    Row("404 of a file", whole(404, error("file-1 not found", code="f")), 404, "f", "request", False),
    Row("404 of everything", http(404, b"<html>", kind="text/html"), 404, "upstream_404", "health"),
    Row("404 of the route", whole(404, {"detail": "Not Found"}), 404, None, "health"),
    Row("400, a page", http(400, b"<html>plain HTTP", kind="text/html"), 400, "upstream_400", "health"),
    Row("404 of a proxy", whole(404, {"message": "no Route matched with those values"}), 404, None, "health"),
    Row("405", whole(405, error(code="c")), 405, "c", "health"),
    Row("408", whole(408, error(code="c")), 408, "c", "health"),
    Row("413, a page", http(413, b"<html>", kind="text/html"), 413, "upstream_413", "request", False),
    Row("422", whole(422, error(code="c")), 422, "c", "request", False),
    Row("429", whole(429, error(code="c"), "retry-after: 3"), 429, "c", "busy"),
    Row("429 of the account", whole(429, error(code="insufficient_quota")), 502, "upstream_429", "key"),
    Row("429 of a size", whole(429, error("Request too large for m", code="c")), 429, "c", "request"),
    Row("500", whole(500, error(code="c")), 500, "c", "health"),
    Row("500, a page", http(500, b"<script>", kind="text/html"), 500, "upstream_500", "health"),
    Row("502", whole(502, error(code="c")), 502, "c", "health"),
    Row("503", whole(503, error(code="c")), 503, "c", "health"),
    Row("504", whole(504, error(code="c")), 504, "c", "health"),
    Row("504 of its time", whole(504, LATE), 504, "deadline_exceeded", "request", False),
    Row("504 of Google", whole(504, error(code=504, status="DEADLINE_EXCEEDED")), 504, 504, "health"),
    Row(
        "504 of a gateway",
        whole(504, error(code="upstream_total_timeout")),
        504,
        "upstream_total_timeout",
        "request",
        False,
    ),
    Row("529", whole(529, error(code="c")), 529, "c", "health"),
]
BAD = "upstream_bad_answer"
BROKE = "upstream_broke_off"
WHOLES = [
    Row("an answer", http(200, GOOD_BODY), 200, None, "nobody", False),
    Row("one named HTML", http(200, GOOD_BODY, kind="text/html"), 200, None, "nobody", False),
    Row(
        "1xx before it",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nlink: a\r\n\r\n" + http(200, GOOD_BODY),
        200,
        None,
        "nobody",
        False,
    ),
    Row("101", b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 502, BROKE, "health"),
    Row("204", b"HTTP/1.1 204 X\r\n\r\n", 502, BAD, "health"),
    Row("206", http(206, GOOD_BODY), 502, BAD, "health"),
    Row("302", http(302, b"", "location: http://127.0.0.1:9/"), 502, BAD, "health"),
    Row("307", http(307, b"", "location: http://127.0.0.1:9/"), 502, BAD, "health"),
    Row("999", http(999, GOOD_BODY), 502, BAD, "health"),
    Row("nothing", http(200, b""), 502, BAD, "health"),
    Row("a page", http(200, b"<html>proxy</html>", kind="text/html"), 502, BAD, "health"),
    Row("half of an answer", http(200, GOOD_BODY[:-9]), 502, BAD, "health"),
    Row("a cut answer", http(200, GOOD_BODY, length=999), 502, "upstream_died", "health", hangs_up=True),
    Row("no choices", http(200, b"{}"), 502, BAD, "health"),
    Row("an empty list of choices", http(200, b'{"choices":[ ]}'), 502, BAD, "health"),
    Row("an error as an answer", http(200, json.dumps(OOM).encode()), 500, 500, "health"),
    Row(
        "the key as an answer",
        http(200, json.dumps(error(SECRET, code="invalid_api_key")).encode()),
        502,
        "upstream_401",
        "key",
    ),
    Row("a refusal as an answer", http(200, json.dumps(error(code=429)).encode()), 429, 429, "health"),
    Row(
        "one's own fault as an answer",
        http(200, json.dumps(error(code="c", type="invalid_request_error")).encode()),
        400,
        "c",
        "request",
        False,
    ),
    Row("a stream that nobody asked for", stream(*OK_EVENTS), 502, BAD, "health"),
    Row("gzip", http(200, gzip.compress(GOOD_BODY), GZIP), 200, None, "nobody", False),
    Row("gzip, cut", http(200, gzip.compress(GOOD_BODY)[:-9], GZIP), 502, "upstream_died", "health"),
    Row("gzip that is none", http(200, GOOD_BODY, GZIP), 502, BROKE, "health"),
    Row("gzip without a name", http(200, gzip.compress(GOOD_BODY)), 502, BAD, "health"),
    Row("gzip that grows", http(200, BOMB, GZIP), 502, BAD, "health"),
    Row("brotli", http(200, GOOD_BODY, "content-encoding: br"), 502, BROKE, "health"),
    Row("two lengths", http(200, GOOD_BODY, "content-length: 3"), 502, BROKE, "health"),
    Row("a length below nothing", http(200, GOOD_BODY, length=-5), 502, BROKE, "health"),
    Row("a length beyond all", http(200, GOOD_BODY, length=10**20), 502, BROKE, "health"),
    Row("a length and chunks", http(200, b"", "transfer-encoding: chunked", length=5), 502, BROKE, "health"),
    Row("no HTTP", b"SSH-2.0-x\r\n\r\n", 502, BROKE, "health", hangs_up=True),
    Row("silence", b"", 502, BROKE, "health", hangs_up=True),
]
GIVEN = 200
STREAMS = [
    Row("a stream", stream(*OK_EVENTS), GIVEN, None, "nobody", False),
    Row("without [DONE]", stream(CHUNK, LAST), GIVEN, None, "nobody", False),
    Row("an odd usage at its end", stream(CHUNK, LAST | {"usage": False}), GIVEN, None, "nobody", False),
    Row("without [DONE], cut", stream(CHUNK, LAST, end=b""), GIVEN, "upstream_died", "health", False, hangs_up=True),
    Row("without an end", stream(CHUNK), GIVEN, "upstream_died", "health", False),
    Row(
        "its last line open",
        stream(CHUNK, LAST, end=chunk(b"data: [DONE]") + b"0\r\n\r\n"),
        GIVEN,
        None,
        "nobody",
        False,
    ),
    Row(
        "its last event cut",
        stream(CHUNK, LAST, end=chunk(b'data: {"usa') + b"0\r\n\r\n"),
        GIVEN,
        None,
        "nobody",
        False,
    ),
    Row(
        "its type unnamed",
        stream(*OK_EVENTS, head=STREAM_HEAD.replace(b"text/event-stream", b"text/plain")),
        GIVEN,
        None,
        "nobody",
        False,
    ),
    Row(
        "named a page",
        stream(*OK_EVENTS, head=STREAM_HEAD.replace(b"text/event-stream", b"text/html")),
        GIVEN,
        None,
        "nobody",
        False,
    ),
    Row("a role and no answer", stream(ROLE, b"[DONE]"), 502, BAD, "health"),
    Row("an error behind a role", stream(ROLE, OOM), 500, "upstream_error_event", "health"),
    Row("an error behind each one's role", stream(FILTERS, ROLE, OTHERS, OOM), 500, "upstream_error_event", "health"),
    Row("an error behind a role told twice", stream(ROLE, ROLE, OOM), GIVEN, 500, "health", False),
    Row("an error behind an empty piece", stream(ROLE, EMPTY, OOM), 500, "upstream_error_event", "health"),
    Row("an error behind what says nothing", stream(EMPTY, OOM), 500, "upstream_error_event", "health"),
    Row("an error behind an empty piece told twice", stream(EMPTY, EMPTY, OOM), GIVEN, 500, "health", False),
    Row("no event behind a role", stream(ROLE, {"message": "boom"}), 502, BAD, "health"),
    Row("a named error inside", NAMED, GIVEN, None, "health", False),
    Row("a role, cut", stream(ROLE, end=b""), 502, "upstream_died", "health", hangs_up=True),
    Row("a role and no end", stream(ROLE), 502, "upstream_died", "health"),
    Row("one's own fault behind a role", stream(ROLE, error("long", code=400), b"[DONE]"), 400, 400, "request", False),
    Row("no choice in it", stream({"choices": []}, b"[DONE]"), 502, BAD, "health"),
    Row("its time over, inside", stream(CHUNK, LATE), GIVEN, "deadline_exceeded", "request", False),
    Row("its time over first", stream(LATE), 504, "deadline_exceeded", "request", False),
    Row("no reason why it ends", stream(ROLE, CHUNK, b"[DONE]"), GIVEN, None, "nobody", False),
    Row("no token before its end", stream(ROLE, LAST, b"[DONE]"), GIVEN, None, "nobody", False),
    Row("no event", stream(), 502, "upstream_died", "health"),
    Row("[DONE] alone", stream(b"[DONE]"), 502, BAD, "health"),
    Row("a page as an event", stream(b"<html>"), 502, BAD, "health"),
    Row("no event of a chat", stream({"status": "ok"}, b"[DONE]"), 502, BAD, "health"),
    Row("a page", http(200, b"<html>", kind="text/html"), 502, BAD, "health"),
    Row("nothing", http(200, b""), 502, BAD, "health"),
    Row("a whole answer", http(200, GOOD_BODY), GIVEN, None, "nobody", False),
    Row("an error first", stream(OOM), 500, "upstream_error_event", "health"),
    Row(
        "an error first, named",
        STREAM_HEAD + chunk(b"event: error\n" + event(error("x", type="overloaded_error"))),
        529,
        "upstream_error_event",
        "health",
    ),
    Row(
        "an error first, in pieces",
        STREAM_HEAD + chunk(event(OOM)[:9]) + chunk(event(OOM)[9:]),
        500,
        "upstream_error_event",
        "health",
    ),
    Row("a refusal first", stream(error("x", type="rate_limit_error")), 429, "upstream_error_event", "health"),
    Row("the key first, no status", stream(error(SECRET, code="insufficient_quota")), 502, "upstream_401", "key"),
    Row("the key behind a role", stream(ROLE, error(SECRET, code="invalid_api_key")), 502, "upstream_401", "key"),
    Row(
        "the key first",
        stream(error(KEY, code="invalid_api_key", type="authentication_error")),
        502,
        "upstream_401",
        "key",
    ),
    Row("another network first", stream(error(SECRET, code=511)), 502, "upstream_511", "health"),
    Row("one's own fault first", stream(error("long", code=400)), 400, 400, "request", False),
    Row("an error inside", stream(CHUNK, OOM), GIVEN, 500, "health", False),
    Row(
        "gzip",
        ZIPPED_HEAD + chunk(gzip.compress(b"".join(event(one) for one in OK_EVENTS))) + b"0\r\n\r\n",
        GIVEN,
        None,
        "nobody",
        False,
    ),
    Row("a bad chunk first", STREAM_HEAD + b"ZZ\r\n", 502, BROKE, "health"),
    Row("a bad chunk later", stream(CHUNK, end=b"ZZ\r\n"), GIVEN, "upstream_died", "health", False),
    Row("429", whole(429, error(code="c"), "retry-after: 3"), 429, "c", "busy"),
    Row("401", whole(401, error()), 502, "upstream_401", "key"),
    Row("500", whole(500, error(code="c")), 500, "c", "health"),
]
ROWS = [*STATUSES, *WHOLES, *(row._replace(is_stream=True) for row in STREAMS)]
IDS = [f"{'stream' if row.is_stream else 'whole'}: {row.name}" for row in ROWS]
CONFIG = "max_answer_bytes = 100000\n[retries]\nspare = 0\nratio = 0.0\npause_s = 0.0\n"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("UPSTREAM_KEY", KEY)


def check_breaker(gateway, row: Row) -> None:
    """The breaker has heard of it what it says, and nothing else."""
    breaker = gateway.router.upstreams[0].breaker
    seen = (not breaker.is_well, breaker.is_busy(time.monotonic_ns()), breaker.num_successes)
    against = row.whose in ("health", "key", "model")
    assert seen == (against, row.whose == "busy", int(row.whose == "nobody"))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
async def test_an_upstream_alone(row):
    bad = Saying(row.said, row.hangs_up)
    async with gateway_before({"bad": bad}, CONFIG, key_env="UPSTREAM_KEY") as (app, gateway):
        told = await asked(app, stream=row.is_stream)
        assert (told.status, told.code) == (row.status, row.code), told
        assert not [one for one in (KEY, SECRET) if one.encode() in told.body + b"".join(told.headers.values())]
        assert not NOT_FOR_CLIENTS & told.headers.keys()
        assert told.headers[b"content-type"].split(b";")[0] in (b"application/json", b"text/event-stream")
        assert counted(gateway, "verdicts_total", upstream="bad", whose=row.whose) == len(bad.asked) >= 1
        assert counted(gateway, "verdicts_total") == len(bad.asked)
        check_breaker(gateway, row)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
async def test_beside_one_that_answers(row):
    """Nothing that the client may still have elsewhere is a failure, and no budget of retries is needed for it."""
    bad = Saying(row.said, row.hangs_up)
    good = Saying(stream(*OK_EVENTS) if row.is_stream else http(200, GOOD_BODY))
    async with gateway_before({"bad": bad, "good": good}, CONFIG, key_env="UPSTREAM_KEY") as (app, gateway):
        told = await asked(app, stream=row.is_stream)
        if row.is_elsewhere:
            assert (told.status, told.code, len(good.asked)) == (200, None, 1), told
            assert b"tick" in told.body
        else:
            assert (told.status, told.code, len(good.asked)) == (row.status, row.code, 0), told
        assert len(bad.asked) == 1
        assert counted(gateway, "verdicts_total", upstream="bad", whose=row.whose) == 1
        check_breaker(gateway, row)


async def test_an_open_breaker_says_why(caplog):
    async with gateway_before({"bad": Saying(whole(401, error()))}, "[breaker]\nfailures = 1\n") as (app, gateway):
        assert 'verdicts_total{upstream="bad",whose="key"} 0.0' in gateway.metrics.render().decode()
        await asked(app)
        told = gateway.metrics.render().decode()
        assert counted(gateway, "kept_bytes", kind="records") == gateway.ledger.counts().kept_bytes > 1000
        assert 'verdicts_total{upstream="bad",whose="key"} 1.0' in told
        assert 'verdicts_total{upstream="bad",whose="model"} 0.0' in told
        stats = gateway.stats()["upstreams"][0]
        assert (stats["is_open"], stats["failing"]) == (True, "upstream_401")
        assert [one.getMessage() for one in caplog.records if "left alone" in one.getMessage()] == [
            "upstream 'bad' is left alone: it fails again and again: upstream_401"
        ]


@pytest.mark.parametrize("cut", [1, 9, len(event(OOM)) - 1])
async def test_an_error_behind_comments_that_the_client_has(cut):
    """Comments are no part of an answer: another upstream may still give it, under the head that is there."""
    data = event(OOM)
    bad = Saying([STREAM_HEAD + chunk(b": wait\n\n"), chunk(data[:cut]), chunk(data[cut:])])
    good = Saying(stream(*OK_EVENTS))
    async with gateway_before({"bad": bad, "good": good}, CONFIG) as (app, _):
        told = await asked(app, stream=True)
        assert (told.status, told.code, told.body.count(b"tick")) == (200, None, 1)
        assert told.body.startswith(b": wait\n\ndata: {")
        assert (len(bad.asked), len(good.asked)) == (1, 1)


async def test_comments_go_on_while_a_role_is_held_back():
    """A long prompt is read: its client sees that the connection lives, and has the role with the first piece."""
    said = [STREAM_HEAD + chunk(event(ROLE)), *[chunk(b": wait\n\n")] * 3, stream(*OK_EVENTS, head=b"")]
    async with gateway_before({"one": Saying(said)}) as (app, gateway):
        told = await asked(app, stream=True)
        waits, _, rest = told.body.partition(b"data: ")
        assert waits == b": wait\n\n" * 3
        assert [told.body.count(one) for one in (b"role", b"tick", b"[DONE]")] == [1, 1, 1]
        assert rest.index(b"role") < rest.index(b"tick")
        ((attempt,),) = (account.attempts for account in gateway.ledger.accounts())
        assert attempt.end_ns - attempt.first_byte_ns > 25e6  # it is when the upstream began to tell


async def test_behind_comments_one_alone_tells_it_as_an_event():
    async with gateway_before({"bad": Saying([STREAM_HEAD + chunk(b": wait\n\n"), chunk(event(OOM))])}, CONFIG) as (
        app,
        _,
    ):
        told = await asked(app, stream=True)
        assert (told.status, told.code) == (200, "upstream_error_event")


WAITS = STREAM_HEAD + chunk(b": wait\n\n")


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_comment_is_no_first_byte_of_an_answer(is_first):
    """Who sends one at once and then nothing would seem to have less to do than those who answer."""
    begin = STREAM_HEAD + chunk(event(CHUNK)) if is_first else WAITS
    one = Saying([begin, *[chunk(b": wait\n\n")] * 30, stream(*OK_EVENTS, head=b"")])
    async with gateway_before({"one": one}) as (app, gateway):
        assert (await asked(app, stream=True)).status == 200
        ((attempt,),) = (account.attempts for account in gateway.ledger.accounts())
        waited_s = (attempt.first_byte_ns - attempt.begin_ns) / 1e9
        assert waited_s < (attempt.end_ns - attempt.begin_ns) / 1e9 - 0.25 * is_first
        assert is_first or waited_s > 0.25
