"""What a chat's answer becomes in OpenAI's Responses API: a response, whole or in events.

A response repeats what was asked (`asked_fields`). Its output is what a model that reasons wrote before its answer, a
message, and an item for each call, of which there may be some without a message. Where a text stands behind a call, a
stream has it there, as a message of its own; a whole answer has all of its text before the calls, as a chat has.

A chat's stream as the typed events of OpenAI's Responses API.

Items come in the order in which they are written, each open, written and closed before the next begins. Only when the
chunk has come that counts the tokens is the response whole, which its last event carries.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


TEXT, REASONING = "output_text", "reasoning_text"  # kinds of a text, in the names of events


class OpenText:
    """A message or reasoning that is being written. Each method returns events, which get their numbers later.

    kind: of its part's text, in the names of events. item, part: make it of a text."""

    def __init__(
        self, own_id: str, index: int, kind: str, item: Callable[[str, str, str], Told], part: Callable[[str], Told]
    ) -> None:
        self._id, self.kind, self._item, self._part = own_id, kind, item, part
        self._pieces: list[str] = []
        self._at = {"output_index": index}
        self._part_at = {"item_id": own_id, **self._at, "content_index": 0}
        self._beside: Told = {"logprobs": []} if kind == TEXT else {}

    def item(self, status: str) -> Told:
        return self._item(self._id, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        added = {"type": "response.output_item.added", **self._at, "item": self.item("in_progress") | {"content": []}}
        return [added, {"type": "response.content_part.added", **self._part_at, "part": self._part("")}]

    def add(self, text: str) -> list[Told]:
        self._pieces.append(text)
        return [{"type": f"response.{self.kind}.delta", **self._part_at, "delta": text, **self._beside}]

    def end(self, status: str) -> list[Told]:
        item, text = self.item(status), "".join(self._pieces)
        return [
            {"type": f"response.{self.kind}.done", **self._part_at, "text": text, **self._beside},
            {"type": "response.content_part.done", **self._part_at, "part": self._part(text)},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class OpenCall:
    """A call that is being written; as `OpenText`."""

    kind = "function_call_arguments"

    def __init__(self, own_id: str, index: int, call_id: str, named: Told) -> None:
        self._id, self._call_id, self._named = own_id, call_id, named
        self._pieces: list[str] = []
        self._at = {"output_index": index}

    def item(self, status: str) -> Told:
        return call_item(self._id, self._call_id, self._named, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        return [{"type": "response.output_item.added", **self._at, "item": self.item("in_progress")}]

    def add(self, arguments: str) -> list[Told]:
        self._pieces.append(arguments)
        return [{"type": f"response.{self.kind}.delta", "item_id": self._id, **self._at, "delta": arguments}]

    def end(self, status: str) -> list[Told]:
        item = self.item(status)
        given = {"name": self._named["name"], "arguments": item["arguments"]}
        return [
            {"type": f"response.{self.kind}.done", "item_id": self._id, **self._at, **given},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class ResponseEvents:
    """Turns a chat's stream, which counts its tokens in a chunk at its end, into a response's. at_end: is given the
    response before the event that carries it is written."""

    def __init__(self, asked: Told, functions: Functions, at_end: Callable[[Told], None]) -> None:
        self._asked, self._functions, self._at_end = asked, functions, at_end
        self._rest = b""
        self._num_events = 0
        self._head: Told | None = None  # the first chunk
        self._done: list[Told] = []  # items
        self._open: OpenText | OpenCall | None = None
        self._status = "completed"

    def feed(self, body: bytes) -> bytes:
        """Returns the events that these bytes complete."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        return b"".join(piece for event in events for piece in self._translated(event))

    def _translated(self, event: bytes) -> Iterator[bytes]:
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            for told in self._events_of(orjson.loads(data)):
                yield from self._written(told)
        else:
            yield event + b"\n\n"  # the end mark

    def _written(self, told: Told) -> tuple[bytes, ...]:
        """Returns the event's bytes in pieces, as what it repeats may be long. A schema there may have numbers of more
        than 64 bits, which orjson does not write."""
        numbered = {"type": told["type"], "sequence_number": self._num_events, **told}
        self._num_events += 1
        return b"event: %b\ndata: " % told["type"].encode(), msgspec.json.encode(numbered), b"\n\n"

    def _events_of(self, chunk: Told) -> Iterator[Told]:
        if "error" in chunk:
            yield self._failure(chunk["error"])
            return
        if self._head is None:
            self._head = chunk
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": response_of(self._asked, chunk, "in_progress")}
        for choice in chunk["choices"]:
            yield from self._of_delta(choice["delta"])
            if choice["finish_reason"] is not None:
                yield from self._last_item(status_of(choice["finish_reason"]))
        if chunk.get("usage") is not None:
            yield self._end(chunk)

    def _of_delta(self, delta: Told) -> Iterator[Told]:
        """Yields what is new: of the call that is open, then reasoning and text, then calls that begin."""
        pieces = delta.get("tool_calls", ())
        for piece in pieces:
            if "id" not in piece and isinstance(self._open, OpenCall):
                yield from self._open.add(piece["function"]["arguments"])
        if reasoning := delta.get("reasoning_content"):
            yield from self._add(REASONING, reasoning)
        if text := delta.get("content"):
            yield from self._add(TEXT, text)
        for piece in pieces:
            if "id" in piece:
                yield from self._begin_call(piece)

    def _add(self, kind: str, text: str) -> Iterator[Told]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(self._new_text(kind))
        assert self._open is not None
        yield from self._open.add(text)

    def _new_text(self, kind: str) -> OpenText:
        if kind == REASONING:
            return OpenText(self._next_id("rs"), self._next_index, kind, reasoning_item, reasoning_part)
        return OpenText(self._next_id("msg"), self._next_index, kind, message_item, text_part)

    def _begin_call(self, piece: Told) -> Iterator[Told]:
        function = piece["function"]
        named = called(self._functions, function["name"])
        call = OpenCall(self._next_id("fc"), self._next_index, piece["id"], named)
        yield from self._begin(call)
        if function["arguments"]:
            yield from call.add(function["arguments"])

    def _begin(self, item: OpenText | OpenCall) -> Iterator[Told]:
        yield from self._close("completed")
        self._open = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Told]:
        if self._open is not None:
            item, self._open = self._open, None
            self._done.append(item.item(status))
            yield from item.end(status)

    def _last_item(self, status: str) -> Iterator[Told]:
        """Yields the end of the last item; of an empty message where there was none."""
        self._status = status
        if self._open is None:
            yield from self._begin(self._new_text(TEXT))
        yield from self._close(status)

    def _end(self, chunk: Told) -> Told:
        timing = chunk.get("timing")
        response = response_of(self._asked, chunk, self._status, self._done, usage=chunk["usage"], timing=timing)
        self._at_end(response)
        return {"type": f"response.{self._status}", "response": response}

    def _failure(self, error: Told) -> Told:
        code, message = error["code"], error["message"]
        if self._head is None:
            return {"type": "error", "code": code, "message": message, "param": error["param"]}
        output = [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]
        failed = response_of(self._asked, self._head, "failed", output, error={"code": code, "message": message})
        return {"type": "response.failed", "response": failed | {"store": False}}  # only what is whole is kept

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)

    def _next_id(self, kind: str) -> str:
        assert self._head is not None
        return item_id(self._head, kind, self._next_index)
