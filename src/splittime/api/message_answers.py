"""A chat's answer as a message of Anthropic's Messages API, whole (`message`) or event by event (`MessageEvents`).

A message has no fields of ours: clients check it closely. The account is in the headers and in the ledger.
"""

from collections.abc import Iterator
from typing import Any

import orjson

ID_PREFIX = "msg_"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message(body: bytes) -> bytes:
    """Returns the message of a chat's whole answer."""
    chat = orjson.loads(body)
    (choice,) = chat["choices"]
    return orjson.dumps(
        _head(chat) | {"content": list(_blocks(choice["message"]))} | _stop(choice) | {"usage": _usage(chat["usage"])}
    )


def _blocks(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what was said, part by part. A call that was cut has no input that could be given, and is left out."""
    if reasoning := said.get("reasoning_content"):
        yield {"type": "thinking", "thinking": reasoning, "signature": ""}
    calls = [made for call in said.get("tool_calls") or () if (made := _call(call)) is not None]
    if said["content"] or not (reasoning or calls):
        yield {"type": "text", "text": said["content"] or ""}
    yield from calls


def _call(call: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the call with its arguments as they were written, whose numbers may be larger than a reader has."""
    arguments = call["function"]["arguments"]
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    given = orjson.Fragment(arguments)
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def error(status: int, body: bytes) -> bytes:
    """Returns the error in this API's form: its type goes by the status."""
    return orjson.dumps(_error(orjson.loads(body)["error"], status))


def _error(found: dict[str, Any], status: int) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**found, "type": kind}}


class MessageEvents:
    """Turns a chat's stream into a message's. A block opens with its first piece, and closes before the next opens."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = False
        self._num_blocks = 0
        self._open = ""  # the type of the block that is open

    def feed(self, body: bytes) -> bytes:
        """Returns the events that these bytes complete."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        datas = (event.removeprefix(b"data: ") for event in events if event.startswith(b"data: {"))
        return b"".join(_written(each) for data in datas for each in self._events_of(orjson.loads(data)))

    def _events_of(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "error" in chunk:
            yield _error(chunk["error"], 500)
            return
        (choice,) = chunk["choices"]
        if not self._has_begun:
            self._has_begun = True
            head = _head(chunk) | {"content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": head | {"usage": _usage(chunk["usage"])}}
        yield from self._pieces(choice["delta"])
        if choice["finish_reason"] is not None:
            if not self._num_blocks:
                yield from self._begin({"type": "text", "text": ""})
            yield from self._end()
            yield {"type": "message_delta", "delta": _stop(choice), "usage": _usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def _pieces(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields what is new: of the call that is open, then thinking and text, then calls that begin."""
        calls = delta.get("tool_calls") or ()
        for call in calls:
            if "id" not in call and self._open == "tool_use":
                yield from self._arguments(call)
        if thought := delta.get("reasoning_content"):
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": text})
        for call in calls:
            if "id" in call:
                name = call["function"]["name"]
                yield from self._begin({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
                yield from self._arguments(call)

    def _arguments(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if arguments := call["function"]["arguments"]:
            yield self._piece({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._open = block["type"]
        self._num_blocks += 1
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _piece(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = ""


def _written(told: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), orjson.dumps(told))


def _head(chat: dict[str, Any]) -> dict[str, Any]:
    own_id = ID_PREFIX + chat["id"].removeprefix("chatcmpl-")
    return {"id": own_id, "type": "message", "role": "assistant", "model": chat["model"]}


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns why it ended; `stop_reason` in a chat's choice is the stop string that was found."""
    found = choice.get("stop_reason")
    return {"stop_reason": "stop_sequence" if found else STOP_REASONS[choice["finish_reason"]], "stop_sequence": found}


def _usage(counted: dict[str, Any]) -> dict[str, int]:
    """Returns tokens as this API counts them: those read from the cache are not in `input_tokens`."""
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }
