"""Verify, then escalate: nothing of a small model's answer is given before its first tokens have been looked at.

    held back -> sure: given, and passed on as it comes | unsure: cut off, and the large model is asked

An answer is unsure where the mean log-probability of its first tokens is below the route's bound (`difficulty`). A
stream is looked at while it comes, another answer as a whole. It is given all the same, and the account says why, where

* no log-probabilities are told, or several answers are asked at once
* as many of the latest were asked anew as may be
* no first byte of the large model is expected before the deadline, or it has no place now: an escalation never waits

An answer that is asked anew is no retry: it counts in no budget, and has the time that is left of the request's own.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from splittime.core.errors import RequestError
from splittime.gateway.answer_events import DONE, AnswerEditor, WholeEvents
from splittime.gateway.config import DifficultyConfig
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.request_account import RequestAccount
from splittime.gateway.resume import Asked, Resumption, body_of
from splittime.gateway.routing import difficulty as firsts
from splittime.gateway.routing.difficulty import NO_PLACE, NO_TIME, OVER_SHARE, Escalations, given_to
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Routed, Upstream
from splittime.gateway.verdict import decoded
from splittime.ledger.attempts import LOGPROBS_REFUSED, UNSURE, UNSURE_KEPT, FirstTokens
from splittime.ledger.stages import Stage
from splittime.web import http
from splittime.wire.sse import AnswerReader, EventLines

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
        self._held, self._why_not = None, "" if self.is_continuing else firsts.why_not_looked_at(body_of(asked))
        if self.is_continuing or self._why_not:
            return asked, editor
        asked, is_added = firsts.asking_for_logprobs(asked)
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
        choice = {} if answer is None else firsts.first_choice(answer)
        if not choice and self._is_added and b"logprobs" in body:
            self._tell(LOGPROBS_REFUSED)
            raise AskedAnew(LOGPROBS_REFUSED)
        if answer is None or not choice:
            return body
        self._values = firsts.logprobs_of(choice)[: self._route.tokens]
        self._judge()
        return msgspec.json.encode(firsts.without_logprobs(answer)) if self._is_added else body

    # ---- a stream

    def _take(self, data: bytes) -> None:
        chunk = None if data == DONE else _object(data)
        if self.found is None:
            if data == DONE:
                self._judge()
            elif chunk is not None:
                self._note(firsts.first_choice(chunk))
        if self._is_added and chunk is not None:
            data = msgspec.json.encode(firsts.without_logprobs(chunk))
        self._held.append(b"data: %b\n\n" % data)
        self._num_bytes += len(data) + EVENT_BYTES
        if self.found is None and self._num_bytes > MAX_HELD_BYTES:
            self._tell(TOO_LONG)

    def _note(self, choice: dict[str, Any]) -> None:
        found = firsts.logprobs_of(choice)
        self._values += found[: self._route.tokens - len(self._values)]
        if len(self._values) >= self._route.tokens or (firsts.says_something(choice) and not self._values):
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


class DifficultyTurn:
    """Changes nothing of a request whose model is the name of no `[[difficulty]]`."""

    def __init__(self, gateway: GatewayService, account: RequestAccount, tenant: str) -> None:
        self._gateway, self._account, self._tenant = gateway, account, tenant
        self._route: DifficultyConfig | None = None
        self._is_checked = False  # the next attempt's first tokens are looked at
        self._given_up: FirstTokens | None = None  # why its first answer was
        self._place: Routed | None = None  # at the large model's, from the verdict on

    def begin(self, request: ForwardedRequest) -> ForwardedRequest:
        """Returns the request as it is passed on first."""
        route = self._route = self._gateway.difficulty.route(request)
        if route is None:
            return request
        _require_decidable(route, request)
        self._account.enter(Stage.ROUTE, now_ns())
        request = self._account.request = given_to(route.small, request)
        self._is_checked = True
        return request

    def resumption(self, request: ForwardedRequest) -> Resumption:
        """Returns what the attempts of this request are asked."""
        route = self._route if self._is_checked else None
        if route is None:
            return Resumption(request)
        escalations = self._gateway.difficulty.escalations(route)
        return CheckedResumption(request, escalations, partial(self._why_kept, route.large, request))

    def asked_anew(self, request: ForwardedRequest, found: FirstTokens, usage: AnswerReader) -> ForwardedRequest:
        """Returns what is asked in the place of an answer that nobody has seen: of the large model where the small one
        was unsure, else of the small one again, which is looked at no more.
        usage: what that answer told of its tokens."""
        self._given_up, self._is_checked = found, False
        self._account.asked_anew_tokens += self._spent(request, found, usage)
        if found.verdict == UNSURE and self._route is not None:
            decision = request.decision
            request = given_to(self._route.large, request)
            request = msgspec.structs.replace(request, decision=decision)  # that was for the small one
        self._account.request = request
        return request

    def _spent(self, request: ForwardedRequest, found: FirstTokens, usage: AnswerReader) -> int:
        """Returns the tokens of an answer that nobody is given, as it told them: a stream that was cut off told none,
        and has its prompt, as estimated, and what was looked at."""
        if found.verdict != UNSURE:
            return 0
        if usage.prompt_tokens is not None and usage.output_tokens is not None:
            return usage.prompt_tokens + usage.output_tokens
        return request.prompt_tokens + found.num_tokens

    def _why_kept(self, large: str, request: ForwardedRequest) -> str:
        """Returns why an unsure answer is given; "" where the large model has a place, which is taken then and there:
        nobody can take it meanwhile, and the request is neither shed nor waits once its answer is thrown away."""
        at_ns, deadline_ns = now_ns(), self._account.deadline_ns
        if deadline_ns is not None and self._first_byte_ns(large, at_ns) >= deadline_ns:
            return NO_TIME
        self._place = self._gateway.queue.place_now(self._tenant, large, request.tokens, request.places)
        return "" if self._place is not None else NO_PLACE

    def _first_byte_ns(self, model: str, at_ns: int) -> int:
        """Returns when the large model's first byte is to be expected at the earliest, as far as that is known."""
        waits = [one.waits.wait_ns(at_ns) for one in self._gateway.router.allowed(model, at_ns)]
        return at_ns + min((wait or 0 for wait in waits), default=0)

    def take_place(self) -> Routed | None:
        """Returns the place that was taken for the request, once."""
        place, self._place = self._place, None
        return place

    def headers(self, found: FirstTokens | None) -> http.Headers:
        """Returns what the client is told: who wrote the answer, and why that one. found: of the latest attempt."""
        request = self._account.request
        if request is None or self._route is None:
            return []
        found = self._given_up or found
        told = f"choice=small{'' if found is None else f'; check={found.verdict}'}".encode()
        return [(b"x-splittime-model", request.model.encode()), (b"x-splittime-difficulty", told)]


def _require_decidable(route: DifficultyConfig, request: ForwardedRequest) -> None:
    """Raises `RequestError` for a request whose answer has no first tokens that are looked at."""
    if request.has_choices:
        return
    message = f"{route.model[:64]!r} stands for two models, of which nothing decides for {request.path}"
    hint = f"ask for {route.small!r} or {route.large!r}"
    raise RequestError(message, code="not_for_endpoint", param="model", value=route.model[:64], hint=hint)
