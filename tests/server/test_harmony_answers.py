"""Chats with a model that writes gpt-oss's messages: reasoning, content and calls, whole, streamed and sent back."""

import json
from collections.abc import Iterator

import pytest

from lazily import openai
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

TEMPLATE = (
    "{{ reasoning_effort }}|{% for m in messages %}{{ m.thinking or '' }}{{ m.content or '' }}{% endfor %}"
    "{% for t in tools or () %}{{ t | tojson }}{% endfor %}{# <|channel|>final<|message|> #}<|start|>assistant"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "hello"}]
THOUGHT = "<|channel|>analysis<|message|>I am é.<|end|>"
FINAL = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>yes"
CALL = f'{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": NaN}}'


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine, model = FakeEngine(say(FINAL), step_s=0.0005), ModelInfo(("fake",), 4096, 257, (256,))
    with (
        LiveServer(engine, ServerConfig(port=0, reasoning_parser="none"), model, TEMPLATE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as server.client,
    ):
        yield server


def ask(live, text: str, messages=USER, **more):
    live.engine.script = say(text)
    return live.client.chat.completions.create(model="fake", messages=messages, **more)


def prompt(live) -> str:
    return bytes(live.engine.submitted[-1].prompt_token_ids).decode()


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["no tools", "tools"])
def test_reasoning_and_the_final_message_whole_and_streamed(live, more: dict) -> None:
    whole = ask(live, FINAL, **more)
    (choice,) = whole.choices
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == (
        "I am é.",
        "yes",
        "stop",
    )
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT.encode())
    deltas = [chunk.choices[0].delta for chunk in ask(live, FINAL, stream=True, **more)]
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I am é."


def test_a_call_whole_streamed_and_sent_back(live) -> None:
    (choice,) = ask(live, CALL, tools=TOOLS, reasoning_effort="low").choices
    assert prompt(live).startswith("low|hello")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": "NaN"}')
    deltas = [chunk.choices[0].delta for chunk in ask(live, CALL, tools=TOOLS, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == '{"a": "NaN"}'
    assert not any(delta.content for delta in deltas)
    sent = {**choice.message.model_dump(exclude_none=True), "reasoning_content": "I am."}
    ask(live, FINAL, [*USER, sent, {"role": "tool", "tool_call_id": call.id, "content": "2"}], tools=TOOLS)
    assert 'helloI am.<tool_call>\n{"name": "f"' in prompt(live)  # of a template that writes no calls


def test_a_call_that_the_length_limit_cut_is_told_as_far_as_it_came(live) -> None:
    (choice,) = ask(live, CALL, tools=TOOLS, max_tokens=len(CALL.encode()) - 3).choices
    assert choice.finish_reason == "length"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": N']
    (choice,) = ask(live, CALL, tools=TOOLS, max_tokens=len(THOUGHT.encode()) + 40).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)


def test_a_form_is_that_of_the_final_message_and_calls_have_their_own(live) -> None:
    ask(live, FINAL, response_format={"type": "json_object"})
    first = json.loads(live.engine.submitted[-1].sampling.grammar)["grammars"][0]["lark_grammar"].split("\n")[0]
    assert "<|channel|>final<|message|>" in first
    ask(live, CALL, tools=TOOLS, tool_choice="required")
    first, calls = json.loads(live.engine.submitted[-1].sampling.grammar)["grammars"]
    assert "final" not in first["lark_grammar"]
    assert "commentary to=functions." in calls["lark_grammar"]
