"""What the cache reads of a request: whether an answer may be kept or given, and by which key.

The key is the whole body in one form (names in order, no spaces between its parts, 1.0 as 1, no nulls, no defaults
written out), with the tenant, the path, the model and the pool: two bodies of one key are one JSON value, and nobody
has another tenant's answers. Texts are compared code point by code point. Nothing in them is folded, no case, no
space, no composed form of Unicode: an indentation, a `!`, a Kelvin sign may be what the question is about.
`likeness` is the same without the latest user's text, which is the `question`: what two requests must share exactly to
share an answer by the likeness of their questions.
"""

import json
from hashlib import sha256
from typing import Any

import msgspec

from splittime.gateway.endpoints import CHAT
from splittime.gateway.forwarded import ForwardedRequest
from splittime.web import http

MAX_REQUEST_BYTES = 256 * 1024  # a longer one is passed on and not looked at
MAX_QUESTION_CHARS = 4000
MAX_AGE_S = 10**9
DEFAULTS: dict[str, Any] = {"stream": False, "n": 1, "best_of": 1, "echo": False, "store": False}


class Wishes(msgspec.Struct, frozen=True):
    """`Cache-Control` of a request, as far as it is heeded. max_age_s: of an answer that it takes."""

    no_store: bool = False
    no_cache: bool = False
    max_age_s: int | None = None


class AskedKey(msgspec.Struct, frozen=True):
    """key: of equal requests. likeness, question: of like ones; empty where only equal ones share an answer.
    why_not: why no answer of this request is kept or given; "" if one may be."""

    key: str = ""
    likeness: str = ""
    question: str = ""
    why_not: str = ""


def wishes(scope: http.Scope) -> Wishes:
    """Returns what `Cache-Control` and `Pragma` ask for; other directives mean nothing to a request here."""
    told: dict[str, str] = {}
    for value in [*http.headers(scope, b"cache-control"), *http.headers(scope, b"pragma")]:
        for part in value.lower().split(","):
            name, _, number = part.strip().partition("=")
            told[name.strip()] = number.strip(' "')
    age = told.get("max-age", "")
    max_age_s = min(int(age[:12]), MAX_AGE_S) if age.isascii() and age.isdigit() else None
    return Wishes("no-store" in told, "no-cache" in told, max_age_s)


def asked_key(request: ForwardedRequest, tenant: str, *, takes_sampled: bool) -> AskedKey:
    """Returns the keys of a request, or why it has none. Takes as long as its body is to be read: at most a few
    milliseconds, outside the event loop."""
    if len(request.body) > MAX_REQUEST_BYTES:
        return AskedKey(why_not="long")
    try:
        body = _plain_numbers(request.body)
        why_not = _why_not(body, takes_sampled)
        return AskedKey(why_not=why_not) if why_not else _keys(body, request, tenant)
    except (ValueError, RecursionError):
        return AskedKey(why_not="unreadable")


def _plain_numbers(body: bytes) -> dict[str, Any]:
    """Raises `ValueError` for a body that is no object."""
    told = json.loads(body, parse_float=_number, parse_constant=_refuse)
    if not isinstance(told, dict):
        raise ValueError("no object")
    return {name: value for name, value in told.items() if value is not None and not _is_default(name, value)}


def _is_default(name: str, value: Any) -> bool:
    """Returns whether leaving it out says the same. `true` is no 1, though Python takes it for one."""
    return name in DEFAULTS and type(value) is type(DEFAULTS[name]) and value == DEFAULTS[name]


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _why_not(body: dict[str, Any], takes_sampled: bool) -> str:
    if any(name in body for name in ("n", "best_of", "store")):
        return "several_answers" if "store" not in body else "stored_elsewhere"
    temperature = body.get("temperature")  # left out, it is the upstream's, which draws
    if not takes_sampled and (temperature != 0 or isinstance(temperature, bool)):
        return "sampled"
    return ""


def _keys(body: dict[str, Any], request: ForwardedRequest, tenant: str) -> AskedKey:
    held = (tenant, request.path, request.model, request.pool)  # a rule's upstreams answer for themselves alone
    key = _digest([*held, body])
    question = _question(body) if request.path == CHAT else ""
    if not question:
        return AskedKey(key)
    messages = body["messages"]
    without = {**body, "messages": [*messages[:-1], {**messages[-1], "content": None}]}
    return AskedKey(key, _digest([*held, without]), question)


def _question(body: dict[str, Any]) -> str:
    """Returns the text of the latest message if a user wrote it, and it is a text of a length that can be compared."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "user" or not isinstance(last.get("content"), str):
        return ""
    text: str = last["content"]
    return text if text.strip() and len(text) <= MAX_QUESTION_CHARS and _is_whole(text) else ""


def _is_whole(text: str) -> bool:
    """Returns whether it can be sent on: a body may have halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(value: list[Any]) -> str:
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
