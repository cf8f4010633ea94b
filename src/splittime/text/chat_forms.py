"""What a chat template would leave out of a conversation, put so that it writes it; and what it leaves out still.

Templates drop what they do not know, or refuse it: a developer's or a second system message, a text beside a call, a
second call, results, ids of another form, two turns of one role. Which of it a template writes is found by rendering:
for each form that a conversation has there is a short one with words that stand nowhere else (`FORMS`). Where one of
them is missing, the first of the form's ways under which all are written is taken, or none if there is none.
A template that writes a form is given it as it came.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

Turn = Mapping[str, Any]
Chat = Sequence[Turn]
Way = Callable[[Chat], Chat]
Render = Callable[[Chat, Sequence[Turn] | None], str]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_LEFT_OUT = 4  # told of one conversation
_NAME = "look_up"
_WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}, "required": ["word"]}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "looks up", "parameters": _WORD}}]
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NO_SIGN = re.compile(r"[\W_]+")
_PROBED = re.compile("qz[0-9]")


def _turn(role: str, content: str, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def _calls(content: str, *words: str, ids: Sequence[str] = ("aaaaaaaa1", "aaaaaaaa2")) -> Turn:
    each = zip(words, ids, strict=False)
    given = [(name, {"name": _NAME, "arguments": {"word": word}}) for word, name in each]
    return _turn(
        "assistant", content, tool_calls=[{"type": "function", "id": name, "function": one} for name, one in given]
    )


def _result(content: str, call_id: str = "aaaaaaaa1") -> Turn:
    return _turn("tool", content, tool_call_id=call_id, name=_NAME)


# ---- ways


def _with_roles(role: str, where: Callable[[int, Turn], bool], chat: Chat) -> Chat:
    return [{**turn, "role": role} if where(index, turn) else turn for index, turn in enumerate(chat)]


def _into_user(chat: Chat) -> Chat:
    """Puts the first system message before the user's first text."""
    at = next((index for index, turn in enumerate(chat) if turn["role"] == "user"), None)
    if at is None:
        return chat
    told = {**chat[at], "content": f"{chat[0]['content']}\n\n{chat[at]['content']}"}
    return [*chat[1:at], told, *chat[at + 1 :]]


def _joined(chat: Chat) -> Chat:
    """Joins texts of one role that follow one another."""
    found: list[Turn] = []
    for turn in chat:
        before = found[-1] if found else None
        is_text = before is not None and not turn.get("tool_calls") and not before.get("tool_calls")
        if before is not None and is_text and turn["role"] == before["role"] in ("user", "assistant", "system"):
            found[-1] = {**before, "content": f"{before['content']}\n\n{turn['content']}"}
        else:
            found.append(turn)
    return found


def _with_calls(change: Callable[[Mapping[str, Any]], Mapping[str, Any]], chat: Chat) -> Chat:
    has = [turn.get("tool_calls") or () for turn in chat]
    return [
        {**turn, "tool_calls": [*map(change, calls)]} if calls else turn for turn, calls in zip(chat, has, strict=True)
    ]


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
    told = (f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in chat)
    return [
        _turn("user", text) if turn["role"] == "tool" else turn
        for turn, text in zip(_calls_as_texts(chat), told, strict=True)
    ]


def _one_by_one(chat: Chat) -> Chat:
    """Has each call in a turn of its own, with its result behind it."""
    found: list[Turn] = []
    for index, turn in enumerate(chat):
        calls = turn.get("tool_calls") or ()
        behind = chat[index + 1 :]
        num_results = next((at for at, each in enumerate(behind) if each["role"] != "tool"), len(behind))
        results = {each.get("tool_call_id"): each for each in behind[:num_results]}
        if len(calls) < 2 or {call.get("id") for call in calls} != results.keys():
            found += [turn] if turn not in found or turn["role"] != "tool" else []
            continue
        for number, call in enumerate(calls):
            found += [{**turn, "content": "" if number else turn["content"], "tool_calls": [call]}, results[call["id"]]]
    return found


