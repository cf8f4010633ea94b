"""The official `anthropic` client against the server: what it sends is understood, what it parses is there."""

import pytest

from lazily import anthropic
from server.conftest import LiveServer, say
from server.fake_engine import FakeEngine
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

ASKED = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def client():
    engine = FakeEngine(say("héllo wörld, this is it"), cached_tokens=1)
    with (
        LiveServer(engine, ServerConfig(port=0, api_key=("k",)), ModelInfo(("fake",), 4096, 257, (256,))) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        yield client


def test_messages_whole_and_sent_back(client) -> None:
    message = client.messages.create(**ASKED, system="Be brief.", extra_body={"temperature": 0.5})
    assert [block.text for block in message.content] == ["héllo wörld, this is it"]
    assert (message.stop_reason, message.usage.cache_read_input_tokens) == ("end_turn", 1)
    turns = [*ASKED["messages"], {"role": "assistant", "content": message.content}, *ASKED["messages"]]
    assert client.messages.create(**{**ASKED, "messages": turns}).content


def test_streams_and_counts(client) -> None:
    with client.messages.stream(**ASKED, stop_sequences=["this"]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "héllo wörld, "
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "this")
    counted = client.messages.count_tokens(model="fake", messages=ASKED["messages"])
    assert counted.input_tokens == final.usage.input_tokens + 1


def test_errors_are_the_clients_own(client) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "none"})
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(**ASKED, tools=[{"name": "f", "input_schema": {"type": "object"}}])
