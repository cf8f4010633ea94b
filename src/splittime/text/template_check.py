"""Does each prompt of a conversation begin with the one before? Proved by rendering, with no server and no model.

    check_template(source, special_tokens, encode) -> tuple[TurnCheck, ...]

A prefix cache gives a turn what its prompt and the one before have in common, from the start on. `CASES` grow as agents
and chats do: each state is the one before, what the model answered, and what came next. Of each turn:

holds    the prompt begins with the one before, and goes on with the answer that the model gave
answer   all messages of the prompt before come back: the answer to them is computed again, and what opened it
         (or it is written otherwise than the model gave it)
history  it differs earlier: all from there on is computed again, in a long conversation nearly everything
refused  the template refuses the conversation

Messages are alike long here: of a long conversation the same part is lost (`TurnCheck.tokens_again`). Without `encode`
a token is counted as `CHARS` characters.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import jinja2.meta
import msgspec

from splittime.core.errors import RequestError
from splittime.text.reasoning import reasoning_of_template
from splittime.text.tokenizer import ChatTemplate, environment

HOLDS, ANSWER, HISTORY, REFUSED = "holds", "answer", "history", "refused"
CHARS = 4
SHOWN, NEAR, _NAME = 60, 80, 12  # characters: of a difference, from it to what explains it, of a mark
START = datetime(2026, 11, 29, 10, 30)
STEP = timedelta(hours=1, minutes=7, seconds=13)  # from turn to turn of a day: whatever is told of the hour, it changes
_TEXT = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}, "required": ["word"]}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "looks up a word", "parameters": _TEXT}}]

Encode = Callable[[str], Sequence[Any]]
Turn = dict[str, Any]
Block = re.Pattern[str]  # an empty one of thoughts


class Case(NamedTuple):
    """How a conversation grows. script: S a system's message, U a user's, A an answer, C a call and its result, P two
    calls at once and theirs; a prompt is made before each answer or call, and at the end. thinks: the model thinks
    first, and its thoughts are sent back. flags: how flags of the request are set, by turns. days: that pass between
    the first prompt and the others."""

    name: str
    script: str
    thinks: bool = False
    flags: tuple[str, ...] = ("on",)
    days: int = 0


CASES = (
    Case("chat", "SUAUAU"),
    Case("chat, thinking off", "SUAUAU", flags=("off",)),
    Case("chat, thoughts sent back", "SUAUAU", thinks=True),
    Case("calls", "SUCCAU"),
    Case("calls, thinking off", "SUCCAU", flags=("off",)),
    Case("calls, thoughts sent back", "SUCCAUCAU", thinks=True),
    Case("two calls at once", "SUPAU"),
    Case("a system's message later", "SUASUAU"),
    Case("thinking switched", "SUAUAU", flags=("on", "off")),
    Case("effort switched", "SUAUAU", flags=("low", "high")),
    Case("the next day", "SUAUAU", days=1),
)
_FLAGS: dict[str, dict[str, Any]] = {
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
    "low": {"reasoning_effort": "low"},
    "high": {"reasoning_effort": "high"},
}
CAUSES = {
    "clock": "the hour is written into the prompt: write the date alone",
    "date": "the date of the day is written into the prompt: give it in a message behind what stays",
    "flag": "a flag of the request is written before the history: set it once a conversation",
    "system": "a system's message is written before what came earlier: send it as a user's",
    "thoughts": "thoughts of earlier turns are dropped: have the template keep them, or drop each at once",
    "empty block": "an empty block of thoughts is written in one turn and not in the next: write it always or never",
    "otherwise": "the answer is written otherwise than the model gave it, or left out",
    "opening": "what opens an answer is not written before answers of the history: the latest one alone is lost",
    "moves": "what stood here comes later now: it moves with the latest message, or something is put before it",
    "gone": "what stood here is not written any more",
}


class TurnCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's prompt beside the one before. at: the first token that differs, of so many of the prompt before
    (`tokens`); before, now: what is written there. cause: of `CAUSES`. breaks: the history is computed again though the
    client only went on."""

    case: str
    turn: int
    verdict: str
    at: int = 0
    tokens: int = 0
    before: str = ""
    now: str = ""
    cause: str = ""
    breaks: bool = False

    def tokens_again(self, context: int) -> int:
        """Returns how many tokens of a history of this length are computed again, where it is more than the answer."""
        return round(context * (1 - self.at / max(1, self.tokens))) if self.verdict == HISTORY else 0


def check_template(
    source: str, special_tokens: Mapping[str, str], encode: Encode | None = None
) -> tuple[TurnCheck, ...]:
    """Returns what becomes of each turn of each case that the template has a word for. Raises ConfigError for one that
    does not parse."""
    clock = [START]  # what the template is told of the time
    template = ChatTemplate(source, special_tokens, lambda: clock[0])
    names = jinja2.meta.find_undeclared_variables(environment().parse(source))
    marks = reasoning_of_template(source, None)
    block = re.compile(rf"{re.escape(marks.begin)}\s*{re.escape(marks.end)}" if marks else "(?!)")
    pieces = re.compile(f".{{1,{CHARS}}}", re.DOTALL).findall
    cases = (case for case in CASES if _concerns(case, names, source))
    return tuple(found for case in cases for found in _checked(case, template, clock, block, encode or pieces))


