"""How gpt-oss writes an answer: messages with a head, in which their channel stands and whom they are for.

    <|channel|>analysis<|message|>what it thinks<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>what it says<|return|>

What is for a function is a call; of the rest, `analysis` is reasoning and anything else content. Whom a message is for
may stand before its channel too. A text without a head is content.
"""

import re
from collections.abc import Container

from splittime.text.marks import ReasoningPlace, ToldApart, ToldApartParser, overlap

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
