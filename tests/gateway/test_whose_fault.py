"""Whose a refusal is: one request's own doing pauses, opens and costs nothing for anybody else."""

import asyncio
import gzip
import json
import time

import pytest

from patience import until_async
from splittime.gateway.breaker import Breaker
from splittime.gateway.config import BreakerConfig, UpstreamConfig
from splittime.gateway.decoded_answer import KeyMask, PassedAnswer, pause_of
from splittime.gateway.forwarded import COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from splittime.gateway.responses import HeldResponse
from splittime.gateway.upstream_checks import lives
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections
from splittime.gateway.upstreams import Upstream
from splittime.gateway.verdict import AttemptAsked, Whose, of_answer, of_event, told_error
from splittime.web.tenants import ANYBODY

from .hostile import CHUNK, STREAM_HEAD, WHOLE, chunk, event, whole
from .in_process import CHAT, PATIENT, Saying, asked, counted, gateway_before


def coded(status: int, body: dict) -> bytes:
    data = gzip.compress(json.dumps(body).encode())
    return b"HTTP/1.1 %d X\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)


REFUSALS = {
    "deadline": Whose.REQUEST,
    "slo_ttft": Whose.REQUEST,
    "grammars_queue_full": Whose.REQUEST,
    "queued_prompt_tokens": Whose.REQUEST,
    "queued_texts": Whose.REQUEST,
    "queued_requests": Whose.BUSY,
    "queue_full": Whose.BUSY,
    "max_open_requests": Whose.BUSY,
    "tokens_per_minute": Whose.BUSY,
    "upstreams_busy": Whose.BUSY,
}


def verdict(status: int, body: object, *, is_timed: bool = False, path: str = CHAT, headers=()):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return of_answer(AttemptAsked("a", path, "m", is_timed), PassedAnswer(status, list(headers), raw))


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("reason", REFUSALS)
def test_our_own_servers_say_why(reason, is_timed):
    told = {"error": {"message": "no", "code": reason, "reason": reason, "type": "overloaded_error"}}
    assert verdict(429, told, is_timed=is_timed).whose is REFUSALS[reason]


@pytest.mark.parametrize("body", [b"", {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, {"x": 1}])
def test_of_others_a_deadline_explains_it(body):
    assert verdict(429, body).whose is Whose.BUSY
    assert verdict(429, body, is_timed=True).whose is Whose.REQUEST


@pytest.mark.parametrize(
    ("is_timed", "code", "whose"),
    [
        (True, "deadline_exceeded", Whose.REQUEST),
        (False, "deadline_exceeded", Whose.REQUEST),  # it is the gateway's own total_s
        (True, "timeout", Whose.HEALTH),
    ],
)
def test_a_deadline_that_has_passed_upstream(is_timed, code, whose):
    assert verdict(504, {"error": {"message": "late", "code": code}}, is_timed=is_timed).whose is whose


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>no</html>",
        b"404 page not found",
        {"detail": "Not Found"},
        {"message": "no Route matched with those values"},
        {"kind": "Status", "code": 404, "message": "the server could not find the requested resource"},
        {"error": "not found"},
        {"error": {"message": "no such path: /v1/embeddings", "code": "not_found", "param": None}},
    ],
)
def test_a_path_that_is_not_there(body):
    assert verdict(404, body, path=EMBEDDINGS).whose is Whose.PATH
    assert verdict(404, body).whose is Whose.HEALTH  # every upstream has chats


@pytest.mark.parametrize("status", [405, 501])
def test_a_method_that_is_not_there(status):
    assert verdict(status, b"", path=EMBEDDINGS).whose is Whose.PATH
    assert verdict(status, b"").whose is Whose.HEALTH


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        ({"message": "model 'x' not found", "type": "not_found_error"}, Whose.MODEL),
        ({"message": "The model `x` does not exist.", "code": 404}, Whose.MODEL),
        ({"message": "x", "code": "model_not_found"}, Whose.MODEL),
        ({"message": "x", "param": "model"}, Whose.MODEL),
        ({"message": "File not found: the model x"}, Whose.REQUEST),
        ({"message": "no such response", "code": "not_found", "param": "previous_response_id"}, Whose.REQUEST),
    ],
)
@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
def test_what_was_asked_for_is_not_there(error, whose, path):
    assert verdict(404, {"error": error}, path=path).whose is whose
    bare = verdict(404, {"object": "error", **error}, path=path)
    assert bare.whose is whose


