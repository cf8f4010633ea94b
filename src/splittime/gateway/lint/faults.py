"""What one request's prompt carries for nothing, in bytes; and what of it may keep its beginning from being shared.

    json_whitespace   indents and line breaks within JSON
    json_empty_keys   keys that are null, "", [] or {} in every object of a list
    repeated_lines    a long line that stands there already
    changing_prefix   a time or an id in the system message, and what stands behind it there

The first three are counted from one request. The last is a fault only if the same beginning goes on with another value
in another request, which `sampler` knows. All of it is linear in the text; JSON is tried at `MAX_STARTS` places.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

MAX_STARTS = 64  # in one text
MIN_JSON_CHARS = 64
MIN_LINE_CHARS = 64
MIN_OBJECTS = 3  # in a list, before a key of theirs is dead
EMPTY: tuple[Any, ...] = (None, "", [], {})
SYSTEM_ROLES = ("system", "developer")
KINDS = ("json_whitespace", "json_empty_keys", "repeated_lines", "changing_prefix")
_CHANGING = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b|\b1[5-9]\d{8}(?:\d{3})?\b"
)
_decoder = json.JSONDecoder()


class ChangingPrefix(NamedTuple):
    """before: what stands before the time or id. rest: that, and all behind it in the system message."""

    before: str
    rest: str


class PromptText(NamedTuple):
    role: str
    text: str


class ToldPrompt(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None
    system: Any = None
    instructions: Any = None


def texts_of(body: bytes) -> list[PromptText]:
    """Returns the texts of a request, its instructions first; none of a body that cannot be read."""
    try:
        told = msgspec.json.decode(body, type=ToldPrompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    found = [
        PromptText("system", text) for told_first in (told.instructions, told.system) for text in _contents(told_first)
    ]
    prompts = told.prompt if isinstance(told.prompt, list) else [told.prompt, told.input]
    found += [PromptText("prompt", one) for one in prompts if isinstance(one, str)]
    turns = told.input if told.messages is None else told.messages
    for message in turns if isinstance(turns, list) else []:
        if isinstance(message, dict):
            role = str(message.get("role", ""))
            found += [PromptText(role, text) for text in _contents(message.get("content"))]
    return found


def _contents(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    told = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in told if isinstance(text, str)]


def faults_of(texts: list[PromptText]) -> Counter[str]:
    """Returns the bytes of each fault that one request shows alone."""
    found: Counter[str] = Counter()
    for _, text in texts:
        for chunk, value in _json_in(text):
            found["json_whitespace"] += max(0, _size(chunk) - _size(_compact(value)))
            found["json_empty_keys"] += sum(map(_empty_keys, _lists_in(value)))
    found["repeated_lines"] = _repeated_lines(texts)
    return +found


def changing_prefix(texts: list[PromptText]) -> ChangingPrefix | None:
    """Returns where a system message that stands first has a time or an id; None where there is none."""
    if not texts or texts[0].role not in SYSTEM_ROLES:
        return None
    match = _CHANGING.search(texts[0].text)
    return None if match is None else ChangingPrefix(texts[0].text[: match.start()], texts[0].text[match.start() :])


def _json_in(text: str) -> Iterator[tuple[str, Any]]:
    """Objects and lists of some length, each outermost one once."""
    end = tries = 0
    for match in re.finditer(r"[\[{]", text):
        if match.start() < end:
            continue
        if tries >= MAX_STARTS:
            return
        tries += 1
        try:
            value, end = _decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if end - match.start() >= MIN_JSON_CHARS:
            yield text[match.start() : end], value


def _lists_in(value: Any) -> Iterator[list[dict[str, Any]]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list) and len(one) >= MIN_OBJECTS and all(isinstance(each, dict) for each in one):
            yield one
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []


def _empty_keys(objects: list[dict[str, Any]]) -> int:
    values: dict[str, list[Any]] = {}
    for one in objects:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    dead = [key for key, found in values.items() if len(found) >= MIN_OBJECTS and all(v in EMPTY for v in found)]
    return sum(_size(_compact({key: value})) - 1 for key in dead for value in values[key])  # a comma for two braces


def _repeated_lines(texts: list[PromptText]) -> int:
    lines = Counter(line for _, text in texts for line in text.splitlines() if len(line.strip()) >= MIN_LINE_CHARS)
    return sum((count - 1) * (_size(line) + 1) for line, count in lines.items())


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
