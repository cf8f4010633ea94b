"""The report of `/lint` in words, for `gateway lint` and among what `gateway inventory` has against the gateway.

Looks at a share of the prompts that pass, in a thread beside the event loop, and keeps numbers and hashes alone.

Bounded: `MAX_WAITING` requests of at most `MAX_BODY_BYTES` wait, the rest of the share is skipped and counted;
`MAX_PREFIXES` beginnings are remembered, each as two hashes. A request's text is let go when it has been looked at.

`faults_of`: what one request's prompt carries for nothing, in bytes; `changing_prefix`: what of it may keep its
beginning from being shared.

    json_whitespace   indents and line breaks within JSON
    json_empty_keys   keys that are null, "", [] or {} in every object of a list
    repeated_lines    a long line that stands there already
    changing_prefix   a time or an id in the system message, and what stands behind it there

The first three are counted from one request. The last is a fault only if the same beginning goes on with another value
in another request, which `PromptLint` knows. All of it is linear in the text; JSON is tried at `MAX_STARTS` places.
"""

import hashlib
import json
import logging
import random
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from splittime.gateway.config import LintConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, ForwardedRequest
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage

WORDS = {
    "json_whitespace": "white space within JSON",
    "json_empty_keys": "keys that are empty in every object of a list",
    "repeated_lines": "long lines that stand there already",
    "changing_prefix": "a time or an id in the system message, and all behind it there",
}
log = logging.getLogger("splittime.gateway")

MAX_WAITING = 64
MAX_BODY_BYTES = 256 * 1024
MAX_PREFIXES = 1024
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


def fault_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields each fault of one model's prompts with what it costs, the dearest first."""
    for kind, fault in sorted(found["faults"].items(), key=lambda item: -item[1]["tokens"]):
        cost = "" if fault["prefill_ms"] is None else f", {fault['prefill_ms']:.1f} ms to prefill"
        yield f"{WORDS.get(kind, kind)}: {fault['requests']} requests, about {fault['tokens']} tokens{cost}"


def lint_notes(told: dict[str, Any]) -> tuple[str, ...]:
    """Returns what all models' prompts carry for nothing, a line each."""
    looked_at = {model: found["requests"] for model, found in told["models"].items()}
    return tuple(
        f"prompts of {model} ({looked_at[model]} looked at): {line}"
        for model, found in told["models"].items()
        for line in fault_lines(found)
    )


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


class ModelFaults:
    """What one model's prompts showed: requests looked at, their bytes, and by kind how many had it, in bytes too."""

    def __init__(self) -> None:
        self.requests = self.num_bytes = 0
        self.having: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()


class PromptLint:
    """`note` takes a request, `report` tells what was found."""

    def __init__(self, config: LintConfig) -> None:
        self._share = config.share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lint")
        self._lock = Lock()
        self._salt = secrets.token_bytes(16)
        self._waiting = self.num_skipped = 0
        self._models: dict[str, ModelFaults] = {}
        self._prefixes: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, request: ForwardedRequest) -> None:
        """Take a request, if chance says so and there is room. model: one of the config's, so they are few."""
        if random.random() >= self._share:
            return
        with self._lock:
            if self._waiting >= MAX_WAITING or len(request.body) > MAX_BODY_BYTES:
                self.num_skipped += 1
                return
            self._waiting += 1
        self._thread.submit(self._look, request.model, request.body)

    def _look(self, model: str, body: bytes) -> None:
        try:
            self._count(model, body)
        except Exception as error:  # whatever it is: it is no fault of the request's, and its text is not logged
            log.error("lint could not look at a prompt: %s", type(error).__name__)
        finally:
            with self._lock:
                self._waiting -= 1

    def _count(self, model: str, body: bytes) -> None:
        texts = texts_of(body)
        found, prefix = faults_of(texts), changing_prefix(texts)
        if prefix is not None and self._has_changed(model, prefix):
            found["changing_prefix"] = len(prefix.rest.encode("utf-8", "surrogatepass"))
        with self._lock:
            of_model = self._models.setdefault(model, ModelFaults())
            of_model.requests += 1
            of_model.num_bytes += len(body)
            of_model.wasted += found
            of_model.having.update(found.keys())

    def _has_changed(self, model: str, prefix: ChangingPrefix) -> bool:
        """Returns whether this beginning went on otherwise the last time."""
        key, value = self._hash(f"{model}\0{prefix.before}"), self._hash(prefix.rest)
        last = self._prefixes.pop(key, None)
        self._prefixes[key] = value
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return last not in (None, value)

    def _hash(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=16).digest()

    def report(self, accounts: Iterable[ClosedAccount]) -> dict[str, Any]:
        """Returns what was found by model. accounts: whose upstreams told what a token of a prompt takes."""
        ns_per_token = prefill_ns_per_token(accounts)
        with self._lock:
            models = {model: _model_report(found, ns_per_token) for model, found in self._models.items()}
            skipped = self.num_skipped
        return {"share": self._share, "skipped": skipped, "prefill_ns_per_token": ns_per_token, "models": models}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def prefill_ns_per_token(accounts: Iterable[ClosedAccount]) -> float | None:
    """Returns what a token that no cache had took to be computed, by the accounts of upstreams; None if none told."""
    lasted_ns = tokens = 0
    for account in accounts:
        nested = [stage for attempt in account.attempts for stage in attempt.nested if stage.stage is Stage.PREFILL]
        if nested:
            lasted_ns += sum(stage.end_ns - stage.begin_ns for stage in nested)
            tokens += account.prompt_tokens - account.cached_tokens
    return lasted_ns / tokens if tokens > 0 else None


def _model_report(found: ModelFaults, ns_per_token: float | None) -> dict[str, Any]:
    faults = {
        kind: {
            "requests": found.having[kind],
            "tokens": found.wasted[kind] // BYTES_PER_TOKEN,
            "prefill_ms": None
            if ns_per_token is None
            else round(found.wasted[kind] // BYTES_PER_TOKEN * ns_per_token / 1e6, 3),
        }
        for kind in KINDS
        if found.having[kind]
    }
    return {"requests": found.requests, "tokens": found.num_bytes // BYTES_PER_TOKEN, "faults": faults}
