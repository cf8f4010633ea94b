"""What a chat's answer becomes in OpenAI's Responses API: a response, whole (`whole`) or in typed events
(`ResponseEvents`).

A response repeats what was asked (`asked_fields`). Its output is a message, unless there are calls and no text, and an
item for each call. Streamed, items come in the order in which they are written, one after the other, so that a text
behind a call is a message of its own; a whole answer has all of its text before the calls, as a chat has.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from splittime.api.responses import OfferedFunction, ResponsesBody
from splittime.core.sampling import SamplingParams

ID_PREFIX, CHAT_PREFIX = "resp_", "chatcmpl-"
CUT = {"reason": "max_output_tokens"}
NEUTRAL = SamplingParams()

Told = dict[str, Any]  # an event, an item or a response, as it is written


def asked_fields(
    body: ResponsesBody, functions: Sequence[OfferedFunction], defaults: Mapping[str, float | int], *, is_kept: bool
) -> Told:
    """Returns the fields of a response that say what was asked, and what became of what was not. defaults: the model's,
    of sampling. is_kept: the response is to be stored."""
    sampled = {name: _sampled(body, defaults, name) for name in SAMPLED}
    return {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        **sampled,
        "text": {"format": _format(body)},
        "tools": [_tool(function) for function in functions],
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
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
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "top_logprobs": 0,
    "truncation": "disabled",
}


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


def whole(asked: Told, body: bytes) -> Told:
    """Returns the response of a chat's whole answer."""
    chat = orjson.loads(body)
    (choice,) = chat["choices"]
    message, status = choice["message"], _status(choice["finish_reason"])
    calls = message.get("tool_calls", ())
    output: list[Told] = []
    if message["content"] or not calls:
        output.append(_message(_item_id(chat, "msg", 0), message["content"] or "", "completed"))
    for call in calls:
        item_id, function = _item_id(chat, "fc", len(output)), call["function"]
        output.append(_call(item_id, call["id"], function["name"], function["arguments"], "completed"))
    output[-1]["status"] = status
    return _response(asked, chat, status, output, usage=chat["usage"], timing=chat.get("timing"))


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _response(
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
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }


def _item_id(chat: Told, kind: str, index: int) -> str:
    return f"{kind}_{chat['id'].removeprefix(CHAT_PREFIX)}_{index}"


def _text_part(text: str) -> Told:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item_id: str, text: str, status: str) -> Told:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": [_text_part(text)]}


def _call(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Told:
    given = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": item_id, "status": status, **given}


# ---- streamed


class OpenMessage:
    """A message that is being written. Each method returns events, which get their numbers later."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._pieces = item_id, list[str]()
        self._at = {"output_index": index}
        self._part_at = {"item_id": item_id, **self._at, "content_index": 0}

    def item(self, status: str) -> Told:
        return _message(self._id, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        added = {"type": "response.output_item.added", **self._at, "item": self.item("in_progress") | {"content": []}}
        return [added, {"type": "response.content_part.added", **self._part_at, "part": _text_part("")}]

    def add(self, text: str) -> list[Told]:
        self._pieces.append(text)
        return [{"type": "response.output_text.delta", **self._part_at, "delta": text, "logprobs": []}]

    def end(self, status: str) -> list[Told]:
        item = self.item(status)
        (part,) = item["content"]
        return [
            {"type": "response.output_text.done", **self._part_at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **self._part_at, "part": part},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class OpenCall:
    """A call that is being written; as `OpenMessage`."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._id, self._call_id, self._name, self._pieces = item_id, call_id, name, list[str]()
        self._at = {"output_index": index}

    def item(self, status: str) -> Told:
        return _call(self._id, self._call_id, self._name, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        return [{"type": "response.output_item.added", **self._at, "item": self.item("in_progress")}]

    def add(self, arguments: str) -> list[Told]:
        self._pieces.append(arguments)
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, "item_id": self._id, **self._at, "delta": arguments}]

    def end(self, status: str) -> list[Told]:
        item, kind = self.item(status), "response.function_call_arguments.done"
        given = {"name": self._name, "arguments": item["arguments"]}
        return [
            {"type": kind, "item_id": self._id, **self._at, **given},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class ResponseEvents:
    """Turns a chat's stream, which counts its tokens in a chunk at its end, into a response's. at_end: is given the
    response before the event that carries it is written."""

    def __init__(self, asked: Told, at_end: Callable[[Told], None]) -> None:
        self._asked, self._at_end = asked, at_end
        self._rest = b""
        self._num_events = 0
        self._head: Told | None = None  # the first chunk
        self._done: list[Told] = []  # items
        self._open: OpenMessage | OpenCall | None = None
        self._status = "completed"

    def feed(self, body: bytes) -> bytes:
        """Returns the events that these bytes complete."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        return b"".join(map(self._translated, events))

    def _translated(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):
            return event + b"\n\n"  # the end mark
        return b"".join(map(self._written, self._events_of(orjson.loads(data))))

    def _written(self, told: Told) -> bytes:
        numbered = {"type": told["type"], "sequence_number": self._num_events, **told}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), orjson.dumps(numbered))

    def _events_of(self, chunk: Told) -> Iterator[Told]:
        if "error" in chunk:
            yield self._failure(chunk["error"])
            return
        if self._head is None:
            self._head = chunk
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": _response(self._asked, chunk, "in_progress")}
        for choice in chunk["choices"]:
            yield from self._of_delta(choice["delta"])
            if choice["finish_reason"] is not None:
                yield from self._last_item(_status(choice["finish_reason"]))
        if chunk.get("usage") is not None:
            yield self._end(chunk)

    def _of_delta(self, delta: Told) -> Iterator[Told]:
        """Yields what is new: of the call that is open, then of the text, then calls that begin."""
        pieces = delta.get("tool_calls", ())
        for piece in pieces:
            if "id" not in piece and isinstance(self._open, OpenCall):
                yield from self._open.add(piece["function"]["arguments"])
        if text := delta.get("content"):
            if not isinstance(self._open, OpenMessage):
                yield from self._begin(OpenMessage(self._next_id("msg"), self._next_index))
            assert self._open is not None
            yield from self._open.add(text)
        for piece in pieces:
            if "id" in piece:
                yield from self._begin_call(piece)

    def _begin_call(self, piece: Told) -> Iterator[Told]:
        function = piece["function"]
        call = OpenCall(self._next_id("fc"), self._next_index, piece["id"], function["name"])
        yield from self._begin(call)
        if function["arguments"]:
            yield from call.add(function["arguments"])

    def _begin(self, item: OpenMessage | OpenCall) -> Iterator[Told]:
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
            yield from self._begin(OpenMessage(self._next_id("msg"), self._next_index))
        yield from self._close(status)

    def _end(self, chunk: Told) -> Told:
        timing = chunk.get("timing")
        response = _response(self._asked, chunk, self._status, self._done, usage=chunk["usage"], timing=timing)
        self._at_end(response)
        return {"type": f"response.{self._status}", "response": response}

    def _failure(self, error: Told) -> Told:
        code, message = error["code"], error["message"]
        if self._head is None:
            return {"type": "error", "code": code, "message": message, "param": error["param"]}
        output = [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]
        failed = _response(self._asked, self._head, "failed", output, error={"code": code, "message": message})
        return {"type": "response.failed", "response": failed}

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)

    def _next_id(self, kind: str) -> str:
        assert self._head is not None
        return _item_id(self._head, kind, self._next_index)
