"""Answers held to a form, and calls of tools, as users ask for them: a real server, the packaged model, the official
OpenAI client. The grammar makes the model call."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel

from benchmarks.server_process import get_json
from lazily import openai

from .test_serve import Server

pytestmark = pytest.mark.timeout(500)
USER = [{"role": "user", "content": "Who is it?"}]
WHICH = [{"role": "user", "content": "Which light?"}]


class Person(BaseModel):
    """Short fields, so that a model of a million parameters comes to the end of one."""

    age: int
    is_here: bool


SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["word", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-num-seqs", "8")
    yield server
    server.process.terminate()
    server.process.wait(60)


def parsed(server: Server, seed: int) -> Person:
    asked = {"model": server.model, "messages": USER, "max_tokens": 200, "seed": seed}
    message = server.client.chat.completions.parse(response_format=Person, **asked).choices[0].message
    assert message.parsed is not None
    return message.parsed


def test_the_clients_parser_gets_an_object_of_the_callers_class(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(isinstance(one.age, int) for one in pool.map(lambda seed: parsed(server, seed), range(8)))


def test_a_response_is_parsed_whole_and_streamed(server: Server) -> None:
    asked = {"model": server.model, "input": "Who is it?", "max_output_tokens": 200, "temperature": 0.0}
    whole = server.client.responses.parse(text_format=Person, **asked)
    assert isinstance(whole.output_parsed, Person)
    with server.client.responses.stream(text_format=Person, **asked) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.output_text.done"} <= kinds
    assert last.output_parsed == whole.output_parsed
    cut = server.client.responses.create(**asked | {"max_output_tokens": 1}, text=last.text.model_dump(by_alias=True))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_vllms_ways_to_ask_and_streams(server: Server) -> None:
    forms = [
        ({"guided_json": SCHEMA}, None),
        ({"guided_json": json.dumps(SCHEMA)}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_regex": "[a-c]{3}/[0-9]"}, "[a-c]{3}/[0-9]"),
        ({"guided_grammar": 'start: "x" "y" "z"'}, "xyz"),
    ]
    for more, pattern in forms:
        chunks = server.client.completions.create(
            model=server.model, prompt="x = ", max_tokens=100, temperature=0.0, stream=True, extra_body=more
        )
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        if pattern is None:
            assert json.loads(text)["word"] in ("red", "green")
        else:
            assert re.fullmatch(pattern, text)


def test_an_answer_that_is_cut_says_so(server: Server) -> None:
    asked = {"model": server.model, "prompt": "x", "max_tokens": 2, "extra_body": {"guided_json": SCHEMA}}
    assert server.client.completions.create(**asked).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"guided_json": {"not": {}}}, "grammar", "not"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": "3"}, "guided_json", "schema"),
        ({"guided_regex": "("}, "grammar", "regex"),
        ({"guided_choice": []}, "guided_choice", "1"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "form"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "no such field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name(server: Server, more: dict, param: str, word: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model=server.model, prompt="x", stream=stream, extra_body=more)
    assert refused.value.param == param
    assert word in str(refused.value)


def test_the_wait_for_a_grammar_is_in_the_account(server: Server) -> None:
    """What takes a while to compile, beside others who do not wait for it."""
    words = [f"{number:05}-{'w' * 12}" for number in range(4000)]
    more = {"guided_choice": words, "max_tokens": 30}
    asked = {"model": server.model, "prompt": "x", "extra_headers": {"X-Request-Id": "many-words"}}
    answer = server.client.completions.create(**asked, extra_body=more)
    assert answer.choices[0].text in words
    stages = get_json(f"{server.url}/ledger/requests/many-words")["stages"]
    assert any(stage["stage"] == "queue" and stage.get("cause") == "grammar" for stage in stages)


# ---- calls of tools


def tool(name: str, **properties: dict) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "It does.", "parameters": schema}}


TOOLS = [tool("light", colour={"enum": ["red", "green"]}), tool("count", number={"type": "integer", "maximum": 9})]
ONE = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.0}
LIGHT = {"type": "function", "function": {"name": "light"}}


def ask(server: Server, **more) -> "openai.types.chat.ChatCompletion":
    asked = {"model": server.model, "messages": WHICH, "max_tokens": 200, "seed": 1} | ONE | more
    return server.client.chat.completions.create(**asked)


def test_a_call_is_made_and_its_answer_goes_back(server: Server) -> None:
    choice = ask(server, tool_choice=LIGHT).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "light")
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    told = {"role": "tool", "tool_call_id": call.id, "content": "it is on"}
    again = [*WHICH, choice.message.model_dump(exclude_none=True) | {"content": ""}, told]
    assert ask(server, messages=again, tool_choice="none", max_tokens=3).choices[0].message.tool_calls is None


def test_a_call_that_is_required_comes_whatever_form_an_answer_would_have(server: Server) -> None:
    assert ask(server, response_format={"type": "json_object"}).choices[0].finish_reason == "tool_calls"


def test_a_stream_has_the_same_call_in_pieces(server: Server) -> None:
    whole = ask(server).choices[0].message.tool_calls[0].function
    chunks = [chunk.choices[0] for chunk in ask(server, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
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
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos", "form"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(server: Server, more: dict, param: str, word: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, **more)
    assert refused.value.param == param
    assert word in str(refused.value)
