"""Loops of agents with tools, as their programs ran them against this server (`recorded`): each request is served
again, and the calls that a scripted model makes come back, streamed and whole. Their own texts are not kept."""

import json
import re
from pathlib import Path

import llguidance
import pytest

from server.conftest import EOS, LiveServer, say
from server.fake_engine import FakeEngine
from splittime.api.decode import convert_part
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.api.responses import ResponsesBody, functions_of
from splittime.server.config import ServerConfig
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls
from text.vocabularies import vocabulary

TEMPLATE = """{% if tools %}<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
<tool_call></tool_call>{% endif %}{% for m in messages %}
{% if m.role not in ("system", "user", "assistant", "tool") %}{{ raise_exception("role") }}{% endif %}
<|{{ m.role }}|>{{ m.content or "" }}{% for c in m.tool_calls or () %}
<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}
<|assistant|>"""
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "recorded").iterdir())}
TURNS = [(name, turn) for name, loop in RECORDED.items() for turn in range(len(loop["lengths"]))]
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@pytest.fixture(scope="module")
def live():
    names = tuple({loop["body"]["model"] for loop in RECORDED.values()})
    engine = FakeEngine(say("ok"), step_s=0.0001, prefill_chunk=10**6)
    server = LiveServer(engine, ServerConfig(port=0), ModelInfo(names, 10**6, EOS + 1, (EOS,)), TEMPLATE)
    server.start()
    yield server
    server.stop()


def of_chat(answer: dict) -> tuple[str, list]:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", [(call["name"], json.loads(call["arguments"])) for call in calls]


def of_chunks(events: list[dict]) -> tuple[str, list]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        call = calls.setdefault(piece["index"], [piece["function"].get("name"), ""])
        call[1] += piece["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def of_response(answer: dict) -> tuple[str, list]:
    items = answer["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [item for item in items if item["type"] == "function_call"]
    return text, [(call["name"], json.loads(call["arguments"])) for call in calls]


def of_message(answer: dict) -> tuple[str, list]:
    blocks = answer["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def of_message_events(events: list[dict]) -> tuple[str, list]:
    blocks: dict[int, dict] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "text": "", "written": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            block["text"] += delta.get("text", "")
            block["written"] += delta.get("partial_json", "")
    found = [block | {"input": json.loads(block["written"] or "{}")} for block in blocks.values()]
    return of_message({"content": found})


READ = {
    "/v1/chat/completions": (of_chat, of_chunks),
    "/v1/responses": (of_response, lambda events: of_response(events[-1]["response"])),
    "/v1/messages": (of_message, of_message_events),
}


def asked(live: LiveServer, loop: dict, turn: int, *, stream: bool):
    """Returns the text and the calls that came of this turn, and the notice."""
    history = "input" if "input" in loop["body"] else "messages"
    body = {key: value for key, value in loop["body"].items() if key not in ("stream", "stream_options")}
    body[history] = body[history][: loop["lengths"][turn]]
    live.engine.script = say(loop["said"][turn])
    status, headers, answer = live.post(loop["path"], {**body, "stream": stream}, loop["headers"])
    assert status == 200, answer
    whole, streamed = READ[loop["path"]]
    if stream:
        written = answer if isinstance(answer, str) else answer.decode()
        answer = [json.loads(line[6:]) for line in written.splitlines() if line.startswith("data: {")]
    return (streamed if stream else whole)(answer), headers.get("x-splittime-notice")


@pytest.mark.parametrize(("name", "turn"), TURNS, ids=lambda value: str(value))
def test_a_turn_of_an_agent_is_served_streamed_and_whole(live: LiveServer, name: str, turn: int) -> None:
    loop = RECORDED[name]
    said = loop["said"][turn]
    calls = [(call["name"], call["arguments"]) for call in map(json.loads, CALL.findall(said))]
    whole, notice = asked(live, loop, turn, stream=False)
    streamed, told = asked(live, loop, turn, stream=True)
    assert whole == streamed
    assert (whole[0].strip(), whole[1]) == (CALL.sub("", said).strip(), calls)
    assert notice == told == loop["notice"]


@pytest.mark.parametrize("name", RECORDED)
def test_no_call_and_no_result_of_a_conversation_is_lost(live: LiveServer, name: str) -> None:
    loop, last = RECORDED[name], len(RECORDED[name]["lengths"]) - 1
    asked(live, loop, last, stream=False)
    prompt = bytes(live.engine.submitted[-1].prompt_token_ids).decode()
    num_calls = sum(len(CALL.findall(said)) for said in loop["said"][:last])
    assert prompt.count("<|tool|>") == num_calls
    assert prompt.count("<tool_call>") == num_calls + bool(loop["body"].get("tools"))


def tools_of(loop: dict) -> list[Tool]:
    body = loop["body"]
    if "input" in body:
        return [
            Tool(name, function.parameters, False)
            for name, function in functions_of(convert_part(body, ResponsesBody, "", Ignored()), Ignored()).items()
        ]
    given = [tool.get("function", tool) for tool in body.get("tools", ())]
    return [Tool(tool["name"], tool.get("parameters") or tool["input_schema"], False) for tool in given]


@pytest.fixture(scope="module")
def tokens():
    return vocabulary()[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_of_any_agents_tools_can_be_held_to(tokens, family: str) -> None:
    for name, loop in RECORDED.items():
        if tools := tools_of(loop):
            made = grammar_of_calls(FAMILIES[family], tools, may_answer=True, may_repeat=False)
            matcher = llguidance.LLMatcher(tokens, made, log_level=0)
            assert not matcher.is_error(), (name, matcher.get_error())
