"""The cache's part in one request: what it finds, what it joins, and what of its answer is kept.

look up -> an equal answer | an equal request under way | a like answer, verified | none: it leads, and what it gets is
kept

Giving a client an answer that no upstream is asked for by its own request: one that is kept, or another's.

`KeptGiving` and `SharedGiving` look to the visit like a relay: how far the answer got, and what it said.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from splittime.core.errors import DeadlineExceeded
from splittime.gateway.answer_events import AnswerEvents
from splittime.gateway.cache.answers import DONE, Flight, KeptAnswer, wishes
from splittime.gateway.cache.spare_room import SpareRoom
from splittime.gateway.config import CacheRoute
from splittime.gateway.decoded_answer import PassedAnswer
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.relay import Relay
from splittime.gateway.request_account import RequestAccount
from splittime.gateway.upstreams import SLO_HEADER
from splittime.ledger.attempts import UNSURE_KEPT
from splittime.ledger.stages import Cause, Stage
from splittime.web import http

if TYPE_CHECKING:
    from splittime.gateway.cache.service import LookUp, ResponseCache
    from splittime.gateway.service import GatewayService

now_ns = time.monotonic_ns
HIT, MISS, BYPASS, SHARED = "hit", "miss", "bypass", "shared"


class Giving:
    """What both share. headers: asked for when the answer begins.

    first_byte_ns: None, since no upstream was asked, and no tokens of one are charged.
    """

    first_byte_ns: int | None = None
    blocked_ns = 0

    def __init__(self, send: http.Send, account: RequestAccount, headers: Callable[[], http.Headers]) -> None:
        self._send, self._account, self._headers = send, account, headers
        self.events = AnswerEvents()
        self.status: int | None = None
        self.ended_ns: int | None = None
        self.has_begun = self.is_answered = False

    async def run(self) -> None:
        """Give it, in time. Raises `DeadlineExceeded`, or why there is no whole answer."""
        deadline_ns = self._account.deadline_ns
        left_s = None if deadline_ns is None else max(0.0, (deadline_ns - now_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                await self._give()
        except TimeoutError:
            raise DeadlineExceeded.before("its answer was complete") from None

    async def _give(self) -> None:
        raise NotImplementedError

    async def give_answer(self, answer: PassedAnswer) -> None:
        """Give a whole answer, as a relay does that has one of an upstream that failed."""
        await self._begin(answer.status, [*answer.headers, (b"content-length", b"%d" % len(answer.body))])
        await self._piece(answer.body)
        await self._end()

    async def _begin(self, status: int, headers: http.Headers) -> None:
        self.has_begun, self.status = True, status
        sent = [*headers, *self._headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def _piece(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        self.is_answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended_ns = now_ns()


class KeptGiving(Giving):
    """A kept answer, given again: a stream as a stream. pace: 1.0 for events as far apart as they came, 0.0 for all at
    once. answer_id: what its `id` is this time.
    """

    def __init__(
        self,
        answer: KeptAnswer,
        answer_id: str,
        pace: float,
        send: http.Send,
        account: RequestAccount,
        headers: Callable[[], http.Headers],
    ) -> None:
        super().__init__(send, account, headers)
        self._answer, self._pace = answer, pace
        self._mark, self._id = answer.mark.encode(), answer_id.encode()

    async def _give(self) -> None:
        if self._answer.is_stream:
            await self._give_stream()
        else:
            self._account.enter(Stage.DELIVER, now_ns())
            body = self._with_id(self._answer.pieces[0].data)
            self.events.take_whole(body)
            await self.give_answer(PassedAnswer(200, [_content_type(self._answer)], body))

    async def _give_stream(self) -> None:
        await self._begin(200, [_content_type(self._answer), (b"cache-control", b"no-store")])
        begin_ns = now_ns()
        self._account.enter(Stage.CACHE, begin_ns, Cause.REPLAY_PACE if self._pace else None)
        for piece in self._answer.pieces:
            wait_ns = begin_ns + int(piece.after_ns * self._pace) - now_ns()
            if self._pace and wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            if piece.data == DONE:
                self._account.enter(Stage.DELIVER, now_ns())
            event = b"data: " + (piece.data if piece.data == DONE else self._with_id(piece.data)) + b"\n\n"
            self.events.feed(event)
            await self._piece(event)
        await self._end()

    def _with_id(self, data: bytes) -> bytes:
        return data.replace(self._mark, self._id)


class SharedGiving(Giving):
    """Another request's answer, given as it comes."""

    def __init__(
        self, flight: Flight, send: http.Send, account: RequestAccount, headers: Callable[[], http.Headers]
    ) -> None:
        super().__init__(send, account, headers)
        self._flight = flight

    async def _give(self) -> None:
        pieces = self._flight.pieces()
        try:
            async for piece in pieces:
                if not self.has_begun:
                    await self._begin(self._flight.status, self._flight.shared_headers())
                self._read(piece)
                await self._piece(piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        if not self._is_stream:
            self.events.take_whole(b"".join(piece for _, piece in self._flight.raw))
        self._account.enter(Stage.DELIVER, now_ns())
        await self._end()

    @property
    def _is_stream(self) -> bool:
        return dict(self._flight.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    def _read(self, piece: bytes) -> None:
        if self._is_stream and piece:
            self.events.feed(piece)


def _content_type(answer: KeptAnswer) -> tuple[bytes, bytes]:
    return b"content-type", answer.content_type.encode("latin-1")


class CacheTurn:
    """send: what the answer of an upstream goes to. headers: what the client is told of the cache, once it is known.
    answer_headers: asked for when an answer begins, these among them."""

    def __init__(
        self,
        gateway: "GatewayService",
        scope: http.Scope,
        account: RequestAccount,
        tenant: str,
        send: http.Send,
        answer_headers: Callable[[], http.Headers],
    ) -> None:
        self._cache, self._room = gateway.cache, SpareRoom(gateway, tenant, scope)
        self._scope, self._account, self._tenant = scope, account, tenant
        self.send, self._answer_headers = send, answer_headers
        self.headers: http.Headers = []
        self._flight: Flight | None = None  # that it leads, others following or not
        self._request: ForwardedRequest | None = None
        self._found: LookUp | None = None
        self._shadowed: LookUp | None = None  # the hit that it was, where the model runs all the same

    async def given(self, request: ForwardedRequest) -> Giving | None:
        """Returns the answer that needs no upstream; None if one is to be asked, with `send` for what it answers."""
        cache = self._cache
        route = None if cache is None or not request.has_choices else cache.route(request.model)
        if cache is None or route is None:
            return None
        self._account.enter(Stage.CACHE, now_ns())
        self._request = request
        return await self._look_up(cache, route, request)

    @property
    def leads(self) -> bool:
        """Returns whether what it sends is kept, and may be given to others."""
        return self._flight is not None

    def goes_on(self, cancel: Callable[[], object]) -> bool:
        """The client has gone. Returns whether the upstream goes on for those who follow; `cancel` ends it later."""
        return self._flight is not None and self._flight.goes_on(cancel)

    def leave(self, relay: Relay | Giving | None) -> None:
        """The request is over: keep what may be kept of its answer, and let nobody wait for the rest."""
        flight, cache, found, request = self._flight, self._cache, self._found, self._request
        self._flight = None
        if flight is None or cache is None or found is None or request is None:
            return
        flight.close()
        if not (relay is not None and _may_be_kept(flight, relay)):
            self._land(cache, flight, found.asked.key)
            return
        if self._shadowed is not None:
            cache.compare(flight, request, self._shadowed, self._room)
        kept = cache.keep(flight, found, request, self._tenant)
        if kept is None:
            self._land(cache, flight, found.asked.key)
        else:
            kept.add_done_callback(lambda _: self._land(cache, flight, found.asked.key))

    # ---- in

    async def _look_up(self, cache: "ResponseCache", route: CacheRoute, request: ForwardedRequest) -> Giving | None:
        wished = wishes(self._scope)
        if wished.no_store:
            self._tell(BYPASS, "no_store")
            return None
        found = await cache.look_up(request, self._tenant, route, wished)
        if found.asked.why_not:
            self._tell(BYPASS, found.asked.why_not)
            return None
        if wished.no_cache:
            self._lead(found, shares=False)
            self._tell(BYPASS, "no_cache")
            return None
        if found.answer is None and (joined := self._joined(found.asked.key)) is not None:
            return joined
        if found.answer is None and self._has_time(cache.likeness_s):
            found = await cache.look_alike(found, route, wished, self._room)
            if found.answer is None and (joined := self._joined(found.asked.key)) is not None:
                return joined
        return self._decided(cache, route, found)

    def _has_time(self, seconds: float) -> bool:
        """Returns whether its client's deadline leaves so much."""
        deadline_ns = self._account.deadline_ns
        return deadline_ns is None or deadline_ns - now_ns() > seconds * 1e9

    def _decided(self, cache: "ResponseCache", route: CacheRoute, found: "LookUp") -> Giving | None:
        if found.answer is None:
            has_slo = http.header(self._scope, SLO_HEADER.encode()) is not None
            self._lead(found, shares=self._account.deadline_ns is None and not has_slo)
            self._tell(MISS, "")
            return None
        if cache.is_shadowed(route):
            self._shadowed = found
            self._lead(found, shares=False)
            self._tell(BYPASS, "shadow")
            return None
        self._tell(HIT, found.kind)
        self.headers.append((b"age", b"%d" % found.answer.age_s(time.time())))
        self.headers.append((b"x-cache-entry", f"{found.kind}-{found.answer.key}".encode()))
        answer_id = self._account.own_id
        return KeptGiving(found.answer, answer_id, route.pace, self.send, self._account, self._answer_headers)

    def _joined(self, key: str) -> SharedGiving | None:
        """Returns the answer of an equal request that is under way."""
        flight = self._cache.flights.get(key) if self._cache is not None else None
        if flight is None or not flight.may_be_joined:
            return None
        self._account.enter(Stage.CACHE, now_ns(), Cause.SAME_REQUEST)
        self._tell(SHARED, "")
        return SharedGiving(flight, self.send, self._account, self._answer_headers)

    def _lead(self, found: "LookUp", *, shares: bool) -> None:
        """Keep what comes for it. shares: others may follow; not one that its own bound of time may end or refuse."""
        assert self._cache is not None
        self._found, self._flight = found, Flight(self._cache.config.max_answer_bytes)
        self.send = self._flight.tee(self.send)
        if shares:
            self._cache.flights[found.asked.key] = self._flight

    def _tell(self, result: str, why: str) -> None:
        """Count what the cache did, and tell the client."""
        assert self._cache is not None
        self._cache.results[result, why] += 1
        self.headers = [(b"x-cache", result.encode())]

    def _land(self, cache: "ResponseCache", flight: Flight, key: str) -> None:
        if cache.flights.get(key) is flight:
            del cache.flights[key]


def _may_be_kept(flight: Flight, relay: Relay | Giving) -> bool:
    """Returns whether an answer is whole, good, of our coding, and ended as the model wanted it to end."""
    if isinstance(relay, Relay) and relay.resumed_by:  # it says so, and may not be what one upstream would have said
        return False
    headers, events = dict(flight.headers), relay.events
    if headers.get(b"x-splittime-difficulty", b"").endswith(UNSURE_KEPT.encode()):  # of a moment without a better one
        return False
    if not flight.is_whole or flight.status != 200 or b"content-encoding" in headers or b"content-type" not in headers:
        return False
    return events.is_done and events.error is None and events.read().finish_reason == "stop"
