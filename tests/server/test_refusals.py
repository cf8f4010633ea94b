"""What is not honoured is refused, by name; limits say value and limit; nothing reaches the engine."""

import asyncio
import json

import pytest

from splittime.core.errors import ConfigError, ErrorInfo
from splittime.server.config import ServerConfig
from splittime.web.http import deadline_ns, respond_error

from .conftest import say

USER = [{"role": "user", "content": "x"}]
BAD_COMPLETIONS = [
    ({"prompt": "x", "dry_base": 2}, "dry_base"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 10_000}, "n"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["x"] * 200}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "x", "stop": ["a"] * 65}, "stop"),
    ({"prompt": "x", "stop": "y" * 2000}, "stop"),
    ({"prompt": "x", "stop": ["y" * 1000] * 5}, "stop"),
    ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"3": 101}}, "logit_bias"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
    ({"prompt": "x", "priority": 2**40}, "priority"),
    ({"prompt": "x", "cache_salt": "y" * 300}, "cache_salt"),
]
BAD_CHATS = [
    ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": USER, "max_tokens": -2}, "max_tokens"),
    ({"messages": USER, "tools": [{"type": "function"}], "tool_choice": "auto"}, "tools[0].function"),
    ({"messages": []}, "messages"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "functions": [{}]}, "functions"),
    ({"messages": USER, "response_format": {"type": "yaml"}}, "response_format.type"),
    ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities[0]"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": USER, "echo": True}, "echo"),
]
HARMLESS = {
    "store": False,
    "metadata": None,
    "n": 1,
    "logit_bias": {},
    "stop": None,
    "max_tokens": None,
    "suffix": None,
}


@pytest.fixture(scope="module")
def live():
    from .conftest import FakeEngine, LiveServer, ModelInfo

    with LiveServer(FakeEngine(say("ok")), ServerConfig(port=0), ModelInfo(("fake",), 4096, 257, (256,))) as server:
        yield server


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_is_refused_by_name(live, body: dict, param: str) -> None:
    before = len(live.engine.submitted)
    status, _, answer = live.post("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert len(live.engine.submitted) == before


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_is_refused_by_name(live, body: dict, param: str) -> None:
    status, _, answer = live.post("/v1/chat/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer


def test_what_changes_nothing_is_accepted(live) -> None:
    assert live.post("/v1/completions", {"prompt": "x", **HARMLESS})[0] == 200
    fine = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]}
    assert live.post("/v1/chat/completions", {"messages": USER, **fine})[0] == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"null"])
def test_a_body_that_is_no_object_is_refused(live, raw: bytes) -> None:
    status, _, answer = live.post("/v1/completions", raw)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_every_refusal_has_an_account(live) -> None:
    headers = {"X-Request-Id": "refused-one"}
    live.post("/v1/completions", {"prompt": "x", "n": 0}, headers)
    account = live.get("/ledger/requests/refused-one")[2]
    assert account["finish_reason"] == "refused"
    assert account["error"]["param"] == "n"
    assert [stage["stage"] for stage in account["stages"]] == ["receive", "deliver"]


