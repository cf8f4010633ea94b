"""Anthropic's Messages API: what goes in, what comes out whole and streamed, what is refused and how."""

import json

import pytest

from splittime.api.limits import ModelInfo
from splittime.api.messages import MessageEvents
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine

ASKED = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def live():
    engine = FakeEngine(say("héllo wörld"), cached_tokens=3)
    with LiveServer(engine, ServerConfig(port=0, api_key=("k",)), ModelInfo(("fake",), 4096, 257, (256,))) as server:
        yield server


def post(live: LiveServer, body: dict, path: str = "/v1/messages", **headers: str):
    return live.post(path, body, {"x-api-key": "k", "anthropic-version": "2023-06-01", **headers})


def streamed(live: LiveServer, **more: object) -> list[dict]:
    status, _, raw = post(live, {**ASKED, "stream": True, **more})
    assert status == 200
    found = [event.split("\n") for event in raw.decode().split("\n\n") if event]
    told = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [each["type"] for each in told]
    return told


def test_a_message_has_exactly_the_fields_of_the_api(live: LiveServer) -> None:
    status, headers, answer = post(live, ASKED, **{"X-Request-Id": "m1"})
    used = answer.pop("usage")
    assert (status, answer) == (200, {
        "id": "msg_m1", "type": "message", "role": "assistant", "model": "fake", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": "héllo wörld"}],
    })  # fmt: skip
    counted = post(live, {"messages": ASKED["messages"]}, "/v1/messages/count_tokens")[2]
    assert counted == {"input_tokens": used["input_tokens"] + 3}
    assert (used["cache_read_input_tokens"], used["cache_creation_input_tokens"]) == (3, 0)
    assert used["output_tokens"] == len("héllo wörld".encode()) + 1
    assert headers["request-id"] == "m1"
    assert "decode" in headers["server-timing"]


def test_a_stream_says_what_the_whole_says(live: LiveServer) -> None:
    whole, events = post(live, ASKED)[2], streamed(live)
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(each["delta"]["text"] for each in events[2:-3]) == "héllo wörld"
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": whole["usage"],
    }


def test_why_it_stopped(live: LiveServer) -> None:
    stops = {"stop_sequences": ["x", "lo"]}
    for more, why in (({"max_tokens": 2}, ("max_tokens", None)), (stops, ("stop_sequence", "lo"))):
        whole, events = post(live, {**ASKED, **more})[2], streamed(live, **more)
        assert (whole["stop_reason"], whole["stop_sequence"]) == why
        assert events[-2]["delta"] == {"stop_reason": why[0], "stop_sequence": why[1]}


def test_system_blocks_and_an_answer_begun_reach_the_template(live: LiveServer) -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    begun = [*ASKED["messages"], {"role": "assistant", "content": [{"type": "text", "text": "I", "citations": None}]}]
    assert post(live, {**ASKED, "system": blocks, "messages": begun, "metadata": {"user_id": "u"}})[0] == 200
    mine = live.engine.submitted[-1].prompt_token_ids
    chat = [{"role": "system", "content": "Be brief."}, ASKED["messages"][0], {"role": "assistant", "content": "I"}]
    body = {"messages": chat, "continue_final_message": True}
    assert live.post("/v1/chat/completions", body, {"Authorization": "Bearer k"})[0] == 200
    assert live.engine.submitted[-1].prompt_token_ids == mine


def test_a_line_for_who_bills_it_is_no_part_of_the_prompt(live: LiveServer) -> None:
    prompts = []
    for turn in ("", "a1", "b2"):
        label = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={turn};"}] if turn else []
        system = [*label, {"type": "text", "text": "Be brief."}]
        status, headers, _ = post(live, {**ASKED, "system": system})
        assert (status, "billing" in headers.get("x-splittime-notice", "")) == (200, bool(turn))
        prompts.append(live.engine.submitted[-1].prompt_token_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    post(live, {**ASKED, "system": "x-billing-note: be kind"})
    assert b"x-billing-note: be kind" in bytes(live.engine.submitted[-1].prompt_token_ids)


TOOL = {"name": "f" * 128, "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
THOUGHT = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"messages": [*ASKED["messages"], {"role": "system", "content": "kinds of agents"}]}, []),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, ["context_management"]),
        ({"output_config": {"effort": "max"}, "thread": None, "mcp_servers": []}, []),
        ({"output_config": {"effort": "high", "form": 1}}, ["output_config.form"]),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": THOUGHT}, *ASKED["messages"]]}, []),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, ["thinking.display"]),
    ],
)
def test_what_newer_clients_send_is_taken_and_told_where_it_has_no_effect(live: LiveServer, more, told) -> None:
    status, headers, answer = post(live, {**ASKED, **more})
    assert status == 200, answer
    assert ([headers["x-splittime-notice"].partition(" has")[0]] if "x-splittime-notice" in headers else []) == told
    counted = {name: value for name, value in {**ASKED, **more}.items() if name != "max_tokens"}
    status, of_count, _ = post(live, counted, "/v1/messages/count_tokens")
    assert (status, of_count.get("x-splittime-notice")) == (200, headers.get("x-splittime-notice"))


