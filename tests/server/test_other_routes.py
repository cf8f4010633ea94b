"""Routes that clients of other servers ask for."""

import json
import socket
import time

import pytest

from splittime import __version__
from splittime.api.ollama import OllamaChatBody, OllamaMessage
from splittime.api.schema import GivenCall, GivenFunction

from .conftest import TEMPLATE, LiveServer, say

USER = {"role": "user", "content": "hi"}


def test_small_questions_are_answered(launch) -> None:
    live = launch(say("x"))
    assert live.get("/version")[2] == {"version": __version__}
    assert live.get("/ping")[::2] == (200, {})
    assert live.post("/ping", b"")[::2] == (200, {})
    assert live.get("/v1/models/")[2] == live.get("/v1/models")[2]
    status, headers, icon = live.get("/favicon.ico")
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert icon.startswith(b"<svg")


def test_the_tokenizer_tells_what_a_client_needs_to_count_as_we_do(launch) -> None:
    told = launch(say("x")).get("/tokenizer_info")[2]
    assert told["special_tokens"] == {"eos_token": "<|end|>"}
    assert told["chat_templates"] == {"default": TEMPLATE}
    assert (told["vocab_size"], told["eos_token_ids"]) == (257, [256])


def test_resetting_the_prefix_cache_switches_it_off_and_on(launch) -> None:
    live = launch(say("x"))
    live.engine.knobs_now["enable_prefix_caching"] = True
    asked = []
    configure = live.engine.configure

    async def noted(knobs, *, lasts=True):
        asked.append((knobs, lasts))
        return await configure(knobs)

    live.engine.configure = noted
    assert live.post("/reset_prefix_cache", b"")[0] == 200
    assert asked == [({"enable_prefix_caching": is_on}, False) for is_on in (False, True)]  # told to no successor


def test_a_cache_that_is_off_stays_off(launch) -> None:
    live = launch(say("x"))
    live.engine.knobs_now["enable_prefix_caching"] = False
    assert live.post("/reset_prefix_cache", b"")[0] == 200
    assert live.engine.knobs_now["enable_prefix_caching"] is False


def test_paths_of_other_servers_lead_to_ours(launch) -> None:
    live = launch(say("x"))
    assert live.get("/models")[2] == live.get("/v1/models")[2]
    for path in ("/chat/completions", "/v1//chat/completions"):
        assert live.post(path, {"messages": [USER], "max_tokens": 1, "repeat_penalty": 1.5})[0] == 200
    assert live.engine.submitted[-1].sampling.repetition_penalty == 1.5
    both = {"repetition_penalty": 0, "repeat_penalty": 1.5}
    assert live.post("/chat/completions", {"messages": [USER], **both})[0] == 400
    assert (
        live.post("/chat/completions", {"messages": [USER], "repetition_penalty": 0, "repeat_penalty": 1.5})[0] == 400
    )
    assert live.post("/rerank", {})[2]["error"]["code"] == "missing_field"
    assert "/v1/embeddings" in live.post("/embed", {})[2]["error"]["hint"]


def test_a_stream_over_http_1_0_is_not_in_chunks(launch) -> None:
    live = launch(say("hello"))
    body = json.dumps({"messages": [USER], "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
        client.sendall(head % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    fields, _, stream = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"data: [DONE]\n\n")


# ---- Ollama's API

CALLING = """{% for t in tools or () %}{{ t | tojson }}<tool_call>{% endfor %}{% for m in messages %}
{{ m.role }}{{ m.tool_call_id }}:{{ m.content }}{% for c in m.tool_calls or () %}{{ c.id }}{% endfor %}{% endfor %}"""
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {"a": [1]}}}
OPTIONS = {"num_predict": 9, "num_ctx": 2048, "n": 3, "temperature": 0, "repeat_penalty": 1.1, "stop": ["zz"]}
LAST = {"done", "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"}
LAST |= {"eval_count", "eval_duration"}


def ollama(live: LiveServer, path: str, **body: object) -> tuple[dict, list[dict]]:
    """Returns what it answers whole, and the lines of its stream."""
    status, _, whole = live.post(path, {"model": "fake:latest", "stream": False, **body})
    assert status == 200, whole
    status, headers, stream = live.post(path, {"model": "fake", **body})
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    return whole, [json.loads(line) for line in stream.splitlines()]


