"""Ollama's API as an adapter: its bodies become those of a chat, of a completion (`raw`) or of embeddings, and their
answers its own objects, whole or one a line. Times are those of the account."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from splittime.api.schema import GivenCall, Strict, no_effect
from splittime.core.errors import RequestError

LEVEL = "0.12.0"  # of Ollama's API: clients ask for its version before they use what came late
STAGES = {"prompt_eval_duration": ("prefill", "prefill_stall"), "eval_duration": ("decode", "decode_stall")}
COUNTS = {"prompt_eval_count": "prompt_tokens", "eval_count": "completion_tokens"}
OPTIONS = "Fields of a chat's body, as temperature, stop and repeat_penalty; num_predict is its max_tokens."
OWN = {"model", "messages", "prompt", "stream", "stream_options", "tools", "echo", "best_of", "n", "response_format"}
REFUSED = {
    "images": "only texts are supported",
    "context": "no context is kept between requests; /api/chat takes all messages",
    "suffix": "infilling is not supported; raw sends a prompt as it is",
    "template": "the model's own template is used; raw sends a prompt as it is",
}


class OllamaBody(Strict, kw_only=True):
    """Fields of every body that is answered by a model."""

    model: Annotated[str | None, Meta(description="A name from /api/tags; default: the model served.")] = None
    options: Annotated[dict[str, Any] | None, Meta(description=OPTIONS)] = None
    keep_alive: Annotated[Any, no_effect("the model stays as long as the server.")] = None


class OllamaGenerating(OllamaBody, kw_only=True):
    stream: Annotated[bool | None, Meta(description="Default: true.")] = None
    format: Annotated[Literal["json", ""] | dict[str, Any] | None, Meta(description="json, or a JSON schema.")] = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def asked(self) -> dict[str, Any]:
        """Returns the fields of a chat's or a completion's body that are not its prompt."""
        given = (self.options or {}).items()
        options = {f"options.{name}" if name in OWN else name: value for name, value in given}
        most = options.pop("num_predict", options.get("max_tokens", -1))
        fields = {**options, "max_tokens": -1 if most == -2 else most, "stream": self.stream is not False, "n": 1}
        if self.format:
            named = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
            fields["response_format"] = {"type": "json_object"} if self.format == "json" else named
        return fields

    def chat_of(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"messages": messages, **self.asked()}
        if self.think is not None:
            fields["include_reasoning"] = bool(self.think)
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
            fields |= {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return fields


class OllamaMessage(Strict, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[GivenCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaGenerating, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def to_body(self) -> dict[str, Any]:
        return self.chat_of(_messages(self.messages or [])) | ({"tools": self.tools} if self.tools else {})


class OllamaGenerateBody(OllamaGenerating, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: Annotated[bool | None, Meta(description="The prompt as it is, without the model's template.")] = None
    images: list[Any] | None = None
    context: list[int] | None = None
    suffix: str | None = None
    template: str | None = None

    def to_body(self) -> dict[str, Any]:
        _refuse({name: getattr(self, name) for name in REFUSED}, "")
        if self.raw and self.prompt:
            return {"prompt": self.prompt, **self.asked()}
        said = (("system", self.system), ("user", self.prompt)) if self.prompt else ()
        return self.chat_of([{"role": role, "content": text} for role, text in said if text])


class OllamaEmbedBody(OllamaBody, kw_only=True):
    input: str | list[str] | None = None
    prompt: Annotated[str | None, Meta(description="The older name, of one input.")] = None
    truncate: Annotated[bool | None, Meta(description="Default: true; what was cut is told in a notice.")] = None
    dimensions: int | None = None

    def to_body(self) -> dict[str, Any]:
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1}
        return {"input": self.prompt or "" if self.input is None else self.input, "dimensions": self.dimensions} | cut


BODIES = (OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaEmbedBody)


def _refuse(given: dict[str, Any], at: str) -> None:
    for name in REFUSED:
        if given.get(name):
            raise RequestError(f"{at}{name}: {REFUSED[name]}", code="unsupported_field", param=at + name)


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns a chat's messages. Where calls have no ids, each result is of the first open call of its tool."""
    messages, calls, named = [], dict[tuple[int, int], str](), defaultdict[str | None, deque[tuple[int, int]]](deque)
    for index, one in enumerate(given):
        _refuse({"images": one.images}, f"messages[{index}].")
        own = enumerate(map(msgspec.to_builtins, one.tool_calls or ()))
        made = [call | {"id": call["id"] or f"call_{index}_{at}"} for at, call in own]
        for at, call in enumerate(made):
            calls[index, at] = call["id"]
            named[call["function"]["name"]].append((index, at))
        call_id = one.tool_call_id
        if one.role == "tool" and call_id is None and calls:
            while (same := named[one.tool_name]) and same[0] not in calls:
                same.popleft()
            call_id = calls.pop(same[0] if same else next(iter(calls)))
        message = {"role": one.role, "content": one.content, "reasoning_content": one.thinking, "tool_call_id": call_id}
        messages.append(message | ({"tool_calls": made} if made else {}))
    return messages


