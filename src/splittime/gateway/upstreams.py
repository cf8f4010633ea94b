"""The upstreams as the gateway sees them now, and which of them gets the next request of a model.

Where there are more than `MANY`, some of each region are drawn first, with those that served the prompt's beginning:
with a thousand upstreams a choice took 3 ms. Of those with room and a breaker that allows it, the nearest region's are
looked at (`Regions`); with affinity the one that served the prompt's beginning has it (`routing.affinity`). Else of
`DRAWN` that are drawn the one with the fewest tokens before their first byte, then in flight, then requests. Counting
tokens in flight first sent prompts to where others were being computed: the slowest took twice as long (docs/log.md).
More than two choices (Mitzenmacher 2001) are no herd, as each gateway knows at once what it sent. A retry goes to an
upstream that has not been tried, while there is one.

A body takes a place for each answer that a model writes for it (`ForwardedRequest.places`). The last places of an
upstream, one of `FOR_OTHERS`, no body of several answers takes; one that asks for more than the rest begins where
nothing else is in flight.

A region is chosen by the least round trip (`RoundTrips`) and expected wait of its upstreams. What is unknown counts as
nothing, so it is soon known. Costs closer than `EQUAL_NS` or a tenth are equal; then the gateway's own region is first.

An upstream is told its own key, never the client's, and what is left of the time. A server of ours is told the tenant
whose key came, whatever a client's header says.
"""

import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from splittime.core.errors import ConfigError, Refused
from splittime.gateway.breaker import Breaker, InFlightLimit, LeftOut
from splittime.gateway.breaks import UpstreamPulse
from splittime.gateway.config import BreakerConfig, GatewayConfig, UpstreamConfig
from splittime.gateway.decoded_answer import USER_AGENT
from splittime.gateway.forwarded import OF_ANTHROPIC
from splittime.gateway.routing.affinity import PrefixAffinity, SeenPrefix
from splittime.gateway.upstream_connections import FirstByteWaits, RoundTrip
from splittime.gateway.usage_asked import EACH_CHUNK
from splittime.gateway.verdict import AnswerVerdict, Whose
from splittime.ledger.attempts import AffinityDecision, Considered
from splittime.web import http
from splittime.web.tenants import tenant_of, told_tenant
from splittime.wire.target import Target

EQUAL_NS, EQUAL_SHARE = 1_000_000, 0.1
log = logging.getLogger("splittime.gateway")

DRAWN = 8
MANY, OF_EACH = 64, 8  # upstreams; how many of each region are looked at where there are more
RETRY_AFTER_S = 1.0  # at the least
FOR_OTHERS = 16  # one of so many places, but one at least, is left by a body with several answers
LACKS_NS = 60_000_000_000  # for so long an upstream that said so is taken not to have a path
MAX_CONSIDERED = 8  # in an account
HUNG_AFTER = 3  # requests in a row without a byte; fewer may have been too long
SUSPECT_S, SUSPECT_NS = 10.0, 300_000_000_000  # after which silence one is a suspect, and for how long
HELD_BY = "responses kept by "  # begins the name of a line
now_ns = time.monotonic_ns
TRACE_HEADERS = (b"traceparent", b"tracestate")
ANTHROPIC_HEADERS = (b"anthropic-version", b"anthropic-beta")
ANTHROPIC_VERSION = "2023-06-01"
ANTHROPIC_KEY = "sk-ant-api"  # begins one, which Anthropic does not take as a bearer's
SLO_HEADER = "x-llm-d-slo-ttft-ms"


class DistanceCost(NamedTuple):
    """What a request to an upstream is expected to take before its first byte, work aside; None where nobody knows."""

    rtt_ns: int | None
    wait_ns: int | None

    @property
    def total_ns(self) -> int:
        return (self.rtt_ns or 0) + (self.wait_ns or 0)


NOWHERE = DistanceCost(None, None)  # where there are no regions


