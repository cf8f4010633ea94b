"""`POST /v1/prefill`: what goes in, what comes out, what is refused and how, and what the books say."""

import time

import msgspec
import pytest

from patience import until
from splittime.core.request import Request
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.account_json import account_from_json, account_json
from splittime.ledger.stages import Stage
from splittime.server.service import MOST_KEPT, MOST_OPEN, Prefilled

from .conftest import LiveServer, say

PATH = "/v1/prefill"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def live(launch) -> LiveServer:
    return launch(say("ok"), config={"api_key": ("operators", "shop")})


def ask(live: LiveServer, body: dict, **headers: str) -> tuple:
    return live.post(PATH, body, {"Authorization": "Bearer shop", **headers})


def test_it_answers_when_the_prompt_is_computed_and_closes_an_account_of_its_own(live: LiveServer) -> None:
    status, headers, answer = ask(live, {"prompt": "abc"}, **{"X-Request-Id": "p1"})
    assert status == 200
    assert answer.pop("created") > 0
    told = {"object": "prefill", "id": "prefill-p1", "model": "fake", "prompt_tokens": 3, "cached_tokens": 0}
    assert answer == told
    assert "prefill" in headers["server-timing"]
    request = live.engine.submitted[0]
    assert (request.prompt_token_ids, request.sampling.pooling) == ((97, 98, 99), AHEAD)
    (account,) = live.ledger.accounts()
    account.verify()
    assert (account.endpoint, account.tenant, account.output_tokens) == ("prefill", "key-2", 0)
    assert account.deadline_ns == pytest.approx(account.start_ns + 60e9)


def test_messages_become_the_prompt_that_a_chat_would_have(live: LiveServer) -> None:
    body = {"messages": USER, "cache_salt": "s"}
    assert ask(live, body)[0] == 200
    assert live.post("/v1/chat/completions", {**body, "max_tokens": 1}, {"Authorization": "Bearer shop"})[0] == 200
    ahead, chat = live.engine.submitted
    assert ahead.prompt_token_ids == chat.prompt_token_ids
    assert ahead.cache_salt == chat.cache_salt


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "prompt"), ({"prompt": "a", "messages": USER}, "prompt"), ({"prompt": "a", "tools": []}, "tools"),
     ({"prompt": [999]}, "prompt"), ({"prompt": ""}, "prompt")],
)  # fmt: skip
def test_what_decides_no_prompt_is_refused(live: LiveServer, body: dict, param: str) -> None:
    status, _, answer = ask(live, body)
    assert status == 400
    assert answer["error"]["param"] == param


def test_a_tenant_has_few_at_a_time_and_they_take_no_place_in_the_queue(live: LiveServer) -> None:
    for _ in range(MOST_OPEN):
        live.call(lambda: live.service.prefilled.enter("key-2"))
    status, headers, answer = ask(live, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (429, "open_prefills")
    assert headers["retry-after"] == "1"
    live.call(lambda: live.service.prefilled.leave("key-2"))
    assert ask(live, {"prompt": "x"})[0] == 200
    until(lambda: live.call(lambda: live.service.prefilled._open["key-2"]) == MOST_OPEN - 1)
    assert live.service.admission.queued_requests == 0


# ---- what it saved


def test_who_comes_with_its_prompt_is_told_what_it_saved_once() -> None:
    kept = Prefilled(10**9)
    assert kept.with_savings(*closed("prefill", range(100), cached=16)).ahead_tokens == 0
    other = kept.with_savings(*closed("chat", [*range(50), *range(900, 999)], cached=32, salt="other"))
    assert (other.ahead_tokens, other.ahead_ns) == (0, 0)
    account = kept.with_savings(*closed("chat", [*range(90), 7, 7, 7], cached=80))
    assert (account.ahead_tokens, account.ahead_ns) == (64, 64 * 840 // 84)
    assert account_from_json(account_json(account)).ahead_tokens == 64
    assert kept.with_savings(*closed("chat", range(100), cached=80)).ahead_tokens == 0


def test_of_prompts_that_part_only_what_is_in_common_counts() -> None:
    kept = Prefilled(10**9)
    kept.with_savings(*closed("prefill", range(100), cached=0))
    kept.with_savings(*closed("prefill", [*range(40), *range(500, 560)], cached=32))
    assert kept.with_savings(*closed("chat", [*range(40), *range(500, 520)], cached=48)).ahead_tokens == 32
    assert kept.with_savings(*closed("chat", [*range(40), *range(500, 520)], cached=48)).ahead_tokens == 16


def test_what_failed_or_is_long_ago_or_too_many_is_not_remembered() -> None:
    kept = Prefilled(5)
    account, request = closed("prefill", range(100), cached=0)
    kept.with_savings(msgspec.structs.replace(account, finish_reason="deadline"), request)
    assert kept.with_savings(*closed("chat", range(100), cached=96)).ahead_tokens == 0
    kept.with_savings(account, request)
    assert kept.with_savings(*closed("chat", range(100), cached=96, end_ns=account.end_ns + 6)).ahead_tokens == 0
    for _ in range(3 * MOST_KEPT):
        kept.with_savings(account, request)
    assert sum(map(len, kept._kept.values())) == MOST_KEPT


def closed(endpoint: str, prompt: object, cached: int, salt: str = "", end_ns: int = 1000) -> tuple:
    token_ids = tuple(prompt)
    sampling = SamplingParams(pooling=AHEAD if endpoint == "prefill" else "", max_tokens=1, seed=0)
    request = Request(request_id="r", prompt_token_ids=token_ids, sampling=sampling, submitted_ns=0, cache_salt=salt)
    stages = (StageInterval(Stage.QUEUE, None, 0, 160), StageInterval(Stage.PREFILL, None, 160, end_ns))
    account = ClosedAccount(
        request_id="r", group_id="r", model="m", endpoint=endpoint, started_at_unix_ns=time.time_ns(), start_ns=0,
        end_ns=end_ns, intervals=stages, finish_reason="stop", prompt_tokens=len(token_ids), cached_tokens=cached,
    )  # fmt: skip
    return account, request
