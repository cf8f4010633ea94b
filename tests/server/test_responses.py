"""OpenAI's Responses API: what goes in, what comes out whole and in events, what is stored, what is refused and how."""

import json
import time

import pytest

from patience import until
from splittime.api.limits import ModelInfo
from splittime.api.response_answers import ResponseEvents, whole
from splittime.api.response_items import ItemCall, ItemMessage, chat_messages, items_of
from splittime.server.config import ServerConfig

from .conftest import LiveServer, say
from .fake_engine import FakeEngine
from .test_endings import connect, nothing_left, raw_request

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% for t in tools or () %}{{ t | tojson }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
KEY, OTHER = {"Authorization": "Bearer k"}, {"Authorization": "Bearer other"}
PLAIN = {"model": "fake", "input": "hello"}


def start(text: str, **config: object) -> LiveServer:
    keys = ServerConfig(port=0, api_key=("k", "other"), **config)
    engine = FakeEngine(say(text), cached_tokens=3, step_s=0.0001)
    server = LiveServer(engine, keys, ModelInfo(("fake",), 4096, 257, (256,)), TEMPLATE)
    server.start()
    return server


@pytest.fixture(scope="module")
def live():
    server = start("héllo wörld")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def caller():
    """A model that says something and calls twice."""
    server = start(f"So: {CALL}\n{CALL}")
    yield server
    server.stop()


@pytest.fixture
def endless(launch) -> LiveServer:
    """A model that writes x for ever, where nobody has a key."""
    return launch(say("x", end=False), step_s=0.005)


def post(live: LiveServer, body: dict, **headers: str):
    return live.post("/v1/responses", body, {**KEY, **headers})


def ask(live: LiveServer, **more: object) -> dict:
    status, _, answer = post(live, {**PLAIN, **more})
    assert status == 200, answer
    return answer


def prompt(live: LiveServer) -> str:
    return bytes(live.engine.submitted[-1].prompt_token_ids).decode()


def streamed(live: LiveServer, **more: object) -> list[dict]:
    status, headers, raw = post(live, {**PLAIN, "stream": True, **more})
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream")
    return checked(raw)


def checked(raw: bytes) -> list[dict]:
    """The events of a stream, of which all are held to the order that the API promises."""
    *found, end = raw.decode().split("\n\n")[:-1]
    assert end == "data: [DONE]"
    names, datas = zip(*(event.split("\n") for event in found), strict=True)
    told = [json.loads(data.removeprefix("data: ")) for data in datas]
    assert [name.removeprefix("event: ") for name in names] == [each["type"] for each in told]
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    assert [each["type"] for each in told[:2]] == ["response.created", "response.in_progress"]
    check_items(told)
    return told


def check_items(told: list[dict]) -> None:
    """Each item is opened, written and closed before the next, and the last response has all of them."""
    done: list[dict] = []
    for each in told[2:-1]:
        assert each["output_index"] == len(done)
        if each["type"] == "response.output_item.added":
            written, item_id = "", each["item"]["id"]
            assert each["item"]["status"] == "in_progress"
        elif each["type"] == "response.output_item.done":
            assert each["item"]["id"] == item_id
            said = each["item"].get("arguments")
            assert (each["item"]["content"][0]["text"] if said is None else said) == written
            done.append(each["item"])
        else:
            assert each["item_id"] == item_id
            written += each.get("delta", "")
            assert each.get("text", each.get("arguments", written)) == written
    output = told[-1]["response"]["output"]
    assert (output[: len(done)] if told[-1]["type"] == "response.failed" else output) == done


# ---- what comes out


def test_a_response_has_exactly_the_fields_of_the_api(live: LiveServer) -> None:
    begin_s = int(time.time())
    status, headers, answer = post(
        live, {**PLAIN, "metadata": {"a": "b"}, "temperature": 0.5}, **{"X-Request-Id": "r1"}
    )
    made = (answer.pop("created_at"), answer.pop("completed_at"))
    assert all(begin_s <= each <= time.time() for each in made)
    output_tokens = len("héllo wörld".encode()) + 1
    input_tokens = len("<user>hello")
    part = {"type": "output_text", "text": "héllo wörld", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_r1_0", "status": "completed", "role": "assistant", "content": [part]}
    assert (status, answer) == (200, {
        "id": "resp_r1", "object": "response", "status": "completed", "error": None, "incomplete_details": None,
        "model": "fake", "output": [message], "instructions": None, "previous_response_id": None,
        "max_output_tokens": None, "temperature": 0.5, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "metadata": {"a": "b"}, "store": True, "user": None, "safety_identifier": None, "prompt_cache_key": None,
        "background": False, "max_tool_calls": None, "reasoning": {"effort": None, "summary": None},
        "service_tier": "default", "top_logprobs": 0, "truncation": "disabled",
        "usage": {
            "input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": input_tokens + output_tokens,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    })  # fmt: skip
    assert headers["x-request-id"] == "r1"
    assert "decode" in headers["server-timing"]


def same(response: dict) -> dict:
    """A response without what differs from one time to the next."""
    text = json.dumps({**response, "created_at": 0, "completed_at": 0})
    for call in response["output"]:
        text = text.replace(call.get("call_id", "-"), "call")
    return json.loads(text.replace(response["id"].removeprefix("resp_"), "ID"))


@pytest.mark.parametrize("more", [{}, {"max_output_tokens": 2}, {"instructions": "Be brief.", "store": False}])
def test_a_stream_says_what_the_whole_says(live: LiveServer, more: dict) -> None:
    told = streamed(live, **more)
    assert same(told[-1]["response"]) == same(ask(live, **more))
    assert {each["type"] for each in told[4:-4]} == {"response.output_text.delta"}


def test_calls_whole_and_streamed(caller: LiveServer) -> None:
    made, told = ask(caller, tools=[TOOL]), streamed(caller, tools=[TOOL])
    kinds = [(item["type"], item["status"], item.get("arguments")) for item in made["output"]]
    call = ("function_call", "completed", '{"a": [1]}')
    assert kinds == [("message", "completed", None), call, call]
    assert made["output"][0]["content"][0]["text"] == "So: "
    assert len({item["call_id"] for item in made["output"][1:]}) == 2
    assert made["tools"] == [{**TOOL, "description": None, "strict": True}]
    assert same(told[-1]["response"]) == same(made)
    assert sum(each["type"] == "response.function_call_arguments.delta" for each in told) > 2
    assert caller.engine.submitted[-1].sampling.grammar
    ask(caller, tools=[{**TOOL, "strict": False}])
    assert not caller.engine.submitted[-1].sampling.grammar


def test_reasoning_is_an_item_of_its_own() -> None:
    text = f"<think>\nI am é.\n</think>\n\nyes {CALL}"
    thinker = start(text, reasoning_parser="think")
    try:
        made, told = ask(thinker, tools=[TOOL]), streamed(thinker, tools=[TOOL])
        assert same(told[-1]["response"]) == same(made)
        assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call"]
        assert made["output"][0]["content"] == [{"type": "reasoning_text", "text": "I am é."}]
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} < {each["type"] for each in told}
        num_reasoning = len(text.encode().partition(b"</think>")[0] + b"</think>")
        assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning}
        for most in (2, 12, 16, num_reasoning + 4):
            cut = ask(thinker, max_output_tokens=most)
            assert same(streamed(thinker, max_output_tokens=most)[-1]["response"]) == same(cut)
            assert cut["output"][-1]["status"] == "incomplete"
        gave = {"type": "function_call_output", "call_id": made["output"][2]["call_id"], "output": "7"}
        ask(thinker, previous_response_id=made["id"], input=[gave])
        short = prompt(thinker)
        assert short == '<user>hello<assistant>(I am é.)yes [f {"a": [1]}]<tool>7'
        ask(thinker, input=[{"role": "user", "content": "hello"}, *made["output"], gave])
        assert prompt(thinker) == short
    finally:
        thinker.stop()


def written(output: list[dict]) -> tuple[str, list[str]]:
    """All text of an output, and the arguments of its calls."""
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    return "".join(texts), [item["arguments"] for item in output if item["type"] == "function_call"]


def test_what_is_cut_is_incomplete_at_every_length(caller: LiveServer) -> None:
    whole_tokens = ask(caller, tools=[TOOL])["usage"]["output_tokens"]
    for most in range(1, whole_tokens, 5):
        asked = {"tools": [TOOL], "max_output_tokens": most}
        made, last = ask(caller, **asked), streamed(caller, **asked)[-1]
        assert last["type"] == "response.incomplete"
        assert written(last["response"]["output"]) == written(made["output"])
        for response in (made, last["response"]):
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert (response["status"], response["completed_at"]) == ("incomplete", None)
            states = [item["status"] for item in response["output"]]
            assert states == ["completed"] * (len(states) - 1) + ["incomplete"]
            assert "<tool_call>" not in json.dumps(response["output"])


def chunk(delta: dict, why: str | None = None) -> dict:
    return {"id": "chatcmpl-a", "created": 1, "model": "m", "usage": None, "choices": [
        {"index": 0, "delta": delta, "finish_reason": why}
    ]}  # fmt: skip


def begun(number: int, arguments: str) -> dict:
    return {
        "index": number,
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }


def more_of(number: int, arguments: str) -> dict:
    return {"index": number, "function": {"arguments": arguments}}


USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
END = {**chunk({}), "choices": [], "usage": USAGE}


def events_of(*chunks: dict, size: int | None = None) -> bytes:
    stream = (
        "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in chunks).encode() + b"data: [DONE]\n\n"
    )
    events, kept = ResponseEvents({"store": True}, {}, lambda response: None), []
    for at in range(0, len(stream), size or len(stream)):
        kept.append(events.feed(stream[at : at + (size or len(stream))]))
    return b"".join(kept)


def test_events_do_not_depend_on_how_the_bytes_are_cut(monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 7.0)
    pieces = [{"content": "ä"}, {"tool_calls": [begun(0, '{"a"')]}, {"tool_calls": [more_of(0, ":1}"), begun(1, "{}")]}]
    chunks = [*map(chunk, pieces), chunk({"content": "b"}, "stop"), END]
    at_once = events_of(*chunks)
    items = checked(at_once)[-1]["response"]["output"]
    assert [item.get("arguments", item.get("content")) is not None for item in items] == [True] * 4
    assert [item["type"] for item in items] == ["message", "function_call", "function_call", "message"]
    for size in range(1, 40):
        assert events_of(*chunks, size=size) == at_once


def test_a_chunk_may_end_a_call_and_have_text_and_another_call() -> None:
    both = {"content": "x", "tool_calls": [more_of(0, "1}"), begun(1, "{")]}
    told = checked(events_of(chunk({"tool_calls": [begun(0, "{")]}), chunk(both), chunk({}, "length"), END))
    items = told[-1]["response"]["output"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in items] == ["{1}", "x", "{"]
    assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]