class Regions:
    """home: the gateway's own region. is_on: whether upstreams have regions."""

    def __init__(self, home: str | None, is_on: bool) -> None:
        self._home, self.is_on = home, is_on

    def costs(self, free: Sequence["Upstream"], now_ns: int) -> dict[str, DistanceCost]:
        """Returns what each of these costs now, by name; {} where there are no regions."""
        if not self.is_on:
            return {}
        return {one.name: DistanceCost(one.round_trip.ns, one.waits.wait_ns(now_ns)) for one in free}

    def nearest(self, free: Sequence["Upstream"], costs: Mapping[str, DistanceCost]) -> list["Upstream"]:
        """Returns the upstreams that cost least, all of one region; all of them where there are no regions."""
        if not costs:
            return list(free)
        most_ns = equal_to_ns(min(costs[one.name].total_ns for one in free))
        equal = [one for one in free if costs[one.name].total_ns <= most_ns]
        first = min(equal, key=lambda one: (one.config.region != self._home, costs[one.name].total_ns))
        return [one for one in equal if one.config.region == first.config.region]


def equal_to_ns(cost_ns: int) -> int:
    """Returns up to which cost another is equal to this one."""
    return cost_ns + max(EQUAL_NS, int(cost_ns * EQUAL_SHARE))


def regions_of(config: GatewayConfig) -> Regions:
    return Regions(config.region, any(upstream.region is not None for upstream in config.upstream))


def check_regions(config: GatewayConfig) -> None:
    """Raises `ConfigError` where some upstreams have a region and others none, or the gateway's own is nobody's."""
    named = {upstream.region for upstream in config.upstream if upstream.region is not None}
    lacking = next((number for number, one in enumerate(config.upstream) if one.region is None), None)
    if named and lacking is not None:
        param = f"upstream[{lacking}].region"
        raise ConfigError(f"{param} is missing, and others have one", param=param, hint="give each one, or none")
    if config.region is not None and config.region not in named:
        hint = f"the upstreams are in {', '.join(sorted(named))}" if named else "give each [[upstream]] a region"
        message = f"region: no upstream is in {config.region!r}"
        raise ConfigError(message, param="region", value=config.region, hint=hint)


class UpstreamLoad:
    """What an address has of this gateway, whichever version of the config gave it. requests: each answer counted.
    places: those that they have. plain_tokens: of the requests whose answer is no text: their end is their first byte.
    waits: how long until a first byte."""

    def __init__(self) -> None:
        self.requests = self.places = self.tokens = self.plain_tokens = 0
        self.waits = FirstByteWaits()
        self._heard_ns = self._num_silent = self._num_left = self._suspect_until_ns = 0

    def note_heard(self, now_ns: int) -> None:
        """A piece of an answer has come, whosever it is: what writes it does not hang."""
        self._heard_ns, self._num_silent, self._num_left = now_ns, 0, 0

    def hangs(self, sent_ns: int, now_ns: int, least_s: float, *, is_own: bool = True) -> bool:
        """Take note of a request that ends without a byte. Returns whether as many in a row as say something did, each
        after `least_s` in which nobody had a piece of an answer. is_own: by a limit of the gateway's; clients that
        leave shut nobody out, and have others asked first."""
        silent_s = (now_ns - sent_ns) / 1e9 if self._heard_ns < sent_ns else 0.0
        if silent_s >= min(least_s, SUSPECT_S):
            self._num_left, self._suspect_until_ns = self._num_left + 1, now_ns + SUSPECT_NS
        is_silent = is_own and silent_s >= least_s
        self._num_silent += is_silent
        return is_silent and self._num_silent >= HUNG_AFTER

    def is_suspect(self, now_ns: int) -> bool:
        """Returns whether it may hang, by what clients did alone: it is asked where no other has room."""
        return self._num_left >= HUNG_AFTER and now_ns < self._suspect_until_ns


