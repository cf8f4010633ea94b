"""`bad_words` and `allowed_token_ids` over HTTP: words become token ids; what makes no sense is refused by name."""

import pytest

from splittime import SamplingParams
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say("hello"))


@pytest.fixture(scope="module")
def live(engine: FakeEngine):
    with LiveServer(engine, ServerConfig(port=0), ModelInfo(("fake",), 4096, 257, (256,))) as server:
        yield server


def sampled(live: LiveServer, engine: FakeEngine, **more: object) -> list[SamplingParams]:
    engine.submitted.clear()
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 3, **more})[0] == 200
    return [request.sampling for request in engine.submitted]


def test_each_answer_is_without_the_words_at_a_begin_and_behind_a_space(live: LiveServer, engine: FakeEngine) -> None:
    for one in sampled(live, engine, bad_words=["ab", " c"], n=2, allowed_token_ids=[1, 2]):
        assert one.bad_token_ids == (tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))
        assert one.allowed_token_ids == (1, 2)
    assert len(engine.submitted) == 2


def test_none_are_none(live: LiveServer, engine: FakeEngine) -> None:
    (one,) = sampled(live, engine, bad_words=[], allowed_token_ids=[])
    assert not one.is_listed


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": ["x"], "guided_choice": ["y"]}, "bad_words"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "guided_choice": ["y"]}, "allowed_token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(live: LiveServer, more: dict[str, object], param: str) -> None:
    status, _, body = live.post("/v1/completions", {"prompt": "x", **more})
    assert (status, body["error"]["param"]) == (400, param)


def test_a_field_of_another_server_is_refused_with_what_there_is_instead(live: LiveServer) -> None:
    status, _, body = live.post("/v1/completions", {"prompt": "x", "samplers": ["top_k"]})
    assert status == 400
    assert "top_p" in body["error"]["hint"]
