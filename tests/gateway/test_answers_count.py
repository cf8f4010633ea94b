"""A body counts as the answers that it asks for: in its tenant's limits, whatever becomes of it."""

import asyncio
import json
from hashlib import sha256

import pytest

from splittime.gateway.forwarded import MAX_ANSWERS, forwarded

from .hostile import WHOLE, whole
from .in_process import CHAT, PATIENT, Saying, asked, gateway_before

COMPLETIONS, EMBEDDINGS, RERANK, SCORE = "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"
DIGEST = sha256(b"few").hexdigest()
TENANT = f'[[tenant]]\nname = "few"\nsha256 = "{DIGEST}"\noperator = true\n'
TENANT += "max_open_requests = 4\nrequests_per_minute = 6\n"
FEW = {"authorization": "Bearer few"}


@pytest.mark.parametrize(
    ("path", "fields", "answers"),
    [
        (COMPLETIONS, {"prompt": "x"}, 1),
        (COMPLETIONS, {"prompt": ["x"] * 8, "n": 16}, 128),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "best_of": 5}, 10),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2),
        (COMPLETIONS, {"prompt": [-1, 2, 3]}, 1),
        (COMPLETIONS, {"prompt": [[1, 2], [3], []]}, 3),
        (COMPLETIONS, {"prompt": ["\\", '"', 'a",', "[["]}, 4),
        (COMPLETIONS, {"prompt": [], "n": 3}, 3),
        (COMPLETIONS, {"prompt": "x", "n": 10**15}, MAX_ANSWERS),
        (COMPLETIONS, {"prompt": "x", "n": -5}, 1),
        (CHAT, {"messages": [], "n": 16, "prompt": ["x"] * 9}, 16),
        (EMBEDDINGS, {"input": ["x"] * 7, "n": 16}, 7),
        (EMBEDDINGS, {"input": [1, 2, 3]}, 1),
        (RERANK, {"query": "q", "documents": ["x"] * 7}, 7),
        (SCORE, {"text_1": "q", "text_2": ["x"] * 5}, 5),
        (SCORE, {"text_1": ["q"] * 5, "text_2": "x"}, 5),
        ("/v1/messages", {"messages": [], "n": 16}, 1),
        ("/v1/responses", {"input": ["x"] * 3, "n": 16}, 1),
    ],
)
def test_answers_are_counted_as_a_server_counts_them(path, fields, answers):
    body = json.dumps({"model": "m", **fields}).encode()
    assert forwarded(path, body, 100).answers == answers
    spaced = json.dumps({"model": "m", **fields}, indent=90).encode()
    assert forwarded(path, spaced, 100).answers == answers


def few_of(gateway):
    return gateway.quotas["few"]


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        (COMPLETIONS, {"prompt": ["x"] * 8, "n": 16}, 128),
        (CHAT, {"n": 5}, 5),
        (EMBEDDINGS, {"input": ["x"] * 5}, 5),
        (RERANK, {"query": "q", "documents": ["x"] * 5}, 5),
    ],
)
async def test_a_body_of_more_answers_than_its_tenant_may_have_open_is_refused(path, fields, count):
    up = Saying(whole(200, WHOLE))
    async with gateway_before({"up": up}, PATIENT + TENANT) as (app, gateway):
        told = await asked(app, FEW, path, **fields)
        error = json.loads(told.body)["error"]
        assert (told.status, error["code"], error["value"], error["limit"]) == (400, "too_many_choices", count, 4)
        assert few_of(gateway).num_open == 0
        assert few_of(gateway).reserved_tokens == 0
        assert (await asked(app, FEW, CHAT)).status == 200
        assert len(up.asked) == 1


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_answers_count_to_the_minute_and_are_given_back_at_the_end(status):
    up = Saying(whole(status, {"error": {"message": "no"}} if status != 200 else WHOLE))
    async with gateway_before({"up": up}, PATIENT + TENANT) as (app, gateway):
        asking = asyncio.create_task(asked(app, FEW, CHAT, n=4))
        while not few_of(gateway).num_open:
            await asyncio.sleep(0)
        await asking
        assert (few_of(gateway).num_open, few_of(gateway).used_requests) == (0, 4)
        told = await asked(app, FEW, CHAT, n=3)
        assert (told.status, json.loads(told.body)["error"]["reason"]) == (429, "requests_per_minute")
        assert 0 < int(told.headers[b"retry-after"]) <= 60
        assert few_of(gateway).num_open == 0


async def test_what_is_open_leaves_no_room_for_more_answers_than_there_may_be():
    up = Saying([b"", whole(200, WHOLE)])
    async with gateway_before({"up": up}, PATIENT + TENANT) as (app, gateway):
        first = asyncio.create_task(asked(app, FEW, CHAT, n=3))
        while few_of(gateway).num_open < 3:
            await asyncio.sleep(0)
        told = await asked(app, FEW, CHAT, n=2)
        assert (told.status, json.loads(told.body)["error"]["reason"]) == (429, "max_open_requests")
        assert (await first).status == 200
        assert few_of(gateway).num_open == 0


async def test_a_body_takes_a_place_at_its_upstream_for_each_answer():
    up = Saying([b"", whole(200, WHOLE)])
    async with gateway_before({"up": up}, PATIENT, max_in_flight=8) as (app, gateway):
        asking = asyncio.create_task(asked(app, n=4))
        while not up.asked:
            await asyncio.sleep(0)
        assert gateway.router.upstreams[0].in_flight.places == 4
        assert (await asking).status == 200
        assert gateway.router.upstreams[0].in_flight.places == 0
