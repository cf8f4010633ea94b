"""Every field of the bodies that the installed SDKs declare: as null it is absent, and at a plausible value it is taken
or refused by name."""

import collections.abc
import importlib
import types
import typing

import pytest

from server.conftest import EOS, LiveServer, say
from server.fake_engine import FakeEngine
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig

NEEDED = typing.Required
USER = {"role": "user", "content": "hi"}
MESSAGE = ("/v1/messages", {"model": "fake", "messages": [USER], "max_tokens": 1}, ())
BODIES = {  # where it is sent, with what, and which fields are refused at a value that is not null
    "openai.types.chat.completion_create_params:CompletionCreateParamsBase": (
        *("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}),
        ("audio", "functions"),
    ),
    "openai.types.completion_create_params:CompletionCreateParamsBase": (
        *("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("suffix",),
    ),
    "openai.types.embedding_create_params:EmbeddingCreateParams": ("/v1/embeddings", {"input": "a"}, ()),
    "openai.types.responses.response_create_params:ResponseCreateParamsBase": (
        *("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("background", "conversation", "prompt"),
    ),
    "anthropic.types.message_create_params:MessageCreateParamsBase": MESSAGE,
    "anthropic.types.beta.message_create_params:MessageCreateParamsBase": MESSAGE,
}
MEANT = {"model": "fake", "logprobs": None, "top_logprobs": None, "stream_options": None, "tool_choice": None}
MEANT |= {"previous_response_id": None, "best_of": 1}  # what only stands beside other fields


@pytest.fixture(scope="module")
def live():
    model = ModelInfo(("fake",), 4096, EOS + 1, (EOS,))
    with LiveServer(FakeEngine(say("ok")), ServerConfig(port=0), model, "{{ messages }}{{ tools }}") as server:
        yield server


def plausible(hint: object, depth: int = 0) -> object:
    """Returns a value of this type, as small as it can be; None where there is none."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (NEEDED, typing.NotRequired, typing.Annotated):
        return plausible(args[0], depth)
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        found = (plausible(each, depth) for each in args if each is not type(None))
        return next((value for value in found if value is not None), None)
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        inner = plausible(args[0], depth + 1)
        return [] if inner is None else [inner]
    if hasattr(hint, "__required_keys__") and depth < 6:  # a TypedDict, be it of typing_extensions
        fields = typing.get_type_hints(hint, include_extras=True)
        required = hint.__required_keys__.union(n for n, each in fields.items() if typing.get_origin(each) is NEEDED)
        return {name: plausible(fields[name], depth + 1) for name in sorted(required)}
    return {str: "x", int: 1, float: 0.5, bool: True}.get(hint, {} if origin is dict or hint is dict else None)


def fields_of(place: str) -> dict[str, object]:
    module, _, name = place.partition(":")
    return typing.get_type_hints(getattr(importlib.import_module(module), name), include_extras=True)


@pytest.mark.parametrize("place", BODIES)
def test_every_field_of_an_sdk_is_absent_as_null_and_taken_or_refused_by_name(live: LiveServer, place: str) -> None:
    path, base, of_meaning = BODIES[place]
    refused = {}
    for name, hint in fields_of(place).items():
        if name in base:
            continue
        status, _, answer = live.post(path, {**base, name: None})
        assert status == 200, (name, answer)
        status, _, answer = live.post(path, {**base, name: MEANT[name] if name in MEANT else plausible(hint)})
        if status != 200:
            refused[name] = status, (answer["error"]["param"] or "").startswith(name)
    assert refused == dict.fromkeys(of_meaning, (400, True))
