"""Prompts that users bring: conversations in ShareGPT's form, and requests as JSONL.

ShareGPT's form is one JSON list of `{"conversations": [{"from": "human" | "gpt" | "system", "value": text}, ...]}`;
with OpenAI's names (`messages`, `role`, `content`) it is read too. A line of JSONL is
`{"prompt": text or ids | "messages": [...], "max_tokens": n, "body": {...}, "tags": {...}}`.
What cannot be used is refused with the line or the place in the list; nothing is left out in silence.
"""

from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.loadgen.data_file import bad_file, bad_line, lines, read_text
from splittime.loadgen.schedule import Message

PARAM = "dataset"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
_CONVERSATION_HINT = "It is a list of {conversations: [{from: human or gpt or system, value: text}, ...]}."
_LINE_HINT = "A line is {prompt or messages, max_tokens, body, tags}, all but the first optional."


class FileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of JSONL, as it is to be sent. `body`: more fields for the request."""

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    body: dict[str, Any] = {}
    tags: dict[str, str] = {}


class Turn(msgspec.Struct, frozen=True):
    """What was said until the user's question, and the answer in the file, if there is one."""

    messages: tuple[Message, ...]
    answer: str | None


def read_requests(path: str) -> list[FileRequest]:
    decoder = msgspec.json.Decoder(FileRequest)
    found = []
    for number, line in lines(read_text(path, PARAM)):
        try:
            request = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise bad_line(path, number, str(error), PARAM, _LINE_HINT) from error
        why = _why_unusable(request)
        if why is not None:
            raise bad_line(path, number, why, PARAM, _LINE_HINT)
        found.append(request)
    if not found:
        raise bad_file(path, "there is no request in it", PARAM, _LINE_HINT)
    return found


def _why_unusable(request: FileRequest) -> str | None:
    if (request.prompt is None) == (request.messages is None):
        return "it needs one of prompt and messages"
    if not (request.prompt or request.messages):
        return "its prompt is empty"
    if request.max_tokens is not None and request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; it must be at least 1"
    if any(not isinstance(message.get("role"), str) for message in request.messages or ()):
        return "a message has no role"
    return None


def read_conversations(path: str) -> tuple[list[list[Turn]], int]:
    """The conversations with a question in them, and how many had none."""
    try:
        listed = msgspec.json.decode(read_text(path, PARAM), type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_file(path, str(error), PARAM, _CONVERSATION_HINT) from error
    read = [_turns(_messages(path, place, entry)) for place, entry in enumerate(listed)]
    found = [turns for turns in read if turns]
    if not found:
        raise bad_file(path, "no conversation in it has a question", PARAM, _CONVERSATION_HINT)
    return found, len(read) - len(found)


def _messages(path: str, place: int, entry: dict[str, Any]) -> list[Message]:
    said = entry.get("conversations", entry.get("messages"))
    try:
        return [_message(one) for one in said]  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"conversation {place} cannot be read ({type(error).__name__}: {error})"
        raise bad_file(path, why, PARAM, _CONVERSATION_HINT) from error


def _message(one: dict[str, Any]) -> Message:
    role, text = one.get("from", one.get("role")), one.get("value", one.get("content"))
    if role not in _ROLES:
        raise ValueError(f"{role!r} is not one of {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise TypeError("what was said is no text")
    return {"role": _ROLES[role], "content": text}


def _turns(messages: list[Message]) -> list[Turn]:
    """Cut where the user has spoken and is answered, or where the talk ends. Answers before a question are left out."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    kept = [one for one in messages[:first] if one["role"] == "system"] + messages[first:]
    found = []
    for end, message in enumerate(kept, 1):
        after = kept[end] if end < len(kept) else None
        if message["role"] == "user" and (after is None or after["role"] != "user"):
            is_answered = after is not None and after["role"] == "assistant"
            found.append(Turn(tuple(kept[:end]), after["content"] if after is not None and is_answered else None))
    return found


def as_text(messages: tuple[Message, ...]) -> str:
    """A chat for the completions endpoint: what was said, a line each."""
    if any(not isinstance(message.get("content"), str) for message in messages):
        raise ConfigError("a message that is not text cannot be part of a text prompt", param="prompt_form")
    return "\n".join(message["content"] for message in messages)