def test_an_answer_without_a_text_is_an_empty_message(monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 7.0)
    response = checked(events_of(chunk({"content": ""}), chunk({}, "stop"), END))[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == ""
    message = {"role": "assistant", "content": ""}
    chat = {**END, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    assert whole({"store": True}, {}, json.dumps(chat).encode()) == response


def test_a_stream_that_fails_says_so_with_what_it_had() -> None:
    error = {"error": {"message": "late", "type": "x", "param": None, "code": "deadline_exceeded"}}
    told = checked(events_of(chunk({"content": "ab"}), error))
    assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.failed", "failed")
    assert told[-1]["response"]["error"] == {"code": "deadline_exceeded", "message": "late"}
    assert (told[0]["response"]["store"], told[-1]["response"]["store"]) == (True, False)
    (alone, end) = events_of(error).decode().split("\n\n")[:-1]
    assert json.loads(alone.split("data: ")[1])["message"] == "late"
    assert end == "data: [DONE]"


def test_a_dead_engine_ends_a_stream_with_a_failed_response(endless: LiveServer) -> None:
    with connect(endless) as client:
        client.sendall(raw_request({"input": "x", "stream": True}, "/v1/responses", "Connection: close\r\n"))
        until(lambda: endless.engine.running and endless.engine.running[0].num_out > 3)
        endless.call(endless.engine.die)
        raw = b"".join(iter(lambda: client.recv(65536), b""))
    *_, last = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: {")]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "engine_died")
    (item,) = last["response"]["output"]
    assert (item["status"], set(item["content"][0]["text"])) == ("incomplete", {"x"})
    assert endless.service.responses.num_bytes == 0


# ---- what goes in


def chat_of(*items: dict, instructions: str | None = None) -> list[dict]:
    return chat_messages(instructions, items_of(items))


def test_items_become_a_chats_messages() -> None:
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]}
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}", "id": "x"} for n in (1, 2)]
    gave = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "d"}]}
    systems = [{"role": "system", "content": "two"}, {"role": "developer", "content": "three"}]
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat_of(*systems, user, said, *calls, gave, *systems[:1], instructions="one") == [
        {"role": "system", "content": "one\n\ntwo\n\nthree"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [{**function, "id": "c1"}, {**function, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "d"},
        {"role": "system", "content": "two"},
    ]
    assert chat_of(user, calls[0], said)[1:] == [
        {"role": "assistant", "content": "c", "tool_calls": [{**function, "id": "c1"}]}
    ]
    assert [each["content"] for each in chat_of(said, said)] == ["c", "c"]


class Apart(str):
    """A text that is not to be copied with each that follows it."""

    def __add__(self, other: str) -> str:
        raise AssertionError(f"{self} is copied")

    __radd__ = __add__


def test_the_texts_of_one_message_are_joined_once() -> None:
    systems = [ItemMessage(role="system", content=Apart(each)) for each in "bcd"]
    assert chat_messages(Apart("a"), systems) == [{"role": "system", "content": "a\n\nb\n\nc\n\nd"}]
    call = ItemCall(call_id="c", name="f", arguments="{}", type="function_call")
    said = [ItemMessage(role="assistant", content=Apart(each)) for each in "xyz"]
    assert [each["content"] for each in chat_messages(None, [call, *said])] == ["xyz"]


def test_a_response_is_asked_of_the_model_as_the_same_chat(live: LiveServer) -> None:
    ask(live, instructions="Be brief.", top_p=0.5, max_output_tokens=7, text={"format": {"type": "json_object"}})
    mine = live.engine.submitted[-1]
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]}
    more = {"top_p": 0.5, "max_tokens": 7, "response_format": {"type": "json_object"}}
    assert live.post("/v1/chat/completions", {**chat, **more}, KEY)[0] == 200
    its = live.engine.submitted[-1]
    assert mine.prompt_token_ids == its.prompt_token_ids
    assert (mine.sampling.top_p, mine.sampling.max_tokens, mine.sampling.grammar) == (0.5, 7, its.sampling.grammar)
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert ask(live, text={"format": schema})["text"]["format"] == {**schema, "description": None}
    assert live.engine.submitted[-1].sampling.grammar