@pytest.mark.parametrize("told", [{"detail": "no such response"}, {"error": "not found"}, {"message": "not found"}])
def test_a_response_that_is_no_longer_kept_takes_its_path_from_nobody(told):
    assert verdict(404, told, path=RESPONSES).whose is Whose.REQUEST
    assert verdict(404, {"detail": "Not Found"}, path=RESPONSES).whose is Whose.PATH


def test_a_model_that_is_told_of_in_words_alone():
    assert verdict(404, {"error": "model 'x' not found, try pulling it first"}).whose is Whose.MODEL


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_error_without_a_type_is_no_beginning_of_a_stream(path, has_head):
    """Who answers at once with anything would get most requests; the client has nothing of it yet."""
    begins = {
        MESSAGES: [
            {"type": "message_start", "message": {"id": "a"}},
            {"type": "ping"},
        ],
        RESPONSES: [],
        CHAT: [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}],
    }
    ends = {
        MESSAGES: [{"type": "message_start"}, {"type": "message_stop"}],
        RESPONSES: [{"type": "response.created"}, {"type": "response.completed"}, b"[DONE]"],
        CHAT: [CHUNK, b"[DONE]"],
    }
    oom, heads = {"error": {"message": "oom", "code": 500}}, begins[path] * has_head
    bad = Saying([STREAM_HEAD, *(chunk(event(one)) for one in (*heads, oom)), b"0\r\n\r\n"])
    good = Saying(STREAM_HEAD + b"".join(chunk(event(one)) for one in ends[path]) + b"0\r\n\r\n")
    async with gateway_before({"bad": bad, "good": good}) as (app, gateway):
        told = await asked(app, path=path, stream=True)
        assert (told.status, told.code, len(good.asked)) == (200, None, 1)
        assert b"oom" not in told.body
        assert b'"a"' not in told.body
        assert not gateway.router.upstreams[0].breaker.is_well


EMPTY = {MESSAGES: {"content": []}, RESPONSES: {"output": []}, EMBEDDINGS: {"data": []}, COUNT_TOKENS: {}}


@pytest.mark.parametrize("path", EMPTY)
def test_a_200_of_another_path_is_no_answer(path):
    """Each kind of answer has a list of its own, which may be empty but for choices."""
    assert verdict(200, EMPTY[path], path=path).whose is Whose.NOBODY
    for told in ({}, {"hello": 1}, {"choices": [{}]}, {"content": "text"}, {"output": None}, []):
        whose = Whose.HEALTH if EMPTY[path] else Whose.NOBODY
        assert verdict(200, told, path=path).whose is whose, told


def test_words_of_a_request_say_nothing_of_the_key_or_the_model():
    """A message may quote what a client wrote."""
    quoted = {"error": {"message": "bad value: 'invalid_api_key: The model `m` does not exist. insufficient_quota'"}}
    for status in (400, 404, 409, 413, 422):
        found = verdict(status, quoted)
        assert (found.whose, found.is_given) == (Whose.REQUEST, True)


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({b"retry-after": b"7"}, 7.0),
        ({b"retry-after": b"1.5"}, 1.5),
        ({b"retry-after": b"0"}, 0.0),
        ({b"retry-after": b"-1"}, None),
        ({b"retry-after": b"soon"}, None),
        ({b"retry-after": b"9" * 400}, 10.0**7),
        ({b"retry-after": b"Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({b"retry-after-ms": b"250"}, 0.25),
        ({b"retry-after-ms": b"x"}, None),
        ({}, None),
    ],
)
def test_how_long_an_upstream_asks_to_be_left_alone(headers, pause_s):
    assert pause_of(headers) == pause_s