def test_a_tool_that_nobody_here_runs_is_not_offered_and_not_forced(launch) -> None:
    live = launch(
        say("ok"), template="{{ messages[0].content }}{% for t in tools %}<{{ t.function.name }}>{% endfor %}"
    )
    eager = {**TOOL, "eager_input_streaming": True, "defer_loading": True}
    status, headers, answer = live.post("/v1/messages", {**ASKED, "tools": [SEARCH, eager]})
    assert (status, "no effect" in headers["x-splittime-notice"]) == (200, True), answer
    assert bytes(live.engine.submitted[-1].prompt_token_ids).decode() == f"hello<{TOOL['name']}>"
    forced = {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}
    status, _, answer = live.post("/v1/messages", {**ASKED, **forced})
    assert (status, "web_search_20250305" in answer["error"]["message"]) == (400, True)
    status, _, answer = live.post("/v1/messages", {**ASKED, "tools": [{"name": "f"}]})
    assert (status, answer["error"]["message"]) == (400, "tools[0].input_schema is missing")


def test_an_answer_may_have_a_form(live: LiveServer) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert post(live, {**ASKED, "output_config": {"format": form}})[0] == 200
    assert live.engine.submitted[-1].sampling.grammar


@pytest.mark.parametrize(
    ("more", "word", "kind"),
    [
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools", "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, "no tools", ""),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text parts", "invalid_request_error"),
        ({"thinking": {"type": "eager"}}, "thinking", "invalid_request_error"),
        ({"model": "none"}, "none", "not_found_error"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request_error"),
    ],
)
def test_refusals_have_the_apis_form(live: LiveServer, more: dict, word: str, kind: str) -> None:
    status, _, answer = post(live, {**ASKED, **more})
    assert status in (400, 404)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == (kind or "invalid_request_error")
    assert word in answer["error"]["message"]


def test_what_a_chat_cannot_have_is_refused_in_counting_too(live: LiveServer) -> None:
    body = {"messages": ASKED["messages"], "tools": [{"name": "get weather", "input_schema": {}}]}
    status, _, counted = post(live, body, "/v1/messages/count_tokens")
    assert (status, counted["error"]["param"]) == (400, "tools[0].function.name")
    assert post(live, {**ASKED, **body})[2] == counted


def test_versions_and_keys(live: LiveServer) -> None:
    status, _, answer = post(live, ASKED, **{"anthropic-version": "2099-01-01"})
    assert (status, answer["type"]) == (400, "error")
    assert "2023-06-01" in answer["error"]["message"]
    for path, key, status, kind in (
        ("", "wrong", 401, "authentication_error"),
        ("/batches", "k", 404, "not_found_error"),
    ):
        found, _, answer = post(live, ASKED, f"/v1/messages{path}", **{"x-api-key": key})
        assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert live.post("/v1/messages", ASKED, {"Authorization": "Bearer k"})[0] == 200
    assert live.post("/v1/messages", ASKED, {"Authorization": "Bearer no", "x-api-key": "k"})[0] == 401


def stream_of(*pieces: tuple[dict, str | None]) -> bytes:
    """A chat's stream, which ends with an error. pieces: a delta, and why it ended."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    chunk = {"id": "chatcmpl-a", "model": "m", "usage": usage}
    choices = [{"index": 0, "delta": delta, "finish_reason": why} for delta, why in pieces]
    events = [json.dumps({**chunk, "choices": [choice]}, ensure_ascii=False) for choice in choices]
    return "".join(f"data: {each}\n\n" for each in [*events, '{"error": {"message": "late"}}', "[DONE]"]).encode()


def test_a_chunk_may_end_a_call_and_have_text_and_another_call() -> None:
    first, last = [{"index": n, "id": f"c{n}", "function": {"name": "f", "arguments": "{"}} for n in (0, 1)]
    more = {"index": 0, "function": {"arguments": "}"}}
    both = {"reasoning_content": "t", "content": "x", "tool_calls": [more, last]}
    raw = MessageEvents().feed(stream_of(({"tool_calls": [first]}, None), (both, "length")))
    told = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]
    blocks = [each["content_block"]["type"] for each in told if each["type"] == "content_block_start"]
    assert blocks == ["tool_use", "thinking", "text", "tool_use"]
    written = ["", "", "", ""]
    for each in (each for each in told if each["type"] == "content_block_delta"):
        delta = each["delta"]
        written[each["index"]] += delta.get("partial_json") or delta.get("text") or delta["thinking"]
    assert written == ["{}", "t", "x", "{"]


def test_events_do_not_depend_on_how_the_stream_is_cut() -> None:
    stream = stream_of(({"content": "ä"}, None), ({"content": "b"}, None), ({"content": ""}, "length"))
    whole = MessageEvents().feed(stream)
    assert whole.count(b"event: ") == 8
    for size in (1, 7, 64):
        cut = MessageEvents()
        assert b"".join(cut.feed(stream[at : at + size]) for at in range(0, len(stream), size)) == whole
