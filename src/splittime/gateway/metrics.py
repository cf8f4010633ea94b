"""What the gateway exports on `/metrics`. docs/reference/metrics.md lists it from `GATEWAY_METRICS`.

Histograms of stages go by the server's name for them: a request has one account, whoever keeps it.
"""

import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from splittime.gateway.feature_metrics import CACHE_METRICS, VERSION_METRICS, cache_series, version_series
from splittime.gateway.routing.measured import DIFFICULTY_METRICS, ROUTING_METRICS, counted, routing_series
from splittime.gateway.verdict import AGAINST
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import TIED_LOST, Attempt
from splittime.ledger.export.metrics import Histogram, MetricSpec
from splittime.ledger.steps import StepRecord

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService

VERDICTS = "splittime_gateway_verdicts_total"
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
        VERDICTS,
        "counter",
        ("upstream", "whose"),
        "Attempts ended, by whose doing: nobody (an answer), request, busy, health, key, model, path, client, own",
    ),
    MetricSpec(
        "splittime_gateway_retries_total",
        "counter",
        (),
        "Second attempts and later, those that left an upstream that answers nobody and tied ones among them",
    ),
    MetricSpec(
        "splittime_gateway_tied_total", "counter", ("result",), "Tied requests, by who had a byte first, if anybody"
    ),
    MetricSpec(
        "splittime_gateway_tied_lost_seconds_total", "counter", ("upstream",), "Time of the attempts that lost a tie"
    ),
    MetricSpec(
        "splittime_gateway_tied_lost_tokens_total", "counter", ("upstream",), "Tokens of their prompts, as estimated"
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
    MetricSpec(
        "splittime_gateway_limits_shared", "gauge", (), "1 while limits are told to the other gateways; none if never"
    ),
    MetricSpec("splittime_gateway_loop_lag_seconds", "gauge", (), "The longest that the event loop was late"),
    MetricSpec("splittime_gateway_queued_requests", "gauge", (), "Requests that wait for an upstream"),
    MetricSpec("splittime_gateway_queued_tokens", "gauge", (), "Their tokens, as estimated"),
    *ROUTING_METRICS,
    *CACHE_METRICS,
    *DIFFICULTY_METRICS,
    *VERSION_METRICS,
)
NOT_THE_CLIENTS = frozenset({"upstream_429"})  # refusals that no client can mend
_HISTOGRAMS = tuple(spec for spec in GATEWAY_METRICS if spec.kind == "histogram")
_COUNTED = (
    "requests",
    "attempts",
    "verdicts",
    "refusals",
    "resumes",
    "degraded",
    "routed",
    "tied_lost_seconds",
    "tied_lost_tokens",
)

Series = dict[tuple[str, ...], float]


class GatewayMetrics(Collector):
    """Subscribes to the gateway's ledger; `render()` is the body of `/metrics`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, gateway: "GatewayService") -> None:
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
        self._count(VERDICTS, upstream, whose)

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
        values[VERDICTS] = self._none_against() | values[VERDICTS]
        for spec in GATEWAY_METRICS:
            if spec.kind != "histogram":
                make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                family = make(spec.name, spec.help, labels=spec.labels)
                for labels, value in list(values[spec.name].items()):
                    family.add_metric(labels, value)
                yield family

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
            "splittime_gateway_tied_total": {(name,): count for name, count in self.gateway.tied.results.items()},
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
            "splittime_gateway_limits_shared": self._is_sharing(),
            "splittime_gateway_loop_lag_seconds": {(): self.gateway.lag.longest_ns / 1e9},
            "splittime_gateway_queued_requests": {(): requests},
            "splittime_gateway_queued_tokens": {(): tokens},
        }

    def _is_sharing(self) -> Series:
        gateway = self.gateway
        shared = gateway.shared_limits
        return {} if shared is None else {(): int(shared.is_shared and gateway.budgets.is_written)}

    def _on_record(self, record: ClosedAccount | StepRecord) -> None:
        if isinstance(record, StepRecord):
            return
        for (stage, cause), duration_ns in derive.stage_totals_ns(record).items():
            self._histograms["splittime_stage_seconds"].observe((stage, cause or ""), duration_ns)
        for attempt in record.attempts:
            if attempt.resumed_by:
                self._count("splittime_gateway_resumes_total", attempt.resumed_by)
            if attempt.error == TIED_LOST:
                self._count_lost(attempt)
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

    def _count_lost(self, attempt: Attempt) -> None:
        lasted_s = (attempt.end_ns - attempt.begin_ns) / 1e9
        self._count("splittime_gateway_tied_lost_seconds_total", attempt.upstream, by=lasted_s)
        self._count("splittime_gateway_tied_lost_tokens_total", attempt.upstream, by=attempt.lost_tokens)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        series = self._counts[name]
        series[labels] = series.get(labels, 0) + by


KNOWN_REASONS = frozenset(
    {"stop", "length", "abort", "deadline", "error", "refused", "unknown", "tool_calls", "content_filter"}
)


def _known(finish_reason: str) -> str:
    """A label that an upstream writes has a bounded number of values."""
    return finish_reason if finish_reason in KNOWN_REASONS else "other"
