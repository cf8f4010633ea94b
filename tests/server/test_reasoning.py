"""Reasoning in a chat's answers: whole and streamed, with calls, with forms, opened or closed by the prompt, cut short,
and left out."""

import contextlib
import json
from collections.abc import Iterator

import pytest

from lazily import openai
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% for t in tools or () %}{{ t | tojson }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
USER = [{"role": "user", "content": "hello"}]
ANSWER = "<think>\nI am é.\n</think>\n\nyes"
NUM_REASONING = len("<think>\nI am é.\n</think>".encode())


@contextlib.contextmanager
def served(**settings: str) -> Iterator[LiveServer]:
    engine, model = FakeEngine(say(ANSWER), step_s=0.0005), ModelInfo(("fake",), 4096, 257, (256,))
    with (
        LiveServer(engine, ServerConfig(port=0, **settings), model, TEMPLATE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as server.client,
    ):
        yield server


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with served() as server:
        yield server


def ask(live, text: str = ANSWER, **more):
    live.engine.script = say(text)
    return live.client.chat.completions.create(model="fake", messages=USER, **more)


def stream(live, text: str = ANSWER, **more) -> tuple[str, str, list, str]:
    """Returns the reasoning, the content, the pieces of calls and why it ended."""
    reasoning, content, calls, ended = "", "", [], ""
    for chunk in ask(live, text, stream=True, **more):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        ended = choice.finish_reason or ended
    return reasoning, content, calls, ended


def thinks(is_on: bool) -> dict:
    return {"extra_body": {"chat_template_kwargs": {"enable_thinking": is_on}}}


def test_reasoning_is_a_field_of_its_own_whole_and_streamed(live) -> None:
    whole = ask(live)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("I am é.", "yes")
    assert whole.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING
    assert whole.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert stream(live) == ("I am é.", "yes", [], "stop")


def test_a_prompt_that_opens_the_reasoning_and_one_that_closes_it(live) -> None:
    assert stream(live, "I am.</think>yes", **thinks(True))[:2] == ("I am.", "yes")
    assert ask(live, "I am.</think>yes", **thinks(True)).usage.completion_tokens_details.reasoning_tokens == 13
    assert stream(live, "yes </think>", **thinks(False))[:2] == ("", "yes </think>")
    assert ask(live, "yes", **thinks(False)).usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_that_is_left_out_is_counted(live) -> None:
    hidden = {"extra_body": {"include_reasoning": False}}
    whole = ask(live, **hidden)
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert whole.choices[0].message.content == "yes"
    assert whole.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING
    assert stream(live, **hidden) == ("", "yes", [], "stop")


def test_an_answer_cut_in_its_reasoning_is_all_reasoning(live) -> None:
    for most in range(8, NUM_REASONING):
        choice = ask(live, max_tokens=most).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert "I am é.".startswith(getattr(choice.message, "reasoning_content", "").split("\n")[0].rstrip("\ufffd"))
    cut = ask(live, max_tokens=14)
    assert cut.choices[0].message.reasoning_content == "I am �"
    assert cut.usage.completion_tokens_details.reasoning_tokens == 14


def test_calls_come_behind_the_reasoning_and_none_in_it(live) -> None:
    text = f"<think>so {CALL}</think>\n\n{CALL}"
    whole = ask(live, text, tools=TOOLS).choices[0]
    assert (whole.message.reasoning_content, whole.message.content, whole.finish_reason) == (
        f"so {CALL}",
        None,
        "tool_calls",
    )
    assert [call.function.arguments for call in whole.message.tool_calls] == ['{"a": [1]}']
    reasoning, content, calls, ended = stream(live, text, tools=TOOLS)
    assert (reasoning, content, ended) == (f"so {CALL}", "", "tool_calls")
    assert "".join(piece.function.arguments for piece in calls) == '{"a": [1]}'


@pytest.mark.parametrize(
    "more", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}]
)
def test_a_form_is_that_of_what_follows_the_reasoning(live, more: dict) -> None:
    grammars = []
    for is_on in (None, True, False):
        ask(live, **more, **({} if is_on is None else thinks(is_on)))
        grammars.append(json.loads(live.engine.submitted[-1].sampling.grammar)["grammars"])
    before, within, behind = grammars
    assert [len(each) for each in grammars] == [2, 2, 1]
    assert "<think>" in before[0]["lark_grammar"].split("\n")[0]
    assert "<think>" not in within[0]["lark_grammar"]
    assert {**behind[0], "name": "form"} == before[1] == within[1]


def test_a_stop_string_in_the_reasoning_ends_the_answer(live) -> None:
    choice = ask(live, stop=["am"]).choices[0]
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("I ", "", "stop")
    assert ask(live, stop=["nk"]).choices[0].message.content == "<thi"


def test_each_answer_of_several_is_told_apart(live) -> None:
    choices = ask(live, n=2).choices
    assert [(each.message.reasoning_content, each.message.content) for each in choices] == [("I am é.", "yes")] * 2


def test_earlier_reasoning_reaches_the_template(live) -> None:
    said = [*USER, {"role": "assistant", "content": "y", "reasoning_content": "because"}, *USER]
    status, _, answer = live.post("/tokenize", {"messages": said})
    assert (status, "because|y" in bytes(answer["tokens"]).decode()) == (200, True)


def test_an_answer_goes_on_where_its_last_message_stands(live) -> None:
    """The mark is not in the prompt's last tokens."""
    said = [*USER, {"role": "assistant", "content": "<think>" + 99 * "a"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    live.engine.script = say("b</think>c")
    _, _, answer = live.post("/v1/chat/completions", {"messages": said, **more})
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("b", "c")


def test_a_setting_leaves_reasoning_in_the_text() -> None:
    with served(reasoning_parser="none") as server:
        whole = ask(server)
        assert (whole.choices[0].message.content, whole.usage.completion_tokens_details) == (ANSWER, None)


def test_a_response_has_an_item_of_reasoning_that_goes_back(live) -> None:
    live.engine.script = say(ANSWER)
    asked = {"model": "fake", "input": "hello", "max_output_tokens": 500, "store": False}
    whole = live.client.responses.create(**asked)
    thought, message = whole.output
    assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "I am é.", "yes")
    assert whole.usage.output_tokens_details.reasoning_tokens == NUM_REASONING
    events = list(live.client.responses.create(**asked, stream=True))
    texts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(texts) == "I am é."
    assert [item.model_dump() | {"id": ""} for item in events[-1].response.output] == [
        item.model_dump() | {"id": ""} for item in whole.output
    ]
    said = [{"role": "user", "content": "a"}, *(item.model_dump() for item in whole.output)]
    live.client.responses.create(**{**asked, "input": [*said, {"role": "user", "content": "b"}]})
    prompt = bytes(live.engine.submitted[-1].prompt_token_ids).decode()
    assert "|aI am é.|yes|b" in prompt


def test_a_response_cut_in_its_reasoning_has_no_message(live) -> None:
    live.engine.script = say(ANSWER)
    cut = live.client.responses.create(model="fake", input="hello", max_output_tokens=12, store=False)
    assert (cut.status, [item.type for item in cut.output]) == ("incomplete", ["reasoning"])
