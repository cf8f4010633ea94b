"""Answers held to a form, as users ask for them: a real server, the packaged model, the official OpenAI client."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from pydantic import BaseModel

from benchmarks.server_process import get_json

from .test_serve import Server

pytestmark = pytest.mark.timeout(500)
USER = [{"role": "user", "content": "Who is it?"}]


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
