"""Where texts are worked on: processes with limits, since a tokenizer and a chat template are somebody else's programs.

The parent (`core.forked`) loads the tokenizer once; a worker shares the vocabulary's memory, and is ended by the kernel
when it takes more processor time or memory than it may.

What is done is a value, a `TextWork`, and so is what comes of it, a `TextDone`. The same work is carried out by a
worker or, where that is known to be short, by the server itself (`carry_out`). An answer to a client is written here
too where it is as long as the text: to take a million ids out of a message and to write them down again would hold up
the event loop for 0.2 s.

Prompts cut to their last tokens, as Hugging Face's tokenizers cut on the left: the special tokens that stand around
a text stay, and of a pair the longer text loses first.
"""

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec

from splittime.core import forked
from splittime.core.errors import EngineError, ErrorInfo, RequestError, SplittimeError
from splittime.core.this_process import share_one_heap
from splittime.text.chat_forms import left_out, with_arguments_read
from splittime.text.foreign_code import is_panic, num_bytes, require_at_most
from splittime.text.tokenizer import Tokenizer

SAMPLE = "a"  # what stands around it stands around any text
Ids = Sequence[int]
MESSAGE_CHARS = 16  # what a chat template writes around a message, roughly
SCALAR_CHARS = 8  # of a number, or of true and false
INLINE_NS = 2_000_000  # the loop's other requests wait for so long
FLOOR_CHARS = 1024
WEIGHT = 0.2  # of the latest text


class KeptTokens(NamedTuple):
    """What is kept of a prompt. whole_len: how many tokens it was, before it was cut."""

    ids: tuple[int, ...]
    whole_len: int


def last_of(ids: Sequence[int], keep_last: int | None) -> KeptTokens:
    """Returns so many last ones of token ids; None for all."""
    return KeptTokens(tuple(ids if keep_last is None else ids[-keep_last:]), len(ids))


def encoded(
    tokenizer: Tokenizer,
    text: str,
    first: str | None,
    add_special_tokens: bool,
    most_tokens: int | None,
    keep_last: int | None,
) -> KeptTokens:
    """Returns the token ids of a text, or of a pair where one stands before it as the first; `keep_last` of them, if
    that says how many. Raises `RequestError` where there are more than `most_tokens`."""
    whole = partial(_whole, tokenizer, text, first, add_special_tokens)
    if keep_last is None:
        return last_of(whole(most_tokens), None)
    texts = [tokenizer.encode(each, add_special_tokens=False) for each in (first, text) if each is not None]
    around, whole_len = _around(tokenizer, len(texts), add_special_tokens), sum(map(len, texts))
    if around is None or whole_len + sum(map(len, around)) <= keep_last:  # as good as never of a long text
        found = last_of(whole(), keep_last)
    else:
        found = KeptTokens(_cut(texts, around, keep_last), whole_len + sum(map(len, around)))
    if most_tokens is not None:
        require_at_most(len(found.ids), most_tokens)
    return found


def _whole(
    tokenizer: Tokenizer, text: str, first: str | None, add_special_tokens: bool, most: int | None = None
) -> tuple[int, ...]:
    if first is not None:
        return tokenizer.encode_pair(first, text, most)
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens, most_tokens=most))


def _around(tokenizer: Tokenizer, num_texts: int, add_special_tokens: bool) -> list[Ids] | None:
    """Returns the special tokens before each text, and those behind the last; None where nothing tells them apart from
    the text."""
    sample, runs = tokenizer.encode(SAMPLE, add_special_tokens=False), list[Ids]()
    rest: Ids = _whole(tokenizer, SAMPLE, None if num_texts == 1 else SAMPLE, add_special_tokens)
    for _ in range(num_texts):
        at = next((at for at in range(len(rest)) if list(rest[at : at + len(sample)]) == sample), None)
        if at is None or not sample:
            return None
        runs.append(rest[:at])
        rest = rest[at + len(sample) :]
    return [*runs, rest]


