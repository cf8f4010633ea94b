"""What a chat template leaves out of a conversation; and the conversation put so that it leaves out less.

Templates drop what they do not know, or refuse it: a developer's or a second system message, a text beside a call, a
second call, results, ids of another form, two turns of one role. A conversation of which that is so is put another way.
Which way is found by rendering: for each form that it has there is a short one with words that stand nowhere else
(`FORMS`). Where one of them is missing, the first way under which all are written is taken, or none if there is none.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

Turn = Mapping[str, Any]
Chat = Sequence[Turn]
Way = Callable[[Chat], Chat]
Render = Callable[[Chat, Sequence[Turn] | None], str]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_LEFT_OUT = 4  # told of one conversation
MOST_SCANNED = 2**26  # characters, for what is left out of it
_NAME = "look_up"
_WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}, "required": ["word"]}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "looks up", "parameters": _WORD}}]
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_JOINED = re.compile(r"""\[["']arguments["']\]\s*\+""")
_NO_SIGN = re.compile(r"[\W_]+")
_PROBED = re.compile("qz[0-9]")


def _turn(role: str, content: str, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def _calls(content: str, *words: str, ids: Sequence[str] = ("aaaaaaaa1", "aaaaaaaa2")) -> Turn:
    functions = ({"name": _NAME, "arguments": {"word": word}} for word in words)
    calls = [{"type": "function", "id": name, "function": one} for name, one in zip(ids, functions, strict=False)]
    return _turn("assistant", content, tool_calls=calls)


def _result(content: str, call_id: str = "aaaaaaaa1") -> Turn:
    return _turn("tool", content, tool_call_id=call_id, name=_NAME)


# ---- ways


def _with_roles(role: str, where: Callable[[int, Turn], bool], chat: Chat) -> Chat:
    return [{**turn, "role": role} if where(index, turn) else turn for index, turn in enumerate(chat)]


def _into_user(chat: Chat) -> Chat:
    """Puts the system messages that come first before the user's first text."""
    count = next((index for index, turn in enumerate(chat) if turn["role"] != "system"), 0)
    at = next((index for index, turn in enumerate(chat) if turn["role"] == "user"), 0)
    if not count or not at:
        return chat
    text = "\n\n".join(turn["content"] for turn in (*chat[:count], chat[at]))
    return [*chat[count:at], {**chat[at], "content": text}, *chat[at + 1 :]]


def _follows(role: str, before: Turn, turn: Turn) -> bool:
    """Returns whether two texts of this role follow one another, of nobody else."""
    is_text = not before.get("tool_calls") and not turn.get("tool_calls")
    return before["role"] == turn["role"] == role and is_text and before.get("name") == turn.get("name")


def _has_run(role: str, chat: Chat) -> bool:
    return any(_follows(role, before, turn) for before, turn in pairwise(chat))


def _joined(role: str, chat: Chat) -> Chat:
    """Joins texts of this role that follow one another, and what was thought before them."""
    runs: list[list[Turn]] = []
    for turn in chat:
        if runs and _follows(role, runs[-1][-1], turn):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [_as_one(run) if len(run) > 1 else run[0] for run in runs]


def _as_one(run: Sequence[Turn]) -> Turn:
    thoughts = "\n\n".join(turn["reasoning_content"] for turn in run if turn.get("reasoning_content"))
    more = {"reasoning_content": thoughts} if thoughts else {}
    return {**run[0], "content": "\n\n".join(filter(None, (turn["content"] for turn in run))), **more}


def _with_calls(change: Callable[[Mapping[str, Any]], Mapping[str, Any]], chat: Chat) -> Chat:
    each = ((turn, turn.get("tool_calls")) for turn in chat)
    return [{**turn, "tool_calls": [*map(change, calls)]} if calls else turn for turn, calls in each]


def with_arguments_read(chat: Chat, template: str) -> Chat:
    """Returns the conversation with the arguments of calls as an object, or as the text that this template wants. Those
    that are empty, or were cut, are none: most templates can write nothing else, and one bad call must not end it."""
    return _with_calls(partial(_arguments_read, _JOINED.search(template) is not None), chat)


def _arguments_read(as_text: bool, call: Mapping[str, Any]) -> Mapping[str, Any]:
    function, read = call["function"], call["function"]["arguments"]
    if isinstance(read, str):
        try:
            read = msgspec.json.decode(read)
        except (msgspec.DecodeError, RecursionError):
            read = {}
    if as_text and not isinstance(read, str):
        read = json.dumps(read, ensure_ascii=False, separators=(",", ":"))
    return {**call, "function": {**function, "arguments": read}}


def _arguments_as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _short_ids(chat: Chat) -> Chat:
    """Gives calls and results ids of nine letters and digits, the same for the same."""
    short = lambda given: given if _SHORT_ID.fullmatch(given) else sha256(given.encode()).hexdigest()[:9]  # noqa: E731
    told = _with_calls(lambda call: {**call, "id": short(call["id"])} if "id" in call else call, chat)
    return [{**turn, "tool_call_id": short(turn["tool_call_id"])} if "tool_call_id" in turn else turn for turn in told]


def _calls_as_texts(chat: Chat) -> Chat:
    found = []
    for turn in chat:
        written = (json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls") or ())
        parts = [turn["content"], *(f"<tool_call>\n{each}\n</tool_call>" for each in written)]
        told = {key: value for key, value in turn.items() if key != "tool_calls"}
        found.append({**told, "content": "\n".join(filter(None, parts))} if len(parts) > 1 else turn)
    return found


def _results_as_texts(chat: Chat) -> Chat:
    each = ((turn, f"<tool_response>\n{turn['content']}\n</tool_response>") for turn in _calls_as_texts(chat))
    return [_turn("user", text) if turn["role"] == "tool" else turn for turn, text in each]


def _one_by_one(chat: Chat) -> Chat:
    """Has each call in a turn of its own, with its result behind it."""
    found, index = list[Turn](), 0
    while index < len(chat):
        turn, index = chat[index], index + 1
        calls, end = turn.get("tool_calls") or (), index
        while len(calls) > 1 and end < len(chat) and chat[end]["role"] == "tool":
            end += 1
        if len(calls) < 2 or end - index != len(calls):
            found.append(turn)
            continue
        other = {"role": turn["role"], "content": ""}
        for number, (call, result) in enumerate(zip(calls, _by_call(calls, chat[index:end]), strict=True)):
            found += [{**(other if number else turn), "tool_calls": [call]}, result]
        index = end
    return found


def _by_call(calls: Sequence[Mapping[str, Any]], results: Sequence[Turn]) -> Sequence[Turn]:
    """Returns the results in the order of their calls; as they came, where ids do not say whose each is."""
    by_id, ids = {each.get("tool_call_id"): each for each in results}, [call.get("id") for call in calls]
    is_known = len(by_id) == len(calls) and set(ids) == by_id.keys()
    return [by_id[each] for each in ids] if is_known else results


def _apart(chat: Chat) -> Chat:
    """Has the text beside calls in a turn before them, with what was thought."""
    found: list[Turn] = []
    for turn in chat:
        if turn.get("tool_calls") and turn["content"]:
            found.append({key: value for key, value in turn.items() if key != "tool_calls"})
            turn = {"role": turn["role"], "content": "", "tool_calls": turn["tool_calls"]}
        found.append(turn)
    return found


def _is_within(index: int, turn: Turn) -> bool:
    return index > 0 and turn["role"] == "system"


def described(tools: Sequence[Turn]) -> Sequence[Turn]:
    """Returns the tools, with an empty description where there is none: some templates cannot do without."""
    return [{**each, "function": {"description": "", **each["function"]}} for each in tools]


# ---- forms


class Form(NamedTuple):
    """has: whether a conversation has it. probe: a short one that has, whose words must be in what is written."""

    has: Callable[[Chat], bool]
    probe: Chat
    ways: tuple[Way, ...]


def _has_calls(count: int, chat: Chat) -> bool:
    return any(len(turn.get("tool_calls") or ()) >= count or (count == 1 and turn["role"] == "tool") for turn in chat)


def _has_long_ids(chat: Chat) -> bool:
    return any(not _SHORT_ID.fullmatch(call.get("id", "")) for turn in chat for call in turn.get("tool_calls") or ())


def _has_text_and_call(chat: Chat) -> bool:
    return any(turn.get("tool_calls") and turn["content"] for turn in chat)


_USER, _LATER = _turn("user", "qz1"), _turn("user", "qz2")
_ANSWER, _ANSWERED = _turn("assistant", "qz3"), _turn("assistant", "qz4")
_SYSTEM, _LONG_ID = _turn("system", "qz5"), "call_602906a60a92"
_AS_SYSTEM = partial(_with_roles, "system", lambda index, turn: turn["role"] == "developer")
_AS_USER = partial(_with_roles, "user", _is_within)
_AS_TEXTS = (_calls_as_texts, _results_as_texts, lambda chat: _joined("user", _results_as_texts(chat)))
FORMS = (
    Form(
        lambda chat: any(turn["role"] == "developer" for turn in chat),
        (_turn("developer", "qz6"), _USER),
        (_AS_SYSTEM, lambda chat: _into_user(_AS_SYSTEM(chat))),
    ),
    Form(
        lambda chat: any(map(_is_within, range(len(chat)), chat)),
        (_USER, _ANSWER, _SYSTEM, _LATER),
        (_AS_USER, lambda chat: _joined("user", _AS_USER(chat))),
    ),
    Form(lambda chat: any(turn["role"] == "system" for turn in chat[:1]), (_SYSTEM, _USER), (_into_user,)),
    Form(_has_long_ids, (_USER, _calls("", "qz7", ids=(_LONG_ID,)), _result("qz8", _LONG_ID)), (_short_ids,)),
    Form(
        partial(_has_calls, 1),
        (_USER, _calls("", "qz7"), _result("qz8")),
        (partial(_with_calls, _arguments_as_text), *_AS_TEXTS),
    ),
    Form(
        lambda chat: ("tool", "user") in pairwise(turn["role"] for turn in chat),
        (_USER, _calls("", "qz7"), _result("qz8"), _LATER),
        _AS_TEXTS,
    ),
    Form(
        partial(_has_calls, 2),
        (_USER, _calls("", "qz7", "qz9"), _result("qz8"), _result("qz0", "aaaaaaaa2")),
        (_one_by_one,),
    ),
    Form(_has_text_and_call, (_USER, _calls("qz9", "qz7"), _result("qz8")), (_apart,)),
    Form(partial(_has_run, "user"), (_USER, _LATER), (partial(_joined, "user"),)),
    Form(partial(_has_run, "assistant"), (_USER, _ANSWER, _ANSWERED, _LATER), (partial(_joined, "assistant"),)),
)


class ChatForms:
    """Which forms of a conversation a template writes. render: by the template, with tools; it may raise."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found: dict[int, Way | None] = {}  # by the form's place; None: as it is

    def as_written(self, chat: Chat) -> Chat:
        """Returns the conversation so that the template writes all of it, as far as a way is known."""
        return self._up_to(len(FORMS), chat)

    def _up_to(self, place: int, chat: Chat) -> Chat:
        for index, form in enumerate(FORMS[:place]):
            if form.has(chat):
                if index not in self._found:
                    self._found[index] = self._saving_way(index)
                way = self._found[index]
                chat = chat if way is None else way(chat)
        return chat

    def _saving_way(self, index: int) -> Way | None:
        probe = self._up_to(index, FORMS[index].probe)
        if self._writes(probe) or not self._writes([_USER]):
            return None
        return next((way for way in FORMS[index].ways if self._writes(way(probe))), None)

    def _writes(self, chat: Chat) -> bool:
        try:
            written = self._render(chat, _TOOLS if _has_calls(1, chat) else None)
        except MemoryError:
            raise
        except Exception:  # whatever it does: it may refuse, or stumble over what it does not know
            return False
        return all(word in written for word in _PROBED.findall(json.dumps(chat)))


# ---- what is left out


class _Sought:
    """Looks for texts in what is written, in their order, as they are or as JSON has them. What would take too long to
    look for counts as found."""

    def __init__(self, written: str) -> None:
        self._written, self._at, self._signs = written, 0, ""
        self._form, self._left = 0, MOST_SCANNED  # the form of the text that was found last, and how far to look still

    def has(self, text: str) -> bool:
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        for form in (self._form, 0, 1, 2):
            begin = self._written.find(forms[form], self._at) if self._left > 0 else self._at
            self._left -= (begin if begin >= 0 else len(self._written)) - self._at
            if begin >= 0:
                self._at, self._form = begin + (len(forms[form]) if self._left > 0 else 0), form
                return True
        self._left -= 4 * len(self._written)
        self._signs = self._signs or _NO_SIGN.sub("", self._written)
        return any(each in self._written or _NO_SIGN.sub("", each) in self._signs for each in set(forms))


def left_out(chat: Chat, tools: Sequence[Turn] | None, written: str, *, with_reasoning: bool = True) -> tuple[str, ...]:
    """Returns, in words, what of a conversation is not in the prompt's text: a few of them, if there are many."""
    found, sought = list[str](), _Sought(written)
    if tools and not any(str(tool["function"]["name"]) in written for tool in tools):
        found.append("the tools: the model was offered none")
    for what, text in _parts(chat, with_reasoning=with_reasoning):
        if len(found) < MOST_LEFT_OUT and text and (not found or what != found[-1]) and not sought.has(text):
            found.append(what)
    return tuple(f"the model's chat template leaves out {what}" for what in found)


def _parts(chat: Chat, *, with_reasoning: bool) -> Iterator[tuple[str, str]]:
    for index, turn in enumerate(chat):
        place = f"messages[{index}]"
        if with_reasoning:
            yield f"the reasoning of {place}", str(turn.get("reasoning_content") or "").strip()
        yield f"the text of {place}", str(turn.get("content") or "").rpartition("</think>")[2].strip()
        for call in turn.get("tool_calls") or ():
            name = str(call["function"]["name"])
            for text in (name, *_texts_in(call["function"]["arguments"])):
                yield f"the call of {name} in {place}", text


def _texts_in(arguments: Any) -> Iterator[str]:
    waiting = [arguments]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part.strip()
        elif isinstance(part, Mapping | list):
            waiting += reversed([*(part.values() if isinstance(part, Mapping) else part)])
