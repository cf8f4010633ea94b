"""What the gateway exports on `/metrics`. docs/reference/metrics.md lists it from `GATEWAY_METRICS`.

Histograms of stages go by the server's name for them: a request has one account, whoever keeps it.

What `/metrics` and `/stats` tell of routing: who was chosen by affinity, how far and how busy upstreams are, and
what was decided by difficulty; that is counted as accounts are closed. Models are the config's.

The metrics of the cache, of versions and of the audit log; the cache's are left out without a cache.
"""

import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from splittime.gateway.audit import AuditLog
from splittime.gateway.breaker import RetryBudgets
from splittime.gateway.breaks import LoopLag
from splittime.gateway.budgets import TokenBudgets
from splittime.gateway.cache.answers import KINDS
from splittime.gateway.cache.spare_room import VERDICTS
from splittime.gateway.canary import CanaryTrial
from splittime.gateway.degrade import Ladder
from splittime.gateway.routing.affinity import PrefixAffinity
from splittime.gateway.tracing import SpanExporter
from splittime.gateway.upstreams import Upstream
from splittime.gateway.verdict import AGAINST
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import Histogram, MetricSpec
from splittime.ledger.export.prometheus import family
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache

DECIDED = "splittime_gateway_difficulty_total"
CHECKED = "splittime_gateway_first_tokens_total"
HELD = "splittime_gateway_first_tokens_held_seconds_total"
ANEW = "splittime_gateway_asked_anew_seconds_total"

ROUTING_METRICS = (
    MetricSpec(
        "splittime_gateway_affinity_total",
        "counter",
        ("result",),
        "Attempts by [affinity]: hit, capped (who served the beginning had too much to do), none (nobody did)",
    ),
    MetricSpec("splittime_gateway_affinity_blocks", "gauge", (), "Pieces of prompts that affinity remembers"),
    MetricSpec(
        "splittime_gateway_round_trip_seconds", "gauge", ("upstream",), "To the upstream and back, as TCP measured it"
    ),
    MetricSpec(
        "splittime_gateway_expected_wait_seconds",
        "gauge",
        ("upstream",),
        "For a first byte of a request that were sent now, from those that have none yet",
    ),
)
DIFFICULTY_METRICS = (
    MetricSpec(DECIDED, "counter", ("model", "choice"), "Requests for a [[difficulty]], which begin at the small one"),
    MetricSpec(
        CHECKED,
        "counter",
        ("upstream", "verdict", "why"),
        "Answers of small models by what their first tokens said, and why unsure ones were kept",
    ),
    MetricSpec(HELD, "counter", ("verdict",), "Time for which such answers were held back, from their first piece on"),
    MetricSpec(ANEW, "counter", ("verdict",), "Time of the attempts whose answers were not given, and asked anew"),
)
PREFIX = "splittime_gateway_cache_"
CACHE_METRICS = (
    MetricSpec(
        f"{PREFIX}requests_total",
        "counter",
        ("result", "why"),
        "Requests of models whose answers are kept: hit (equal or like), miss, shared, bypass (and why)",
    ),
    MetricSpec(f"{PREFIX}wrong_total", "counter", ("kind",), "Hits that were said to be wrong"),
    MetricSpec(
        f"{PREFIX}shadowed_total", "counter", ("kind", "outcome"), "Hits for which the model ran too, by what it said"
    ),
    MetricSpec(
        f"{PREFIX}verdicts_total",
        "counter",
        ("verdict",),
        "What the verifier was asked and said: yes, no, late, failed, not_asked (no room, or it is left alone)",
    ),
    MetricSpec(f"{PREFIX}errors_total", "counter", (), "Times that the store of answers failed"),
    MetricSpec(f"{PREFIX}answers", "gauge", (), "Answers kept"),
    MetricSpec(f"{PREFIX}bytes", "gauge", (), "Their bytes"),
    MetricSpec(f"{PREFIX}questions", "gauge", (), "Questions whose vectors are held"),
    MetricSpec(
        f"{PREFIX}false_hit_rate",
        "gauge",
        ("kind", "bound"),
        "Share of shadowed hits for which the model said something else, and the ends of its 95 % interval",
    ),
)