def _cut(texts: Sequence[Ids], around: Sequence[Ids], kept: int) -> tuple[int, ...]:
    """Returns so many tokens of texts that are more. Where what stands around them leaves them no room, it is cut."""
    room = kept - sum(map(len, around))
    if room > 0:
        sizes = [room] if len(texts) == 1 else _sizes(len(texts[0]), len(texts[1]), room)
        texts = [ids[len(ids) - size :] for ids, size in zip(texts, sizes, strict=True)]
    runs = [run for pair in zip_longest(around, texts, fillvalue=()) for run in pair]
    return tuple(token for run in runs for token in run)[-kept:]


def _sizes(one: int, other: int, room: int) -> tuple[int, int]:
    """Returns how many tokens two texts keep that have more than the room: the longer one loses until both are as long,
    and an odd token more is that of the longer."""
    least = min(one, other, room // 2)
    return (least, room - least) if one <= other else (room - least, least)


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Texts to token ids. most_tokens: of each; one that has more is refused. keep_last: so many last ones of each.
    answer_max_model_len: the ids of the only text are wanted as `Tokens` in JSON, which says this beside them; with
    their strings if `wants_strings`. firsts: of each text, what stands before it as the first of a pair; () for no
    pairs."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True
    most_tokens: int | None = None
    answer_max_model_len: int | None = None
    wants_strings: bool = False
    keep_last: int | None = None
    firsts: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(map(len, self.texts + self.firsts))


class Render(msgspec.Struct, frozen=True, tag=True):
    """A chat to a text by the model's template, and that to token ids. options: of the template. counts_only: how many
    ids there are is wanted, and not they. The others are those of `Encode`."""

    messages: tuple[dict[str, Any], ...]
    options: dict[str, Any] = {}
    add_special_tokens: bool = False
    most_tokens: int | None = None
    answer_max_model_len: int | None = None
    wants_strings: bool = False
    keep_last: int | None = None
    counts_only: bool = False

    @property
    def size(self) -> int:
        """A template may write any field of a message, and something of its own."""
        said = sum(MESSAGE_CHARS + _text_size(message) for message in self.messages)
        return said + _text_size(self.options)


class RenderEach(msgspec.Struct, frozen=True, tag=True):
    """Several chats, each to token ids as `Render` does it."""

    chats: tuple[tuple[dict[str, Any], ...], ...]
    options: dict[str, Any] = {}
    most_tokens: int | None = None

    @property
    def size(self) -> int:
        return sum(Render(chat, self.options).size for chat in self.chats)


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Token ids to a text."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool

    @property
    def size(self) -> int:
        return len(self.token_ids)


TextWork = Encode | Render | RenderEach | Decode


class TextDone(msgspec.Struct, frozen=True, tag=True):
    """ids: of each text, unless they are in `answer`, a JSON object of up to 40 MB that lies where it came. whole_lens:
    how many tokens each text had before it was cut. num_bytes: of the texts that were tokenised. render_ns: how long a
    template took to write a chat. left_out: in words, what it wrote nothing of."""

    ids: tuple[tuple[int, ...], ...] = ()
    whole_lens: tuple[int, ...] = ()
    num_bytes: int = 0
    text: str = ""
    answer: memoryview = memoryview(b"")
    render_ns: int = 0
    left_out: tuple[str, ...] = ()


class Tokens(msgspec.Struct):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str | None] | msgspec.UnsetType = msgspec.UNSET


class TextFailed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


TextAnswer = TextDone | TextFailed


