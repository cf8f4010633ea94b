"""Routing by difficulty in one request: which model it is given to, whether that is asked anew, and what it is told.

its text decides -> the large model | the small one -> its first tokens decide -> that answer | the large one
"""

import time
from functools import partial

import msgspec

from splittime.core.errors import RequestError
from splittime.gateway.config import DifficultyConfig
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.request_account import RequestAccount
from splittime.gateway.resume.resumption import Resumption
from splittime.gateway.routing.difficulty import NO_PLACE, NO_TIME, SMALL, given_to
from splittime.gateway.routing.escalation import CheckedResumption
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Routed
from splittime.ledger.attempts import UNSURE, DifficultyDecision, FirstTokens
from splittime.ledger.stages import Stage
from splittime.web import http
from splittime.wire.sse import AnswerReader

now_ns = time.monotonic_ns


class DifficultyTurn:
    """Changes nothing of a request whose model is the name of no `[[difficulty]]`."""

    def __init__(self, gateway: GatewayService, account: RequestAccount, tenant: str) -> None:
        self._gateway, self._account, self._tenant = gateway, account, tenant
        self._route: DifficultyConfig | None = None
        self._decision: DifficultyDecision | None = None  # by the text
        self._is_checked = False  # the next attempt's first tokens are looked at
        self._given_up: FirstTokens | None = None  # why its first answer was
        self._place: Routed | None = None  # at the large model's, from the verdict on

    async def begin(self, request: ForwardedRequest) -> ForwardedRequest:
        """Returns the request as it is passed on first."""
        route = self._route = self._gateway.difficulty.route(request)
        if route is None:
            return request
        _require_decidable(route, request)
        self._account.enter(Stage.ROUTE, now_ns())
        request = self._account.request = await self._gateway.difficulty.decided(route, request)
        self._decision = None if request.decision is None else request.decision.difficulty
        self._is_checked = route.escalate is not None and request.model == route.small and request.has_choices
        return request

    def resumption(self, request: ForwardedRequest) -> Resumption:
        """Returns what the attempts of this request are asked."""
        route = self._route if self._is_checked else None
        escalations = None if route is None else self._gateway.difficulty.escalations(route)
        if route is None or escalations is None:
            return Resumption(request)
        return CheckedResumption(request, escalations, partial(self._why_kept, route.large, request))

    def asked_anew(self, request: ForwardedRequest, found: FirstTokens, usage: AnswerReader) -> ForwardedRequest:
        """Returns what is asked in the place of an answer that nobody has seen: of the large model where the small one
        was unsure, else of the small one again, which is looked at no more.
        usage: what that answer told of its tokens."""
        self._given_up, self._is_checked = found, False
        self._account.asked_anew_tokens += self._spent(request, found, usage)
        if found.verdict == UNSURE and self._route is not None and self._decision is not None:
            decision = request.decision
            request = given_to(self._route.large, request, self._decision)
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
        asked = (self._tenant, large, request.tokens)
        self._place = self._gateway.queue.place_now(*asked, is_charged=True, answers=request.places)
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
        request, decision = self._account.request, self._decision
        if request is None or decision is None:
            return []
        found = self._given_up or found
        check = f"; check={found.verdict}" if found is not None and decision.choice == SMALL else ""
        told = f"choice={decision.choice}{check}".encode()
        return [(b"x-splittime-model", request.model.encode()), (b"x-splittime-difficulty", told)]


def _require_decidable(route: DifficultyConfig, request: ForwardedRequest) -> None:
    """Raises `RequestError` for a request that nothing would be decided of: its answer is not written, or has no first
    tokens that are looked at."""
    if request.has_choices or (request.is_written and route.labels is not None):
        return
    message = f"{route.model[:64]!r} stands for two models, of which nothing decides for {request.path}"
    hint = f"ask for {route.small!r} or {route.large!r}"
    raise RequestError(message, code="not_for_endpoint", param="model", value=route.model[:64], hint=hint)
