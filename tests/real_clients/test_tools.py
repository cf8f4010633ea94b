"""Calls of tools as users ask for them: a real server, the packaged model, the official OpenAI client. The grammar
makes the model call."""

import json
from collections.abc import Iterator

import openai
import pytest

from .test_serve import Server

pytestmark = pytest.mark.timeout(500)
USER = [{"role": "user", "content": "Which light?"}]


def tool(name: str, **properties: dict) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "It does.", "parameters": schema}}


TOOLS = [tool("light", colour={"enum": ["red", "green"]}), tool("count", number={"type": "integer", "maximum": 9})]
ONE = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.0}
LIGHT = {"type": "function", "function": {"name": "light"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-num-seqs", "8")
    yield server
    server.process.terminate()
    server.process.wait(60)


def ask(server: Server, **more) -> openai.types.chat.ChatCompletion:
    asked = {"model": server.model, "messages": USER, "max_tokens": 200, "seed": 1} | ONE | more
    return server.client.chat.completions.create(**asked)


def test_a_call_is_made_and_its_answer_goes_back(server: Server) -> None:
    choice = ask(server, tool_choice=LIGHT).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "light")
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    told = {"role": "tool", "tool_call_id": call.id, "content": "it is on"}
    again = [*USER, choice.message.model_dump(exclude_none=True) | {"content": ""}, told]
    assert ask(server, messages=again, tool_choice="none", max_tokens=3).choices[0].message.tool_calls is None


def test_a_stream_has_the_same_call_in_pieces(server: Server) -> None:
    whole = ask(server).choices[0].message.tool_calls[0].function
    chunks = [chunk.choices[0] for chunk in ask(server, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert len(pieces) > 1
    assert pieces[0].id.startswith("call_")
    assert [piece.id for piece in pieces[1:]] == [None] * (len(pieces) - 1)
    assert pieces[0].function.name == whole.name
    assert "".join(piece.function.arguments for piece in pieces) == whole.arguments


def test_a_call_that_is_cut_says_so_and_is_not_completed(server: Server) -> None:
    whole = ask(server, tool_choice=LIGHT)
    for most in range(1, whole.usage.completion_tokens):
        choice = ask(server, tool_choice=LIGHT, max_tokens=most).choices[0]
        assert choice.finish_reason == "length"
        said = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert all(whole.choices[0].message.tool_calls[0].function.arguments.startswith(each) for each in said)
        assert "<tool_call>" not in (choice.message.content or "")


def test_a_response_calls_and_its_stored_conversation_goes_on(server: Server) -> None:
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    more = {"tools": flat, "tool_choice": {"type": "function", "name": "light"}, "parallel_tool_calls": False}
    asked = {"model": server.model, "max_output_tokens": 200, "temperature": 0.0}
    first = server.client.responses.create(input="Which light?", **asked, **more)
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "light")
    assert json.loads(call.arguments)["colour"] in ("red", "green")
    with server.client.responses.stream(input="Which light?", **asked, **more) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        last = stream.get_final_response()
    assert "".join(pieces) == last.output[0].arguments == call.arguments
    gave = [{"type": "function_call_output", "call_id": call.call_id, "output": "it is on"}]
    asked["max_output_tokens"] = 5
    second = server.client.responses.create(previous_response_id=first.id, input=gave, **asked)
    again = [{"role": "user", "content": "Which light?"}, *first.output, *gave]
    assert second.output_text == server.client.responses.create(input=again, **asked).output_text
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"tool_choice": "auto"}, "tools", "template"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]", "two of the name"),
        ({"response_format": {"type": "json_object"}}, "tools", "another form"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos", "form"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Server, more: dict, param: str, word: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, **more)
    assert refused.value.param == param
    assert word in str(refused.value)
