"""Marks in a text that comes in pieces: what may be the beginning of one, a mark whatever the white space in it, how
often what is undecided is looked at, and where an answer begins.

How gpt-oss writes an answer: messages with a head, in which their channel stands and whom they are for.

    <|channel|>analysis<|message|>what it thinks<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>what it says<|return|>

What is for a function is a call; of the rest, `analysis` is reasoning and anything else content. Whom a message is for
may stand before its channel too. A text without a head is content.
"""

import re
from collections import deque
from collections.abc import Container
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

SHORT_CHARS = 512  # of what is undecided: it is looked at with each piece
GROWTH = 16  # what is longer is looked at again when it has grown by this part of it
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CALL_END = "<|call|>"
CALL_BEGIN, CALL_NAMED = f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}"
THOUGHT, THOUGHT_END = f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant"
ANSWER = f"{CHANNEL}final{MESSAGE}"
OTHER_CHANNELS = (f"{CHANNEL}final", f"{CHANNEL}commentary")  # than that of reasoning, whatever else their heads say
MOST_HEAD_CHARS = 1024
_ENDS = ("<|end|>", "<|return|>", CALL_END)
_MARKS = (*_ENDS, START, CHANNEL)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_NAME = re.compile(r"[\w.-]+")  # of a function
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_HEAD_BEGINS = (START, CHANNEL, "to=")


class ReasoningPlace(StrEnum):
    """Where an answer begins. before: it may begin with reasoning. within: its prompt has opened it. behind: its prompt
    has closed it, or its text goes on."""

    BEFORE = "before"
    WITHIN = "within"
    BEHIND = "behind"


class ToldApart(NamedTuple):
    reasoning: str
    content: str


class Undecided:
    """Holds pieces of a text back until it is worth looking at what is undecided once more: so the work is in
    proportion to the text, in how many pieces it comes and however long nothing can be decided."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_chars = 0

    def grown(self, text: str, piece: str, *, is_end: bool) -> str | None:
        """Returns the undecided text with all that has come behind it; None where that is to wait for more. is_end: no
        other piece follows."""
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if not is_end and len(text) > SHORT_CHARS and self._num_chars * GROWTH < len(text):
            return None
        whole = text + "".join(self._pieces)
        self._pieces, self._num_chars = [], 0
        return whole


class ToldApartParser:
    """Tells reasoning from content. Give it the answer's text in pieces, and of each token where in it that begins."""

    def __init__(self) -> None:
        self._text, self._undecided = "", Undecided()  # what has come and is not decided yet
        self._num_chars = 0  # of what has come
        self._offsets: deque[int] = deque()  # of tokens in what is not decided yet
        self._num_tokens = 0

    def note_token(self, offset: int) -> None:
        """A token begins at this character of the answer."""
        self._offsets.append(offset)

    def push(self, text: str, *, is_end: bool = False) -> ToldApart:
        """Returns what this piece makes sure. is_end: no other piece follows."""
        grown = self._undecided.grown(self._text, text, is_end=is_end)
        if grown is None:
            return ToldApart("", "")
        self._num_chars += len(grown) - len(self._text)
        self._text = grown
        return self._told_apart(is_end)

    def _told_apart(self, is_end: bool) -> ToldApart:
        raise NotImplementedError


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of the text that begins the mark and is not all of it."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def trigger(mark: str) -> str:
    """Returns the mark up to its first white space: what is looked for in a text."""
    return mark.split()[0] if mark.strip() else ""


def last_word(mark: str) -> str:
    """Returns the mark from its last white space on."""
    return mark.split()[-1] if mark.strip() else ""


def behind(text: str, mark: str) -> str | None:
    """Returns what follows the mark that the text begins with, whatever the white space before and in it; the text
    itself where it does not begin so, None where that is not known yet."""
    found = _loosely(mark).match(text)
    if found is not None:
        return text[found.end() :]
    return None if _beginning(mark).fullmatch(text) else text


@lru_cache(maxsize=256)
def _loosely(mark: str) -> re.Pattern[str]:
    return re.compile(r"\s*" + r"\s*".join(map(re.escape, mark.split())))