Series = dict[tuple[str, ...], float]
VERSION_METRICS = (
    MetricSpec("splittime_gateway_config_version", "gauge", (), "Number of the config that serves, 1 at the start"),
    MetricSpec(
        "splittime_gateway_config_changes_total",
        "counter",
        ("result",),
        "Changes of the config: started, applied, canary, promoted, rolled_back, refused",
    ),
    MetricSpec(
        "splittime_gateway_canary_requests", "gauge", ("arm",), "Requests that count for a canary's decision, by arm"
    ),
    MetricSpec("splittime_gateway_audit_lines_total", "counter", (), "Lines written to the audit log"),
    MetricSpec("splittime_gateway_audit_drops_total", "counter", (), "Records that the audit log lacks"),
)
VERDICTS_TOLD = "splittime_gateway_verdicts_total"
GATEWAY_METRICS = (
    MetricSpec("splittime_stage_seconds", "histogram", ("stage", "cause"), "Time of a request in a stage, by cause"),
    MetricSpec(
        "splittime_gateway_first_byte_seconds",
        "histogram",
        ("upstream",),
        "Request sent to first byte of the answer read, of streams: of a whole answer the first byte is the end",
    ),
    MetricSpec("splittime_gateway_requests_total", "counter", ("finish_reason",), "Requests ended"),
    MetricSpec(
        "splittime_gateway_attempts_total",
        "counter",
        ("upstream", "result"),
        "Attempts ended: answered, cancelled, or the code of the failure; upstream_401 and upstream_403: of its key",
    ),
    MetricSpec(
        VERDICTS_TOLD,
        "counter",
        ("upstream", "whose"),
        "Attempts ended, by whose doing: nobody (an answer), request, busy, health, key, model, path, client, own",
    ),
    MetricSpec(
        "splittime_gateway_retries_total",
        "counter",
        (),
        "Second attempts and later, those that left an upstream that answers nobody among them",
    ),
    MetricSpec("splittime_gateway_degraded_total", "counter", ("stage",), "Requests that a stage has changed"),
    MetricSpec(
        "splittime_gateway_resumes_total", "counter", ("by",), "Attempts that went on with another's stream, and how"
    ),
    MetricSpec(
        "splittime_gateway_refusals_total",
        "counter",
        ("reason", "upstream"),
        "Requests refused by the gateway (no upstream), or by an upstream that asked for a pause: upstream_429",
    ),
    MetricSpec(
        "splittime_gateway_routed_total", "counter", ("rule",), "Requests that a rule decided; empty where none did"
    ),
    MetricSpec("splittime_gateway_invalid_accounts_total", "counter", (), "Accounts that broke the ledger's first law"),
    MetricSpec("splittime_gateway_ledger_drops_total", "counter", ("reason",), "Records missing in the ledger's file"),
    MetricSpec(
        "splittime_gateway_hops_total",
        "counter",
        ("result",),
        "Hops posted by clients: kept, known (posted before), forgotten (by age or bound)",
    ),
    MetricSpec(
        "splittime_gateway_spans_total",
        "counter",
        ("result",),
        "Spans of [tracing]: sent, queue_full (dropped), not_taken (by the collector: dropped)",
    ),
    MetricSpec(
        "splittime_gateway_requests_in_flight",
        "gauge",
        ("upstream",),
        "Requests that an upstream has, each answer counted",
    ),
    MetricSpec("splittime_gateway_in_flight_limit", "gauge", ("upstream",), "Those that it may have at once now"),
    MetricSpec("splittime_gateway_tokens_in_flight", "gauge", ("upstream",), "Their tokens, as estimated"),
    MetricSpec(
        "splittime_gateway_breaker_open", "gauge", ("upstream",), "1 after failures in a row, 0 after a success"
    ),
    MetricSpec("splittime_gateway_degradation_level", "gauge", (), "Stages of [[degradation]] that are entered"),
    MetricSpec(
        "splittime_gateway_budget_used_tokens", "gauge", ("tenant", "budget"), "Of the day or month that is now"
    ),
    MetricSpec("splittime_gateway_loop_lag_seconds", "gauge", (), "The longest that the event loop was late"),
    MetricSpec("splittime_gateway_queued_requests", "gauge", (), "Requests that wait for an upstream"),
    MetricSpec("splittime_gateway_queued_tokens", "gauge", (), "Their tokens, as estimated"),
    MetricSpec("splittime_gateway_kept_bytes", "gauge", ("kind",), "Kept in memory to be asked for: records"),
    *ROUTING_METRICS,
    *CACHE_METRICS,
    *DIFFICULTY_METRICS,
    *VERSION_METRICS,
)
NOT_THE_CLIENTS = frozenset({"upstream_429"})  # refusals that no client can mend
_HISTOGRAMS = tuple(spec for spec in GATEWAY_METRICS if spec.kind == "histogram")
_COUNTED = ("requests", "attempts", "verdicts", "refusals", "resumes", "degraded", "routed")


