"""The official `openai` client's `responses` against the server: what it sends is understood, what it parses is there.
With grammars, on a real engine: test_forms and test_tools."""

import json

import pydantic
import pytest

from lazily import openai
from server.conftest import LiveServer, say
from server.fake_engine import FakeEngine
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | tojson if tools else '' }}"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def launched(text: str, **more: str) -> LiveServer:
    config = ServerConfig(port=0, api_key=("k", "other"), **more)
    server = LiveServer(
        FakeEngine(say(text), cached_tokens=1), config, ModelInfo(("fake",), 4096, 257, (256,)), TEMPLATE
    )
    server.start()
    return server


@pytest.fixture(scope="module")
def live():
    server = launched("héllo wörld, this is it")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(live: LiveServer):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_responses_whole_and_streamed(client) -> None:
    whole = client.responses.create(model="fake", input="hello", metadata={"a": "b"}, instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.error) == ("héllo wörld, this is it", "completed", None)
    assert (whole.usage.input_tokens_details.cached_tokens, whole.metadata) == (1, {"a": "b"})
    with client.responses.stream(model="fake", input="hello", instructions="Be brief.") as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    raw = list(client.responses.create(model="fake", input="hello", stream=True, max_output_tokens=3))
    assert (raw[-1].type, raw[-1].response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")


def test_every_field_and_event_is_of_the_clients_types(client, live: LiveServer) -> None:
    """The client itself takes what it gets for what it should be; here its classes check it."""
    status, _, answer = live.post("/v1/responses", {"input": "hello", "metadata": {}}, {"Authorization": "Bearer k"})
    assert status == 200
    response = openai.types.responses.Response.model_validate(answer)
    assert set(response.model_extra) == {"store", "presence_penalty", "frequency_penalty"}  # of Open Responses
    check_events(client)


def check_events(client, **more) -> None:
    kind = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    asked = {"model": "fake", "input": "hello", "stream": True, **more}
    with client.responses.with_streaming_response.create(**asked) as stream:
        datas = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(datas) > 8
    for data in datas:
        assert kind.validate_json(data).type == json.loads(data)["type"]


def test_a_stored_response_is_got_gone_on_from_and_deleted(client, live: LiveServer) -> None:
    first = client.responses.create(model="fake", input=[{"role": "user", "content": "hello"}])
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(model="fake", input="and?", previous_response_id=first.id, store=False)
    assert second.usage.input_tokens > first.usage.input_tokens
    prompt = bytes(live.engine.submitted[-1].prompt_token_ids).decode()
    assert prompt == "user: hello\nassistant: héllo wörld, this is it\nuser: and?\n"
    other = client.with_options(api_key="other")
    for ask in (lambda: other.responses.retrieve(first.id), lambda: other.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            ask()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.create(model="fake", input="and?", previous_response_id=first.id)


def test_calls_and_what_they_gave_go_back_as_the_client_has_them(client) -> None:
    server = launched(f"<think>\nhm\n</think>\n\nSo: {CALL}", reasoning_parser="think")
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as caller:
            check_events(caller, tools=[TOOL])
            asked = {"model": "fake", "tools": [TOOL]}
            first = caller.responses.create(input="hello", **asked)
            reasoning, _, call = first.output
            assert reasoning.content[0].text == "hm"
            assert (first.output_text, call.name, call.arguments) == ("So: ", "f", '{"a": [1]}')
            gave = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            again = [{"role": "user", "content": "hello"}, *first.output, gave]
            caller.responses.create(input=again, **asked)
            whole = server.engine.submitted[-1].prompt_token_ids
            caller.responses.create(input=[gave], previous_response_id=first.id, **asked)
            assert server.engine.submitted[-1].prompt_token_ids == whole
            dumped = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in first.output), gave]
            caller.responses.create(input=dumped, **asked)
            assert server.engine.submitted[-1].prompt_token_ids == whole
    finally:
        server.stop()


def test_errors_are_the_clients_own_classes(client) -> None:
    with pytest.raises(openai.BadRequestError, match="stream it") as refused:
        client.responses.create(model="fake", input="hello", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
        client.responses.create(model="fake", input="hello", tools=[{"type": "web_search"}], tool_choice="required")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="none", input="hello")
