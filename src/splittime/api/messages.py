"""Anthropic's Messages API as an adapter: a body becomes that of a chat, and a chat's answer a message, whole
(`message`) or event by event (`MessageEvents`).

A turn's blocks are a chat's messages: results of tools are messages of their own, calls and thinking are fields of the
assistant's. A last turn of the assistant's is continued, as the API promises.

A message has no fields of ours: clients check it closely. The account is in the headers and in the ledger.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from splittime.api.lenient import Ignored
from splittime.api.schema import CacheControl, Label, Strict, hint, no_effect
from splittime.core.errors import RequestError

VERSIONS = ("2023-06-01", "2026-10-21")  # the latter took temperature, top_p and top_k away; they are honoured here

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CUSTOM = (None, "custom")
ONLY_CUSTOM = "offer it as a tool with a name and an input_schema, which your program carries out"
BUDGET = (
    "Most tokens of thinking: behind them it is closed, and the answer goes on. Without effect where there can be no "
    "bound: a model that does not reason, or whose end of reasoning is no token, and gpt-oss where it may call tools."
)


class MessagesBlock(Strict, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, no_effect("of an earlier answer, whose text has been read.")] = None

    def to_chat(self) -> dict[str, str]:
        return {"type": "text", "text": self.text}


class ToolUseBlock(Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """A call, of an answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        arguments = msgspec.json.encode(self.input).decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[MessagesBlock] | None = None
    is_error: Annotated[bool | None, no_effect("the text says it.")] = None
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        content = _content("" if self.content is None else self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ThinkingBlock(Strict, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning, of an answer."""

    thinking: str
    signature: Annotated[str | None, no_effect("reasoning is not signed.")] = None


class RedactedThinkingBlock(Strict, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str | None, no_effect("only who encrypted it can read it.")] = None


class MessagesTurn(Strict, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock]

    def to_chat(self) -> list[dict[str, Any]]:
        """Returns the turn's messages: each result of a tool is one, what is left another."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block.to_chat() for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, MessagesBlock)]
        calls = [block.to_chat() for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        said: dict[str, Any] = {"role": self.role, "content": _content(texts)}
        if calls:
            said["tool_calls"] = calls
        if thoughts:
            said["reasoning_content"] = "\n".join(thoughts)
        return [*results, said] if texts or calls or thoughts or not results else results


class MessagesTool(Strict, kw_only=True):
    """type: one that is not custom is a tool that nobody here runs, which is offered to no model."""

    name: str
    input_schema: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    type: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Chosen calls are held to the schema too.")] = None
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ChosenTool(Strict, kw_only=True):
    """auto, any or none of the tools, or the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="true: at most one call.")] = None

    def to_chat(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": self.name or ""}}
        choice = {"any": "required", "tool": named}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Thinking(Strict, kw_only=True):
    """Whether the model is to reason, where its chat template can tell it (`enable_thinking`), and how much. adaptive:
    as the template has it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, Meta(description=BUDGET)] = None

    def to_chat(self) -> dict[str, Any]:
        is_on = self.type != "disabled"
        fields: dict[str, Any] = {"include_reasoning": is_on}
        if self.type != "adaptive":
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        if is_on and self.budget_tokens is not None:
            fields["thinking_token_budget"] = self.budget_tokens
        return fields


class OutputForm(Strict, kw_only=True):
    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")]


class OutputConfig(Strict, kw_only=True):
    effort: Annotated[str | None, Meta(description="A variable of the chat template, for models that read it.")] = None
    format: Annotated[OutputForm | None, Meta(description="The answer is held to it.")] = None

    def to_chat(self) -> dict[str, Any]:
        fields: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": EFFORTS.get(self.effort, "high")}
        if self.format is not None:
            form = {"name": "output", "schema": self.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        return fields


class CountTokensBody(Strict, kw_only=True):
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    messages: Annotated[list[MessagesTurn], Meta(min_length=1)]
    system: str | list[MessagesBlock] | None = None
    tools: Annotated[list[MessagesTool] | None, Meta(description="That the model may call.")] = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: Annotated[Any, hint("an input is never made shorter; send fewer messages")] = None

    def to_chat(self) -> dict[str, Any]:
        """Returns the fields of a chat's body that say what the model reads."""
        head = [] if self.system is None else [{"role": "system", "content": _content(self.system)}]
        turns = [message for turn in self.messages for message in turn.to_chat()]
        fields: dict[str, Any] = {"messages": [*head, *turns]}
        if self.model is not None:
            fields["model"] = self.model
        if turns[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if tools := [tool.to_chat() for tool in self.tools or () if tool.type in CUSTOM]:
            fields["tools"] = tools
        for chosen in (self.tool_choice, self.thinking, self.output_config):
            fields |= {} if chosen is None else chosen.to_chat()
        return fields


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, no_effect("labels of the client's.")] = None
    service_tier: Annotated[Label | None, no_effect("there is one tier.")] = None

    def to_chat(self) -> dict[str, Any]:
        """Returns a chat's body. A stream's chunks count tokens, since the first event tells those of the prompt."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.stream:
            fields["stream_options"] = {"continuous_usage_stats": True}
        return {**super().to_chat(), **fields}


def _content(given: str | Sequence[MessagesBlock]) -> Any:
    return given if isinstance(given, str) else [block.to_chat() for block in given]


def note_tools(body: CountTokensBody, ignored: Ignored | None) -> None:
    """Notes the tools that are left out. Raises `RequestError` for one that is asked for, or has no schema; without
    `ignored` for each."""
    chosen = None if body.tool_choice is None else body.tool_choice.name
    for index, tool in enumerate(body.tools or ()):
        at = f"tools[{index}]"
        if tool.type in CUSTOM:
            if tool.input_schema is None:
                raise RequestError(f"{at}.input_schema is missing", code="missing_field", param=f"{at}.input_schema")
        elif ignored is None or tool.name == chosen:
            said = f"{at} is of the type {tool.type!r}, which nobody here runs"
            raise RequestError(said, code="unsupported_field", param=f"{at}.type", value=tool.type, hint=ONLY_CUSTOM)
        else:
            ignored.add(f"tools[{index}]", "no tool of this type runs here, so that the model was offered none", "tool")


def chat_body(body: CountTokensBody) -> bytes:
    """Returns the chat's body that asks the same, as JSON: it is read as a client's own, with the same refusals."""
    return msgspec.json.encode(body.to_chat())


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
