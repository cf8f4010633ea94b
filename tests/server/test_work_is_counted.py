"""A key's limits count work: answers, texts that are embedded or ranked, and texts that are only counted."""

import asyncio
from pathlib import Path

import pytest

from splittime.core.errors import Refused
from splittime.server.app import PATHS
from splittime.server.counted import CountedText
from splittime.text.process import Encode
from splittime.text.workers import framed
from splittime.web.http import Disconnected
from splittime.web.reading import SHORT_BYTES, ReadingLine
from splittime.web.tenants import TENANT

from .conftest import LiveServer, say

FILE = """
[[key]]
name = "ops"
key = "operators"
operator = true

[[key]]
name = "few"
key = "few"
max_open_requests = 4
requests_per_minute = 6
tokens_per_minute = 200
weight = 3
"""
FEW, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in ("few", "operators"))


@pytest.fixture
def live(launch, tmp_path: Path) -> LiveServer:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return launch(say("ok ok ok ok", end=False), config={"api_keys_file": str(path)})


def few(live: LiveServer):
    return live.service.quota(next(each for each in live.service.keys.tenants if each.name == "few"))


@pytest.mark.parametrize(("prompts", "n"), [(8, 16), (5, 1), (1, 5)])
def test_a_body_of_more_answers_than_the_key_may_have_open_is_refused(live, prompts: int, n: int) -> None:
    status, _, answer = live.post("/v1/completions", {"prompt": ["x"] * prompts, "n": n, "max_tokens": 2}, FEW)
    told = answer["error"]
    assert (status, told["code"], told["value"], told["limit"]) == (400, "too_many_choices", prompts * n, 4)
    assert "max_open_requests" in told["message"]
    assert few(live).num_open == 0
    assert not live.engine.submitted


def test_answers_count_to_the_minute_and_what_is_too_much_now_may_come_later(live) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 1}
    assert live.post("/v1/completions", body, FEW)[0] == 200
    status, headers, answer = live.post("/v1/completions", body, FEW)
    assert (status, answer["error"]["reason"]) == (429, "requests_per_minute")
    assert 0 < int(headers["retry-after"]) <= 60
    assert few(live).num_open == 0
    assert 'reason="requests_per_minute"' in live.get("/metrics", **OPERATOR)[2].decode()


def test_requests_go_to_the_engine_with_their_key_and_its_weight(live) -> None:
    for who in (FEW, OPERATOR):
        live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, who)
    assert [(each.tenant, each.weight) for each in live.engine.submitted] == [("few", 3.0), ("ops", 1.0)]
    assert [(each.tenant, each.weight) for each in live.ledger.accounts()] == [("few", 3.0), ("ops", 1.0)]


def test_what_was_reserved_for_an_answer_is_given_back_when_it_is_shorter(live) -> None:
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 150}, FEW)[0] == 200
    used = few(live)
    assert used.reserved_tokens == 0
    assert used.used_tokens == sum(a.prompt_tokens + a.output_tokens for a in live.ledger.accounts())
    status, _, answer = live.post("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 150}, FEW)
    assert (status, answer["error"]["reason"]) == (429, "tokens_per_minute")


TEXTS = [
    ("/tokenize", {"prompt": "a b c"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "a b c"}]}),
    ("/v1/responses/input_tokens", {"input": "a b c"}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_work_on_texts_counts_as_a_request_and_its_tokens(live, path: str, body: dict) -> None:
    body = {**body, "model": live.get("/v1/models", **FEW)[2]["data"][0]["id"]}
    for number in range(1, 7):
        assert live.post(path, body, FEW)[0] == 200
        assert few(live).used_requests == number
    assert few(live).used_tokens >= 6
    assert few(live).num_open == 0
    status, _, answer = live.post(path, body, FEW)
    assert status == 429
    assert answer["error"].get("reason", answer["error"]["type"]) in ("requests_per_minute", "rate_limit_error")
    assert live.post(path, body, OPERATOR)[0] == 200


def test_a_key_that_has_no_place_open_is_refused_work_on_texts(live) -> None:
    use = few(live).enter(1, 4)
    for path, body in TEXTS:
        assert live.post(path, body, FEW)[0] == 429
    use.leave(0, 1)
    assert live.post(*TEXTS[0], FEW)[0] == 200


def test_a_faulty_body_gives_its_place_back(live) -> None:
    for path, _ in TEXTS:
        assert live.post(path, b"{", FEW)[0] == 400
    assert few(live).num_open == 0


def test_every_path_that_works_on_a_body_of_a_key_is_counted_or_named_here(live) -> None:
    """So that one that comes to be served is thought of."""
    counted = {path for path, _ in TEXTS} | {
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"),
        *("/v1/prefill", "/v1/messages", "/v1/responses", "/v1/responses/input_tokens"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
    of_operators_or_light = {
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/ping", "/reset_prefix_cache", "/sleep", "/wake"),
        *(
            "/api/show",
            "/v1/responses/{response_id}/cancel",
            "/wake_up",
            "/kv/blocks",
            "/ledger/hops",
            "/ledger/what-if",
        ),
    }
    assert {path for method, path, _ in PATHS if method == "POST"} == counted | of_operators_or_light


@pytest.mark.parametrize("was_begun", [True, False])
def test_work_on_a_text_that_is_left_is_charged_once_it_was_begun(live, monkeypatch, was_begun: bool) -> None:
    tasks, service = [], live.service
    submit = service.texts.submit

    def noted(work, **sharer):
        tasks.append(submit(work, **sharer))
        tasks[-1].num_tries = int(was_begun)
        return tasks[-1]

    async def leave() -> None:
        """The client leaves when its text has been given to the workers."""
        scope = {"headers": [], TENANT: few(live).tenant}

        async def receive():
            while not tasks:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with pytest.raises(Disconnected), CountedText(service, scope, receive) as text:
            await text.done(0, lambda: framed(Encode(("a b c " * 100,), True)))

    monkeypatch.setattr(service.texts, "submit", noted)
    asyncio.run_coroutine_threadsafe(leave(), live.loop).result(60)
    expected = service.admission.estimate_tokens(600) if was_begun else 0
    assert tasks[0].size == 600
    assert (few(live).used_tokens, few(live).num_open) == (expected, 0)
    assert (expected > 0) is was_begun


LONG_TEXT = "a " * SHORT_BYTES
LONG = [
    ("/v1/completions", {"prompt": LONG_TEXT}),
    ("/v1/responses", {"input": LONG_TEXT}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("/tokenize", {"prompt": LONG_TEXT}),
    ("/detokenize", {"tokens": [1] * SHORT_BYTES}),
]


@pytest.mark.parametrize(("path", "body"), LONG)
def test_a_long_body_is_read_in_its_keys_turn(live, monkeypatch, path: str, body: dict) -> None:
    asked, add = set(), ReadingLine.add

    def noting(line, sharer, *args):
        asked.add(sharer)
        return add(line, sharer, *args)

    monkeypatch.setattr(ReadingLine, "add", noting)
    live.post(path, body, FEW)
    assert asked == {("few", 3.0)}


def test_too_many_long_bodies_of_one_key_are_refused_and_counted(live, monkeypatch) -> None:
    def refuse(line, sharer, num_bytes, work):
        raise Refused("too many bodies wait", reason="queued_bodies", limit=5)

    monkeypatch.setattr(ReadingLine, "add", refuse)
    for path, body in LONG[:2]:
        status, headers, answer = live.post(path, body, FEW)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queued_bodies", "1")
    assert few(live).num_open == 0
    assert live.service.admission.refusals["queued_bodies"] == 2
