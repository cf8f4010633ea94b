"""The description of the API holds: what it describes is accepted, what it does not is refused, and what comes back is
what it says. schemathesis draws the requests and applies all of its checks."""

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.errors import InvalidArgument, Unsatisfiable

from lazily import schemathesis
from splittime.api.lenient import RESPONSES_UNSUPPORTED
from splittime.api.limits import ModelInfo
from splittime.api.openapi import _below, document
from splittime.api.responses import ResponsesBody
from splittime.api.schema import ChatBody, CompletionBody, ForeignFields
from splittime.core.sampling import SamplingParams
from splittime.server import routes_info
from splittime.server.config import ServerConfig
from splittime.text.tokenizer import OWN_NAMES

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

FORMS = (
    "thinking_token_budget",  # refused where a model does not reason
    "chat_template_kwargs",  # of numbers that 64 bits hold
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
NOT_DRAWN = (
    *("/sleep", "/wake", "/wake_up"),  # they change what every later request is answered
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),  # there are no folders to draw; test_adapters has some
    *("/v1/messages", "/v1/messages/count_tokens"),  # test_messages holds another API's
    *("/v1/responses", "/v1/responses/input_tokens"),  # a call's output needs its call; test_responses holds them
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),  # Ollama's; test_other_routes holds them
    "/kv/blocks",  # msgpack is not drawn; test_kv_route holds it
    "/v1/prefill",  # tools go with messages; test_prefill holds it
    *("/v1/rerank", "/v1/score"),  # this vocabulary has no "yes"; test_ranking has one
)


def test_every_sampling_parameter_is_described() -> None:
    fields = set(SamplingParams.__struct_fields__) - {"prompt_logprobs", "grammar", "bad_token_ids", "pooling"}
    fields -= {"reasoning_limit"}
    assert fields <= set(CompletionBody.__struct_fields__)
    schemas = document(ServerConfig())["components"]["schemas"]
    for kind in (CompletionBody, ChatBody):
        described = schemas[kind.__name__]
        assert set(described["properties"]) == set(kind.__struct_fields__)
        assert "additionalProperties" not in described


def test_the_responses_api_is_described() -> None:
    described = document(ServerConfig())
    schemas, paths = described["components"]["schemas"], described["paths"]
    assert (set(paths["/v1/responses"]), set(paths["/v1/responses/{response_id}"])) == ({"post"}, {"get", "delete"})
    assert set(schemas["ResponsesBody"]["properties"]) == set(ResponsesBody.__struct_fields__)
    _, items = schemas["ResponsesBody"]["properties"]["input"]["anyOf"]
    named = re.findall("schemas/([A-Za-z]+)", f"{items} {schemas['ResponsesBody']['properties']['tools']}")
    assert named == ["ItemMessage", "ItemReasoning", "ItemCall", "ItemCallOutput", "OfferedFunction"]
    assert not any("additionalProperties" in schemas[name] for name in named)
    for name, field in schemas["ResponsesBody"]["properties"].items():
        assert (field.get("x-effect") == "refused") == (name in RESPONSES_UNSUPPORTED and name != "tool_choice")
    strict = document(ServerConfig(strict=True))["components"]["schemas"]
    assert all(strict[name]["additionalProperties"] is False for name in named)


def test_a_key_is_part_of_the_description() -> None:
    assert "security" not in document(ServerConfig())
    assert document(ServerConfig(), asks_for_key=True)["security"] == [{"key": []}]


def test_strict_servers_describe_no_field_without_effect() -> None:
    lenient, strict = (document(ServerConfig(strict=strict))["components"]["schemas"] for strict in (False, True))
    assert lenient["ChatBody"]["properties"]["metadata"]["x-effect"] == "none"
    assert strict["ChatBody"]["properties"]["metadata"]["type"] == "null"


def test_names_and_vocabulary_of_the_model_are_described() -> None:
    schemas = document(ServerConfig(), ModelInfo(("a", "b"), 512, 1000))["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["model"]["anyOf"][0]["enum"] == ["a", "b"]
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == 999


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 57, 100, 257, 1000, 1009, 2048, 10_500])
def test_the_pattern_of_numbers_below_a_limit(limit: int) -> None:
    pattern = re.compile(_below(limit))
    assert [n for n in range(limit + 1200) if pattern.fullmatch(str(n))] == list(range(limit))
    assert not pattern.fullmatch("00")


