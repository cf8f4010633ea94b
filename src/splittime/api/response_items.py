"""The items that OpenAI's Responses API takes as input: messages, calls of functions, and what these gave.

Items are read one by one, since a message may leave out its type, and each of another type is refused by name. What a
response had as output may come back as it is: an item's id and status are labels. A chat's messages are made of items:
those with instructions at the beginning become one, since templates take one; reasoning, text and calls that follow
each other are one message of the assistant's.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from splittime.api.decode import convert_part
from splittime.api.lenient import RESPONSES_UNSUPPORTED, Ignored
from splittime.api.schema import Strict, no_effect
from splittime.core.errors import RequestError

BETWEEN_SYSTEM = "\n\n"  # texts of instructions, of which templates take one
TEXT_TYPES = ("input_text", "output_text")
DESCRIBE_IT = "send texts as input_text; write into them what an image, a file or a sound holds"
ITEM_WAYS_OUT = {"item_reference": "send the item itself, or name its response as previous_response_id"}
ONLY_ITEMS = "messages, reasoning, function_call and function_call_output are taken"

ChatMessage = dict[str, Any]


def refused(name: str) -> Meta:
    """Marks a field that is taken only at the value which changes nothing."""
    return Meta(description=RESPONSES_UNSUPPORTED[name], extra_json_schema={"x-effect": "refused"})


class ResponsesPart(Strict, kw_only=True):
    """A part of a body of this API; `refusals` says why a field is not taken at a value that would have an effect."""

    refusals: ClassVar[Mapping[str, str]] = RESPONSES_UNSUPPORTED


class AnyItem(ResponsesPart, kw_only=True):
    id: Annotated[str | None, Meta(description="A label.")] = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, Meta(description="A label.")] = None


class ItemPart(ResponsesPart, kw_only=True):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, Meta(description="Of an earlier answer, whose text is what is read.")] = None
    logprobs: Annotated[Any, Meta(description="Of an earlier answer, whose text is what is read.")] = None


class ItemMessage(AnyItem, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    type: Literal["message"] = "message"
    phase: Annotated[Literal["commentary", "final_answer"] | None, no_effect("no template tells them apart.")] = None

    def add_to(self, chat: list[ChatMessage]) -> None:
        role = "system" if self.role == "developer" else self.role
        if not _goes_on(chat, role):
            chat.append({"role": role, "content": None})
        if chat[-1]["content"] is None:
            chat[-1]["content"] = []
        chat[-1]["content"].append(_text(self.content))


class ReasoningText(ResponsesPart, kw_only=True):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(ResponsesPart, kw_only=True):
    type: Literal["summary_text"]
    text: str


class ItemReasoning(AnyItem, kw_only=True):
    """What a model wrote before the item behind this one; its template decides whether it reads that again."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: Annotated[list[SummaryText] | None, Meta(description="Read where there is no content.")] = None
    encrypted_content: Annotated[Any, no_effect("only who encrypted it can read it.")] = None

    def add_to(self, chat: list[ChatMessage]) -> None:
        text = "\n".join(part.text for part in self.content or self.summary or ())
        if text:
            chat.append({"role": "assistant", "content": None, "reasoning_content": text})


class ItemCall(AnyItem, kw_only=True):
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON, as it came in the response.")]
    type: Literal["function_call"]
    namespace: Annotated[str | None, Meta(description="Of the function: one of that namespace is meant.")] = None
    caller: Annotated[Any, no_effect("calls are the model's own.")] = None

    def add_to(self, chat: list[ChatMessage]) -> None:
        if not chat or chat[-1]["role"] != "assistant":
            chat.append({"role": "assistant", "content": None})
        function = {"name": self.name, "arguments": self.arguments}
        function |= {"namespace": self.namespace} if self.namespace else {}
        chat[-1].setdefault("tool_calls", []).append({"id": self.call_id, "type": "function", "function": function})


class ItemCallOutput(AnyItem, kw_only=True):
    call_id: str
    output: Annotated[str | list[ItemPart], Meta(description="What the function gave.")]
    type: Literal["function_call_output"]

    def add_to(self, chat: list[ChatMessage]) -> None:
        chat.append({"role": "tool", "tool_call_id": self.call_id, "content": [_text(self.output)]})


