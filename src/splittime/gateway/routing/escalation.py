"""Verify, then escalate: nothing of a small model's answer is given before its first tokens have been looked at.

    held back -> sure: given, and passed on as it comes | unsure: cut off, and the large model is asked

It is unsure where the mean log-probability of its first tokens is below the route's bound (`difficulty`). A stream is
looked at while it comes; an answer that is no stream comes as a whole, and is looked at then. Where nothing can be said
of it (a server that tells no log-probabilities, several answers at once) it is given, and the account says why. An
unsure answer is given too where as many of the latest were asked anew as may be, where no first byte of the large model
is to be expected before the request's deadline, and where that has no place at that moment: an escalation waits for
nobody.

An answer that is asked anew is no retry: it counts in no budget, and has the time that is left of the request's own.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from splittime.gateway.answer_events import DONE, AnswerEditor, WholeEvents
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.resume.request import body_of
from splittime.gateway.resume.resumption import Asked, Resumption
from splittime.gateway.routing.difficulty import OVER_SHARE, Escalations
from splittime.gateway.routing.first_tokens import (
    asking_for_logprobs,
    first_choice,
    logprobs_of,
    says_something,
    why_not_looked_at,
    without_logprobs,
)
from splittime.gateway.told_error import decoded
from splittime.gateway.upstreams import Upstream
from splittime.ledger.attempts import LOGPROBS_REFUSED, UNSURE, UNSURE_KEPT, FirstTokens
from splittime.wire.sse import EventLines

now_ns = time.monotonic_ns
SURE, NO_LOGPROBS, TOO_LONG = "sure", "no_logprobs", "too_long"
MAX_HELD_BYTES = 4 * 2**20
EVENT_BYTES = 64  # beside its data, in memory


class AskedAnew(Exception):
    """The answer that has come is not given. verdict: why; `unsure`, or `logprobs_refused`: nobody may be asked for
    them."""

    def __init__(self, verdict: str) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class CheckedResumption(Resumption):
    """What a small model's attempts are asked where their first tokens are looked at.

    why_kept: asked when one seems unsure, why it is given all the same; "" where the large model is to be asked."""

    def __init__(self, request: ForwardedRequest, route: Escalations, why_kept: Callable[[], str]) -> None:
        super().__init__(request)
        self._route, self._why_kept = route, why_kept
        self._held: HeldAnswer | None = None
        self._why_not = ""

    def reads_body(self, upstream: Upstream) -> bool:
        return True

    def attempt(self, upstream: Upstream) -> Asked:
        asked, editor = super().attempt(upstream)
        self._held, self._why_not = None, "" if self.is_continuing else why_not_looked_at(body_of(asked))
        if self.is_continuing or self._why_not:
            return asked, editor
        asked, is_added = asking_for_logprobs(asked)
        self._held = HeldAnswer(editor or WholeEvents(), self._route, self._why_kept, is_added=is_added)
        return asked, self._held

    @property
    def first_tokens(self) -> FirstTokens | None:
        """Returns what was read of the latest attempt's; None before there is a verdict."""
        if self._why_not:
            return FirstTokens(verdict=self._why_not, below=self._route.below)
        return None if self._held is None else self._held.found


class HeldAnswer:
    """Gives nothing until there is a verdict (`found`), and then what `editor` makes of the answer.

    is_added: log-probabilities were asked for by the gateway alone, and are taken out again."""

    def __init__(
        self, editor: AnswerEditor, route: Escalations, why_kept: Callable[[], str], *, is_added: bool
    ) -> None:
        self._editor, self._route, self._why_kept, self._is_added = editor, route, why_kept, is_added
        self._lines = EventLines()
        self._values: list[float] = []
        self._held: list[bytes] = []
        self._num_bytes = 0
        self._begin_ns: int | None = None
        self.found: FirstTokens | None = None

    @property
    def is_too_long(self) -> bool:
        return self._editor.is_too_long

    def edit(self, piece: bytes) -> bytes:
        """Returns the events that the client may have now. Raises `AskedAnew`."""
        whole = self._editor.edit(piece)
        if self.found is not None and not self._is_added:
            return whole
        self._begin_ns = now_ns() if self._begin_ns is None else self._begin_ns
        for data in self._lines.feed(whole):
            self._take(data)
        if self.found is None:
            return b""
        events, self._held = b"".join(self._held), []
        return events

    def edit_whole(self, body: bytes) -> bytes:
        """Returns an answer that is no stream, or an error, as the client may have it. Raises `AskedAnew`."""
        self._begin_ns = now_ns()
        answer = _object(self._editor.edit_whole(body))
        choice = {} if answer is None else first_choice(answer)
        if not choice and self._is_added and b"logprobs" in body:
            self._tell(LOGPROBS_REFUSED)
            raise AskedAnew(LOGPROBS_REFUSED)
        if answer is None or not choice:
            return body
        self._values = logprobs_of(choice)[: self._route.tokens]
        self._judge()
        return msgspec.json.encode(without_logprobs(answer)) if self._is_added else body

    # ---- a stream

    def _take(self, data: bytes) -> None:
        chunk = None if data == DONE else _object(data)
        if self.found is None:
            if data == DONE:
                self._judge()
            elif chunk is not None:
                self._note(first_choice(chunk))
        if self._is_added and chunk is not None:
            data = msgspec.json.encode(without_logprobs(chunk))
        self._held.append(b"data: %b\n\n" % data)
        self._num_bytes += len(data) + EVENT_BYTES
        if self.found is None and self._num_bytes > MAX_HELD_BYTES:
            self._tell(TOO_LONG)

    def _note(self, choice: dict[str, Any]) -> None:
        found = logprobs_of(choice)
        self._values += found[: self._route.tokens - len(self._values)]
        if len(self._values) >= self._route.tokens or (says_something(choice) and not self._values):
            self._judge()

    # ---- the verdict

    def _judge(self) -> None:
        if not self._values:
            self._tell(NO_LOGPROBS)
        elif sum(self._values) / len(self._values) >= self._route.below:
            self._route.note(is_anew=False)
            self._tell(SURE)
        else:
            self._judge_unsure("" if self._route.has_room else OVER_SHARE)

    def _judge_unsure(self, why_kept: str) -> None:
        why_kept = why_kept or self._why_kept()
        self._route.note(is_anew=not why_kept)
        self._tell(UNSURE_KEPT if why_kept else UNSURE, why_kept)
        if not why_kept:
            raise AskedAnew(UNSURE)

    def _tell(self, verdict: str, why: str = "") -> None:
        at_ns, values = now_ns(), self._values
        self.found = FirstTokens(
            verdict=verdict,
            num_tokens=len(values),
            mean_logprob=sum(values) / len(values) if values else None,
            below=self._route.below,
            held_ns=at_ns - (at_ns if self._begin_ns is None else self._begin_ns),
            why=why,
        )


def _object(data: bytes) -> dict[str, Any] | None:
    """Returns what the bytes say if that is an object."""
    return found if isinstance(found := decoded(data), dict) else None
