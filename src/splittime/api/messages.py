"""Anthropic's Messages API as an adapter: a body becomes that of a chat, and a chat's answer becomes a message, whole
(`message`) or event by event (`MessageEvents`).

A message has no fields of ours: clients check it closely. The account is in the headers and in the ledger. A last turn
of the assistant's is continued, as the API promises.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from splittime.api.schema import CacheControl, ChatBody, Strict, no_effect

VERSIONS = ("2023-06-01", "2026-10-21")  # the latter took temperature, top_p and top_k away; they are honoured here
ID_PREFIX = "msg_"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesBlock(Strict, kw_only=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: None = None

    def to_chat(self) -> dict[str, str]:
        return {"type": self.type, "text": self.text}


class MessagesTurn(Strict, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[MessagesBlock]

    def to_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": _content(self.content)}


class ThinkingOff(Strict, kw_only=True):
    type: Literal["disabled"]


class CountTokensBody(Strict, kw_only=True):
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    messages: Annotated[list[MessagesTurn], Meta(min_length=1)]
    system: str | list[MessagesBlock] | None = None
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: None = None
    thinking: ThinkingOff | None = None

    def to_chat(self) -> dict[str, Any]:
        """Returns the fields of a chat's body that say what the model reads."""
        head = [] if self.system is None else [{"role": "system", "content": _content(self.system)}]
        turns = [turn.to_chat() for turn in self.messages]
        fields: dict[str, Any] = {"messages": [*head, *turns]}
        if self.model is not None:
            fields["model"] = self.model
        if turns[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        return fields


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, no_effect("labels of the client's.")] = None
    service_tier: Annotated[str | None, no_effect("there is one tier.")] = None

    def to_chat(self) -> dict[str, Any]:
        """Returns a chat's body. A stream's chunks count tokens, since the first event tells those of the prompt."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.stream:
            fields["stream_options"] = {"continuous_usage_stats": True}
        return {**super().to_chat(), **fields}


def _content(given: str | list[MessagesBlock]) -> Any:
    return given if isinstance(given, str) else [block.to_chat() for block in given]


def chat_of(body: CountTokensBody) -> ChatBody:
    return msgspec.convert(body.to_chat(), ChatBody)


def chat_body(body: MessagesBody) -> bytes:
    return msgspec.json.encode(body.to_chat())


# ---- answers


def message(body: bytes) -> bytes:
    """Returns the message of a chat's whole answer."""
    chat = orjson.loads(body)
    (choice,) = chat["choices"]
    return orjson.dumps(
        _head(chat)
        | {"content": [{"type": "text", "text": choice["message"]["content"]}]}
        | _stop(choice)
        | {"usage": _usage(chat["usage"])}
    )


def error(status: int, body: bytes) -> bytes:
    """Returns the error in this API's form: its type goes by the status, and its message says the way out."""
    return orjson.dumps(_error(orjson.loads(body)["error"], status))


def _error(found: dict[str, Any], status: int) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    said = f"{found['message']}; {found['hint']}" if found.get("hint") else found["message"]
    return {"type": "error", "error": {**found, "type": kind, "message": said}}


class MessageEvents:
    """Turns a chat's stream into a message's. A text of one block opens with the first chunk."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = False

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
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        if text := choice["delta"].get("content"):
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        if choice["finish_reason"] is not None:
            yield {"type": "content_block_stop", "index": 0}
            yield {"type": "message_delta", "delta": _stop(choice), "usage": _usage(chunk["usage"])}
            yield {"type": "message_stop"}


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
