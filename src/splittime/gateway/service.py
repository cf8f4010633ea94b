"""What the gateway's requests share: the upstreams, the queue, the keys, the ledger, and who is being served now.

What a new version takes over from the one before: upstreams, limits and retries that are configured alike keep their
state, so a swap forgets no request in flight, no open breaker and no used-up limit.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from splittime import __version__
from splittime.core.errors import ErrorInfo, Refused
from splittime.gateway.audit import AuditLog
from splittime.gateway.breaker import LeftOut, RetryBudgets
from splittime.gateway.breaks import LoopLag
from splittime.gateway.budgets import BudgetFile, LearntUse, TokenBudgets
from splittime.gateway.canary import CanaryTrial
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import EMBEDDER, TRACING, Secrets
from splittime.gateway.degrade import Ladder
from splittime.gateway.fair_queue import FairQueue
from splittime.gateway.lint import PromptLint
from splittime.gateway.metrics import GatewayMetrics, upstream_stats
from splittime.gateway.page import PageAnswers
from splittime.gateway.request_account import RequestAccount
from splittime.gateway.responses import HeldResponses
from splittime.gateway.routing.affinity import PrefixAffinity
from splittime.gateway.routing.difficulty import DifficultyRouting
from splittime.gateway.routing.policy import RoutePolicy
from splittime.gateway.tracing import SpanExporter
from splittime.gateway.upstream_checks import HealthChecks, QueuePolls
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections
from splittime.gateway.upstreams import Router, Upstream, regions_of
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.store import Ledger
from splittime.web.tenants import ANYBODY, ApiKeys, Quota, Tenant
from splittime.wire.target import Address

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache


now_ns = time.monotonic_ns
log = logging.getLogger("splittime.gateway")

ENGINE = "splittime gateway"
READING_THREADS = 2
DRAIN_POLL_S = 0.02
LAST_WORDS_S = 5.0  # for streams to take their error event, after the grace time
CUT_S = 1.0  # for those that did not read them to be gone
TOLD = (  # among its facts
    *("queue", "retries", "affinity", "breaker", "cache", "cache_route", "difficulty", "degradation"),
)
UNKNOWN_TO_IT = ("token_ready_ns", "token_written_ns", "token_steps", "num_preemptions")
OF_THE_PROCESS = (
    *("budgets", "is_draining", "cache", "lag", "audit", "tracing", "lint", "metrics", "pool"),
    *("started_ns", "held", "started_unix_s", "visits", "round_trips", "connections", "learnt"),
)


def upstreams_of(before: "GatewayService | None", made: Sequence[Upstream]) -> list[Upstream]:
    """Returns the upstreams of a new version: those of living ones where they are configured alike, key included. Who
    is configured otherwise takes over what its address has in flight, under whichever name it had that."""
    at: dict[Address, list[Upstream]] = {}
    for one in _living(before):
        at.setdefault(one.address, []).append(one)
    kept = {(one.name, one.address) for one in made}
    return [_carried(one, at.get(one.address, ()), kept) for one in made]


def _living(before: "GatewayService | None") -> list[Upstream]:
    if before is None:
        return []
    services = [before, *(before.versions.living if before.versions is not None else [])]
    return list(dict.fromkeys(one for service in services for one in service.router.upstreams))


def _carried(made: Upstream, same: Sequence[Upstream], kept: Collection[tuple[str, Address]]) -> Upstream:
    """same: the upstreams of its address before."""
    of_name = [one for one in same if one.name == made.name]
    for one in of_name:
        if (one.config, one.key) == (made.config, made.key) and one.breaker.config == made.breaker.config:
            return one
    for one in of_name or [one for one in same if (one.name, one.address) not in kept]:
        made.take_over(one)
        break
    return made


def quota_of(before: "GatewayService | None", tenant: Tenant) -> Quota:
    """Returns the earlier version's, which goes on with other limits when this version begins (`Quota.change`)."""
    old = None if before is None else before.quotas.get(tenant.name)
    return old if old is not None else Quota(tenant)


class ServedVisit(Protocol):
    """A request that is being served (`visit.GatewayVisit`), as far as the others are told of it, and its end."""

    account: RequestAccount
    tenant: Tenant

    def end_early(self, error: ErrorInfo) -> None: ...
    def cut(self) -> None: ...


class Versions(Protocol):
    """The versions of the config (`versions.GatewayVersions`), as far as one of them looks at the others."""

    canary: "GatewayService | None"
    trial: CanaryTrial | None
    counts: dict[str, int]

    @property
    def living(self) -> "list[GatewayService]": ...
    def arm_of(self, tenant: Tenant) -> "GatewayService": ...


class GatewayService:
    """`open` begins, inside the event loop; `drain` and `close` end."""

    def __init__(
        self,
        config: GatewayConfig,
        secrets: Secrets,
        ledger: Ledger,
        version: str = "",
        before: "GatewayService | None" = None,
    ) -> None:
        """before: the version that this one follows: they share what is one of a process, and what has not changed."""
        self.config, self.ledger, self.version, self._before = config, ledger, version, before
        self.versions: Versions | None = None
        self.num_open = 0
        self.keys = ApiKeys(holders=secrets.holders, metrics_digest=secrets.metrics_key)
        self.quotas = {tenant.name: quota_of(before, tenant) for tenant in (ANYBODY, *self.keys.tenants)}
        self.policy = RoutePolicy(config)
        self.difficulty = DifficultyRouting(config.difficulty, secrets.bounds)
        self.left_out: LeftOut = LeftOut() if before is None else before.left_out
        keys = secrets.upstream_keys
        made = [Upstream(one, config.breaker, keys.get(one.name), self.left_out) for one in config.upstream]
        upstreams = upstreams_of(before, made)
        self.affinity = self._affinity(before)
        regions = regions_of(config)
        self.router = Router(upstreams, pools=self.policy.pools, affinity=self.affinity, regions=regions)
        self.queue = FairQueue(config.queue, self.router, {tenant.name: tenant.weight for tenant in config.tenant})
        self.ladder = Ladder(config.degradation, self.queue.longest_wait_ns)
        self.retry_budgets = self._retries(before)
        self._queue_polls = QueuePolls(self.router.upstreams, self._on_room)
        self._health_checks = HealthChecks(self.router.upstreams, self._on_room)
        if before is None:
            self._begin(keys)
        else:
            for name in OF_THE_PROCESS:
                setattr(self, name, getattr(before, name))
        for upstream in self.router.upstreams:
            upstream.round_trip = self.round_trips.of(upstream.address.host, upstream.address.port)
        self.page_answers = PageAnswers(partial(state_now, self), self.ledger, self.pool)

    def _retries(self, before: "GatewayService | None") -> RetryBudgets:
        """Returns what counts attempts beyond the first: that of the version before, where its config is the same."""
        if before is not None and before.config.retries == self.config.retries:
            return before.retry_budgets
        return RetryBudgets(self.config.retries)

    def _affinity(self, before: "GatewayService | None") -> PrefixAffinity:
        """Returns what remembers who served what: that of the version before, where its config is the same."""
        if before is not None and before.config.affinity == self.config.affinity:
            return before.affinity
        return PrefixAffinity(self.config.affinity, None if before is None else before.affinity.results)

    def _begin(self, keys: Mapping[str, str]) -> None:
        """Make what is one of the process: every later version takes it over (`OF_THE_PROCESS`)."""
        config = self.config
        file = None if config.budget_file is None else BudgetFile(config.budget_file)
        self.budgets = TokenBudgets(config.tenant, file)
        self.is_draining = False
        self.lag, self.round_trips, self.held, self.learnt = LoopLag(), RoundTrips(), HeldResponses(), LearntUse()
        self.connections = UpstreamConnections(self.round_trips)
        self.cache = self._cache(config, keys.get(EMBEDDER))
        self.audit = None if config.audit is None else AuditLog(config.audit)
        self.pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="reading")
        self.tracing = self._tracing(keys.get(TRACING))
        self.lint = None if config.lint is None else PromptLint(config.lint)
        self.metrics = GatewayMetrics(self)
        self.started_ns, self.started_unix_s = time.monotonic_ns(), int(time.time())
        self.visits: set[ServedVisit] = set()
        self.ledger.describe_by(self.facts)

    def _tracing(self, key: str | None) -> SpanExporter | None:
        if self.config.tracing is None:
            return None
        exporter = SpanExporter(self.config.tracing, key, self.connections, self.pool)
        self.ledger.subscribe(exporter.note)
        return exporter

    def _on_room(self) -> None:
        self.queue.dispatch()
        self.queue.on_leave()

    @property
    def seen_upstreams(self) -> dict[str, Upstream]:
        """The upstreams by the name that metrics have; a canary's own ones have `@canary` behind theirs."""
        canary = self.versions.canary if self.versions is not None else None
        others = [one for one in canary.router.upstreams if one not in self.router.upstreams] if canary else []
        return {one.name: one for one in self.router.upstreams} | {f"{one.name}@canary": one for one in others}

    def _cache(self, config: GatewayConfig, embedder_key: str | None) -> "ResponseCache | None":
        if not config.cache_route:
            return None
        from splittime.gateway.cache.service import ResponseCache  # imports numpy

        return ResponseCache(config, self.connections, embedder_key)

    async def open(self) -> None:
        """Begin what runs beside requests."""
        self._queue_polls.begin(self.connections)
        self._health_checks.begin(self.connections)
        if self._before is not None:
            self._before = None  # no chain of them is kept
            for tenant in (ANYBODY, *self.keys.tenants):
                self.quotas[tenant.name].change(tenant)
            return
        self.budgets.open()
        self.lag.begin()
        if self.tracing is not None:
            self.tracing.open()

    # ---- may a request come in

    @property
    def is_ready(self) -> bool:
        """Returns whether some upstream may be asked now."""
        at_ns = time.monotonic_ns()
        return not self.is_draining and any(one.breaker.allows(at_ns) for one in self.router.upstreams)

    def require_serving(self) -> None:
        if self.is_draining:
            raise Refused("the gateway is shutting down", reason="draining", status=503)

    def require_allowance(self, tenant: Tenant) -> None:
        """Raises `Refused` if a limit or a budget of this tenant lets no request in now. Takes nothing."""
        self.quota(tenant).check(time.monotonic_ns())
        self.budgets.check(tenant.name)

    def is_open_to(self, tenant: Tenant) -> bool:
        """Returns whether a request of this tenant is surely not refused for want of room: nobody waits, no limit is
        met."""
        if self.is_draining or self.queue.requests:
            return False
        try:
            self.require_allowance(tenant)
        except Refused:
            return False
        return True

    def quota(self, tenant: Tenant) -> Quota:
        return self.quotas[tenant.name]

    def enter(self, visit: ServedVisit) -> None:
        self.visits.add(visit)
        self.num_open += 1

    def leave(self, visit: ServedVisit) -> None:
        self.visits.discard(visit)
        self.num_open -= 1
        self.ladder.observe(time.monotonic_ns())

    def is_open(self, request_id: str, tenant: Tenant) -> bool:
        mine = (visit for visit in self.visits if tenant.sees in (None, visit.tenant.name))
        return any(visit.account.request_id == request_id for visit in mine)

    # ---- what it knows of itself

    def facts(self) -> ServerFacts:
        upstreams = [msgspec.to_builtins(one.config) for one in self.router.upstreams]
        settings: dict[str, Any] = {
            "upstreams": upstreams,
            "rules": [msgspec.to_builtins(rule) for rule in self.config.rule],
            "aliases": dict(self.config.aliases),
            "policy": self.policy.version,
            **{name: msgspec.to_builtins(getattr(self.config, name)) for name in TOLD},
        }
        process = Process(name="gateway", started_ns=self.started_ns, ready_ns=self.started_ns)
        return ServerFacts(
            version=__version__,
            model=", ".join(self.router.models),
            max_model_len=0,
            settings=settings,
            processes=(process,),
            engine=ENGINE,
            unknown=UNKNOWN_TO_IT,
        )

    @property
    def waiting(self) -> tuple[int, int]:
        """Returns how many requests wait for an upstream, those of earlier versions too, and their tokens."""
        living = [self] if self.versions is None else self.versions.living
        return sum(one.queue.requests for one in living), sum(one.queue.tokens for one in living)

    def stats(self) -> dict[str, Any]:
        """Returns the state of the queue and of each upstream now."""
        at_ns = time.monotonic_ns()
        cache = {} if self.cache is None else {"cache": self.cache.stats()}
        return {
            **cache,
            "open_requests": len(self.visits),
            "is_draining": self.is_draining,
            "difficulty": self.difficulty.stats(),
            "policy": self.policy.version,
            "config": self.version,
            "queue": {"requests": self.waiting[0], "tokens": self.waiting[1]},
            "retries": self.retry_budgets.num_taken,
            "affinity": dict(self.affinity.results),
            "degradation": [stage.name for stage in self.ladder.stages[: self.ladder.observe(at_ns)]],
            "upstreams": [upstream_stats(name, one, at_ns) for name, one in self.seen_upstreams.items()],
        }

    # ---- the end

    async def drain(self) -> None:
        """Admit nobody; let what is open finish within the grace time; end the rest with an error."""
        self.is_draining = True
        log.info("shutting down: %d requests open", len(self.visits))
        await self._until_empty(self.config.grace_s)
        error = ErrorInfo("overloaded_error", "the gateway is shutting down", "draining", 503, retry_after_s=1.0)
        for visit in list(self.visits):
            visit.end_early(error)
        await self._until_empty(LAST_WORDS_S)
        for visit in list(self.visits):
            visit.cut()
        await self._until_empty(CUT_S)

    async def _until_empty(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while self.visits and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)

    async def retire(self) -> None:
        """Another version has taken its place: it asks nobody any more how they are."""
        await self._queue_polls.end()
        await self._health_checks.end()

    async def close(self) -> None:
        self.lag.end()
        await self.retire()
        if self.audit is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.audit.close)
        await self.budgets.close()
        if self.tracing is not None:
            await self.tracing.close()
        self.connections.close()
        if self.cache is not None:
            self.cache.close()
        if self.lint is not None:
            self.lint.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def state_now(gateway: GatewayService, at_ns: int) -> dict[str, Any]:
    """Returns how things are at this instant; to be called in the event loop."""
    retries, allowed = gateway.retry_budgets.used(at_ns)
    return {
        **gateway.stats(),
        "models": len(gateway.policy.names),
        "is_ready": gateway.is_ready,
        "loop_lag_ns": gateway.lag.longest_ns,
        "longest_wait_ns": gateway.queue.longest_wait_ns(at_ns),
        "queue_limits": {"requests": gateway.config.queue.max_requests, "tokens": gateway.config.queue.max_tokens},
        "retry_budget": {"used": retries, "allowed": allowed, "window_s": gateway.config.retries.window_s},
        "ladder": [stage.name for stage in gateway.ladder.stages],
        "refusals": gateway.metrics.refusals(),
        "attempts": gateway.metrics.attempts(),
        "tenants": _tenants(gateway),
    }


def _tenants(gateway: GatewayService) -> list[dict[str, Any]]:
    weights = {tenant.name: tenant.weight for tenant in gateway.config.tenant} or {"": 1.0}
    shares = gateway.queue.shares
    return [
        {
            "name": name,
            "weight": weight,
            "in_flight": shares[name].in_flight if name in shares else 0,
            "waiting": shares[name].requests if name in shares else 0,
        }
        for name, weight in weights.items()
    ]
