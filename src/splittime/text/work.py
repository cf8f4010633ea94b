"""What is done with texts on a server's behalf, as values: a `TextWork` to be carried out, and its `TextDone`.

The same work is carried out by a worker process (`text_process`) or, where that is known to be short, by the server
itself; only this file says how. An answer to a client is written here too where it is as long as the text: to take a
million ids out of a message and to write them down again would hold up the event loop for 0.2 s.
"""

from typing import Any

import msgspec
import orjson

from splittime.core.errors import ErrorInfo, RequestError
from splittime.text.token_bound import num_bytes
from splittime.text.tokenizer import Tokenizer

MESSAGE_CHARS = 16  # what a chat template writes around a message, roughly
SCALAR_CHARS = 8  # of a number, or of true and false
INLINE_NS = 2_000_000  # the loop's other requests wait for so long
FLOOR_CHARS = 1024
WEIGHT = 0.2  # of the latest text


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Texts to token ids. most_tokens: of each; one that has more is refused. answer: fields of a JSON object that is
    to hold the ids of the only text, and their strings if `wants_strings`."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    most_tokens: int | None = None
    answer: dict[str, Any] | None = None
    wants_strings: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))


class Render(msgspec.Struct, frozen=True, tag=True):
    """A chat to a text by the model's template, and that to token ids. options: of the template.
    answer, wants_strings: those of `Encode`."""

    messages: tuple[dict[str, Any], ...]
    options: dict[str, Any] = {}
    add_special_tokens: bool = False
    most_tokens: int | None = None
    answer: dict[str, Any] | None = None
    wants_strings: bool = False

    @property
    def size(self) -> int:
        """A template may write any field of a message, and something of its own."""
        said = sum(MESSAGE_CHARS + _text_size(message) for message in self.messages)
        return said + _text_size(self.options)


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Token ids to a text."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool

    @property
    def size(self) -> int:
        return len(self.token_ids)


TextWork = Encode | Render | Decode


class TextDone(msgspec.Struct, frozen=True, tag=True):
    """ids: of each text, unless they are in `answer`, a JSON object. num_bytes: of the texts that were tokenised."""

    ids: tuple[tuple[int, ...], ...] = ()
    num_bytes: int = 0
    text: str = ""
    answer: bytes = b""


class TextFailed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


TextAnswer = TextDone | TextFailed


def carry_out(work: TextWork, tokenizer: Tokenizer) -> TextDone:
    """Raises the request's error."""
    match work:
        case Decode():
            text = tokenizer.decode(work.token_ids, skip_special_tokens=work.skip_special_tokens)
            return TextDone(text=text)
        case Encode():
            return _encoded(work, work.texts, tokenizer)
        case Render():
            text = tokenizer.render_chat(work.messages, **work.options)
            try:
                return _encoded(work, (text,), tokenizer)
            except RequestError as error:
                error.info = msgspec.structs.replace(error.info, param="messages")
                raise


class InlineTokenizing:
    """Decides which texts are tokenised on the event loop itself: those that surely take less than handing them to
    another process costs. Only texts for a tokenizer that is known to be quick (`text.pieces`) come into question, and
    no chats: a template is a program that may never end.

    How long a text takes is learnt from the texts before it, by the character, as an exponential mean; what a call
    costs however short its text is counts as that of `FLOOR_CHARS`. A slow tokenizer so leaves the loop after its
    first text.

    max_chars: longer texts never are.
    """

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self._ns_per_char = 0.0

    def takes(self, num_chars: int) -> bool:
        return num_chars <= self.max_chars and max(num_chars, FLOOR_CHARS) * self._ns_per_char <= INLINE_NS

    def learn(self, num_chars: int, took_ns: int) -> None:
        latest = took_ns / max(num_chars, FLOOR_CHARS)
        self._ns_per_char += WEIGHT * (latest - self._ns_per_char) if self._ns_per_char else latest


def _encoded(work: Encode | Render, texts: tuple[str, ...], tokenizer: Tokenizer) -> TextDone:
    special, most = work.add_special_tokens, work.most_tokens
    ids = tuple(tuple(tokenizer.encode(text, add_special_tokens=special, most_tokens=most)) for text in texts)
    size = sum(map(num_bytes, texts))
    if work.answer is None:
        return TextDone(ids, size)
    strings = {"token_strs": list(map(tokenizer.id_to_token, ids[0]))} if work.wants_strings else {}
    answer = {"count": len(ids[0]), **work.answer, "tokens": ids[0], **strings}
    return TextDone(num_bytes=size, answer=orjson.dumps(answer))


def _text_size(value: Any) -> int:
    """Characters of all texts in a value of JSON, however deep."""
    size, rest = 0, [value]
    while rest:
        match rest.pop():
            case str() as text:
                size += len(text)
            case dict() as fields:
                rest += fields.keys()
                rest += fields.values()
            case list() | tuple() as values:
                rest += values
            case _:
                size += SCALAR_CHARS
    return size