def _apart(chat: Chat) -> Chat:
    """Has the text beside calls in a turn before them."""
    found: list[Turn] = []
    for turn in chat:
        if turn.get("tool_calls") and turn["content"]:
            text = {key: value for key, value in turn.items() if key != "tool_calls"}
            found += [
                text,
                {key: value for key, value in {**turn, "content": ""}.items() if key != "reasoning_content"},
            ]
        else:
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
FORMS = (
    Form(
        lambda chat: any(turn["role"] == "developer" for turn in chat),
        (_turn("developer", "qz6"), _USER),
        (_AS_SYSTEM, lambda chat: _into_user(_AS_SYSTEM(chat))),
    ),
    Form(
        lambda chat: any(map(_is_within, range(len(chat)), chat)),
        (_USER, _ANSWER, _SYSTEM, _LATER),
        (_AS_USER, lambda chat: _joined(_AS_USER(chat))),
    ),
    Form(lambda chat: chat[:1] != [] and chat[0]["role"] == "system", (_SYSTEM, _USER), (_into_user,)),
    Form(_has_long_ids, (_USER, _calls("", "qz7", ids=(_LONG_ID,)), _result("qz8", _LONG_ID)), (_short_ids,)),
    Form(
        partial(_has_calls, 1),
        (_USER, _calls("", "qz7"), _result("qz8"), _LATER),
        (
            partial(_with_calls, _arguments_as_text),
            _calls_as_texts,
            _results_as_texts,
            lambda chat: _joined(_results_as_texts(chat)),
        ),
    ),
    Form(
        partial(_has_calls, 2),
        (_USER, _calls("", "qz7", "qz9"), _result("qz8"), _result("qz0", "aaaaaaaa2")),
        (_one_by_one,),
    ),
    Form(_has_text_and_call, (_USER, _calls("qz9", "qz7"), _result("qz8")), (_apart,)),
    Form(
        lambda chat: len(_joined(chat)) < len(chat),
        (_USER, _turn("user", "qz9"), _ANSWER, _ANSWERED, _LATER),
        (_joined,),
    ),
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
        probe = self._up_to(index, list(FORMS[index].probe))
        if self._writes(probe) or not self._writes([_USER]):
            return None
        return next((way for way in FORMS[index].ways if self._writes(way(probe))), None)

    def _writes(self, chat: Chat) -> bool:
        try:
            written = self._render(chat, _TOOLS if _has_calls(1, chat) else None)
        except Exception:  # whatever it does: it may refuse, or stumble over what it does not know
            return False
        return all(word in written for word in _PROBED.findall(json.dumps(chat)))


# ---- what is left out


def left_out(chat: Chat, tools: Sequence[Turn] | None, written: str) -> tuple[str, ...]:
    """Returns, in words, what of a conversation is not in the prompt's text: a few of them, if there are many."""
    found: list[str] = []
    signs, at = "", 0
    if tools and not any(str(tool["function"]["name"]) in written for tool in tools):
        found.append("the model's chat template leaves out the tools: the model was offered none")
    for what, text in _parts(chat):
        if len(found) == MOST_LEFT_OUT:
            break
        begin = written.find(text, at)
        if begin >= 0:
            at = begin + len(text)
        elif text not in written:
            signs = signs or _NO_SIGN.sub("", written)
            if not any(_NO_SIGN.sub("", each) in signs for each in (text, json.dumps(text))):
                found.append(f"the model's chat template leaves out {what}")
    return tuple(found)


def _parts(chat: Chat) -> Sequence[tuple[str, str]]:
    found = []
    for index, turn in enumerate(chat):
        place = f"messages[{index}]"
        texts = ((f"the reasoning of {place}", "reasoning_content"), (f"the text of {place}", "content"))
        found += [(what, str(turn.get(name) or "").strip()) for what, name in texts]
        for call in turn.get("tool_calls") or ():
            found.append((f"the call of {call['function']['name']} in {place}", str(call["function"]["name"])))
    return [each for each in found if each[1]]
