"""Calls and thinking in Anthropic's Messages API: sent, answered whole and streamed, and sent back."""

import json
from collections.abc import Iterator

import pytest

from lazily import anthropic
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|{{ m.tool_call_id or '' }}"
    "{% for c in m.tool_calls or () %}{{ c.id }}={{ c.function | tojson }}{% endfor %}]{% endfor %}"
    "{% for t in tools or () %}{{ t | tojson }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TOOLS = [{"name": "f", "description": "It does.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": ["é"]}}\n</tool_call>'
ANSWER = f"<think>\nI am.\n</think>\n\nSo: {CALL}\n{CALL}"
ASKED = {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine, model = FakeEngine(say(ANSWER), step_s=0.0005), ModelInfo(("fake",), 4096, 257, (256,))
    with (
        LiveServer(engine, ServerConfig(port=0), model, TEMPLATE) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as server.client,
    ):
        yield server


def prompt(live: LiveServer) -> str:
    return bytes(live.engine.submitted[-1].prompt_token_ids).decode()


def test_thinking_a_text_and_calls_whole_and_streamed(live) -> None:
    whole = live.client.messages.create(**ASKED)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = whole.content
    assert (thought.thinking, text.text, first.name, second.input) == ("I am.", "So: ", "f", {"a": ["é"]})
    with live.client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    apart = {"id": None, "parsed_output": None}
    assert [each.model_dump() | apart for each in streamed.content] == [
        each.model_dump() | apart for each in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage) == ("tool_use", whole.usage)


def test_what_was_answered_is_sent_back_as_the_template_reads_it(live) -> None:
    whole = live.client.messages.create(**ASKED)
    called = whole.content[2]
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "it is on", "is_error": False}
    turns = [*ASKED["messages"], {"role": "assistant", "content": whole.content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "And?"}]})
    live.client.messages.create(**{**ASKED, "messages": turns})
    said = prompt(live)
    assert f"[tool||it is on|{called.id}][user||And?|]" in said
    assert "[assistant|I am.|So: |" in said
    assert f'{called.id}={{"name": "f", "arguments": {{"a": ["é"]}}}}' in said
    counted = live.client.messages.count_tokens(model="fake", messages=turns, tools=TOOLS)
    assert counted.input_tokens == len(said.encode())


@pytest.mark.parametrize(
    ("choice", "is_held", "may_repeat"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, True, False),
    ],
)
def test_a_choice_of_tools_is_a_chats(live, choice: dict, is_held: bool, may_repeat: bool) -> None:
    live.client.messages.create(**ASKED, tool_choice=choice)
    grammar = live.engine.submitted[-1].sampling.grammar
    assert bool(grammar) == is_held
    assert ("next" in grammar) == (is_held and may_repeat)


def test_without_a_choice_no_tool_is_told(live) -> None:
    live.client.messages.create(**ASKED, tool_choice={"type": "none"})
    assert "It does." not in prompt(live)


def test_thinking_is_turned_off_by_the_template_and_in_the_answer(live) -> None:
    whole = live.client.messages.create(**ASKED, thinking={"type": "disabled"})
    assert prompt(live).endswith("</think>\n\n")
    assert "thinking" not in [block.type for block in whole.content]
    on = live.client.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
    assert on.content[0].type == "thinking"


def test_a_call_that_was_cut_has_no_input(live) -> None:
    most = len(ANSWER.encode()) - 25
    cut = live.client.messages.create(**{**ASKED, "max_tokens": most})
    assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["thinking", "text", "tool_use"])
    _, _, raw = live.post("/v1/messages", {**ASKED, "max_tokens": most, "stream": True})
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]
    pieces = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert "".join(pieces) == '{"a": ["é"]}{"'
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_numbers_of_a_calls_input_are_told_as_they_were_written(live) -> None:
    arguments = '{"a": 123456789012345678901234567890, "b": 1.10, "c": [0.1e2]}'
    before = live.engine.script
    live.engine.script = say(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    raw = live.client.messages.with_raw_response.create(**ASKED)
    live.engine.script = before
    assert f'"input":{arguments}'.encode() in raw.http_response.content
