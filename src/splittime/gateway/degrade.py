"""What the stages that are entered make of a request, and how its answer says so.

`degraded: {"stage": ..., "reason": ...}` stands first in the answer's body, or in a stream's first chunk, and the
header `X-Splittime-Degraded` says the same. A request that the stages change nothing of (it asks for fewer tokens than
they leave, or for the smaller model itself) is answered as ever, and says nothing.

Which stage of the ladder the gateway is on: entered by the queue's wait, left with hysteresis.

The wait is that of whoever has waited longest now. A stage is entered as soon as the wait reaches its `enter_wait_s`,
and left when the wait has been at most its `leave_wait_s` for `hold_s` without a break: a queue that swings about one
bound does not swing the answers.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from splittime.gateway.config import DegradationConfig
from splittime.gateway.forwarded import CHAT, ENDPOINTS, ForwardedRequest, forwarded
from splittime.web import http

OBJECT = b"{"
EVENT = b"data: {"
QUEUE_WAIT = "queue_wait"  # the reason of every stage so far


class Lesser(NamedTuple):
    """request: what goes to an upstream. stage: the last that changed it; "" for none. answer: in place of any."""

    request: ForwardedRequest
    stage: str = ""
    answer: str | None = None

    @property
    def mark(self) -> dict[str, str]:
        return {"stage": self.stage, "reason": QUEUE_WAIT} if self.stage else {}

    @property
    def headers(self) -> http.Headers:
        value = f"stage={self.stage}; reason={QUEUE_WAIT}".encode()
        return [(b"x-splittime-degraded", value)] if self.stage else []


def lesser(request: ForwardedRequest, stages: Sequence[DegradationConfig], assumed_max_tokens: int) -> Lesser:
    """Returns what these stages, all entered, make of a request. One whose answer no model writes stays as it is:
    another model's vectors and scores mean something else."""
    if not request.is_written:
        return Lesser(request)
    try:
        fields: dict[str, Any] = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, RecursionError):  # of a field that nobody had to read before: the upstream's to say
        return Lesser(request)
    stage, answer = "", None
    is_bound = bool(request.previous_id) or (request.decision is not None and bool(request.decision.upstreams))
    for one in stages:
        if is_bound and one.model is not None:  # a rule says who may have it, or an upstream holds what was before it
            continue
        if one.answer is not None and not request.has_choices:
            continue
        if _changes(fields, one, ENDPOINTS[request.path].most):
            stage, answer = one.name, one.answer or answer
    if not stage:
        return Lesser(request)
    changed = forwarded(request.path, msgspec.json.encode(fields), assumed_max_tokens)
    pool = request.pool if changed.model == request.model else changed.model  # a stage's model has its own line
    return Lesser(msgspec.structs.replace(changed, decision=request.decision, pool=pool), stage, answer)


def _changes(fields: dict[str, Any], stage: DegradationConfig, names: Sequence[str]) -> bool:
    """Returns whether the stage changes the request's fields, which it then has. names: of those that bound its
    answer."""
    if stage.answer is not None:
        return True
    if stage.model is not None:
        changes = fields["model"] != stage.model
        fields["model"] = stage.model
        return changes
    name = next((one for one in names if fields.get(one) is not None), names[-1])
    told, most = fields.get(name), stage.max_tokens or 0
    if told is not None and 0 <= told <= most:
        return False
    fields[name] = most
    if type(fields.get("min_tokens")) is int:
        fields["min_tokens"] = min(fields["min_tokens"], most)
    return True


class MarkedAnswer:
    """Writes a mark into an answer: once, before its first field."""

    def __init__(self, mark: dict[str, str]) -> None:
        self._mark = b'"degraded":%b,' % msgspec.json.encode(mark) if mark else b""

    def in_events(self, events: bytes) -> bytes:
        """Returns whole events of a stream, with the mark in the first that is an object."""
        begin = events.find(EVENT)
        return events if begin < 0 else self._written(events, begin + len(EVENT))

    def in_body(self, body: bytes) -> bytes:
        return self._written(body, 1) if body.startswith(OBJECT) else body

    def _written(self, data: bytes, at: int) -> bytes:
        mark, self._mark = self._mark, b""
        return data[:at] + mark + data[at:] if mark else data


def template_answer(lesser: Lesser, answer_id: str) -> tuple[bytes, bytes]:
    """Returns the content type and the body of an answer that no model has made."""
    request, is_chat = lesser.request, lesser.request.path == CHAT
    head = {"id": answer_id, "created": int(time.time()), "model": request.model}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    text = lesser.answer or ""
    if request.is_stream:
        piece: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        choice = {"index": 0, **piece, "finish_reason": "stop"}
        chunk = {"degraded": lesser.mark, **head, "object": kind, "choices": [choice], "usage": usage}
        return b"text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(chunk)
    piece = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    kind = "chat.completion" if is_chat else "text_completion"
    choice = {"index": 0, **piece, "finish_reason": "stop"}
    whole = {"degraded": lesser.mark, **head, "object": kind, "choices": [choice], "usage": usage}
    return b"application/json", msgspec.json.encode(whole)


class Ladder:
    """stages: the lightest first. wait_ns: how long whoever has waited longest has waited, at this instant."""

    def __init__(self, stages: Sequence[DegradationConfig], wait_ns: Callable[[int], int]) -> None:
        self.stages = tuple(stages)
        self._wait_ns = wait_ns
        self._calm_since_ns: int | None = None
        self.level = 0  # stages that are entered

    def observe(self, now_ns: int) -> int:
        """Returns the level at this instant; to be called when somebody comes or goes."""
        if not self.stages:
            return 0
        wait_s = self._wait_ns(now_ns) / 1e9
        while self.level < len(self.stages) and wait_s >= self.stages[self.level].enter_wait_s:
            self.level += 1
            self._calm_since_ns = None
        self._maybe_leave(wait_s, now_ns)
        return self.level

    def _maybe_leave(self, wait_s: float, now_ns: int) -> None:
        while self.level and wait_s <= self.stages[self.level - 1].leave_wait_s:
            if self._calm_since_ns is None:
                self._calm_since_ns = now_ns
            hold_ns = int(self.stages[self.level - 1].hold_s * 1e9)
            if now_ns - self._calm_since_ns < hold_ns:
                return
            self.level -= 1
            self._calm_since_ns += hold_ns  # the next one is held for its own time
        self._calm_since_ns = None