LARGE = {"type": "object", "default": 2**64, "minimum": -(10**30)}


def test_a_prompt_is_counted_and_no_response_can_be_cancelled(live: LiveServer) -> None:
    counted = live.post("/v1/responses/input_tokens", {**PLAIN, "instructions": "Be brief."}, KEY)
    made = ask(live, instructions="Be brief.")
    assert counted[2] == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    answers = [live.post(f"/v1/responses/{each}/cancel", b"", KEY) for each in (made["id"], "resp_none")]
    assert [status for status, *_ in answers] == [400, 404]


def test_a_schema_that_is_repeated_may_have_numbers_of_more_than_64_bits(live: LiveServer) -> None:
    form = {"type": "json_schema", "name": "n", "schema": LARGE}
    more = {"text": {"format": form}, "tools": [{**TOOL, "parameters": LARGE}], "tool_choice": "none"}
    for response in (ask(live, **more), streamed(live, **more)[-1]["response"]):
        assert response["text"]["format"]["schema"] == response["tools"][0]["parameters"] == LARGE
        assert live.get(f"/v1/responses/{response['id']}", **KEY)[2] == response


DEEP: dict = {}
for _ in range(70):
    DEEP = {"not": DEEP}
IMAGE = {"type": "input_image", "image_url": "x"}
GAVE = {"type": "function_call_output", "call_id": "c", "output": ""}
TAKEN = [
    ({"include": ["reasoning.encrypted_content"]}, ["include"]),
    ({"truncation": "auto"}, ["truncation"]),
    ({"truncation": "disabled", "client_metadata": {}, "max_tool_calls": None}, []),
    ({"client_metadata": {"thread_id": "x"}}, []),
    ({"max_tool_calls": 3}, ["max_tool_calls"]),
    ({"stream_options": None, "text": {"verbosity": "low"}}, ["text.verbosity"]),
    ({"text": {"verbosity": "medium"}, "context_management": []}, []),
    ({"context_management": [{"type": "compaction"}]}, ["context_management"]),
    ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, ["tools[0]"]),
    ({"reasoning": {"effort": "low", "summary": "detailed"}}, ["reasoning.summary"]),
    ({"reasoning": {"effort": "low", "summary": "auto"}, "seed": 1, "stop": ["q"], "top_k": 3}, []),
    ({"input": [{"role": "user", "content": "a", "extra": 1}]}, ["input[0].extra"]),
    ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}, {"role": "user", "content": "a"}]}, []),
]


