"""The beginning of a call, up to its arguments."""

import json
import re
from typing import NamedTuple

from splittime.text.marks import behind
from splittime.text.tool_families import ToolFamily

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r":\d*")
_ID = re.compile(r"[a-zA-Z0-9]*")


class CallHead(NamedTuple):
    """size: its characters; 0 while it is not whole. number: that the model gave the call; "" for none."""

    size: int
    name: str
    number: str = ""


def read_members(text: str, arguments: str) -> CallHead | None:
    """Reads `{"name": "f", "arguments": ` before an object. Returns None where the text begins no such head."""
    at, name = 0, ""
    for part in ("{", '"name"', ":", None, ",", f'"{arguments}"', ":"):
        at += len(text[at:]) - len(text[at:].lstrip())
        size = len(part) if part is not None and text.startswith(part, at) else 0
        if part is None and (written := _STRING.match(text, at)):
            size, name = len(written[0]), _decoded(written[0])
        if not size:
            rest = text[at:]
            is_begin = part.startswith(rest) if part is not None else not rest or rest[0] == '"'
            return CallHead(0, "") if is_begin else None
        at += size
    at += len(text[at:]) - len(text[at:].lstrip())
    if at == len(text):
        return CallHead(0, "")
    return CallHead(at, name) if text[at] == "{" else None


def _decoded(written: str) -> str:
    """Returns the text of a string in JSON; "", which is no tool's name, where it is none."""
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def read_name(text: str, family: ToolFamily) -> CallHead | None:
    """Reads a name and the family's marks around it. Returns None where the text begins no such head."""
    rest = behind(text, family.before_name)
    if rest is None or not rest.strip():
        return CallHead(0, "")
    if rest == text and family.before_name and not family.is_numbered:
        return None
    named = _NAME.match(rest.lstrip())
    if named is None:
        return None
    rest = rest.lstrip()[named.end() :]
    numbered = _NUMBER.match(rest) if family.is_numbered else None
    if numbered is not None:
        rest = rest[numbered.end() :]
    if family.id_mark and rest.startswith(family.id_mark):
        rest = rest[len(family.id_mark) :]
        rest = rest[len(_ID.match(rest)[0]) :]  # type: ignore[index]
    if not rest or (family.id_mark and family.id_mark.startswith(rest)):
        return CallHead(0, "")
    after = behind(rest, family.after_name)
    if after is None:
        return CallHead(0, "")
    is_whole = after != rest or not family.after_name.strip()
    number = "" if numbered is None else numbered[0][1:]
    return CallHead(len(text) - len(after), named[0], number) if is_whole else None