@lru_cache(maxsize=256)
def _beginning(mark: str) -> re.Pattern[str]:
    """Matches all of a text that may yet become this mark."""
    pattern = ""
    for word in reversed(mark.split()):
        for character in reversed(word):
            pattern = rf"(?:{re.escape(character)}{pattern})?"
        pattern = rf"\s*{pattern}"
    return re.compile(pattern)


class HarmonyParser(ToldApartParser):
    """tools: whose calls are passed on among the content for a `ToolParser`, in one form whatever their head was; where
    there are any, those of a function that is unknown too. What else is for somebody is content, without its head."""

    def __init__(self, place: ReasoningPlace, tools: Container[str]) -> None:
        super().__init__()
        self._tools, self._has_tools = tools, bool(tools)
        self._is_in_head = place is ReasoningPlace.BEFORE
        self._is_reasoning = place is ReasoningPlace.WITHIN
        self._called, self._is_in_call = "", False  # the tool, until its arguments begin; and whether they have
        self._said = ["", ""]

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far, with its marks."""
        return self._num_tokens + (len(self._offsets) if self._is_reasoning and not self._is_in_head else 0)

    def _told_apart(self, is_end: bool) -> ToldApart:
        self._said = ["", ""]
        while self._head(is_end) if self._is_in_head else self._body(is_end):
            pass
        return ToldApart(*self._said)

    # ---- each returns whether there is more to do with what has come

    def _head(self, is_end: bool) -> bool:
        bare, at = self._text.lstrip(), self._text.find(MESSAGE, 0, MOST_HEAD_CHARS)
        may_be_head = any(mark.startswith(bare[: len(mark)]) for mark in _HEAD_BEGINS)
        if may_be_head and at >= 0:
            self._open(self._text[:at])
            self._take(at + len(MESSAGE))
            return True
        is_cut_off = is_end and (not bare or bare.startswith(("<", "to=")))
        if not may_be_head or len(bare) > MOST_HEAD_CHARS or (is_end and not is_cut_off):
            self._open("")
            begun = next((mark for mark in (START, CHANNEL) if bare.startswith(mark)), "")
            self._take(len(self._text) - len(bare) + len(begun) if begun else 0)
            return True
        if is_cut_off:
            self._take(len(self._text))
        return False

    def _open(self, head: str) -> None:
        """A message begins. head: what stands before its text; "" for none."""
        channel = head.rpartition(CHANNEL)[2]
        recipient = _RECIPIENT.search(head)
        is_call = recipient is not None and (
            recipient[1] in self._tools
            or (self._has_tools and "to=functions." in head and _NAME.fullmatch(recipient[1]) is not None)
        )
        self._called = recipient[1] if is_call else ""  # type: ignore[index]
        self._is_reasoning = recipient is None and channel.strip().startswith("analysis")
        self._is_in_head = False

    def _body(self, is_end: bool) -> bool:
        bare = self._text.lstrip()
        if self._called and not bare and not is_end:
            return False
        if self._called:
            self._is_in_call = bare.startswith("{")
            self._say(CALL_BEGIN + self._called + CALL_NAMED if self._is_in_call else "")
            self._called = ""
        found = _MARK.search(self._text)
        if found is None:
            held = 0 if is_end else max(overlap(self._text, mark) for mark in _MARKS)
            self._say(self._take(len(self._text) - held))
            return False
        self._say(self._take(found.start()))
        if found[0] in _ENDS:
            self._take(len(found[0]))
        if self._is_in_call:
            self._say(CALL_END)
        self._is_in_head, self._is_in_call, self._is_reasoning, self._called = True, False, False, ""
        return True

    def _say(self, text: str) -> None:
        self._said[0 if self._is_reasoning else 1] += text

    def _take(self, size: int) -> str:
        """Returns so much of what has come, which is decided with that, as are its tokens."""
        taken, self._text = self._text[:size], self._text[size:]
        end = self._num_chars - len(self._text)
        while self._offsets and self._offsets[0] < end:
            self._offsets.popleft()
            self._num_tokens += self._is_reasoning
        return taken