@pytest.fixture(scope="module", params=[False, True], ids=["lenient", "strict"])
def live(request):
    config = ServerConfig(port=0, strict=request.param)
    with LiveServer(
        FakeEngine(say("ok then"), step_s=0.0001), config, ModelInfo(("fake",), 2**53, 257, (256,))
    ) as server:
        yield server


@pytest.mark.parametrize(("mode", "expected"), [("positive", 200), ("negative", 400)])
@pytest.mark.sample(2)
def test_the_server_does_what_its_description_says(live: LiveServer, mode, expected: int) -> None:
    described = live.get("/openapi.json")[2]
    described = without_forms(described if live.config.strict else without_foreign_fields(described))
    if expected == 200:
        close(described)
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=live.url)
    operations = [found.ok() for found in schema.get_all_operations()]
    seen = {status for one in operations if one.path not in NOT_DRAWN for status in run_some(one, mode, live)}
    assert expected in seen


def without_foreign_fields(described: dict) -> dict:
    """schemathesis finds no chat with some dozens of fields of one value each; test_lenient holds them one by one."""
    for name in ("CompletionBody", "ChatBody"):
        properties = described["components"]["schemas"][name]["properties"]
        for field in ForeignFields.__struct_fields__:
            del properties[field]
    return described


def close(described: dict) -> None:
    """Else fields that are refused by name are drawn as unknown ones. test_lenient draws those."""
    for name, schema in described["components"]["schemas"].items():
        if "properties" in schema and name != "ServerSentEvent":
            schema["additionalProperties"] = False


def without_forms(described: dict) -> dict:
    """The rules of forms and tools are told in words; test_forms and test_tools hold them one by one."""
    for name in ("CompletionBody", "ChatBody"):
        for field in FORMS:
            described["components"]["schemas"][name]["properties"].pop(field, None)
    described["components"]["schemas"]["Message"]["properties"].pop("tool_calls", None)
    return described


def num_choices(body: dict) -> float:
    prompt, n = body.get("prompt"), body.get("n")
    return len(prompt) * n if isinstance(prompt, list) and isinstance(n, int | float) else 0


def asks_for_more_than_it_may_have(body: dict) -> bool:
    least, *most = (body.get(name) for name in ("min_tokens", "max_tokens", "max_completion_tokens"))
    return isinstance(least, int) and least > min(16, *(limit for limit in (16, *most) if isinstance(limit, int)))


def may_have_too_many_logprobs(body: dict) -> bool:
    asked = (body.get(name) for name in ("min_tokens", "max_tokens", "max_completion_tokens"))
    return body.get("logprobs") not in (None, False) and any(
        isinstance(most, int | float) and most > 700 for most in asked
    )


def run_some(operation, mode, live: LiveServer) -> set[int]:
    """Statuses of some drawn requests, each checked; none if this operation has nothing of that kind to draw."""
    statuses = set()

    @settings(max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case) -> None:
        body = case.body if isinstance(case.body, dict) else {}
        hops = body.get("hops") if isinstance(body.get("hops"), list) else []
        own = [one for one in hops if isinstance(one, dict) and one.get("parent_id", "") == one.get("span_id")]
        assume(not own)  # that a hop does not lie in itself is told in words
        assume(num_choices(body) <= live.config.max_choices)  # so is this
        assume(not asks_for_more_than_it_may_have(body))  # and this
        assume(not may_have_too_many_logprobs(body))  # and this
        assume(not body.get("ignore_eos"))  # this model's answers have no longest
        variables = body.get("chat_template_kwargs")
        assume(not (isinstance(variables, dict) and OWN_NAMES & variables.keys()))  # and that these names are taken
        assume(body.get("truncate_prompt_tokens") != -1 or not body.keys() & {"max_tokens", "max_completion_tokens"})
        statuses.add(case.call_and_validate(base_url=live.url, timeout=60).status_code)

    try:
        check()
    except (Unsatisfiable, InvalidArgument):
        return set()
    return statuses


def test_the_description_is_made_once_for_a_model(launch, monkeypatch) -> None:
    """It took 15 ms of the loop for whoever asked."""
    made, make = list[ModelInfo](), routes_info.document
    monkeypatch.setattr(
        routes_info, "document", lambda limits, model, **more: made.append(model) or make(limits, model, **more)
    )
    live = launch()
    first = live.get("/openapi.json")[2]
    assert (live.get("/openapi.json")[2], len(made)) == (first, 1)
    live.service.model = dataclasses.replace(live.service.model, max_model_len=77)
    assert (live.get("/openapi.json")[2] != first, len(made)) == (True, 2)