def test_unknown_models_pages_and_methods(live) -> None:
    assert live.post("/v1/completions", {"prompt": "x", "model": "gpt-4"})[0] == 404
    status, _, answer = live.get("/nowhere")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, headers, answer = live.get("/v1/completions")
    assert (status, headers["allow"], answer["error"]["code"]) == (405, "POST", "method_not_allowed")
    assert live.get("/ledger/requests/none")[0] == 404
    assert live.get("/ledger/steps?limit=x")[0] == 400
    assert live.get("/ledger/requests?slower_than_ms=-1")[0] == 400


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/completion", "OpenAI"),
        ("/embed", "/v1/embeddings"),
    ],
)
def test_a_client_of_another_api_is_told_which_one_this_is(live, path: str, word: str) -> None:
    status, _, answer = live.post(path, {"model": "x", "messages": USER})
    assert status == 404
    assert word in answer["error"]["hint"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_the_message_of_every_api_ends_with_the_way_out(live, path: str) -> None:
    """Clients show nothing else of an error."""
    text = {"input": "x"} if path == "/v1/responses" else {"messages": USER}
    status, _, answer = live.post(path, {"model": "gpt-4", "max_tokens": 4, **text})
    error = answer["error"]
    said = error if isinstance(error, str) else error["message"]
    assert (status, said.count("served: "), said.count("gpt-4")) == (404, 1, 1), said
    assert isinstance(error, str) or said.endswith(f"; {error['hint']}")


def test_a_refusal_names_the_way_out_in_a_line(live) -> None:
    def refused(path: str, body: dict) -> dict:
        return live.post(path, body)[2]["error"]

    assert len(refused("/v1/completions", {"prompt": "x", "samplers": ["a"]})["hint"]) < 80
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    answer = refused("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert (answer["code"], answer["param"]) == ("unsupported_field", "messages[0].content[0].type")
    assert "only text" in answer["message"]
    assert "served: " in live.get("/v1/models/gpt-4")[2]["error"]["hint"]


def test_too_large_a_body_is_refused_at_its_headers(live) -> None:
    status, _, answer = live.post("/v1/completions", b" " * (5 * 2**20))
    assert status == 413
    assert answer["error"]["limit"] == 4 * 2**20


@pytest.mark.parametrize("value", ["has space", "a" * 200, ""])
def test_bad_ids_are_refused(live, value: str) -> None:
    status, _, answer = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": value})
    assert status == 400
    assert answer["error"]["param"] == "X-Request-Id"


BAD_DEADLINES = [
    *("0", "0.001", "0.999", "-5", "1e11", "10000000001", "1e999", "nan", "inf", "-inf", "soon"),
    *("1_000_0", "0x10", "5ms", "1,5", ".", "1.", "", "1 2", "+5"),
]


@pytest.mark.parametrize("value", BAD_DEADLINES)
def test_a_deadline_that_cannot_be_meant_is_told_value_and_limit(live, value: str) -> None:
    status, _, answer = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Deadline-Ms": value})
    error = answer["error"]
    assert (status, error["param"], error.get("value", "")) == (400, "X-Request-Deadline-Ms", value)
    assert error["limit"] == [1, 10_000_000_000]
    assert "1 to 10000000000" in error["message"]


@pytest.mark.parametrize("value", ["1", "1.0", "60000", "2.5e4", "1e10", "10000000000"])
def test_deadlines_between_are_kept(value: str) -> None:
    scope = {"headers": [(b"x-request-deadline-ms", value.encode())]}
    assert deadline_ns(scope, 7) == 7 + int(float(value) * 1e6)


DUPLICATES = [
    (b'{"prompt": "x", "prompt": "y"}', "prompt"),
    (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2000}', "max_tokens"),
    (b'{"prompt": "x", "prom\\u0070t": "x"}', "prompt"),
    (b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}', None),
    (b'{"prompt": "x", "logit_bias": {"5": 1, "6": 1, "5": 2}}', "5"),
]


@pytest.mark.parametrize(("raw", "name"), DUPLICATES)
def test_a_name_that_stands_twice_is_refused(live, raw: bytes, name: str | None) -> None:
    before = len(live.engine.submitted)
    status, _, answer = live.post("/v1/completions", raw)
    assert (status, answer["error"]["code"]) == (400, "duplicate_field")
    assert answer["error"]["param"] == name or name is None
    assert len(live.engine.submitted) == before


def test_nor_in_messages_knobs_and_texts_to_tokenise(live) -> None:
    message = b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "role": "system"}]}'
    for method, path, raw in (
        ("POST", "/v1/chat/completions", message),
        ("POST", "/tokenize", b'{"prompt": "a", "prompt": "b"}'),
        ("PATCH", "/knobs", b'{"max_queued_requests": 5, "max_queued_requests": 6}'),
    ):
        status, _, answer = live.request(method, path, raw)
        assert (status, answer["error"]["code"]) == (400, "duplicate_field"), path
    assert live.service.admission.bounds.max_queued_requests not in (5, 6)