# ---- through a gateway

LATE = whole(429, {"error": {"message": "late", "code": "deadline", "reason": "deadline"}}, "retry-after: 30")
BUSY = whole(429, {"error": {"message": "slow down"}}, "retry-after: 30")


@pytest.mark.parametrize("header", ["x-llm-d-slo-ttft-ms", "x-request-deadline-ms"])
@pytest.mark.parametrize("said", [LATE, BUSY])
async def test_the_clients_own_bound_pauses_nobody(header, said):
    """However often one client is refused for its own bound, all upstreams are there for the next."""
    one, two = Saying(said), Saying(said)
    async with gateway_before({"one": one, "two": two}) as (app, gateway):
        for _ in range(12):
            told = await asked(app, {header: "5000"})
            assert told.status == 429
        assert len(one.asked) + len(two.asked) == 24  # each is asked once: another may have a shorter queue
        assert gateway.retry_budgets.used(time.monotonic_ns())[0] == 0
        at_ns = time.monotonic_ns()
        assert all(up.breaker.allows(at_ns) and up.breaker.is_well for up in gateway.router.upstreams)
        one.said = two.said = whole(200, WHOLE)
        assert (await asked(app)).status == 200


TENANTS = "".join(
    f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}"\noperator = true\n' for name in ("a", "b", "c")
)


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


@pytest.fixture
def tenants(monkeypatch) -> str:
    for name in ("a", "b", "c"):
        monkeypatch.setenv(name.upper(), f"key-of-{name}")
    return TENANTS


async def test_a_429_without_a_reason_pauses_for_its_tenant_until_another_meets_one(tenants):
    """It may be about what one tenant asked; two tenants agree that it is not."""
    slow = whole(429, {"error": {"message": "x", "code": "slow"}}, "retry-after: 30")
    one = Saying(slow)
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, gateway):
        assert (await asked(app, of("a"))).code == "slow"
        one.said = whole(200, WHOLE)
        for _ in range(3):
            told = await asked(app, of("a"))
            assert (told.status, told.code, told.headers[b"retry-after"]) == (429, "upstreams_busy", b"30")
        assert len(one.asked) == 1  # it is left alone by who was refused
        for _ in range(3):
            assert (await asked(app, of("b"))).status == 200
        assert not gateway.router.upstreams[0].breaker.is_busy(time.monotonic_ns())
        one.said = slow
        assert (await asked(app, of("b"))).code == "slow"
        one.said = whole(200, WHOLE)
        assert [(await asked(app, of(name))).code for name in "abc"] == ["upstreams_busy"] * 3
        assert gateway.router.upstreams[0].breaker.is_busy(time.monotonic_ns())
        assert len(one.asked) == 5


async def test_one_that_says_that_its_key_is_used_up_pauses_for_all_at_once(tenants):
    one = Saying(whole(429, {"error": {"message": "x", "code": "tokens_per_day"}}, "retry-after: 30"))
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, _):
        assert (await asked(app, of("a"))).code == "tokens_per_day"
        assert [(await asked(app, of(name))).code for name in "abc"] == ["upstreams_busy"] * 3
        assert len(one.asked) == 1


async def test_those_who_have_their_part_of_a_servers_queue_pause_nobody_else(tenants):
    """A server that is told whose a request is refuses who has more than that, and takes the others' all the same."""
    one = Saying(whole(429, {"error": {"message": "x", "code": "queued_requests"}}, "retry-after: 30"))
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, gateway):
        assert [(await asked(app, of(name))).code for name in "ab"] == ["queued_requests"] * 2
        one.said = whole(200, WHOLE)
        assert [(await asked(app, of(name))).status for name in "abc"] == [429, 429, 200]
        assert not gateway.router.upstreams[0].breaker.is_busy(time.monotonic_ns())