class OnTrial(Protocol):
    """The versions of the config, as far as they are counted."""

    trial: CanaryTrial | None
    counts: dict[str, int]


class MeasuredGateway(Protocol):
    """A gateway, as far as it is measured. waiting: requests and their tokens."""

    ledger: Ledger
    version: str
    affinity: PrefixAffinity
    ladder: Ladder
    budgets: TokenBudgets
    retry_budgets: RetryBudgets
    lag: LoopLag
    audit: AuditLog | None
    tracing: SpanExporter | None
    cache: "ResponseCache | None"

    @property
    def versions(self) -> OnTrial | None: ...
    @property
    def seen_upstreams(self) -> dict[str, Upstream]: ...
    @property
    def waiting(self) -> tuple[int, int]: ...


def routing_series(gateway: MeasuredGateway) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the samples of `ROUTING_METRICS` by name and labels; what is not known has none."""
    upstreams, at_ns = gateway.seen_upstreams.items(), time.monotonic_ns()
    trips = {(name,): one.round_trip.ns for name, one in upstreams}
    waits = {(name,): one.waits.wait_ns(at_ns) for name, one in upstreams}
    return {
        "splittime_gateway_affinity_total": {(name,): count for name, count in gateway.affinity.results.items()},
        "splittime_gateway_affinity_blocks": {(): gateway.affinity.num_blocks},
        "splittime_gateway_round_trip_seconds": {key: ns / 1e9 for key, ns in trips.items() if ns is not None},
        "splittime_gateway_expected_wait_seconds": {key: ns / 1e9 for key, ns in waits.items() if ns is not None},
    }


def counted(account: ClosedAccount) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yields name, labels and increase of each series that an account adds to."""
    routing = account.routing
    if routing is not None and routing.difficulty is not None:
        yield DECIDED, (routing.model, routing.difficulty.choice), 1
    for attempt in account.attempts:
        found = attempt.first_tokens
        if found is not None:
            yield CHECKED, (attempt.upstream, found.verdict, found.why), 1
            yield HELD, (found.verdict,), found.held_ns / 1e9
            if attempt.error == found.verdict:
                yield ANEW, (found.verdict,), (attempt.end_ns - attempt.begin_ns) / 1e9


def upstream_stats(name: str, upstream: Upstream, at_ns: int) -> dict[str, Any]:
    """Returns what `/stats` tells of one upstream."""
    breaker = upstream.breaker
    return {
        "name": name,
        "requests": upstream.requests,
        "tokens": upstream.tokens,
        "limit": upstream.limit,
        "is_open": breaker.is_open,
        "is_busy": breaker.is_busy(at_ns),
        "failing": upstream.failing,
        "asked_again_in_s": round(breaker.wait_ns(at_ns) / 1e9, 3),
        "region": upstream.config.region,
        "round_trip_ns": upstream.round_trip.ns,
        "expected_wait_ns": upstream.waits.wait_ns(at_ns),
    }


def cache_series(cache: "ResponseCache | None") -> dict[str, Series]:
    """Returns the values of each of `CACHE_METRICS`, by labels."""
    if cache is None:
        return {spec.name: {} for spec in CACHE_METRICS}
    values: list[Series] = [
        {(result, why): count for (result, why), count in cache.results.items()},
        {(kind,): cache.wrong[kind] for kind in KINDS},
        {(kind, found): count for (kind, found), count in cache.shadowed.items()},
        {} if cache.verifier is None else {(verdict,): cache.verifier.counts[verdict] for verdict in VERDICTS},
        {(): cache.num_errors},
        {(): cache.store.num_answers},
        {(): cache.store.num_bytes},
        {(): cache.num_questions},
        _rates(cache),
    ]
    return {spec.name: series for spec, series in zip(CACHE_METRICS, values, strict=True)}