Item = ItemMessage | ItemReasoning | ItemCall | ItemCallOutput
KINDS: dict[str, type[Item]] = {
    "message": ItemMessage,
    "reasoning": ItemReasoning,
    "function_call": ItemCall,
    "function_call_output": ItemCallOutput,
}


def items_of(given: str | Sequence[dict[str, Any]], ignored: Ignored | None = None) -> list[Item]:
    """Returns the items of an input; a text is a message of the user's. Raises RequestError, which names the place, for
    an item or a part of another type, and for what is wrong in one."""
    if isinstance(given, str):
        return [ItemMessage(role="user", content=given)]
    return [_item(each, f"input[{index}]", ignored) for index, each in enumerate(given)]


def chat_messages(
    instructions: str | None, items: Sequence[Item], earlier: Sequence[ChatMessage] = ()
) -> list[ChatMessage]:
    """Returns the messages of a chat that has these items behind what was said earlier, which stays as it is. A
    message's texts are gathered, and joined when all are there: to copy what there is with each of 16,000 texts took
    seconds."""
    chat = [*earlier[:-1], *map(_opened, earlier[-1:])]
    for item in items:
        item.add_to(chat)
    for message in chat[max(0, len(earlier) - 1) :]:
        if message["content"] is not None:
            message["content"] = (BETWEEN_SYSTEM if message["role"] == "system" else "").join(message["content"])
    return instructed(chat, instructions)


def instructed(chat: Sequence[ChatMessage], instructions: str | None) -> list[ChatMessage]:
    """Returns the chat with instructions before all of it: one message with those that it begins with."""
    if not instructions:
        return list(chat)
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": BETWEEN_SYSTEM.join((instructions, chat[0]["content"]))}, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def _opened(message: ChatMessage) -> ChatMessage:
    """Returns a copy of the message to which more can be added."""
    opened = {**message, "content": None if message["content"] is None else [message["content"]]}
    if "tool_calls" in message:
        opened["tool_calls"] = list(message["tool_calls"])
    return opened


def require_calls(items: Sequence[Item], earlier: Sequence[Container[str]] = ()) -> None:
    """Raises RequestError for an output of a call that no item before it makes. earlier: the calls of a stored
    conversation that they go on from."""
    called = set()
    for index, item in enumerate(items):
        if isinstance(item, ItemCall):
            called.add(item.call_id)
        elif isinstance(item, ItemCallOutput) and not any(item.call_id in made for made in (called, *earlier)):
            raise RequestError(
                f"input[{index}].call_id: no function_call before it has the id {item.call_id!r}",
                param=f"input[{index}].call_id",
                value=item.call_id,
                hint="send the function_call before its output, or name its response as previous_response_id",
            )


def _item(given: dict[str, Any], at: str, ignored: Ignored | None) -> Item:
    named = given.get("type", "message")
    kind = KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        hint = ITEM_WAYS_OUT.get(str(named), ONLY_ITEMS)
        raise _refused(f"{at} is of the type {named!r}, which is not supported", f"{at}.type", named, list(KINDS), hint)
    types = ("reasoning_text", "summary_text") if kind is ItemReasoning else TEXT_TYPES
    for part_at, part_type in _part_types(given, at):
        said = f"{part_at} is of the type {part_type!r}, which is not supported"
        if part_type not in types:
            raise _refused(said, f"{part_at}.type", part_type, list(types), DESCRIBE_IT)
    return convert_part(given, kind, at, ignored)


def _part_types(given: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """Yields the place and the type of each part that has one."""
    for name in ("content", "output"):
        parts = given.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and "type" in part:
                yield f"{at}.{name}[{index}]", part["type"]


def _refused(said: str, param: str, value: Any, limit: list[str], hint: str) -> RequestError:
    return RequestError(said, code="unsupported_field", param=param, value=value, limit=limit, hint=hint)


def _goes_on(chat: list[ChatMessage], role: str) -> bool:
    """Returns whether a message of this role becomes part of the last one: instructions at the beginning do, and what
    stands behind reasoning alone, or behind calls, of the same turn."""
    if not chat or chat[-1]["role"] != role:
        return False
    last = chat[-1]
    return len(chat) == 1 if role == "system" else last["content"] is None or "tool_calls" in last


def _text(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