@pytest.mark.parametrize(("more", "told"), TAKEN, ids=[str(more)[:40] for more, _ in TAKEN])
def test_what_changes_no_answer_is_taken_and_told(live: LiveServer, more: dict, told: list[str]) -> None:
    status, headers, answer = post(live, {**PLAIN, **more})
    assert status == 200, answer
    assert ([headers["x-splittime-notice"].partition(" has")[0]] if "x-splittime-notice" in headers else []) == told


def test_functions_of_a_namespace_are_offered_and_tools_of_others_are_not() -> None:
    live = start("ok")
    try:
        inner = {"type": "namespace", "name": "n", "tools": [TOOL, {"type": "custom", "name": "c"}]}
        asked = ask(live, tools=[inner, {**TOOL, "name": "g"}, {"type": "local_shell"}], reasoning={"effort": "high"})
        assert [each["name"] for each in asked["tools"]] == ["f", "g"]
        assert '"f"' in prompt(live)
        assert "local_shell" not in prompt(live)
        assert asked["reasoning"] == {"effort": "high", "summary": None}
    finally:
        live.stop()


def test_a_call_says_of_which_namespace_its_function_is(caller: LiveServer) -> None:
    inner = [{"type": "namespace", "name": name, "tools": [TOOL]} for name in ("n", "m")]
    names = [{"name": "f", "namespace": "n"}] * 2
    for output in (ask(caller, tools=inner)["output"], streamed(caller, tools=inner)[-1]["response"]["output"]):
        assert [{key: call.get(key) for key in ("name", "namespace")} for call in output[1:]] == names
    assert '"m__f"' in prompt(caller)  # as "f" is taken
    assert "namespace" not in ask(caller, tools=[TOOL, inner[0]])["output"][1]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    earlier = [{**call, "namespace": name} for name in ("n", "m", "gone")]
    ask(caller, tools=inner, input=[*earlier, call, {**GAVE, "output": "x"}])
    assert [f"[{name} {{}}]" in prompt(caller) for name in ("f", "m__f", "gone__f", "n__f")] == [
        True,
        True,
        True,
        False,
    ]
    body = {**PLAIN, "tools": [TOOL, TOOL]}
    assert post(caller, body)[2]["error"]["param"] == "tools[1]"