# ---- answers


def written_at(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


class OllamaAnswer:
    """Makes a chat's or a completion's answer one of Ollama's. is_chat: of /api/chat. is_loading: nothing was asked."""

    def __init__(self, *, is_chat: bool, is_loading: bool) -> None:
        self._is_chat, self._is_loading = is_chat, is_loading
        self._rest = b""
        self._calls: dict[int, dict[str, str]] = {}  # of a stream

    def whole(self, body: bytes) -> bytes:
        answer = orjson.loads(body)
        (choice,) = answer["choices"]
        said = choice.get("message") or {"content": choice["text"]}
        calls = [call["function"] for call in said.get("tool_calls") or ()]
        return orjson.dumps(self._piece(answer, said, calls) | self._end(answer, choice))

    def feed(self, body: bytes) -> bytes:
        """Returns the lines that these bytes of a stream complete."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        chunks = (orjson.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {"))
        return b"".join(orjson.dumps(line) + b"\n" for chunk in chunks for line in self._lines(chunk))

    def _lines(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "error" in chunk:
            yield error_of(chunk)
            return
        (choice,) = chunk["choices"]
        said = choice.get("delta") or {"content": choice.get("text")}
        for call in said.get("tool_calls") or ():
            held = self._calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name in held:
                held[name] += call["function"].get(name) or ""
        if (said.get("content") or said.get("reasoning_content")) and not self._is_loading:
            yield self._piece(chunk, said, ())
        if choice["finish_reason"] is not None:
            if self._calls:
                yield self._piece(chunk, {}, self._calls.values())
            yield self._piece(chunk, {}, ()) | self._end(chunk, choice)

    def _piece(self, chunk: dict[str, Any], said: dict[str, Any], calls: Iterable[dict[str, str]]) -> dict[str, Any]:
        text = "" if self._is_loading else said.get("content") or ""
        more: dict[str, Any] = {"thinking": said["reasoning_content"]} if said.get("reasoning_content") else {}
        if made := [{"function": call} for call in map(_call, calls) if call is not None]:
            more["tool_calls"] = made
        message = {"message": {"role": "assistant", "content": text, **more}}
        content = message if self._is_chat else {"response": text, **more}
        return {"model": chunk["model"], "created_at": written_at(chunk["created"]), **content, "done": False}

    def _end(self, answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        reason = "load" if self._is_loading else "length" if choice["finish_reason"] == "length" else "stop"
        counted = {name: answer["usage"][theirs] for name, theirs in COUNTS.items()}
        return {"done": True, "done_reason": reason, **_times(answer["timing"], *STAGES), **counted}


def _call(given: dict[str, str]) -> dict[str, Any] | None:
    """Returns None for a call that was cut: its arguments could not be given as an object."""
    try:
        return {"name": given["name"], "arguments": orjson.loads(given["arguments"])}
    except orjson.JSONDecodeError:
        return None


def _times(account: dict[str, Any], *names: str) -> dict[str, int]:
    """Returns the time of all of it and that of the stages behind these names, in nanoseconds."""
    times = {"total_duration": account["sealed_ns"] - account["start_ns"], "load_duration": 0}
    for name in names:
        stages = (each for each in account["stages"] if each["stage"] in STAGES[name])
        times[name] = sum(each["end_ns"] - each["begin_ns"] for each in stages)
    return times


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Embeddings(msgspec.Struct):
    model: str
    data: list[_Embedding]
    usage: dict[str, int]
    timing: dict[str, Any]


def embedded(body: bytes, *, is_older: bool) -> bytes:
    """Returns the answer of /api/embed; is_older: of /api/embeddings."""
    answer = msgspec.json.decode(body, type=_Embeddings)
    vectors = [each.embedding for each in answer.data]
    counted = {**_times(answer.timing), "prompt_eval_count": answer.usage["prompt_tokens"]}
    whole = {"model": answer.model, "embeddings": vectors, **counted}
    return msgspec.json.encode({"embedding": vectors[0]} if is_older else whole)


def error_of(told: dict[str, Any]) -> dict[str, Any]:
    return {"error": told["error"]["message"]}