def carry_out(work: TextWork, tokenizer: Tokenizer) -> TextDone:
    """Raises the request's error."""
    match work:
        case Decode():
            text = tokenizer.decode(work.token_ids, skip_special_tokens=work.skip_special_tokens)
            return TextDone(text=text, whole_lens=(len(work.token_ids),))
        case Encode():
            return _encoded(work, work.texts, tokenizer)
        case RenderEach():
            texts = tuple(tokenizer.render_chat(chat, **work.options) for chat in work.chats)
            return _encoded(Encode(texts, False, work.most_tokens), texts, tokenizer)
        case Render():
            begin_ns = monotonic_ns()
            chat = with_arguments_read(work.messages, tokenizer.chat_templates.get("default", ""))
            text = tokenizer.render_chat(chat, **work.options)
            render_ns = monotonic_ns() - begin_ns
            told = left_out(chat, work.options.get("tools"), text)
            try:
                done = _encoded(work, (text,), tokenizer)
                return msgspec.structs.replace(done, render_ns=render_ns, left_out=told)
            except RequestError as error:
                error.info = msgspec.structs.replace(error.info, param="messages")
                raise


class InlineTokenizing:
    """Decides which texts are tokenised on the event loop itself: those that surely take less than handing them to
    another process costs. Only texts for a tokenizer that is known to be quick (`foreign_code.is_quick`) come into
    question, and no chats: a template is a program that may never end.

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
    each = tuple(_encoded_each(work, texts, tokenizer))
    ids, size = tuple(one.ids for one in each), sum(map(num_bytes, texts))
    if work.answer_max_model_len is None:
        counts_only = isinstance(work, Render) and work.counts_only
        return TextDone(() if counts_only else ids, tuple(one.whole_len for one in each), size)
    strings = list(map(tokenizer.id_to_token, ids[0])) if work.wants_strings else msgspec.UNSET
    answer = Tokens(len(ids[0]), work.answer_max_model_len, ids[0], strings)
    return TextDone(whole_lens=(each[0].whole_len,), num_bytes=size, answer=memoryview(msgspec.json.encode(answer)))


def _encoded_each(work: Encode | Render, texts: tuple[str, ...], tokenizer: Tokenizer) -> Iterator[KeptTokens]:
    """Yields the ids of each text. Raises `RequestError`, which names one of several texts by its index."""
    firsts = work.firsts if isinstance(work, Encode) else ()
    for index, text in enumerate(texts):
        try:
            first, special = firsts[index] if firsts else None, work.add_special_tokens
            yield encoded(tokenizer, text, first, special, work.most_tokens, work.keep_last)
        except RequestError as error:
            if len(texts) > 1:
                error.info = msgspec.structs.replace(error.info, param=f"{error.info.param}[{index}]")
            raise


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


# ---- the process


def main() -> None:
    share_one_heap()
    tokenizer = ready_tokenizer(forked.description())
    forked.serve(lambda channel, limits: _be_worker(channel, tokenizer, limits))


def ready_tokenizer(description: bytes) -> Tokenizer:
    """Returns the tokenizer, with what is proved of it looked up before anybody forks: 0.1 s for 150,000 tokens."""
    tokenizer = Tokenizer.described(description)
    _ = tokenizer.shortcuts
    return tokenizer


def _be_worker(channel: socket.socket, tokenizer: Tokenizer, limits: forked.ForkLimits) -> None:
    """Answer one work after the other until the server closes the socket."""
    forked.begin(channel, limits)
    decoder, encoder = msgspec.msgpack.Decoder(TextWork), msgspec.msgpack.Encoder()
    forked.answer_each(channel, limits.cpu_s, lambda message: encoder.encode(_answer(decoder, message, tokenizer)))


def _answer(decoder: "msgspec.msgpack.Decoder[TextWork]", message: bytes, tokenizer: Tokenizer) -> TextAnswer:
    try:
        done: TextDone = carry_out(decoder.decode(message), tokenizer)
        return done
    except SplittimeError as error:
        return TextFailed(error.info)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        words = f"a text worker failed: {type(error).__name__}: {str(error)[:200]}"
        return TextFailed(EngineError(words, code="text_worker_failed").info)


if __name__ == "__main__":
    main()