class Upstream:
    """One upstream. in_flight: given by this gateway. in_flight_limit: how many it is given at once, where that is
    found from its queue. round_trip: how far it is. failing: the code of the latest verdict that spoke against it, ""
    since an answer. is_key_refused: that verdict was about the key."""

    def __init__(
        self, config: UpstreamConfig, breaker: BreakerConfig, key: str | None = None, left_out: LeftOut | None = None
    ) -> None:
        self.config, self.name = config, config.name
        target = Target(url=config.url)
        self.address, self.key = target.address, key
        self.breaker = Breaker(breaker, left_out)
        self.in_flight = UpstreamLoad()
        wait_s = config.queue_wait_s
        most = config.max_in_flight
        self.in_flight_limit = InFlightLimit(most, wait_s) if wait_s is not None and most else None
        self.round_trip = RoundTrip()
        self.failing, self.is_key_refused = "", False
        self.pulse = UpstreamPulse(self.address, key, config.first_byte_s)
        self.tells_usage = EACH_CHUNK  # unless it has refused that
        self._lacks_until_ns: dict[tuple[str, str], int] = {}  # by path and model, of the few that are passed on

    def take_over(self, old: "Upstream") -> None:
        """Go on from what an earlier config's upstream of this address has in flight, and from what it has shown."""
        self.in_flight = old.in_flight
        if old.key != self.key:  # what the address said of that key is nothing of this one
            return
        self._lacks_until_ns, self.tells_usage = old._lacks_until_ns, old.tells_usage
        self.failing, self.is_key_refused = old.failing, old.is_key_refused
        if old.breaker.config == self.breaker.config:
            self.breaker = old.breaker
        else:
            self.breaker.take_over(old.breaker)
        told = (self.config.max_in_flight, self.config.queue_wait_s)
        if told == (old.config.max_in_flight, old.config.queue_wait_s):
            self.in_flight_limit = old.in_flight_limit

    @property
    def requests(self) -> int:
        """How many it has now, each answer counted."""
        return self.in_flight.requests

    @property
    def tokens(self) -> int:
        return self.in_flight.tokens

    @property
    def waits(self) -> FirstByteWaits:
        return self.in_flight.waits

    @property
    def limit(self) -> int:
        """How many requests it may have at once now, each answer counted."""
        return self.config.max_in_flight if self.in_flight_limit is None else self.in_flight_limit.now

    @property
    def has_room(self) -> bool:
        return self.in_flight.places < self.limit

    @property
    def _most_of_one(self) -> int:
        """How many places a body of several answers may take: the last ones are for others."""
        return max(1, self.limit - max(1, self.limit // FOR_OTHERS))

    def places_of(self, answers: int) -> int:
        """Returns how many places a body of so many answers takes."""
        return min(answers, self._most_of_one)

    def has_room_for(self, answers: int) -> bool:
        """Whether a body of so many answers may be sent now."""
        taken, most = self.in_flight.places, self._most_of_one
        if answers == 1:
            return self.has_room
        return taken + answers <= most if answers <= most else self.has_room and not taken

    @property
    def tokens_unbegun(self) -> int:
        """How many tokens have no first byte yet."""
        return self.waits.tokens + self.in_flight.plain_tokens

    @property
    def keeps_accounts(self) -> bool:
        return self.config.kind == "splittime"

    def lacks(self, path: str, model: str, now_ns: int) -> bool:
        """Whether it said of late that it does not have this path, where this model was asked for."""
        return now_ns < self._lacks_until_ns.get((path, model), 0)

    def note_lacks(self, path: str, model: str, now_ns: int) -> None:
        self._lacks_until_ns[path, model] = now_ns + LACKS_NS
        left_out = self.breaker.left_out
        left_out.until_ns = max(left_out.until_ns, now_ns + LACKS_NS)

    def hear(self, verdict: AnswerVerdict, path: str, model: str, now_ns: int, tenant: str = "") -> None:
        """Take note of what an attempt's end, for this tenant, says of this upstream."""
        breaker, has_others, was_open = self.breaker, len(set(self.config.models)) > 1, self.breaker.is_open
        if verdict.whose is Whose.PATH or (verdict.whose is Whose.MODEL and has_others):
            self.note_lacks(path, model, now_ns)
        elif verdict.is_against:
            breaker.note_failure(now_ns, tenant if verdict.is_reached else "")
            self.failing, self.is_key_refused = verdict.code, verdict.whose is Whose.KEY
            if breaker.is_open and not was_open:
                log.warning("upstream %r is left alone: it fails again and again: %s", self.name, verdict.code)
        elif verdict.whose is Whose.BUSY:
            whom = "" if verdict.is_for_all else tenant
            breaker.note_busy(now_ns, verdict.pause_s, whom, is_for_one=verdict.is_for_one)
        elif verdict.whose is Whose.NOBODY:
            breaker.note_success(now_ns, tenant)
            self.in_flight.note_heard(now_ns)
            self.failing, self.is_key_refused = "", False

    def enter(self, tokens: int, answers: int = 1, places: int = 1) -> None:
        self.in_flight.requests += answers
        self.in_flight.places += places
        self.in_flight.tokens += tokens
        if self.in_flight_limit is not None and not self.has_room_for(answers):
            self.in_flight_limit.note_full()

    def leave(self, tokens: int, answers: int = 1, places: int = 1) -> None:
        self.in_flight.requests -= answers
        self.in_flight.places -= places
        self.in_flight.tokens -= tokens


def held_line(upstream: str) -> str:
    """Returns the name of the line of requests that one upstream alone can have, as it keeps what was before them."""
    return HELD_BY + upstream


def told_of(line: str, *, is_busy: bool) -> str:
    """Returns what a client is told where nobody of a line may be asked."""
    if line.startswith(HELD_BY):
        who = f"upstream {line.removeprefix(HELD_BY)!r}, which keeps the response,"
        return f"{who} asked for a pause" if is_busy else f"{who} does not answer"
    return f"every upstream of {line!r} asked for a pause" if is_busy else f"no upstream of {line!r} answers"


class ManyUpstreams:
    """A line of so many upstreams that nobody looks at all of them for a request."""

    def __init__(self, line: Sequence[Upstream]) -> None:
        self.members: frozenset[Upstream] = frozenset(line)
        self._regions: dict[str | None, list[Upstream]] = {}
        for upstream in line:
            self._regions.setdefault(upstream.config.region, []).append(upstream)

    def draw(self, rng: random.Random) -> list[Upstream]:
        """Returns some of each region."""
        return [one for some in self._regions.values() for one in rng.sample(some, min(OF_EACH, len(some)))]


class Routed(NamedTuple):
    """Who gets a request, and among whom it was chosen: the first of `considered` is the one. affinity: what prefix
    affinity had to say of it. answers, places: how many it asks for there, and how many places it has for them."""

    upstream: Upstream
    considered: tuple[Considered, ...]
    affinity: AffinityDecision | None = None
    answers: int = 1
    places: int = 1

    def enter(self, tokens: int) -> None:
        """Take its places."""
        self.upstream.breaker.begin(self)
        self.upstream.enter(tokens, self.answers, self.places)

    def leave(self, tokens: int) -> None:
        """Give them back."""
        self.upstream.leave(tokens, self.answers, self.places)
        self.upstream.breaker.leave(self)


class Router:
    """draw: for tests and replays; default: a generator of its own. pools: the names of the upstreams of lines beside
    those of the models, which only rules lead to (`routing.policy`). affinity, regions: default: none."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        draw: random.Random | None = None,
        pools: Mapping[str, Sequence[str]] | None = None,
        affinity: PrefixAffinity | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.upstreams = tuple(upstreams)
        self._random = draw or random.Random()
        self._affinity, self._regions = affinity or PrefixAffinity(None), regions or Regions(None, is_on=False)
        self._by_model: dict[str, list[Upstream]] = {}
        for upstream in self.upstreams:
            for model in dict.fromkeys(upstream.config.models):
                self._by_model.setdefault(model, []).append(upstream)
        self._by_name = {upstream.name: upstream for upstream in self.upstreams}
        named = {pool: [self._by_name[name] for name in names] for pool, names in (pools or {}).items()}
        alone = {held_line(upstream.name): [upstream] for upstream in self.upstreams}
        self._lines = named | alone | self._by_model
        self._left_out = {one.breaker.left_out for one in self.upstreams}  # one, where they share it
        self._many = {line: ManyUpstreams(some) for line, some in self._lines.items() if len(some) > MANY}

    @property
    def models(self) -> list[str]:
        return list(self._by_model)

    def has_room(self, now_ns: int) -> bool:
        """Whether any upstream has that may be asked, of whatever model."""
        return any(upstream.has_room and upstream.breaker.allows(now_ns) for upstream in self.upstreams)

    def of_model(self, model: str) -> Sequence[Upstream]:
        """Returns the upstreams of a model, or of a pool by its name."""
        return self._lines.get(model, ())

    def allowed(self, model: str, now_ns: int, tenant: str = "") -> list[Upstream]:
        """Returns the upstreams of a model that may be asked, whether they have room, or asked this tenant for a pause,
        or not."""
        return [upstream for upstream in self.of_model(model) if upstream.breaker.may_be_asked(now_ns, tenant)]

    def may_ask(self, model: str, now_ns: int, tenant: str = "") -> bool:
        """Whether any upstream is allowed."""
        return any(upstream.breaker.may_be_asked(now_ns, tenant) for upstream in self.of_model(model))

    def has_room_for(
        self, model: str, now_ns: int, tried: Collection[str] = (), answers: int = 1, tenant: str = ""
    ) -> bool:
        """Whether somebody would get a request of this model, for this tenant, now."""
        if tried:
            return self.choose(model, now_ns, tried, None, answers, tenant) is not None
        line = self.of_model(model)
        return any(upstream.has_room_for(answers) and upstream.breaker.allows(now_ns, tenant) for upstream in line)

    def choose(
        self,
        model: str,
        now_ns: int,
        tried: Collection[str] = (),
        prefix: SeenPrefix | None = None,
        answers: int = 1,
        tenant: str = "",
    ) -> Routed | None:
        """Returns who gets a request of this model, for this tenant, now; None if nobody has room. prefix: its own."""
        for line, is_whole in (self._drawn(model, prefix), False), (self.of_model(model), True):
            allowed = [upstream for upstream in line if upstream.breaker.allows(now_ns, tenant)]
            untried = [one for one in allowed if one.limit and one.name not in tried]  # who may have none never will
            able = untried or (allowed if is_whole else [])
            trusted = [upstream for upstream in able if not upstream.in_flight.is_suspect(now_ns)]
            for some in (trusted, able) if len(trusted) < len(able) else (able,):
                if free := [upstream for upstream in some if upstream.has_room_for(answers)]:
                    routed = self._best_of(some, free, now_ns, prefix)
                    return routed._replace(answers=answers, places=routed.upstream.places_of(answers))
        return None

    def _drawn(self, model: str, prefix: SeenPrefix | None) -> Sequence[Upstream]:
        """Returns some of many upstreams of a model; none where they are few."""
        many = self._many.get(model)
        if many is None:
            return ()
        names = self._affinity.served(prefix)
        served = [one for name in names if (one := self._by_name.get(name)) is not None and one in many.members]
        return list(dict.fromkeys([*many.draw(self._random), *served]))

    def _best_of(self, able: list[Upstream], free: list[Upstream], now_ns: int, prefix: SeenPrefix | None) -> Routed:
        costs = self._regions.costs(free, now_ns)
        near = self._regions.nearest(free, costs)
        region = near[0].config.region
        able, here = ([one for one in some if one.config.region == region] for some in (able, free))
        served, decision = self._affinity.preferred(prefix, able, here)
        ordered = self._least_of(near) if served is None else [served]
        if served is not None or costs:
            others = sorted(free, key=lambda one: (costs.get(one.name, NOWHERE).total_ns, one.tokens))
            ordered = [ordered[0], *(one for one in others if one is not ordered[0])][:MAX_CONSIDERED]
        found = [Considered(one.name, one.requests, one.tokens, *costs.get(one.name, NOWHERE)) for one in ordered]
        return Routed(ordered[0], tuple(found), decision)

    def _least_of(self, free: list[Upstream]) -> list[Upstream]:
        """Returns those that were drawn, the one with least to do first."""
        drawn = self._random.sample(free, DRAWN) if len(free) > DRAWN else free
        return sorted(drawn, key=lambda one: (one.tokens_unbegun, one.tokens, one.requests, self._random.random()))

    def _has_left_out(self, now_ns: int) -> bool:
        """Returns whether anybody may be left out now: of a thousand none is looked at for nothing."""
        return any(now_ns < some.until_ns for some in self._left_out)

    def left_out(self, line: str, path: str, model: str, tenant: str, now_ns: int) -> list[str]:
        """Returns the names of a line's upstreams that do not have this path for this model, or asked this tenant for a
        pause."""
        if not self._has_left_out(now_ns):
            return []
        some = self.of_model(line)
        return [one.name for one in some if one.lacks(path, model, now_ns) or one.breaker.pause_ns(tenant, now_ns)]

    def require_one(self, line: str, tenant: str, now_ns: int) -> None:
        """Raises `Refused` where no upstream of a line may be asked, or each that may has this tenant pause."""
        if not self.may_ask(line, now_ns, tenant):
            raise self.nobody(line, now_ns)
        allowed = self.allowed(line, now_ns, tenant) if self._has_left_out(now_ns) else []
        pauses_ns = [one.breaker.pause_ns(tenant, now_ns) for one in allowed if one.limit]
        if pauses_ns and all(pauses_ns):
            after_s = max(RETRY_AFTER_S, min(pauses_ns) / 1e9)
            raise Refused(told_of(line, is_busy=True), reason="upstreams_busy", retry_after_s=after_s)

    def nobody(self, line: str, now_ns: int) -> Refused:
        """Returns what a client is told where nobody of a line may be asked: 429 where an upstream lives and asked for
        a pause, 503 where none can be had."""
        upstreams = self.of_model(line)
        busy = [one for one in upstreams if one.breaker.is_busy(now_ns) and not one.breaker.is_open]
        wait_s = min((one.breaker.wait_ns(now_ns) for one in busy or upstreams), default=0) / 1e9
        told, after_s = told_of(line, is_busy=bool(busy)), max(RETRY_AFTER_S, wait_s)
        if busy:
            return Refused(told, reason="upstreams_busy", retry_after_s=after_s)
        return Refused(told, reason="no_upstream", status=503, retry_after_s=after_s)


def sent_headers(
    scope: http.Scope, upstream: Upstream, attempt_id: str, until_ns: int, first_token_by_ns: int | None
) -> dict[str, str]:
    """Returns the headers of one attempt. until_ns, first_token_by_ns: the deadlines."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": USER_AGENT,
        "x-request-id": attempt_id,
        "x-request-deadline-ms": _left_ms(until_ns),
    }
    is_anthropics = scope["path"] in OF_ANTHROPIC
    headers |= key_headers(upstream.key, is_anthropics=is_anthropics)
    if upstream.keeps_accounts:
        headers |= {"x-include-timing": "1", **told_tenant(tenant_of(scope))}
    if first_token_by_ns is not None:
        headers[SLO_HEADER] = _left_ms(first_token_by_ns)
    for name in (*TRACE_HEADERS, *(ANTHROPIC_HEADERS if is_anthropics else ())):
        value = http.header(scope, name)
        if value is not None and value.isascii() and value.isprintable():  # else no header of ours
            headers[name.decode()] = value
    return headers


def key_headers(key: str | None, *, is_anthropics: bool) -> dict[str, str]:
    """Returns how an upstream knows the gateway. is_anthropics: the path is one of Anthropic's API."""
    headers = {"anthropic-version": ANTHROPIC_VERSION} if is_anthropics else {}
    if key is None:
        return headers
    is_its_key = is_anthropics and key.startswith(ANTHROPIC_KEY)
    return headers | ({"x-api-key": key} if is_its_key else {"authorization": f"Bearer {key}"})


def _left_ms(until_ns: int) -> str:
    return str(max(1, (until_ns - now_ns()) // 1_000_000))
