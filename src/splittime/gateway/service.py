"""What the gateway's requests share: the upstreams, the queue, the keys, the ledger, and who is being served now."""

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from splittime import __version__
from splittime.core.errors import ErrorInfo, Refused
from splittime.gateway.audit.log import AuditLog
from splittime.gateway.breaker import LeftOut
from splittime.gateway.budget_stores import store_of
from splittime.gateway.budgets import TokenBudgets
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_keys import EMBEDDER, TRACING, Secrets
from splittime.gateway.degrade.lesser import Ladder
from splittime.gateway.fair_queue import FairQueue
from splittime.gateway.health_checks import HealthChecks
from splittime.gateway.learnt_use import LearntUse
from splittime.gateway.lint.sampler import PromptLint
from splittime.gateway.loop_lag import LoopLag
from splittime.gateway.metrics import GatewayMetrics
from splittime.gateway.page.paths import PageAnswers
from splittime.gateway.queue_polls import QueuePolls
from splittime.gateway.responses.held import HeldResponses
from splittime.gateway.retry_budget import RetryBudgets
from splittime.gateway.routing.affinity import PrefixAffinity
from splittime.gateway.routing.difficulty import DifficultyRouting
from splittime.gateway.routing.measured import upstream_stats
from splittime.gateway.routing.policy import RoutePolicy
from splittime.gateway.routing.regions import regions_of
from splittime.gateway.routing.round_trips import RoundTrips
from splittime.gateway.shared_limits import SharedLimits
from splittime.gateway.tied import TiedRequests
from splittime.gateway.tracing.exporter import SpanExporter
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.upstreams import Router, Upstream
from splittime.gateway.versions.carried import quota_of, upstreams_of
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.store import Ledger
from splittime.web.quota import Quota
from splittime.web.tenants import ANYBODY, ApiKeys, Tenant

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache
    from splittime.gateway.versions.swap import GatewayVersions
    from splittime.gateway.visit import GatewayVisit

log = logging.getLogger("splittime.gateway")

ENGINE = "splittime gateway"
READING_THREADS = 2
DRAIN_POLL_S = 0.02
LAST_WORDS_S = 5.0  # for streams to take their error event, after the grace time
CUT_S = 1.0  # for those that did not read them to be gone
TOLD = (  # among its facts
    *("queue", "retries", "tied", "affinity", "breaker", "cache", "cache_route", "difficulty", "degradation"),
)
UNKNOWN_TO_IT = ("token_ready_ns", "token_written_ns", "token_steps", "num_preemptions")
OF_THE_PROCESS = (
    *("budgets", "shared_limits", "is_draining", "cache", "lag", "audit", "tracing", "lint", "metrics", "pool"),
    *("started_ns", "held", "started_unix_s", "visits", "round_trips", "connections", "learnt"),
)


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
        self.versions: GatewayVersions | None = None
        self.num_open = 0
        self.keys = ApiKeys(holders=secrets.holders, metrics_digest=secrets.metrics_key)
        self.quotas = {tenant.name: quota_of(before, tenant) for tenant in (ANYBODY, *self.keys.tenants)}
        self.policy = RoutePolicy(config)
        self.difficulty = DifficultyRouting(config.difficulty, secrets.judges, secrets.bounds)
        self.left_out: LeftOut = LeftOut() if before is None else before.left_out
        keys = secrets.upstream_keys
        made = [Upstream(one, config.breaker, keys.get(one.name), self.left_out) for one in config.upstream]
        upstreams = upstreams_of(before, made)
        self.affinity = self._affinity(before)
        regions = regions_of(config)
        self.router = Router(upstreams, pools=self.policy.pools, affinity=self.affinity, regions=regions)
        self.queue = FairQueue(config.queue, self.router, {tenant.name: tenant.weight for tenant in config.tenant})
        self.ladder = Ladder(config.degradation, self.queue.longest_wait_ns)
        self.retry_budgets, self.tied = self._retries(before)
        self._queue_polls = QueuePolls(self.router.upstreams, self._on_room)
        self._health_checks = HealthChecks(self.router.upstreams, self._on_room)
        if before is None:
            self._begin(keys)
        else:
            for name in OF_THE_PROCESS:
                setattr(self, name, getattr(before, name))
        for upstream in self.router.upstreams:
            upstream.round_trip = self.round_trips.of(upstream.address.host, upstream.address.port)
        self.page_answers = PageAnswers(self)

    def _retries(self, before: "GatewayService | None") -> tuple[RetryBudgets, TiedRequests]:
        """Returns what counts attempts beyond the first: that of the version before, where its config is the same."""
        config = self.config
        if before is None:
            return RetryBudgets(config.retries), TiedRequests(config.tied, None)
        budget = before.retry_budgets if before.config.retries == config.retries else RetryBudgets(config.retries)
        has_same_tied = before.config.tied == config.tied
        return budget, before.tied if has_same_tied else TiedRequests(config.tied, before.tied.results)

    def _affinity(self, before: "GatewayService | None") -> PrefixAffinity:
        """Returns what remembers who served what: that of the version before, where its config is the same."""
        if before is not None and before.config.affinity == self.config.affinity:
            return before.affinity
        return PrefixAffinity(self.config.affinity, None if before is None else before.affinity.results)

    def _begin(self, keys: Mapping[str, str]) -> None:
        """Make what is one of the process: every later version takes it over (`OF_THE_PROCESS`)."""
        config = self.config
        self.budgets = TokenBudgets(config.tenant, store_of(config))
        shares = config.limits_valkey
        self.shared_limits = None if shares is None else SharedLimits(shares, lambda: self.metrics.gateway.quotas)
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
        self.visits: set[GatewayVisit] = set()
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
        if self.shared_limits is not None:
            self.shared_limits.open()
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

    def enter(self, visit: "GatewayVisit") -> None:
        self.visits.add(visit)
        self.num_open += 1

    def leave(self, visit: "GatewayVisit") -> None:
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
            "tied": dict(self.tied.results),
            "affinity": dict(self.affinity.results),
            "degradation": [stage.name for stage in self.ladder.stages[: self.ladder.observe(at_ns)]],
            "upstreams": [upstream_stats(name, one, at_ns) for name, one in self.seen_upstreams.items()],
        }

    # ---- the end

    async def drain(self) -> None:
        """Admit nobody; let what is open finish within the grace time; end the rest with an error."""
        self.is_draining = True
        log.warning("shutting down: %d requests open", len(self.visits))
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
        if self.shared_limits is not None:
            await self.shared_limits.close()
        if self.tracing is not None:
            await self.tracing.close()
        self.connections.close()
        if self.cache is not None:
            self.cache.close()
        if self.lint is not None:
            self.lint.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
