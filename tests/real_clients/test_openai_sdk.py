"""The official `openai` client against the server: what it sends is understood, what it parses is there."""

import asyncio

import pytest

from lazily import openai
from server.conftest import LiveServer, say
from server.fake_engine import FakeEngine
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def live():
    engine = FakeEngine(say("héllo wörld, this is it"), cached_tokens=1)
    with LiveServer(engine, ServerConfig(port=0, api_key=("k",)), ModelInfo(("fake",), 4096, 257, (256,))) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").object == "model"


def test_chats_whole_and_streamed(client) -> None:
    whole = client.chat.completions.create(model="fake", messages=USER, max_tokens=50)
    assert whole.choices[0].message.content == "héllo wörld, this is it"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == 1
    stream = client.chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "héllo wörld, this is it"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_can_be_sent_back(client) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER).choices[0].message
    again = client.chat.completions.create(model="fake", messages=[*USER, answer, *USER])
    assert again.choices[0].message.content
    dumped = client.chat.completions.create(model="fake", messages=[*USER, answer.model_dump(), *USER])
    assert dumped.choices[0].message.content


def test_completions_with_everything(client, live: LiveServer) -> None:
    answer = client.completions.create(
        model="fake",
        prompt=["a", "b"],
        n=3,
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        logprobs=2,
        stop=["zz"],
        echo=True,
        extra_body={"top_k": 5, "min_p": 0.01, "ignore_eos": True, "return_token_ids": True, "priority": 1},
        extra_headers={"X-Request-Id": "sdk", "X-Include-Timing": "1"},
    )
    assert len(answer.choices) == 6
    assert answer.id == "cmpl-sdk"
    assert answer.choices[0].logprobs.text_offset[0] == 0
    assert len(answer.choices[0].token_ids) == 4
    assert answer.timing["stages"]


def test_chat_logprobs(client) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    assert content[0].bytes == [104]
    assert len(content[0].top_logprobs) == 2


def test_errors_are_the_clients_own_classes(client, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="template does not write them"):
        client.chat.completions.create(
            model="fake", messages=USER, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.NotFoundError, match="served: fake"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()
    bounds = live.service.admission.bounds
    bounds.max_queued_prompt_tokens, bounds.max_queued_requests, before = 1, 0, bounds.max_queued_requests
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=USER)
    bounds.max_queued_prompt_tokens, bounds.max_queued_requests = 262_144, before


def test_an_error_inside_a_stream_is_raised(client, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.engine, "step_s", 0.05)  # 4,000 tokens take 200 s
    stream = client.chat.completions.create(
        model="fake",
        messages=USER,
        stream=True,
        max_tokens=4000,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Deadline-Ms": "1500"},
    )
    with pytest.raises(openai.APIError, match="deadline"):
        list(stream)


def test_64_at_once(live: LiveServer) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(model="fake", prompt="x" * i, stream=True, max_tokens=40)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i + 1) for i in range(64)))

    assert set(asyncio.run(all_of_them())) == {"héllo wörld, this is it"}


def test_embeddings_as_the_client_asks_for_them(client, live: LiveServer) -> None:
    """It asks for base64 unless it is told otherwise, and reads it itself."""
    made = client.embeddings.create(model="fake", input=["abc", "de"])
    told = client.embeddings.create(model="fake", input=["abc", "de"], encoding_format="float")
    assert [one.embedding for one in made.data] == [pytest.approx(one.embedding, abs=1e-7) for one in told.data]
    assert (made.usage.prompt_tokens, made.usage.total_tokens, made.object) == (5, 5, "list")
    assert len(client.embeddings.create(model="fake", input=[[1, 2], [3]], dimensions=4).data[1].embedding) == 4
    with pytest.raises(openai.BadRequestError, match="2049 entries, more than 2048"):
        client.embeddings.create(model="fake", input=["a"] * 2049)