@pytest.mark.parametrize("reason", ["max_open_requests", "requests_per_minute", "tokens_per_minute"])
async def test_a_limit_that_a_large_body_alone_meets_pauses_for_its_tenant(reason, tenants):
    """A server refuses by what is left of the key's part: a smaller request of another still has room there."""
    one = Saying(whole(429, {"error": {"message": "x", "code": reason}}, "retry-after: 30"))
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, _):
        assert (await asked(app, of("a"))).code == reason
        one.said = whole(200, WHOLE)
        assert [(await asked(app, of(name))).status for name in "abc"] == [429, 200, 200]


async def test_what_one_tenant_has_an_upstream_fail_at_shuts_no_other_out(tenants):
    """The others ask seldom: none of them had an answer within `open_s`."""
    poison = whole(500, {"error": {"message": "x", "code": "c"}})
    answer = whole(200, WHOLE)
    one = Saying(lambda body: [poison if b"poison" in body else answer], models=poison)  # no check closes it
    async with gateway_before({"one": one}, f"{PATIENT}[breaker]\nopen_s = 0.01\n{tenants}") as (app, gateway):
        assert [(await asked(app, of(name))).status for name in "bc"] == [200, 200]
        await asyncio.sleep(0.02)
        assert [(await asked(app, of("a"), user="poison")).status for _ in range(5)] == [500] * 5
        told = await asked(app, of("a"))
        assert (told.status, told.code, len(one.asked)) == (503, "no_upstream", 7)  # at once: it does not wait
        assert counted(gateway, "breaker_open") == 1
        assert [(await asked(app, of(name))).status for name in "bc"] == [200, 200]
        assert (await asked(app, of("a"))).status == 200  # it lives, as the others saw


async def test_a_tenant_that_one_asked_for_a_pause_goes_to_another(tenants):
    one, two = Saying(BUSY), Saying(whole(200, WHOLE))
    async with gateway_before({"one": one, "two": two}, PATIENT + tenants) as (app, _):
        for _ in range(4):
            assert (await asked(app, of("a"))).status == 200
        assert (len(one.asked), len(two.asked)) == (1, 4)
        assert (await asked(app, of("b"))).status == 200
        assert len(one.asked) == 2


def test_pauses_are_over_when_they_are():
    second_ns, breaker = 10**9, Breaker(BreakerConfig())
    breaker.note_busy(0, 10.0, "a")
    breaker.note_busy(second_ns, 5.0, "a")  # a shorter one does not shorten it
    assert breaker.allows(second_ns)
    assert breaker.pause_ns("a", 9 * second_ns) == second_ns
    assert (breaker.pause_ns("a", 10 * second_ns), breaker.pause_ns("b", second_ns)) == (0, 0)
    breaker.note_busy(10 * second_ns, 10.0, "b")  # that of the other is over
    assert breaker.allows(11 * second_ns)
    breaker.note_busy(11 * second_ns, 3.0, "a")
    assert (breaker.allows(13 * second_ns), breaker.allows(14 * second_ns)) == (False, True)
    assert breaker.pause_ns("b", 14 * second_ns) == 6 * second_ns
    breaker.note_busy(14 * second_ns, 1.0)
    assert not breaker.allows(14 * second_ns)


async def test_a_plain_429_pauses_and_a_later_one_does_not_shorten_it():
    one = Saying(BUSY)
    async with gateway_before({"one": one}, "[retries]\nmax_attempts = 1\n") as (app, gateway):
        assert (await asked(app)).status == 429
        breaker = gateway.router.upstreams[0].breaker
        assert 29 < breaker.wait_ns(time.monotonic_ns()) / 1e9 <= 30
        breaker.note_busy(time.monotonic_ns(), 1.0)
        assert 29 < breaker.wait_ns(time.monotonic_ns()) / 1e9 <= 30
        told = await asked(app)
        assert (told.status, told.code, len(one.asked)) == (429, "upstreams_busy", 1)


