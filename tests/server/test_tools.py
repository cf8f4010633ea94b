"""A model that chooses to call: what is text, what is a call, and that no mark shows, whole and streamed."""

import pytest

from lazily import openai
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or () %}{{ t | tojson }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'


@pytest.fixture(scope="module")
def live():
    engine, model = FakeEngine(say(f"So: {CALL}\n{CALL}")), ModelInfo(("fake",), 4096, 257, (256,))
    with LiveServer(engine, ServerConfig(port=0), model, TEMPLATE) as server:
        yield server


def ask(live, **more):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], tools=TOOLS, **more
        )
        return [chunk.choices[0] for chunk in answer] if more.get("stream") else answer.choices[0]


def test_a_text_and_two_calls_whole_and_streamed(live) -> None:
    whole = ask(live)
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "So: ")
    assert [call.function.arguments for call in whole.message.tool_calls] == ['{"a": [1]}'] * 2
    chunks = ask(live, stream=True)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "So: "
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    for index in (0, 1):
        assert "".join(each.function.arguments for each in pieces if each.index == index) == '{"a": [1]}'
    assert not live.engine.submitted[-1].sampling.grammar


def test_with_tool_choice_none_the_answer_is_a_text_and_no_tool_is_told(live) -> None:
    told = len(live.engine.submitted[-1].prompt_token_ids) if ask(live) else 0
    assert ask(live, tool_choice="none").message.content == f"So: {CALL}\n{CALL}"
    assert len(live.engine.submitted[-1].prompt_token_ids) < told
