"""What affinity reads of a request: its prompt as bytes to which the next turn of a chat only appends.

Messages (or items of a response's input), and tools and instructions before them, are written in one form (names in
order, no spaces, no nulls), one after the other with nothing around them: a chat's turn begins with the whole of the
turn before. A prompt lacks its closing quote or bracket for the same reason. Nothing of this is sent anywhere;
`prefix_table` keeps hashes of it.
"""

from typing import Any, NamedTuple

import msgspec

MAX_BODY_BYTES = 2**20  # a longer request is passed on, and chosen for by load


class PromptBody(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None
    tools: Any = None
    functions: Any = None
    system: Any = None
    instructions: Any = None
    cache_salt: Any = None


class SaltedPrompt(NamedTuple):
    """text: the prompt in its one form. salt: the client's own, as JSON: prefixes are shared within one."""

    text: bytes
    salt: bytes


def salted_prompt(body: bytes) -> SaltedPrompt | None:
    """Returns the prompt of a request's body; None for one that is too long or cannot be read."""
    if len(body) > MAX_BODY_BYTES:
        return None
    try:
        told = msgspec.json.decode(body, type=PromptBody)
        first = (told.tools, told.functions, told.system, told.instructions)
        before = [_encoded(each) for each in first if each is not None]
        return SaltedPrompt(b"".join([*before, *_pieces(told)]), _encoded(told.cache_salt))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _pieces(told: PromptBody) -> list[bytes]:
    turns = told.input if told.messages is None else told.messages
    if isinstance(turns, list):
        return [_encoded(_without_nulls(turn)) for turn in turns]
    prompt = told.prompt if turns is None else turns
    return [] if prompt is None else [_encoded(prompt)[:-1]]


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