def test_a_model_that_one_of_several_is_not_there_keeps_nobody_from_the_others():
    """An upstream of two models lacks one: only that is asked elsewhere."""
    lacking = verdict(404, {"error": {"message": "x", "code": "model_not_found"}})
    two = Upstream(UpstreamConfig(name="a", url="http://a", models=("m", "n")), BreakerConfig(failures=1))
    two.hear(lacking, CHAT, "m", 5)
    assert (two.breaker.is_open, two.lacks(CHAT, "m", 6), two.lacks(CHAT, "n", 6)) == (False, True, False)
    one = Upstream(UpstreamConfig(name="a", url="http://a", models=("m",)), BreakerConfig(failures=1))
    one.hear(lacking, CHAT, "m", 5)
    assert one.breaker.is_open


def test_a_key_is_taken_out_of_what_an_upstream_says():
    mask = KeyMask("sk-12345678")
    assert mask.masked(b'{"message": "key sk-12345678, not sk-1234"}') == b'{"message": "key ***, not sk-1234"}'
    told = mask.headers({b"x-splittime-notice": b"sk-12345678 is old", b"retry-after": b"1.2", b"set-cookie": b"a=b"})
    assert told == [(b"retry-after", b"2"), (b"x-splittime-notice", b"*** is old")]
    assert mask.headers({b"x-splittime-notice": b"a\x01b", b"retry-after": b"x\r\na: b"}) == []
    assert KeyMask(None).masked(b"as it is") == KeyMask("as it").masked(b"as it is") == b"as it is"  # a word is no key


def test_a_text_that_is_not_allowed_is_the_requests_own_also_under_a_200():
    told = {"error": {"message": "x", "code": "content_filter"}}
    found = verdict(200, told)
    assert (found.whose, found.answer.status, found.error.info.status) == (Whose.REQUEST, 400, 400)
    event = of_event(AttemptAsked("a", CHAT, "m"), told_error(told), b"{}")
    assert (event.whose, event.answer.status, event.error.info.status) == (Whose.REQUEST, 400, 400)
    assert verdict(200, {"error": {"message": "x", "code": "odd"}}).error.info.status == 502


async def test_what_a_client_sends_beside_its_request_goes_to_no_upstream():
    """Keys, cookies and addresses of a client are the gateway's business; a list says what is passed on."""
    sent = {"authorization": "Bearer leak", "x-api-key": "leak", "api-key": "leak", "x-goog-api-key": "leak"}
    sent |= {"cookie": "leak", "proxy-authorization": "leak", "x-forwarded-for": "leak", "openai-organization": "leak"}
    one = Saying(whole(200, WHOLE))
    async with gateway_before({"one": one}) as (app, _):
        assert (await asked(app, sent)).status == 200
        one.said = whole(200, {"content": []})
        assert (await asked(app, sent | {"anthropic-version": "2023-06-01"}, MESSAGES)).status == 200
        for head, _ in one.asked:
            assert b"leak" not in head
            names = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:] if line}
            known = {b"host", b"content-type", b"content-length", b"accept-encoding", b"user-agent", b"x-request-id"}
            assert names - {b"anthropic-version"} == known | {b"x-request-deadline-ms"}
            assert b"accept-encoding: identity" in head


RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "error": None}
FAILED = RESPONSE | {"status": "failed", "error": {"code": "server_error", "message": "it failed"}}


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (whole(200, RESPONSE), 200, None),
        (coded(200, RESPONSE), 200, None),
        (whole(200, FAILED), 200, "server_error"),
        (whole(200, {"id": "resp_1", "object": "response", "deleted": True}), 200, None),
        (whole(200, {"error": {"message": "x", "code": 500}}), 500, 500),
        (whole(200, {"id": "resp_1"}), 502, "upstream_bad_answer"),
        (b"SSH-2.0-x\r\n\r\n", 502, "upstream_broke_off"),
        (whole(404, {"error": {"message": "no such response", "code": "c"}}), 404, "c"),
        (whole(401, {"error": {"message": "wrong key sk-12345678", "code": "c"}}), 502, "upstream_401"),
        (whole(500, {"error": {"message": "sk-12345678 broke", "code": "c"}}), 500, "c"),
        (b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n", 502, "upstream_bad_answer"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 6\r\n\r\n<html>", 502, "upstream_bad_answer"),
    ],
)
async def test_a_response_that_is_read_again_is_judged_too(said, status, code, monkeypatch):
    monkeypatch.setenv("UPSTREAM_KEY", "sk-12345678")
    async with gateway_before({"one": Saying(b"", models=said)}, key_env="UPSTREAM_KEY") as (app, gateway):
        gateway.held.note(ANYBODY.name, "resp_1", HeldResponse("one", "m"))
        told = await asked(app, path="/v1/responses/resp_1", method="GET")
        assert (told.status, told.code) == (status, code)
        assert b"sk-12345678" not in told.body
        assert not {b"location", b"content-encoding"} & told.headers.keys()


@pytest.mark.parametrize("status", [403, 404, 500, 200])
async def test_one_tenants_requests_open_no_breaker_for_others(status, tenants):
    """A text that an upstream cannot stand, sent as often as one likes, while others are served."""
    bad = whole(status, {"error": {"message": "The model broke", "code": "x"}})
    one = Saying(bad)
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, gateway):
        for _ in range(4):
            one.said = whole(200, WHOLE)
            assert (await asked(app, of("b"))).status == 200
            one.said = bad
            for _ in range(8):
                assert (await asked(app, of("a"))).status >= 403
        assert not gateway.router.upstreams[0].breaker.is_open
        for _ in range(8):  # others meet it too
            await asked(app, of("c"))
        assert gateway.router.upstreams[0].breaker.is_open


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", STREAM_HEAD, STREAM_HEAD + chunk(event(CHUNK))])
async def test_what_breaks_off_for_one_tenant_is_there_for_others(said, tenants):
    """Servers cut a stream whose text they fail at; one that is gone takes no connection, which nobody brings about."""
    one = Saying(whole(200, WHOLE))
    async with gateway_before({"one": one}, PATIENT + tenants) as (app, gateway):
        breaker = gateway.router.upstreams[0].breaker
        for _ in range(4):
            one.said, one.hangs_up = whole(200, WHOLE), False
            assert (await asked(app, of("b"))).status == 200
            one.said, one.hangs_up = said, True
            for _ in range(8):
                assert (await asked(app, of("a"), stream=True)).code in ("upstream_broke_off", "upstream_died")
        assert not breaker.is_open
        for _ in range(breaker.config.failures):
            breaker.note_failure(time.monotonic_ns())
        assert breaker.is_open


# ---- quiet services

QUIET = "[breaker]\nfailures = 2\nopen_s = 0.05\n" + PATIENT


@pytest.mark.parametrize("models", [whole(503, {}), whole(200, {"error": {"message": "no"}}), whole(302, {})])
async def test_what_does_not_answer_the_gateway_itself_gets_nobodys_request(models):
    """The probes of an open breaker are the gateway's, so that all requests are answered."""
    bad, good = Saying(whole(500, {"error": {}}), models=models), Saying(whole(200, WHOLE))
    async with gateway_before({"bad": bad, "good": good}, QUIET) as (app, gateway):
        for _ in range(6):
            assert (await asked(app)).status == 200
        checks = bad.num_checks
        while bad.num_checks < checks + 3:
            assert (await asked(app)).status == 200
        assert len(bad.asked) == 2
        assert gateway.router.upstreams[0].breaker.is_open
        assert counted(gateway, "breaker_open", upstream="bad") == 1


