"""What a review found where the gateway's parts meet: each of these once kept a place or an answer wrongly."""

import asyncio

import pytest

from splittime.gateway.cache.answers import _keys
from splittime.gateway.config import BreakerConfig, DegradationConfig, QueueConfig, UpstreamConfig
from splittime.gateway.degrade import lesser
from splittime.gateway.fair_queue import FairQueue, now_ns
from splittime.gateway.forwarded import MOST_TOKENS, forwarded
from splittime.gateway.forwarding import SignOfLife
from splittime.gateway.upstreams import Router, Upstream
from splittime.ledger.attempts import RouteDecision

from .conftest import gateway_of, upstream


def asked(**fields):
    import json

    return forwarded("/v1/completions", json.dumps({"model": "m", "prompt": "x", **fields}).encode(), 100)


@pytest.mark.parametrize("most", [2**64, 10**30, 10**400])
def test_a_huge_answer_is_no_more_than_a_very_long_one(hostile, tmp_path, most):
    assert asked(max_tokens=most, n=1024).output_tokens == MOST_TOKENS
    with gateway_of(tmp_path, upstream("fine", hostile.url("fine"), max_in_flight=1)) as gateway:
        for _ in range(3):
            assert gateway.ask("fine", max_tokens=most)[0] in (200, 429)
        assert gateway.get("/stats")["upstreams"][0]["requests"] == 0
        assert gateway.get("/ledger/requests")["accounts"]


def test_a_body_that_only_resume_reads_keeps_no_place(hostile, tmp_path):
    text = upstream("fine", hostile.url("fine"), max_in_flight=1) + "resume = true\n"
    with gateway_of(tmp_path, text) as gateway:
        for _ in range(3):
            body = b'{"model": "fine", "prompt": "x", "stream": true, "x": 1e999}'
            assert gateway.ask("fine", path="/v1/completions", raw=body)[0] == 400
        assert gateway.get("/stats")["upstreams"][0]["requests"] == 0


def test_who_leaves_as_it_gets_its_place_gives_it_back():
    async def run() -> int:
        config = UpstreamConfig(name="u", url="http://127.0.0.1:1", models=("a", "b"), max_in_flight=1)
        router = Router([Upstream(config, BreakerConfig(), None)])
        queue = FairQueue(QueueConfig(), router, {})
        first = await enter(queue, "a")

        async def send(message):
            pass

        sign = SignOfLife(send, list, 0.001)
        waiting = asyncio.ensure_future(sign.during(enter(queue, "a"), now_ns() + 10**9))
        await asyncio.sleep(0.02)
        queue.leave(first, "t", 1)
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
        found = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            queue.leave(found, "t", 1)
        return router.upstreams[0].requests

    assert asyncio.run(run()) == 0


def enter(queue, model, tried=()):
    return queue.enter("t", model, 1, until_ns=now_ns() + 10**10, tried=tried, draw=0.99, on_wait=lambda: None)


def test_a_line_that_never_empties_starves_no_other():
    async def run() -> str:
        config = UpstreamConfig(name="u", url="http://127.0.0.1:1", models=("a", "b"), max_in_flight=1)
        queue = FairQueue(QueueConfig(shed_from=1.0), Router([Upstream(config, BreakerConfig(), None)]), {})
        held = await enter(queue, "a")
        lines = {name: asyncio.ensure_future(enter(queue, name)) for name in ("a", "b")}
        for _ in range(3):
            await asyncio.sleep(0)
            queue.leave(held, "t", 1)
            done, _ = await asyncio.wait(lines.values(), return_when=asyncio.FIRST_COMPLETED)
            name = next(name for name, task in lines.items() if task in done)
            if name == "b":
                lines["a"].cancel()
                return name
            held = lines["a"].result()
            lines["a"] = asyncio.ensure_future(enter(queue, "a"))
        return "a"

    assert asyncio.run(run()) == "b"


def test_a_rules_upstreams_answer_for_themselves_alone():
    import msgspec

    request = asked()
    kept = [_keys({}, msgspec.structs.replace(request, pool=pool), "t").key for pool in ("m", "eu")]
    assert kept[0] != kept[1]
    bound = RouteDecision(policy="p", rule="r", asked_model="m", model="m", upstreams=("eu",), prompt_tokens=1)
    stages = [DegradationConfig(name="small", enter_wait_s=1.0, leave_wait_s=0.5, model="other")]
    free, held = asked(), msgspec.structs.replace(asked(), decision=bound, pool="eu")
    assert lesser(free, stages, 100).request.model == "other"
    assert lesser(held, stages, 100).request == held


def test_a_lesser_answer_needs_no_more_tokens_than_it_may_have():
    stages = [DegradationConfig(name="short", enter_wait_s=1.0, leave_wait_s=0.5, max_tokens=10)]
    body = lesser(asked(max_tokens=100, min_tokens=50), stages, 100).request.body
    assert b'"min_tokens":10' in body