def test_names_may_stand_again_in_other_objects_and_in_texts(live) -> None:
    text = '"prompt": "prompt", {"role": 1, "role": 1}'
    messages = [{"role": "user", "content": text}, {"role": "user", "content": text}]
    assert live.post("/v1/chat/completions", {"messages": messages})[0] == 200
    assert live.post("/v1/completions", {"prompt": text, "seed": 10**18})[0] == 200
    assert live.post("/v1/completions", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}")[0] == 400


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate", "identity, gzip", "chunked", "nonsense"])
def test_a_body_in_an_encoding_is_415(live, coding: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/sleep"):
        status, _, answer = live.post(path, b'{"prompt": "x"}', {"Content-Encoding": coding})
        assert (status, answer["error"]["param"], answer["error"]["value"]) == (415, "Content-Encoding", coding), path
    assert live.engine.rest.state == "awake"


@pytest.mark.parametrize("coding", ["identity", "Identity", "identity, identity"])
def test_a_body_as_it_is_is_taken(live, coding: str) -> None:
    assert live.post("/v1/completions", {"prompt": "x"}, {"Content-Encoding": coding})[0] == 200


def test_knobs_change_live_or_are_refused(live) -> None:
    assert live.request("PATCH", "/knobs", {"max_num_seqs": 9, "max_queued_requests": 77})[2] == {
        "max_num_seqs": 9,
        "max_queued_requests": 77,
        "max_queued_prompt_tokens": 262_144,
    }
    for bad in ({"nope": 1}, {"max_queued_requests": 0}, {"max_queued_requests": True}, {"max_num_seqs": 5, "no": 1}):
        status, _, answer = live.request("PATCH", "/knobs", bad)
        assert status == 400, answer
    assert live.get("/knobs")[2]["max_num_seqs"] == 9
    assert live.service.admission.bounds.max_queued_requests == 77


def test_a_public_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        with pytest.raises(ConfigError):
            ServerConfig(host=host).validate()
        ServerConfig(host=host, api_key=("k",)).validate()
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerConfig(host=host).validate()


def test_a_key_is_asked_for_everywhere_but_at_the_probes(launch) -> None:
    live = launch(say("x"), config={"api_key": ("secret",)})
    assert live.get("/health")[0] == live.get("/ready")[0] == 200
    for path in ("/v1/models", "/metrics", "/ledger/requests", "/nowhere", "/openapi.json"):
        assert live.get(path)[0] == 401
        assert live.get(path, Authorization="Bearer wrong")[0] == 401
    assert live.get("/v1/models", Authorization="Bearer secret")[0] == 200


def test_while_the_engine_loads_the_server_answers_and_says_so(launch) -> None:
    live = launch(say("x"))
    live.engine.is_ready = False
    assert live.get("/health")[0] == 200
    for method, path, body in (("GET", "/ready", None), ("POST", "/v1/completions", {"prompt": "x"})):
        status, headers, answer = live.request(method, path, body)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert answer["error"]["reason"] == "not_ready"
    live.engine.is_ready = True
    assert live.get("/ready")[0] == 200


def test_a_page_of_another_site_cannot_change_anything(launch) -> None:
    """Browsers send such a POST without asking first; the page cannot read the answer, but the harm would be done."""
    server = launch()
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
    for path in ("/sleep?mode=abort", "/wake", "/v1/completions"):
        status, _, body = server.post(path, {}, elsewhere)
        assert (status, body["error"]["code"]) == (403, "cross_site")
    assert server.request("GET", "/health", headers=elsewhere)[0] == 200
    assert server.post("/v1/completions", {"model": "fake", "prompt": "a"}, {"Sec-Fetch-Site": "same-origin"})[0] == 200


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/ledger/requests?slower=60", "slower_than_ms"),
        ("/ledger/steps?foo=1", "limit"),
        ("/ledger/requests?limit=1&limit=2", "twice"),
        ("/sleep?level=1&level=2", "twice"),
        ("/sleep?level=", "level"),
    ],
)
def test_what_a_query_cannot_ask_is_refused(launch, path, word) -> None:
    server = launch()
    status, _, body = server.post(path, b"") if path.startswith("/sleep") else server.get(path)
    assert status == 400
    assert word in body["error"]["message"] + str(body["error"].get("limit", ""))


def answered(error: ErrorInfo) -> tuple[dict[bytes, bytes], dict]:
    """Headers and body of an error's answer."""
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(respond_error(send, error))
    return dict(sent[0]["headers"]), json.loads(sent[1]["body"])


@pytest.mark.parametrize(("wait_s", "told"), [(0.001, b"1"), (1.0, b"1"), (1.2, b"2"), (30.0, b"30")])
def test_when_to_come_back_is_told_in_whole_seconds_never_too_early(wait_s: float, told: bytes) -> None:
    headers, body = answered(ErrorInfo("overloaded_error", "full", "full", 429, retry_after_s=wait_s))
    assert headers[b"retry-after"] == told
    assert body["error"]["retry_after_s"] == wait_s


def test_an_error_may_quote_a_number_beyond_64_bits() -> None:
    assert answered(ErrorInfo("k", "m", "c", 400, limit=2**70))[1]["error"]["limit"] == 2**70


def test_the_name_among_many_is_found_in_one_pass(live) -> None:
    """Counting each name against all took half an hour for 300,000, in the event loop. More are too many at all."""
    names = b",".join(b'"%d": ""' % number for number in range(30_000))
    status, _, answer = live.post("/v1/completions", b'{"prompt": "x", "metadata": {%b, "29999": ""}}' % names)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "duplicate_field", "29999")


def test_too_many_prompts_are_counted_before_they_are_looked_at(live) -> None:
    status, _, answer = live.post("/v1/completions", {"prompt": [[999_999]] * 129})
    assert (status, answer["error"]["value"], answer["error"]["limit"]) == (400, 129, 128)