def _concerns(case: Case, names: set[str], source: str) -> bool:
    """Whether the template has what the case is about; else it is a case that is there already."""
    if case.days or case.thinks:
        return ("strftime_now" if case.days else "reasoning") in source
    return case.flags == ("on",) or any(flag in names for flag in _FLAGS[case.flags[-1]])


def _checked(
    case: Case, template: ChatTemplate, clock: list[datetime], block: Block, encode: Encode
) -> Iterator[TurnCheck]:
    earlier, clock[0] = ("", 0), START
    for turn, chat in enumerate(_grown(case)):
        flags, tools = _FLAGS[case.flags[turn % len(case.flags)]], TOOLS if set("CP") & set(case.script) else None
        render = partial(template.render, chat, tools=tools, variables=flags)
        try:
            still = render()
            clock[0] = START + (timedelta(days=min(turn, case.days)) if case.days else turn * STEP)
            text, last = render(), chat[-1]["content"]
            end = text.rfind(last) + len(last) if last in text else _num_same(text, render(add_generation_prompt=False))
        except RequestError as error:
            yield TurnCheck(case=case.name, turn=turn + 1, verdict=REFUSED, now=error.info.message)
            return
        if turn:
            yield _compared(case, turn + 1, chat, earlier, text, still, block, encode)
        earlier = (text, end)


def _grown(case: Case) -> Iterator[list[Turn]]:
    """Yields the messages of each prompt."""
    chat: list[Turn] = []
    for place, kind in enumerate(case.script):
        if kind in "ACP":
            yield [*chat]
        chat += _said(kind, place, case.thinks)
    yield chat


def _said(kind: str, place: int, thinks: bool) -> list[Turn]:
    if kind in "SU":
        return [{"role": {"S": "system", "U": "user"}[kind], "content": _words(kind, place)}]
    thought = {"reasoning_content": _words("thought", place)} if thinks else {}
    if kind == "A":
        return [{"role": "assistant", "content": _words("answer", place), **thought}]
    ids = [f"call{place:02}aa{number}" for number in range(1 + (kind == "P"))]
    called = {"name": "look_up", "arguments": {"word": _words("call", place)}}
    calls = [{"type": "function", "id": one, "function": called} for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "name": "look_up", "content": _words(one, place)} for one in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls, **thought}, *results]


def _words(what: str, place: int) -> str:
    """Some 200 characters that stand nowhere else."""
    return " ".join(f"{what}{place}x{number}" for number in range(24))


def _given(chat: Sequence[Turn]) -> list[str]:
    """Returns what the model gave in its latest turn."""
    one = next(one for one in reversed(chat) if one["role"] == "assistant")
    calls = [call["function"]["arguments"]["word"] for call in one.get("tool_calls", ())]
    return [one["content"], one.get("reasoning_content", ""), *calls]


def _compared(
    case: Case, turn: int, chat: list[Turn], past: tuple[str, int], now: str, still: str, block: Block, encode: Encode
) -> TurnCheck:
    """Returns how a turn's prompt goes on. past: the prompt before, and where its messages end. still: this one if no
    time had passed."""
    (before, end), at = past, _num_same(past[0], now)
    goes_on = at == len(before) and all(one in now[at:] for one in _given(chat))
    verdict = HISTORY if at < end else HOLDS if goes_on else ANSWER
    if verdict == HOLDS:
        return TurnCheck(case=case.name, turn=turn, verdict=verdict)
    ids, mark = encode(before), before.rfind("<", max(0, at - _NAME), at)
    begin = mark if mark >= 0 else at  # a mark is shown whole
    return TurnCheck(
        case=case.name,
        turn=turn,
        verdict=verdict,
        breaks=verdict == HISTORY and not case.days and len(case.flags) == case.script.count("S") == 1,
        at=_num_same(ids, encode(now)),
        tokens=len(ids),
        before=before[begin : begin + SHOWN],
        now=now[begin : begin + SHOWN],
        cause=_cause(case, verdict, chat, before, now, still, at, block),
    )


def _num_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns with how many equal ones both begin."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _cause(case: Case, verdict: str, chat: list[Turn], before: str, now: str, still: str, at: int, block: Block) -> str:
    """Returns which of `CAUSES` stands at the difference."""
    if _num_same(before, still) > at:
        return "date" if case.days else "clock"
    thoughts = [one["reasoning_content"] for one in chat if one.get("reasoning_content")]
    if verdict == ANSWER and any(one not in now for one in _given(chat) if one not in thoughts):
        return "otherwise"
    near = slice(max(0, at - NEAR), at + NEAR)
    has_block = block.search(before[near]) or block.search(now[near])
    if verdict == ANSWER:
        return "empty block" if has_block else "thoughts" if any(text not in now for text in thoughts) else "opening"
    if len(case.flags) > 1 and at < before.find(_words("U", case.script.find("U"))):
        return "flag"
    if any(text in before and text not in now for text in thoughts):
        return "thoughts"
    if has_block:
        return "empty block"
    late = case.script.find("S", 1)
    if late > 0 and 0 <= now.find(_words("S", late)) <= at + NEAR:
        return "system"
    return "moves" if before[at : at + SHOWN] in now[at:] else "gone"
