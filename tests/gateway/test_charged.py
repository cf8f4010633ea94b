"""What was used is charged: to many at once, to who leaves, and by a stream that tells nothing of its tokens."""

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from patience import until
from splittime.gateway.forwarded import EMBEDDINGS

from .conftest import gateway_of, upstream
from .hostile import CHUNK, STREAM_HEAD, WHOLE, chunk, event, whole
from .in_process import CHAT, PATIENT, Saying, asked, counted, gateway_before
from .test_limits import bearer

NAMES = ("minute", "day", "leaver")
KEYS = {name.upper(): f"of-{name}" for name in ("ops", *NAMES)}
LIMITS = {
    "ops": "operator = true",
    "minute": "tokens_per_minute = 100",
    "day": "tokens_per_day = 100",
    "leaver": "tokens_per_day = 1000000",
}


@pytest.fixture(scope="module")
def charging(hostile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("charging")
    text = f'budget_file = "{folder}/budgets.sqlite"\n[breaker]\nfailures = 100\n'
    for name in ("held", "slow", "halfopen", "fine", "dying"):
        text += upstream(name, hostile.url(name))
    for name, limit in LIMITS.items():
        text += f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}"\n{limit}\n'
    with gateway_of(folder, text, **KEYS) as gateway:
        yield gateway


@pytest.mark.parametrize("kind", ["minute", "day"])
def test_what_many_at_once_may_use_is_reserved_before(charging, hostile, kind):
    """50 at once had all of them in: none had used anything yet."""
    hostile.hold.clear()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(charging.ask, "held", bearer(f"of-{kind}"), max_tokens=90) for _ in range(12)]
        until(lambda: sum(one.done() for one in asked) == 11)
        hostile.hold.set()
        codes = sorted(one.result()[0] for one in asked)
    assert codes == [200] + [429] * 11
    refused = next(json.loads(one.result()[2])["error"] for one in asked if one.result()[0] == 429)
    assert refused["reason"] == f"tokens_per_{kind}"
    answers = [charging.ask("fine", bearer(f"of-{kind}"))[0] for _ in range(12)]
    given = 10 * (1 + answers.count(200))
    assert 100 <= given <= 110  # and nobody was refused for what was given back
    assert answers == [200] * answers.count(200) + [429] * answers.count(429)


def used(gateway) -> float:
    asked = urllib.request.Request(f"{gateway.url}/metrics", headers=bearer("of-ops"))
    with urllib.request.urlopen(asked, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "budget_used" in line and 'tenant="leaver"' in line)


def left(gateway, hostile, model: str, **fields) -> tuple[float, int]:
    """Returns what was charged for a request that was left when its upstream had it, and its body's bytes."""
    before, seen = used(gateway), len(hostile.asked[model])
    told = {"model": model, "messages": [{"role": "user", "content": "word " * 2000}], **fields}
    body = json.dumps(told).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer of-leaver\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(hostile.asked[model]) > seen)
    until(lambda: used(gateway) > before)
    return used(gateway) - before, len(body)


