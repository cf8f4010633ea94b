"""A bound of the reasoning in requests: chats, messages and streams, several answers, and where there can be none. The
engine's script thinks until the bound ends it, by the rule that the runner has."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from lazily import openai
from splittime.api.limits import ModelInfo
from splittime.core.request import Request
from splittime.diagnose.explain import explain
from splittime.ledger.account_json import account_from_json, account_json
from splittime.runner.slot import bound_of
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
HARMONY_TEMPLATE = "{{ messages[0].content }}<|start|>assistant {# <|channel|>final<|message|> to=functions. tools #}"
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|endofmessage|>")
MARKS, BEGIN, CLOSE, EOS = ("<think>", "</think>"), 257, 258, 256
USER = [{"role": "user", "content": "hello"}]
ASKED = {"model": "fake", "messages": USER}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def thinking(request: Request) -> list[int]:
    """Thinks without end: it opens its reasoning where its prompt has not, and says yes when it is closed."""
    bound, prompt = bound_of(request.sampling), request.prompt_token_ids
    said = [] if BEGIN in prompt else [BEGIN]
    while not (forced := bound.must_come(np.array(said, dtype=np.int64)) if bound else ()) and len(said) < 60:
        said.append(ord("a"))
    return [*said, *forced, *b"\n\nyes", EOS]


@contextlib.contextmanager
def served(template: str = TEMPLATE, marks: tuple[str, ...] = MARKS, **settings: str) -> Iterator[LiveServer]:
    model = ModelInfo(("fake",), 4096, 257 + len(marks), (EOS,))
    server = LiveServer(FakeEngine(thinking, step_s=0.0005), ServerConfig(port=0, **settings), model, template)
    server.marks = marks
    server.start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as server.client:
        yield server
    server.stop()


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with served() as server:
        yield server


def ask(live: LiveServer, budget: int | None, **more: object):
    body = {"thinking_token_budget": budget, **more.pop("extra_body", {})}
    return live.client.chat.completions.create(**ASKED, extra_body=body, **more)


def limit_of(live: LiveServer):
    return live.engine.submitted[-1].sampling.reasoning_limit


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_an_answer_goes_on_when_its_budget_is_used_up(live: LiveServer, budget: int) -> None:
    whole = ask(live, budget, n=2)
    for choice in whole.choices:
        assert (getattr(choice.message, "reasoning_content", ""), choice.message.content) == ("a" * budget, "yes")
        assert choice.finish_reason == "stop"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * (budget + 2)
    pieces = [chunk.choices[0].delta for chunk in ask(live, budget, stream=True)]
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "a" * budget
    assert "".join(piece.content or "" for piece in pieces) == "yes"


def test_the_bound_counts_from_where_the_reasoning_is_opened(live: LiveServer) -> None:
    ask(live, 5)
    assert (limit_of(live).max_tokens, limit_of(live).end_ids) == (5, (CLOSE,))
    assert limit_of(live).begin_ids == ((BEGIN,), (10, BEGIN), (10, 10, BEGIN))
    within = ask(live, 5, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert limit_of(live).begin_ids == ()
    assert within.choices[0].message.reasoning_content == "aaaaa"
    assert within.usage.completion_tokens_details.reasoning_tokens == 6
    ask(live, 5, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert limit_of(live) is None
    for none in (-1, None):
        ask(live, none, max_tokens=9)
        assert limit_of(live) is None


def test_the_account_says_how_much_was_thought(live: LiveServer) -> None:
    ask(live, 3, extra_headers={"X-Request-Id": "thought"})
    (account,) = live.ledger.account("thought")
    assert (account.reasoning_tokens, account.most_reasoning_tokens) == (5, 3)
    assert account_from_json(account_json(account)) == account
    assert "(5 of reasoning, bounded to 3 between its marks)" in " ".join(explain(account).plain.split())


def test_a_message_has_a_budget_of_thinking(live: LiveServer) -> None:
    asked = {**ASKED, "max_tokens": 80, "thinking": {"type": "enabled", "budget_tokens": 4}}
    status, _, answer = live.post("/v1/messages", asked)
    assert status == 200
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["content"][0]["thinking"], answer["content"][1]["text"]) == ("aaaa", "yes")
    live.post("/v1/messages", {**asked, "thinking": {"type": "disabled", "budget_tokens": 4}})
    assert limit_of(live) is None


def refused(live: LiveServer, budget: object, **more: object) -> tuple[int, str]:
    status, _, answer = live.post("/v1/chat/completions", {**ASKED, "thinking_token_budget": budget, **more})
    assert answer["error"]["param"] == "thinking_token_budget"
    return status, answer["error"]["message"]


def test_where_there_can_be_no_bound_it_is_refused(live: LiveServer) -> None:
    assert refused(live, -2)[0] == 400
    assert refused(live, 2**31)[0] == 400
    status, _, answer = live.post("/v1/completions", {"prompt": "a", "thinking_token_budget": 4})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
    with served(reasoning_parser="none") as other:
        assert "nothing says that this model reasons" in refused(other, 4)[1]
        other.engine.script = say("yes")
        asked = {**ASKED, "max_tokens": 80, "thinking": {"type": "enabled", "budget_tokens": 4}}
        assert other.post("/v1/messages", asked)[0] == 200  # there is none, so it is within any bound
    with served(marks=()) as other:
        assert "</think> is no token" in refused(other, 4)[1]
        assert message_within(other, 4)[0] == 200


def message_within(live: LiveServer, budget: int, **more: object) -> tuple[int, dict]:
    asked = {**ASKED, "max_tokens": 80, "thinking": {"type": "enabled", "budget_tokens": budget}, **more}
    status, _, answer = live.post("/v1/messages", asked)
    return status, answer


@pytest.mark.parametrize("budget", [-1, -2, 2**31])
def test_a_message_is_refused_a_budget_that_makes_no_sense(live: LiveServer, budget: int) -> None:
    status, answer = message_within(live, budget)
    assert status == 400
    assert "thinking.budget_tokens" in answer["error"]["message"]


def test_harmony_goes_on_to_what_it_says_but_not_where_it_may_call() -> None:
    with served(HARMONY_TEMPLATE, HARMONY_MARKS) as live:
        live.engine.script = say("yes")
        ask(live, 4)
        channel, message, start = 257, 258, 259
        (first, *_), end = limit_of(live).begin_ids, limit_of(live).end_ids
        assert first == (channel, *b"analysis", message)
        assert {32, 10} <= set(limit_of(live).blank_ids)
        assert limit_of(live).closed_by == ((channel, *b"final"), (channel, *b"commentary"))
        assert end[-17:] == (start, *b"assistant", channel, *b"final", message)
        assert "may call tools" in refused(live, 4, tools=TOOLS)[1]
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        assert message_within(live, 4, tools=tools)[0] == 200
        assert limit_of(live) is None
        assert message_within(live, 4)[0] == 200
        assert limit_of(live).max_tokens == 4