def _rates(cache: "ResponseCache") -> Series:
    """The rate itself is absent while nothing was compared: it is not known to be 0."""
    from splittime.gateway.cache.service import wilson

    rates: Series = {}
    for kind in KINDS:
        false, trials = cache.false_hits(kind)
        rates[kind, "low"], rates[kind, "high"] = wilson(false, trials)
        if trials:
            rates[kind, "rate"] = false / trials
    return rates


def version_series(gateway: MeasuredGateway) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the samples of `VERSION_METRICS` by name and labels."""
    versions, audit = gateway.versions, gateway.audit
    trial = None if versions is None else versions.trial
    arms: dict[tuple[str, ...], float] = {}
    if trial is not None:
        arms = {("canary",): trial.num_tried, ("others",): trial.num_control}
    number = float(gateway.version.partition(":")[0] or 0)
    changes: dict[tuple[str, ...], float] = (
        {} if versions is None else {(what,): float(count) for what, count in versions.counts.items()}
    )
    return {
        "splittime_gateway_config_version": {(): number},
        "splittime_gateway_config_changes_total": changes,
        "splittime_gateway_canary_requests": arms,
        "splittime_gateway_audit_lines_total": {(): 0 if audit is None else audit.num_lines},
        "splittime_gateway_audit_drops_total": {(): 0 if audit is None else audit.num_dropped},
    }


class GatewayMetrics(Collector):
    """Subscribes to the gateway's ledger; `render()` is the body of `/metrics`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, gateway: MeasuredGateway) -> None:
        self.gateway = gateway  # the version that serves
        self._histograms = {spec.name: Histogram() for spec in _HISTOGRAMS}
        self._counts: dict[str, Series] = {f"splittime_gateway_{name}_total": {} for name in _COUNTED}
        self._counts |= {spec.name: {} for spec in DIFFICULTY_METRICS}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        gateway.ledger.subscribe(self._on_record)

    def count_refusal(self, reason: str, upstream: str = "") -> None:
        self._count("splittime_gateway_refusals_total", reason, upstream)

    def count_attempt(self, upstream: str, result: str, whose: str) -> None:
        self._count("splittime_gateway_attempts_total", upstream, result)
        self._count(VERDICTS_TOLD, upstream, whose)

    def keep(self, upstreams: Collection[str]) -> None:
        """Drops the series of all others: upstreams that come and go leave none behind."""
        for spec in (spec for spec in GATEWAY_METRICS if "upstream" in spec.labels):
            at, histogram = spec.labels.index("upstream"), self._histograms.get(spec.name)
            counts: list[dict[tuple[str, ...], Any]] = [self._counts.get(spec.name, {})]
            kept: list[dict[tuple[str, ...], Any]] = [histogram.series, histogram.sums] if histogram else counts
            for series in kept:
                for labels in [one for one in series if one[at] and one[at] not in upstreams]:
                    del series[labels]

    def refusals(self) -> dict[str, float]:
        """Returns how many requests were refused since the start, by reason, and by upstream where one refused."""
        counts = self._counts["splittime_gateway_refusals_total"].items()
        return {f"{reason} at {upstream}" if upstream else reason: count for (reason, upstream), count in counts}

    def attempts(self) -> list[tuple[str, str, float]]:
        """Returns upstream, result and how many attempts had it since the start."""
        return [
            (upstream, result, count)
            for (upstream, result), count in self._counts["splittime_gateway_attempts_total"].items()
        ]

    def render(self) -> bytes:
        text = "".join(line for spec in _HISTOGRAMS for line in self._histograms[spec.name].lines(spec))
        return text.encode() + generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        values = {**self._counts, **self._totals(), **self._gauges(), **self._extras()}
        values[VERDICTS_TOLD] = self._none_against() | values[VERDICTS_TOLD]
        for spec in GATEWAY_METRICS:
            if spec.kind != "histogram":
                yield family(spec, values[spec.name])

    def _extras(self) -> dict[str, Series]:
        gateway = self.gateway
        return {**routing_series(gateway), **cache_series(gateway.cache), **version_series(gateway)}

    def _none_against(self) -> Series:
        """Returns zeros: an increase is seen of what was there before, and a key that is refused stops all attempts."""
        names = {one.name for one in self.gateway.seen_upstreams.values()}
        return {(name, whose): 0 for name in sorted(names) for whose in sorted(AGAINST)}

    def _totals(self) -> dict[str, Series]:
        counts, hops = self.gateway.ledger.counts(), self.gateway.ledger.hop_book.counts()
        return {
            "splittime_gateway_hops_total": {(name,): getattr(hops, name) for name in ("kept", "known", "forgotten")},
            "splittime_gateway_spans_total": self._spans(),
            "splittime_gateway_retries_total": {(): self.gateway.retry_budgets.num_taken},
            "splittime_gateway_invalid_accounts_total": {(): counts.invalid_accounts},
            "splittime_gateway_ledger_drops_total": {("queue_full",): counts.dropped, ("disk",): counts.unwritten},
        }

    def _spans(self) -> Series:
        exporter = self.gateway.tracing
        return {} if exporter is None else {(result,): count for result, count in exporter.spans.items()}

    def _gauges(self) -> dict[str, Series]:
        upstreams, (requests, tokens) = self.gateway.seen_upstreams.items(), self.gateway.waiting
        return {
            "splittime_gateway_requests_in_flight": {(name,): one.requests for name, one in upstreams},
            "splittime_gateway_in_flight_limit": {(name,): one.limit for name, one in upstreams},
            "splittime_gateway_tokens_in_flight": {(name,): one.tokens for name, one in upstreams},
            "splittime_gateway_breaker_open": {(name,): int(one.breaker.is_open) for name, one in upstreams},
            "splittime_gateway_degradation_level": {(): self.gateway.ladder.observe(time.monotonic_ns())},
            "splittime_gateway_budget_used_tokens": self.gateway.budgets.used(),
            "splittime_gateway_loop_lag_seconds": {(): self.gateway.lag.longest_ns / 1e9},
            "splittime_gateway_queued_requests": {(): requests},
            "splittime_gateway_queued_tokens": {(): tokens},
            "splittime_gateway_kept_bytes": {("records",): self.gateway.ledger.counts().kept_bytes},
        }

    def _on_record(self, record: ClosedAccount | StepRecord) -> None:
        if isinstance(record, StepRecord):
            return
        for (stage, cause), duration_ns in derive.stage_totals_ns(record).items():
            self._histograms["splittime_stage_seconds"].observe((stage, cause or ""), duration_ns)
        for attempt in record.attempts:
            if attempt.resumed_by:
                self._count("splittime_gateway_resumes_total", attempt.resumed_by)
            if attempt.first_byte_ns is not None and attempt.num_events:  # of a stream
                lasted_ns = attempt.first_byte_ns - attempt.begin_ns
                self._histograms["splittime_gateway_first_byte_seconds"].observe((attempt.upstream,), lasted_ns)
        if record.degraded:
            self._count("splittime_gateway_degraded_total", record.degraded)
        if record.routing is not None:
            self._count("splittime_gateway_routed_total", record.routing.rule)
        if record.is_refused and record.error is not None and record.error.code in NOT_THE_CLIENTS:
            self.count_refusal(record.error.code, record.attempts[-1].upstream if record.attempts else "")
        for name, labels, by in counted(record):
            self._count(name, *labels, by=by)
        self._count("splittime_gateway_requests_total", _known(record.finish_reason))

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        series = self._counts[name]
        series[labels] = series.get(labels, 0) + by


KNOWN_REASONS = frozenset(
    {"stop", "length", "abort", "deadline", "error", "refused", "unknown", "tool_calls", "content_filter"}
)


def _known(finish_reason: str) -> str:
    """A label that an upstream writes has a bounded number of values."""
    return finish_reason if finish_reason in KNOWN_REASONS else "other"