def test_who_leaves_before_the_first_byte_is_charged_the_prompt(charging, hostile):
    for model in ("slow", "halfopen"):
        charged, num_bytes = left(charging, hostile, model, stream=True, max_tokens=50)
        assert charged == -(-num_bytes // 4)


def test_who_leaves_a_whole_answer_is_charged_what_was_in_flight_too(charging, hostile):
    charged, num_bytes = left(charging, hostile, "slow", max_tokens=50)
    assert -(-num_bytes // 4) < charged <= -(-num_bytes // 4) + 50


def test_a_clients_own_deadline_is_no_way_to_pay_nothing(charging):
    before = used(charging)
    headers = bearer("of-leaver") | {"x-request-deadline-ms": "150"}
    assert charging.ask("slow", headers, stream=True)[0] in (408, 504)
    until(lambda: used(charging) > before)


ERROR = {"error": {"message": "x", "code": "internal_error", "type": "server_error"}}
PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n"
STREAM_OF = {name: STREAM_HEAD + chunk(event(told)) for name, told in (("error", ERROR), ("page", b"<html>"))}
WITH_CHUNK = STREAM_HEAD + chunk(event(CHUNK)) + chunk(event(ERROR)) + b"0\r\n\r\n"


async def charged_of(
    tmp_path, monkeypatch, said: bytes, more: str = "", hangs_up: bool = True, path: str = CHAT, **fields
) -> tuple[int, float]:
    """Returns the answer's status, and what a tenant was charged for it. more: keys of the gateway's own."""
    monkeypatch.setenv("A", "of-a")
    tenant = '[[tenant]]\nname = "a"\nkey_env = "A"\noperator = true\ntokens_per_day = 1000000\n'
    text = f'{more}budget_file = "{tmp_path}/{len(said)}.sqlite"\n[breaker]\nfailures = 100\n{PATIENT}{tenant}'
    async with gateway_before({"one": Saying(said, hangs_up=hangs_up)}, text, whole_answer_s=0.5) as (app, gateway):
        told = await asked(app, bearer("of-a"), path=path, **fields)
        return told.status, sum(gateway.budgets.used().values())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        PAGE,
        EMPTY,
        PAGE.replace(b"6", b"9"),
        whole(200, ERROR | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
        whole(500, ERROR),
        STREAM_OF["error"],
        STREAM_OF["page"],
    ],
)
async def test_who_is_given_nothing_is_charged_nothing(tmp_path, monkeypatch, said, is_stream):
    """An upstream that says 200 and no answer cost the prompt, though its client had a 502."""
    status, charged = await charged_of(tmp_path, monkeypatch, said, stream=is_stream)
    assert (status // 100, charged) == (5, 0)


async def test_what_was_given_before_it_broke_off_is_charged(tmp_path, monkeypatch):
    status, charged = await charged_of(tmp_path, monkeypatch, WITH_CHUNK, stream=True)
    assert status == 200
    assert charged > 1
    assert await charged_of(tmp_path, monkeypatch, whole(200, WHOLE)) == (200, 10)


def prompt_of(**fields) -> int:
    """Returns the tokens of a body's prompt, as estimated."""
    return -(-len(json.dumps({"model": "m", "messages": [], "max_tokens": 3, **fields})) // 4)


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
@pytest.mark.parametrize("message", [{"content": "word " * 400}, {"content": None, "reasoning": "word " * 400}])
async def test_a_whole_answer_that_tells_no_tokens_is_charged_by_its_text(tmp_path, monkeypatch, usage, message):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    told = whole(200, {"id": "x", "choices": [choice], **({} if usage is None else {"usage": usage})})
    assert await charged_of(tmp_path, monkeypatch, told, max_tokens=900) == (200, prompt_of(max_tokens=900) + 500)


async def test_one_that_took_longer_than_it_may_has_used_its_upstream(tmp_path, monkeypatch):
    """No byte of it has come, and its tenant could have an upstream work for nothing."""
    status, charged = await charged_of(tmp_path, monkeypatch, b"", hangs_up=False, max_tokens=50)
    assert (status, charged) == (504, prompt_of(max_tokens=50) + 50)


async def test_one_that_is_longer_than_it_may_be_has_used_its_upstream(tmp_path, monkeypatch):
    told = whole(200, {"data": [{"embedding": [0.0] * 30_000}]})
    asking = {"path": EMBEDDINGS, "input": ["a", "b"]}
    status, charged = await charged_of(tmp_path, monkeypatch, told, "max_answer_bytes = 100000\n", **asking)
    assert (status, charged) == (502, prompt_of(input=["a", "b"]))


async def test_one_that_is_longer_than_it_may_be_is_asked_once_and_opens_nothing():
    """An upstream that writes more than anybody can have asked for has itself to blame; this one was asked for it."""
    long = whole(200, {"data": [{"embedding": [0.0] * 30_000}]})
    one, two = Saying(long), Saying(long)
    async with gateway_before({"one": one, "two": two}, f"max_answer_bytes = 100000\n{PATIENT}") as (app, gateway):
        told = await asked(app, path=EMBEDDINGS, input=["a", "b"])
        assert (told.status, told.code) == (502, "upstream_bad_answer")
        assert len(one.asked) + len(two.asked) == 1
        assert [up.breaker.is_well for up in gateway.router.upstreams] == [True, True]
        assert counted(gateway, "verdicts_total", whose="request") == 1
        assert (await asked(app)).code == "upstream_bad_answer"
        assert [up.breaker.is_well for up in gateway.router.upstreams] == [False, False]


async def test_an_upstream_that_broke_off_before_its_client_left_has_done_nothing(tmp_path, monkeypatch):
    """The client's time is over in the pause before another attempt."""
    monkeypatch.setenv("A", "of-a")
    tenant = '[[tenant]]\nname = "a"\nkey_env = "A"\noperator = true\ntokens_per_day = 1000000\n'
    text = f'budget_file = "{tmp_path}/b.sqlite"\n[retries]\npause_s = 30.0\nspare = 5\n{tenant}'
    async with gateway_before({name: Saying(b"", hangs_up=True) for name in ("one", "two")}, text) as (app, gateway):
        told = await asked(app, bearer("of-a") | {"x-request-deadline-ms": "200"}, max_tokens=500)
        assert sum(gateway.budgets.used().values()) == 0
    assert told.status in (502, 504)
