"""The upstreams as the gateway sees them now, and which of them gets the next request of a model.

Of those that have room and a breaker that allows it, two are drawn, and the one with fewer tokens in flight at this
gateway gets it (fewer requests where that is equal): the power of two choices (Mitzenmacher 2001), which needs no view
of all and sends no herd to the emptiest. A retry goes to an upstream that has not been tried, while there is one.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from splittime.gateway.breaker import Breaker
from splittime.gateway.config import BreakerConfig, UpstreamConfig
from splittime.gateway.in_flight_limit import InFlightLimit
from splittime.ledger.attempts import Considered
from splittime.wire.target import Target

DRAWN = 2


class Upstream:
    """One upstream. requests, tokens: in flight, given by this gateway. adapted: how many it is given at once, where
    that is found from its queue."""

    def __init__(self, config: UpstreamConfig, breaker: BreakerConfig, key: str | None = None) -> None:
        self.config, self.name = config, config.name
        self.base_url, self.key = Target(url=config.url).base_url, key
        self.breaker = Breaker(breaker)
        self.requests = self.tokens = 0
        wait_s = config.queue_wait_s
        self.adapted = None if wait_s is None else InFlightLimit(config.max_in_flight, wait_s)

    @property
    def limit(self) -> int:
        """How many requests it may have at once now."""
        return self.config.max_in_flight if self.adapted is None else self.adapted.now

    @property
    def has_room(self) -> bool:
        return self.requests < self.limit

    @property
    def keeps_accounts(self) -> bool:
        return self.config.kind == "splittime"

    def enter(self, tokens: int) -> None:
        self.breaker.begin()
        self.requests += 1
        self.tokens += tokens
        if self.adapted is not None and not self.has_room:
            self.adapted.note_full()

    def leave(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens

    def considered(self) -> Considered:
        return Considered(self.name, self.requests, self.tokens)


class Routed(NamedTuple):
    """Who gets a request, and among whom it was chosen: the first of `considered` is the one."""

    upstream: Upstream
    considered: tuple[Considered, ...]


class Router:
    """draw: for tests and replays; default: a generator of its own. pools: the names of the upstreams of lines beside
    those of the models, which only rules lead to (`routing.policy`)."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        draw: random.Random | None = None,
        pools: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.upstreams = tuple(upstreams)
        self._random = draw or random.Random()
        self._by_model: dict[str, list[Upstream]] = {}
        for upstream in self.upstreams:
            for model in dict.fromkeys(upstream.config.models):
                self._by_model.setdefault(model, []).append(upstream)
        by_name = {upstream.name: upstream for upstream in self.upstreams}
        named = {pool: [by_name[name] for name in names] for pool, names in (pools or {}).items()}
        self._lines = named | self._by_model

    @property
    def models(self) -> list[str]:
        return list(self._by_model)

    def has_room(self, now_ns: int) -> bool:
        """Whether any upstream has that may be asked, of whatever model."""
        return any(upstream.has_room and upstream.breaker.allows(now_ns) for upstream in self.upstreams)

    def of_model(self, model: str) -> Sequence[Upstream]:
        """Returns the upstreams of a model, or of a pool by its name."""
        return self._lines.get(model, ())

    def allowed(self, model: str, now_ns: int) -> list[Upstream]:
        """Returns the upstreams of a model that may be asked, whether they have room or not."""
        return [upstream for upstream in self.of_model(model) if upstream.breaker.allows(now_ns)]

    def choose(self, model: str, now_ns: int, tried: Collection[str] = ()) -> Routed | None:
        """Returns who gets a request of this model now; None if nobody has room."""
        allowed = self.allowed(model, now_ns)
        untried = [upstream for upstream in allowed if upstream.name not in tried]
        free = [upstream for upstream in untried or allowed if upstream.has_room]
        return self._least_of(free) if free else None

    def _least_of(self, free: list[Upstream]) -> Routed:
        drawn = self._random.sample(free, DRAWN) if len(free) > DRAWN else free
        ordered = sorted(drawn, key=lambda upstream: (upstream.tokens, upstream.requests, self._random.random()))
        return Routed(ordered[0], tuple(upstream.considered() for upstream in ordered))

    def soonest_s(self, upstreams: Iterable[Upstream], now_ns: int) -> float:
        """Returns how long until the first of these may be asked again."""
        return min((upstream.breaker.wait_ns(now_ns) for upstream in upstreams), default=0) / 1e9