def test_ollamas_chats_and_prompts_are_answered_whole_and_line_by_line(launch) -> None:
    live = launch(say("hello"))
    for path, said, body in (
        ("/api/chat", lambda one: one["message"]["content"], {"messages": [USER], "keep_alive": "5m"}),
        ("/api/generate", lambda one: one["response"], {"prompt": "hi", "system": "Be brief.", "format": ""}),
        ("/api/generate", lambda one: one["response"], {"prompt": "hi", "raw": True}),
    ):
        whole, lines = ollama(live, path, options=OPTIONS, **body)
        assert said(whole) == "".join(map(said, lines)) == "hello"
        assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]
        assert whole.keys() - lines[0].keys() == LAST - {"done"}
        assert (whole["done_reason"], whole["eval_count"], lines[-1]["eval_count"]) == ("stop", 6, 6)
        assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0
        sampling = live.engine.submitted[-1].sampling
        assert (sampling.max_tokens, sampling.repetition_penalty, sampling.stop) == (9, 1.1, ("zz",))
    assert live.engine.submitted[-1].prompt_token_ids == tuple(b"hi")
    whole, lines = ollama(live, "/api/generate")
    assert (whole["response"], whole["done_reason"], len(lines)) == ("", "load", 1)
    other = {"messages": [], "prompt": "other", "stream": True, "stream_options": {}, "echo": True, "model": "z"}
    asked = {"messages": [USER], "stream": False, "options": {"max_tokens": 7, "best_of": 2, "tools": [F], **other}}
    status, headers, whole = live.post("/api/chat", asked, {"X-Include-Timing": "0"})
    assert (status, whole["message"]["content"], "eval_duration" in whole) == (200, "hello", True)
    assert "options.prompt has no effect" in headers["x-splittime-notice"]
    assert live.engine.submitted[-1].sampling.max_tokens == 7
    form = {"type": "object", "properties": {"a": {"const": 1}}}
    for given in ("json", form):
        live.post("/api/chat", {"messages": [USER], "stream": False, "format": given})
        assert live.engine.submitted[-1].sampling.grammar


def test_ollamas_calls_are_objects_and_results_find_theirs(launch) -> None:
    live = launch(say('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'), template=CALLING)
    results = [{"role": "tool", "tool_name": "f", "content": each} for each in "xy"]
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, *results]
    whole, lines = ollama(live, "/api/chat", messages=history, tools=[F])
    assert whole["message"]["tool_calls"] == lines[-2]["message"]["tool_calls"] == [CALL]
    prompt = bytes(live.engine.submitted[-1].prompt_token_ids).decode()
    assert prompt.endswith("assistant:call_1_0call_1_1toolcall_1_0:xtoolcall_1_1:y")


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/api/chat", {"messages": [{**USER, "images": ["a"]}]}, 400, "messages[0].images"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/chat", {"messages": [USER], "options": {"mirostat": 1}}, 400, "mirostat"),
        ("/api/chat", {"messages": [USER], "options": {"temperature": "hot"}}, 400, "temperature"),
        ("/api/chat", {"messages": [USER], "model": "none"}, 404, "no model 'none' here"),
    ],
)
def test_ollamas_refusals_are_texts(launch, path: str, body: dict, status: int, word: str) -> None:
    found, _, answer = launch().post(path, body)
    assert found == status
    assert word in answer["error"]


def test_what_ollamas_clients_ask_of_models(launch) -> None:
    live = launch(template=CALLING)
    (entry,) = live.get("/api/tags")[2]["models"]
    assert entry["name"] == live.get("/api/ps")[2]["models"][0]["model"] == "fake"
    shown = live.post("/api/show", {"model": "fake:latest"})[2]
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["splittime.context_length"] == 4096
    assert live.post("/api/show", {"model": "none"})[0] == 404
    assert live.post("/api/show", {"model": "x" * 2**16})[0] == 413
    for path in ("/api/none", "/api/tags"):
        assert [type(each) for each in live.post(path, {})[2].values()] == [str]
    assert live.get("/api/version")[2]["version"].count(".") == 2


def test_a_long_history_of_calls_takes_time_in_proportion() -> None:
    """5,461 calls and as many results of another tool took 1.7 s, for which other keys' long bodies waited."""
    call = GivenCall(function=GivenFunction(name="f", arguments="{}"))

    def taken_ns(count: int) -> int:
        results = [OllamaMessage(role="tool", tool_name="g")] * count
        body = OllamaChatBody(messages=[OllamaMessage(role="assistant", tool_calls=[call] * count), *results])
        begin_ns = time.thread_time_ns()
        asked = body.to_body()["messages"]
        assert [each["tool_call_id"] for each in asked[1:]] == [f"call_0_{at}" for at in range(count)]
        return time.thread_time_ns() - begin_ns

    assert min(taken_ns(4_000) for _ in range(3)) < 40 * min(taken_ns(400) for _ in range(3))