@pytest.mark.parametrize(
    ("failing", "models", "is_tried"),
    [
        (500, whole(200, []), True),
        (500, whole(200, {"data": ["x" * 2**20]}), True),
        (500, b"HTTP/1.1 200 X\r\ncontent-length: 6\r\n\r\n<html>", False),
        (500, whole(401, {}), True),
        (500, whole(403, {"error": {"message": "this key may not list models"}}), True),
        (401, whole(401, {}), False),
        (401, whole(403, {}), False),
        (401, whole(200, {"data": []}), True),
    ],
)
async def test_what_a_check_of_an_open_breaker_tells(failing, models, is_tried):
    async with gateway_before(
        {"bad": Saying(whole(failing, {}), models=models)}, "[breaker]\nfailures = 1\n" + PATIENT
    ) as (app, gateway):
        up = gateway.router.upstreams[0]
        await asked(app)
        assert up.breaker.is_open
        assert await lives(gateway.connections, up) is is_tried


@pytest.mark.parametrize("key", ["sk-ant-api03-x", "sk-12345678", None])
async def test_a_check_has_the_head_that_its_key_needs(key):
    heads = []

    async def serve(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(whole(200, {"data": []}))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    up = Upstream(UpstreamConfig(name="a", url=url, models=("m",)), BreakerConfig(), key)
    connections = UpstreamConnections(RoundTrips())
    assert await lives(connections, up)
    connections.close()
    server.close()
    is_its = key is not None and key.startswith("sk-ant-api")
    assert (b"x-api-key: " in heads[0], b"anthropic-version: " in heads[0]) == (is_its, is_its)
    assert (b"authorization: bearer sk-1" in heads[0]) == (key == "sk-12345678")


@pytest.mark.parametrize("has_tenants", [False, True])
async def test_a_pause_that_ends_lets_who_waits_for_another_go_there(has_tenants, tenants):
    """Nobody comes or leaves meanwhile: the gateway looks by itself."""
    one, two = Saying(whole(429, {}, "retry-after-ms: 100")), Saying([b""] * 2000)
    text = "[retries]\npause_s = 0.0\nspare = 5\n" + (tenants if has_tenants else "")
    async with gateway_before({"one": one, "two": two}, text, max_in_flight=1) as (app, _):
        head = of("a") if has_tenants else {}
        first = asyncio.create_task(asked(app, head))
        await until_async(lambda: two.asked)
        one.said = whole(200, WHOLE)
        assert (await asyncio.wait_for(asked(app, head), 5)).status == 200
        assert (len(one.asked), len(two.asked), first.done()) == (2, 1, False)
        first.cancel()


async def test_who_answers_it_is_tried_by_requests_that_another_may_have():
    bad, good = Saying(whole(500, {"error": {}})), Saying(whole(200, WHOLE))
    async with gateway_before({"bad": bad, "good": good}, QUIET) as (app, gateway):
        while bad.num_checks < 3:
            assert (await asked(app)).status == 200
        assert 2 < len(bad.asked) <= 2 + bad.num_checks + 1  # one request a check
        bad.said = whole(200, WHOLE)
        while gateway.router.upstreams[0].breaker.is_open:
            assert (await asked(app)).status == 200
        assert counted(gateway, "verdicts_total", upstream="bad", whose="nobody") == 1


@pytest.mark.parametrize(("spare", "status"), [(0, 503), (1, 200)])
async def test_leaving_one_that_answers_others_meanwhile_is_counted(spare, status):
    """Upstreams that fail and answer by turns may have too much to do."""

    def said(body: bytes) -> list[bytes]:
        return [b"", b"", b"", whole(503, {"error": {}})] if b"slow" in body else [whole(200, WHOLE)]

    by_turns, good = Saying(said), Saying(whole(200, WHOLE))
    text = f"[retries]\nratio = 0.0\nspare = {spare}\npause_s = 0.0\n"
    async with gateway_before({"by_turns": by_turns, "good": good}, text) as (app, _):
        slow, quick = await asyncio.gather(asked(app, user="slow"), asked(app, user="quick"))
        assert (slow.status, quick.status) == (status, 200)
        assert (len(by_turns.asked), len(good.asked)) == (2, spare)


@pytest.mark.parametrize(
    ("said", "times"),
    [
        (whole(503, {"error": {}}), 3),
        (whole(529, {"error": {}}), 3),
        (whole(500, {"error": {}}), 1),
        (whole(401, {"error": {}}), 1),
        (whole(429, {"error": {}}), 1),
        (whole(200, {}), 1),
    ],
)
async def test_who_is_alone_is_asked_again_where_that_may_pass(said, times):
    one = Saying(said)
    async with gateway_before({"one": one}, "[retries]\nspare = 9\npause_s = 0.0\nmax_attempts = 3\n") as (app, _):
        await asked(app)
        assert len(one.asked) == times


async def test_a_refusal_of_ones_own_is_asked_of_one_other():
    three = [Saying(LATE) for _ in range(3)]
    async with gateway_before(dict(zip("abc", three, strict=True)), "[retries]\nspare = 9\npause_s = 0.0\n") as (
        app,
        _,
    ):
        assert (await asked(app, {"x-llm-d-slo-ttft-ms": "5000"})).status == 429
        assert sorted(len(one.asked) for one in three) == [0, 1, 1]


async def test_a_stream_that_begins_closes_the_breaker_before_it_ends():
    """However long it lasts, the next request need not wait for its end."""
    one = Saying([STREAM_HEAD + chunk(event(CHUNK)), *[b""] * 200])
    async with gateway_before({"one": one}, "[breaker]\nfailures = 1\n") as (app, gateway):
        breaker = gateway.router.upstreams[0].breaker
        breaker.note_failure(time.monotonic_ns())
        breaker.note_checked(time.monotonic_ns(), is_well=True)
        asking = asyncio.create_task(asked(app, stream=True))
        while breaker.is_open:
            assert not asking.done()
            await asyncio.sleep(0.001)
        assert not asking.done()
        asking.cancel()


async def test_what_one_tenant_has_upstreams_fail_at_takes_no_retry_from_another(tenants):
    def said(body):
        if b"poison" in body:
            return [whole(500, {"error": {"message": "x", "code": "c"}})]
        fails.append(b"once" in body)
        return [whole(503, {"error": {}}) if fails == [True] else whole(200, WHOLE)]

    fails = list[bool]()
    text = f"[retries]\nratio = 0.0\nspare = 1\npause_s = 0.0\n[breaker]\nfailures = 100\n{tenants}"
    async with gateway_before({"one": Saying(said), "two": Saying(said)}, text) as (app, gateway):
        for _ in range(3):
            assert (await asked(app, of("a"), user="poison")).status == 500
        assert not any(up.breaker.is_well for up in gateway.router.upstreams)  # so that no retry is free
        assert gateway.retry_budgets.of("a").used(time.monotonic_ns()) == (1, 1.0)
        told = await asked(app, of("b"), user="once")
        assert (told.status, told.code) == (200, None)
        assert gateway.retry_budgets.used(time.monotonic_ns()) == (2, 2.0)


async def test_upstreams_that_fail_and_answer_by_turns_have_a_budget():
    """Leaving an upstream is free where nobody has an answer of it, and for one that answers; else retries count."""
    one, two = Saying(whole(503, {"error": {}})), Saying(whole(503, {"error": {}}))
    async with gateway_before({"one": one, "two": two}, "[retries]\nratio = 0.0\nspare = 0\npause_s = 0.0\n") as (
        app,
        gateway,
    ):
        budget = gateway.retry_budgets
        for _ in range(3):
            await asked(app)  # both fail: the first finds nothing against the second
        assert budget.num_taken == 1
        assert len(one.asked) + len(two.asked) == 4


async def test_an_answer_that_a_client_gave_no_time_is_not_held_against_its_upstream():
    up = Saying([STREAM_HEAD, *[chunk(event(CHUNK))] * 500])
    async with gateway_before({"up": up}, PATIENT) as (app, gateway):
        told = await asked(app, {"X-Request-Deadline-Ms": "60"}, stream=True)
        assert told.code == "deadline_exceeded"
        assert gateway.router.upstreams[0].breaker.is_well
