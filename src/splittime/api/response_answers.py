"""What a chat's answer becomes in OpenAI's Responses API: a response, whole; in events: `response_events`.

A response repeats what was asked (`asked_fields`). Its output is what a model that reasons wrote before its answer, a
message, and an item for each call, of which there may be some without a message. Where a text stands behind a call, a
stream has it there, as a message of its own; a whole answer has all of its text before the calls, as a chat has.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from splittime.api.responses import Functions, OfferedFunction, ResponsesBody
from splittime.core.sampling import SamplingParams

ID_PREFIX, CHAT_PREFIX = "resp_", "chatcmpl-"
CUT = {"reason": "max_output_tokens"}
NEUTRAL = SamplingParams()

Told = dict[str, Any]  # an event, an item or a response, as it is written


def asked_fields(
    body: ResponsesBody, functions: Functions, defaults: Mapping[str, float | int], *, is_kept: bool
) -> Told:
    """Returns the fields of a response that say what was asked, and what became of what was not. What may be long is
    written here, once, beside the event loop: a stream tells it three times. defaults: the model's, of sampling.
    is_kept: the response is to be stored."""
    sampled = {name: _sampled(body, defaults, name) for name in SAMPLED}
    return {
        "instructions": _written(body.instructions),
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        **sampled,
        "text": _written({"format": _format(body)}),
        "tools": _written([_tool(function) for function in functions.values()]),
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "metadata": body.metadata or {},
        "store": is_kept,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        **WITHOUT_CHOICE,
    }


SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
WITHOUT_CHOICE: Told = {
    "background": False,
    "max_tool_calls": None,
    "service_tier": "default",
    "top_logprobs": 0,
    "truncation": "disabled",
}


def _written(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _sampled(body: ResponsesBody, defaults: Mapping[str, float | int], name: str) -> float:
    given = getattr(body, name)
    return defaults.get(name, getattr(NEUTRAL, name)) if given is None else given  # type: ignore[no-any-return]


def _format(body: ResponsesBody) -> Told:
    asked = None if body.text is None else body.text.format
    return {"type": "text"} if asked is None else msgspec.to_builtins(asked)  # type: ignore[no-any-return]


def _tool(function: OfferedFunction) -> Told:
    told = {name: getattr(function, name) for name in ("type", "name", "description", "parameters")}
    return told | {"strict": function.is_strict}


# ---- whole


def whole(asked: Told, functions: Functions, body: bytes) -> Told:
    """Returns the response of a chat's whole answer."""
    chat = orjson.loads(body)
    (choice,) = chat["choices"]
    output = list(_items(chat, functions, choice["message"]))
    status = output[-1]["status"] = status_of(choice["finish_reason"])
    return response_of(asked, chat, status, output, usage=chat["usage"], timing=chat.get("timing"))


def _items(chat: Told, functions: Functions, message: Told) -> Iterator[Told]:
    """Yields what an answer is made of, all of it completed; an answer of nothing is an empty message."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    num_before = 0
    if reasoning:
        yield reasoning_item(item_id(chat, "rs", 0), reasoning, "completed")
        num_before = 1
    if message["content"] or not (reasoning or calls):
        yield message_item(item_id(chat, "msg", num_before), message["content"] or "", "completed")
        num_before += 1
    for index, call in enumerate(calls, num_before):
        named, arguments = called(functions, call["function"]["name"]), call["function"]["arguments"]
        yield call_item(item_id(chat, "fc", index), call["id"], named, arguments, "completed")


def status_of(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def response_of(
    asked: Told,
    chat: Told,
    status: str,
    output: Sequence[Told] = (),
    *,
    usage: Told | None = None,
    error: Told | None = None,
    timing: Told | None = None,
) -> Told:
    """Returns a response. chat: an answer or a chunk of it, of which the head is read."""
    told = {
        "id": ID_PREFIX + chat["id"].removeprefix(CHAT_PREFIX),
        "object": "response",
        "created_at": chat["created"],
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "error": error,
        "incomplete_details": CUT if status == "incomplete" else None,
        "model": chat["model"],
        "output": list(output),
        "usage": None if usage is None else _usage(usage),
        **asked,
    }
    return told if timing is None else told | {"timing": timing}


def _usage(counted: Told) -> Told:
    cached, of_output = counted["prompt_tokens_details"]["cached_tokens"], counted.get("completion_tokens_details", {})
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": of_output.get("reasoning_tokens", 0)},
        "total_tokens": counted["total_tokens"],
    }


def item_id(chat: Told, kind: str, index: int) -> str:
    return f"{kind}_{chat['id'].removeprefix(CHAT_PREFIX)}_{index}"


def message_item(own_id: str, text: str, status: str) -> Told:
    return {"type": "message", "id": own_id, "status": status, "role": "assistant", "content": [text_part(text)]}


def text_part(text: str) -> Told:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(own_id: str, text: str, status: str) -> Told:
    return {"type": "reasoning", "id": own_id, "status": status, "summary": [], "content": [reasoning_part(text)]}


def reasoning_part(text: str) -> Told:
    return {"type": "reasoning_text", "text": text}


def called(functions: Functions, name: str) -> Told:
    """Returns the names by which the client knows the function that the model called so."""
    function = functions.get(name)
    if function is None or function.namespace is None:
        return {"name": name}
    return {"name": function.name, "namespace": function.namespace}


def call_item(own_id: str, call_id: str, named: Told, arguments: str, status: str) -> Told:
    given = {"call_id": call_id, **named, "arguments": arguments}
    return {"type": "function_call", "id": own_id, "status": status, **given}