def test_a_summary_stands_for_reasoning_that_another_server_kept() -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]}
    assert chat_of(item) == [{"role": "assistant", "content": None, "reasoning_content": "s"}]


MCP = {"type": "mcp", "server_label": "x"}
REFUSED = [
    ({"background": True}, "background", "stream it"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
    ({"tools": [TOOL, MCP], "tool_choice": "required"}, "tools[1].type", "as a function"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"tools": [{**TOOL, "parameters": 3}]}, "tools[0].parameters", "object"),
    ({"tools": [{**TOOL, "parameters": LARGE}]}, "tools", "write such a number as a text"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "required"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "function_call"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "previous_response_id"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "input_text"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_text"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text", "str"),
    ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "critic"),
    ({"input": [GAVE]}, "input[0].call_id", "before its output"),
    ({"input": []}, "input", "length"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "16"),
    ({"metadata": {"a": "x" * 513}}, "metadata[...]", "512"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"input": "x" * 5000}, "input", "context"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}}}, "text.format.schema", "deeper"),
    ({"temperature": 300}, "temperature", "300"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param", "word"), REFUSED, ids=[param for _, param, _ in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(live: LiveServer, more: dict, param: str, word: str, stream) -> None:
    status, _, answer = post(live, {**PLAIN, "stream": stream, **more})
    error = answer["error"]
    assert (status, error["param"]) == (400, param), error
    assert word in f"{error['message']} {error.get('hint')}"


def test_a_strict_server_takes_back_what_it_has_answered_and_no_field_without_effect() -> None:
    strict = start("ok", strict=True)
    try:
        first = ask(strict)
        ask(strict, input=[{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "b"}])
        for more, param in (
            ({"user": "u"}, "user"),
            ({"input": [{"role": "user", "content": "a", "phase": "commentary"}]}, "input[0].phase"),
        ):
            status, _, answer = post(strict, {**PLAIN, **more})
            assert (status, answer["error"]["param"]) == (400, param)
    finally:
        strict.stop()


def test_other_errors_are_those_of_every_route(live: LiveServer) -> None:
    assert post(live, {**PLAIN, "model": "none"})[2]["error"]["code"] == "model_not_found"
    assert live.post("/v1/responses", PLAIN)[0] == 401
    assert post(live, PLAIN, **{"X-Request-Deadline-Ms": "no"})[0] == 400
    assert live.request("PUT", "/v1/responses", b"{}", KEY)[0] == 405
    assert live.post("/v1/responses", b"{", KEY)[2]["error"]["code"] == "invalid_json"


# ---- what is stored


def test_a_stored_response_is_given_and_forgotten(live: LiveServer) -> None:
    made, told = ask(live), streamed(live)
    kept = [line.split() for line in live.get("/metrics", **KEY)[2].decode().splitlines() if "kept_bytes{" in line]
    responses, records = live.service.responses.num_bytes, live.service.ledger.counts().kept_bytes
    assert {name.split('"')[1]: float(count) for name, count in kept} == {"responses": responses, "records": records}
    assert min(responses, records) > 1000
    for response in (made, told[-1]["response"]):
        at = f"/v1/responses/{response['id']}"
        assert live.get(at, **KEY)[::2] == (200, response)
        assert live.request("DELETE", at, headers=OTHER)[0] == 404
        gone = {"id": response["id"], "object": "response", "deleted": True}
        assert live.request("DELETE", at, headers=KEY)[::2] == (200, gone)
        assert live.get(at, **KEY)[0] == live.request("DELETE", at, headers=KEY)[0] == 404
    kept = ask(live, store=False)
    assert kept["store"] is False
    assert live.get(f"/v1/responses/{kept['id']}", **KEY)[0] == 404
    status, _, answer = live.get(f"/v1/responses/{kept['id']}?stream=true", **KEY)
    assert (status, answer["error"]["param"]) == (400, "stream")


def test_what_a_response_had_as_input_is_listed_in_pages(live: LiveServer) -> None:
    first = ask(live, input="one")
    texts = [{"role": "user", "content": [{"type": "input_text", "text": word}]} for word in ("two", "three")]
    at = f"/v1/responses/{ask(live, input=texts, previous_response_id=first['id'])['id']}/input_items"

    def page(query: str = "") -> tuple[list[str], dict]:
        status, _, answer = live.get(at + query, **KEY)
        assert (status, answer["object"]) == (200, "list")
        return [item["content"][0]["text"] for item in answer["data"] if item["type"] == "message"], answer

    said = first["output"][-1]["content"][0]["text"]
    assert page("?order=asc")[0] == ["one", said, "two", "three"]
    found, whole = page()
    assert (found, whole["has_more"]) == (["three", "two", said, "one"], False)
    assert (whole["first_id"], whole["last_id"]) == (whole["data"][0]["id"], whole["data"][-1]["id"])
    assert len({item["id"] for item in whole["data"]}) == len(whole["data"])
    found, begin = page("?limit=2")
    assert (found, begin["has_more"]) == (["three", "two"], True)
    assert page(f"?limit=3&after={begin['last_id']}")[0] == [said, "one"]
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
        status, _, answer = live.get(f"{at}?{query}", **KEY)
        assert (status, answer["error"]["param"]) == (400, param)
    assert live.get(f"{at}?include=x", **KEY)[2]["error"]["param"] == "include"
    assert live.get(at, **OTHER)[0] == live.get("/v1/responses/resp_0/input_items", **KEY)[0] == 404
    assert live.request("POST", at, b"{}", KEY)[0] == 405


def test_another_keys_response_answers_like_an_unknown_one(live: LiveServer) -> None:
    mine = ask(live)["id"]
    for method in ("GET", "DELETE"):
        answers = [live.request(method, f"/v1/responses/{name}", headers=OTHER) for name in (mine, "resp_" + "0" * 24)]
        (status, _, theirs), (_, _, unknown) = answers
        assert status == 404
        assert theirs == json.loads(json.dumps(unknown).replace("resp_" + "0" * 24, mine))
    for name in (mine, "resp_0"):
        status, _, answer = live.post("/v1/responses", {**PLAIN, "previous_response_id": name}, OTHER)
        assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
        assert answer["error"]["param"] == "previous_response_id"
    assert post(live, {**PLAIN, "previous_response_id": mine})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_going_on_is_sending_everything_again(caller: LiveServer, stream: bool) -> None:
    asked = {"instructions": "One.", "input": "hello", "tools": [TOOL]}
    first = streamed(caller, **asked)[-1]["response"] if stream else ask(caller, **asked)
    calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    gave = [{"type": "function_call_output", "call_id": each, "output": "7"} for each in calls]
    more = {"previous_response_id": first["id"], "instructions": "Two.", "tools": [TOOL], "tool_choice": "none"}
    second = ask(caller, **{**more, "input": gave})
    short = prompt(caller)
    user = {"role": "user", "content": "hello"}
    ask(caller, input=[user, *first["output"], *gave], instructions="Two.")
    assert prompt(caller) == short
    assert short.startswith("<system>Two.<user>hello<assistant>So: [f ")
    assert "One." not in short
    assert second["previous_response_id"] == first["id"]
    third = ask(caller, previous_response_id=second["id"], input="and?", store=False)
    assert prompt(caller) == f"{short.replace('<system>Two.', '')}<assistant>So: {CALL}\n{CALL}<user>and?"
    assert post(caller, {**PLAIN, "previous_response_id": third["id"]})[0] == 404


def test_a_response_that_has_no_room_says_that_it_is_not_stored() -> None:
    small = start("ok", max_stored_response_bytes=4500)
    try:
        assert ask(small, input="x")["store"] is True
        made, told = ask(small, input="x" * 3000), streamed(small, input="x" * 3000)
        assert made["store"] is told[-1]["response"]["store"] is False
        assert small.get(f"/v1/responses/{made['id']}", **KEY)[0] == 404
    finally:
        small.stop()


def test_a_server_that_keeps_none_says_so() -> None:
    none = start("ok", max_stored_responses=0)
    try:
        assert ask(none)["store"] is False
        status, _, answer = post(none, {**PLAIN, "store": True})
        assert (status, answer["error"]["param"]) == (400, "store")
        assert "--max-stored-responses" in answer["error"]["hint"]
    finally:
        none.stop()


# ---- the books


def test_a_response_has_one_account_which_its_id_finds(live: LiveServer) -> None:
    before = len(live.ledger.accounts())
    made = ask(live)
    (account,) = live.ledger.accounts()[before:]
    assert account.endpoint == "chat"
    told = live.get(f"/ledger/requests/{made['id']}", **KEY)[2]
    assert (told["request_id"], told["output_tokens"]) == (account.request_id, made["usage"]["output_tokens"])
    timed = post(live, PLAIN, **{"X-Include-Timing": "1"})[2]["timing"]
    assert timed["stages"][-1]["end_ns"] == timed["sealed_ns"] - timed["start_ns"]


def test_a_client_that_goes_ends_its_response_and_nothing_is_stored(endless: LiveServer) -> None:
    for stream in (False, True):
        with connect(endless) as client:
            client.sendall(raw_request({"input": "x", "stream": stream}, "/v1/responses"))
            until(lambda: len(endless.engine.running) == 1)
        until(lambda: nothing_left(endless))
    assert [account.finish_reason for account in endless.ledger.accounts()] == ["abort", "abort"]
    assert endless.service.responses.num_bytes == 0


def test_a_full_queue_refuses_a_response_at_its_head(live: LiveServer) -> None:
    bounds = live.service.admission.bounds
    before, bounds.max_queued_requests = bounds.max_queued_requests, 0
    try:
        status, headers, answer = post(live, PLAIN)
    finally:
        bounds.max_queued_requests = before
    assert (status, answer["error"]["code"]) == (429, "queued_requests")
    assert headers["retry-after"]
