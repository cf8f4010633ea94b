"""The ledger on `/metrics`: histograms fed by subscription, gauges read from the engine at each scrape.

A histogram here is a list of counts found by bisection (prometheus_client's own searches its bounds one by one and
takes a lock for each sample); counters and gauges go by prometheus_client. All histograms share one set of edges,
10 us to 100 s, six to a decade (1, 1.5, 2, 3, 5, 7). `METRICS` is the whole list, and `docs/reference/metrics.md` is
made from it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from splittime.core.sleep import Rest, SleepReport
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

EDGES_NS = (*(m * 10**e // 10 for e in range(4, 11) for m in (10, 15, 20, 30, 50, 70)), 10**11)
_EDGE_LABELS = [*(str(edge_ns / 1e9) for edge_ns in EDGES_NS), "+Inf"]
STEP_PARTS = ("plan", "launch", "device", "sample", "commit", "host_gap", "idle")
SLEEP_STATES = ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all"))


class Gauges(Protocol):
    """What of `engine.messages.EngineStats` is exported (the ledger cannot import the engine). Only read."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def waiting_prompt_tokens(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_query_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def prefix_host_hit_tokens(self) -> int: ...
    @property
    def host_blocks_used(self) -> int: ...
    @property
    def host_blocks_total(self) -> int: ...
    @property
    def offloaded_tokens(self) -> int: ...
    @property
    def restored_tokens(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def rest(self) -> Rest: ...
    @property
    def gc_pause_ns(self) -> int: ...
    @property
    def gc_collections(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...


class MetricSpec(NamedTuple):
    name: str
    kind: str  # histogram, counter, gauge
    labels: tuple[str, ...]
    help: str


METRICS = (
    MetricSpec("splittime_stage_seconds", "histogram", ("stage", "cause"), "Time of a request in a stage, by cause"),
    MetricSpec(
        "splittime_time_to_first_token_seconds", "histogram", ("prompt_tokens",), "Arrival to first token written"
    ),
    MetricSpec("splittime_time_per_output_token_seconds", "histogram", ("prompt_tokens",), "TPOT, once a request"),
    MetricSpec(
        "splittime_inter_token_latency_seconds", "histogram", ("prompt_tokens",), "Gap between tokens, each gap"
    ),
    MetricSpec("splittime_e2e_seconds", "histogram", ("prompt_tokens",), "Arrival to the end of the account"),
    MetricSpec(
        "splittime_max_stall_seconds", "histogram", ("prompt_tokens",), "Longest gap of a request, once a request"
    ),
    MetricSpec("splittime_step_seconds", "histogram", ("part",), "A step's own split, and the gaps before it"),
    MetricSpec("splittime_send_lag_seconds", "histogram", (), "Token ready to bytes given to the socket"),
    MetricSpec(
        "splittime_unseen_seconds",
        "histogram",
        (),
        "How long a request lay in its socket while the server's event loop was busy; 0 below 8 ms",
    ),
    MetricSpec(
        "splittime_sleep_seconds", "histogram", ("action", "part"), "Parts of falling asleep (sleep), of waking (wake)"
    ),
    MetricSpec("splittime_cancel_to_freed_seconds", "histogram", (), "Client gone to blocks free"),
    MetricSpec("splittime_requests_total", "counter", ("finish_reason",), "Requests ended"),
    MetricSpec("splittime_tokens_total", "counter", ("kind",), "Tokens of ended requests: prompt, cached, output"),
    MetricSpec("splittime_refusals_total", "counter", ("reason",), "Requests refused before the engine"),
    MetricSpec("splittime_invalid_accounts_total", "counter", (), "Accounts that broke the ledger's first law"),
    MetricSpec("splittime_ledger_drops_total", "counter", ("reason",), "Records missing in the file: queue_full, disk"),
    MetricSpec("splittime_steps_total", "counter", (), "Steps"),
    MetricSpec("splittime_preemptions_total", "counter", (), "Requests whose blocks were taken back"),
    MetricSpec("splittime_prefix_query_tokens_total", "counter", (), "Prompt tokens looked up in the prefix cache"),
    MetricSpec("splittime_prefix_hit_tokens_total", "counter", (), "Prompt tokens found there"),
    MetricSpec("splittime_prefix_host_hit_tokens_total", "counter", (), "Of these, the ones that were in host memory"),
    MetricSpec("splittime_offloaded_tokens_total", "counter", (), "Tokens of evicted blocks copied to host memory"),
    MetricSpec("splittime_restored_tokens_total", "counter", (), "Tokens of blocks copied back from there"),
    MetricSpec("splittime_gc_pause_seconds_total", "counter", (), "Time the engine spent in garbage collection"),
    MetricSpec("splittime_gc_collections_total", "counter", (), "Garbage collections of the engine"),
    MetricSpec(
        "splittime_executions_total", "counter", ("execution",), "Steps by how they were run: host, eager, captured"
    ),
    MetricSpec("splittime_padded_rows_total", "counter", (), "Rows that captured steps computed for nobody"),
    MetricSpec(
        "splittime_device_seconds_total",
        "counter",
        ("state",),
        "Time of a device apart from the host: busy in steps; gap, idle between them; idle share: gap / (busy + gap)",
    ),
    MetricSpec("splittime_requests_waiting", "gauge", (), "Requests in the engine's queue"),
    MetricSpec("splittime_requests_running", "gauge", (), "Requests that hold blocks and are computed"),
    MetricSpec("splittime_waiting_prompt_tokens", "gauge", (), "Prompt tokens in the engine's queue"),
    MetricSpec("splittime_blocks_used", "gauge", (), "KV cache blocks held by requests"),
    MetricSpec("splittime_blocks_cached", "gauge", (), "KV cache blocks kept for their prefix, free to be evicted"),
    MetricSpec("splittime_blocks_total", "gauge", (), "KV cache blocks there are"),
    MetricSpec("splittime_host_blocks_used", "gauge", (), "Blocks of host memory that keep what was evicted"),
    MetricSpec("splittime_host_blocks_total", "gauge", (), "Blocks of host memory there are for it"),
    MetricSpec("splittime_paused", "gauge", (), "1 while the engine is paused"),
    MetricSpec("splittime_asleep", "gauge", (), "The level at which the engine sleeps, 0 while it is awake"),
    MetricSpec("vllm:num_requests_waiting", "gauge", (), "Same as splittime_requests_waiting, for routers"),
    MetricSpec("vllm:num_requests_running", "gauge", (), "Same as splittime_requests_running, for routers"),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", (), "Used share of the KV cache, 0 to 1, for routers"),
    MetricSpec("vllm:engine_sleep_state", "gauge", ("sleep_state",), "1 for what it is, in vLLM's words"),
)


class Histogram:
    """Counts by label values over `EDGES_NS`; a sample equal to an edge is within it."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, ...], list[int]] = {}
        self.sums_ns: dict[tuple[str, ...], int] = {}

    def observe(self, labels: tuple[str, ...], duration_ns: float) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        counts[bisect_left(EDGES_NS, duration_ns)] += 1
        self.sums_ns[labels] += int(duration_ns)

    def observe_all(self, labels: tuple[str, ...], durations_ns: list[int]) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        for duration_ns in durations_ns:
            counts[bisect_left(EDGES_NS, duration_ns)] += 1
        self.sums_ns[labels] += sum(durations_ns)

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        self.sums_ns[labels] = 0
        return self.series.setdefault(labels, [0] * (len(EDGES_NS) + 1))

    def lines(self, spec: MetricSpec) -> Iterator[str]:
        """The text form. Nothing is escaped: stages, causes and bucket names need it not."""
        yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} histogram\n"
        for values, counts in list(self.series.items()):
            pairs = ",".join(f'{label}="{value}"' for label, value in zip(spec.labels, values, strict=True))
            head = f"{spec.name}_bucket{{{pairs}{',' if pairs else ''}le="
            yield "".join(f'{head}"{edge}"}} {n}.0\n' for edge, n in zip(_EDGE_LABELS, accumulate(counts), strict=True))
            tail = f"{{{pairs}}}" if pairs else ""
            yield f"{spec.name}_sum{tail} {self.sums_ns[values] / 1e9}\n{spec.name}_count{tail} {sum(counts)}.0\n"


class PrometheusExporter(Collector):
    """Subscribes to a ledger; `render()` is the body of `/metrics`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, ledger: Ledger, stats: Callable[[], Gauges]) -> None:
        self._ledger, self._stats = ledger, stats
        self._histograms = {spec.name: Histogram() for spec in METRICS if spec.kind == "histogram"}
        self._counters: dict[str, dict[tuple[str, ...], float]] = {s.name: {} for s in METRICS if s.kind == "counter"}
        self._num_padded = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ledger.subscribe(self._on_record)

    def render(self) -> bytes:
        """Our own text for the histograms, since it takes a tenth of the time, and a scrape holds up every stream."""
        specs = [spec for spec in METRICS if spec.kind == "histogram"]
        text = "".join(line for spec in specs for line in self._histograms[spec.name].lines(spec))
        return text.encode() + generate_latest(self._registry)

    def count_refusal(self, reason: str) -> None:
        self._count("splittime_refusals_total", reason)

    def observe_sleep(self, report: SleepReport) -> None:
        start_ns = {"start": report.end_ns - report.begin_ns}  # its own parts have names without end
        for name, duration_ns in (start_ns if report.restarted else report.parts_ns).items():
            self._histograms["splittime_sleep_seconds"].observe((report.action, name), duration_ns)

    def observe_send_lag(self, lag_ns: int) -> None:
        self._histograms["splittime_send_lag_seconds"].observe((), lag_ns)

    def observe_cancel_to_freed(self, duration_ns: int) -> None:
        """An engine that was done before it was asked has freed the blocks earlier still: that counts as 0."""
        self._histograms["splittime_cancel_to_freed_seconds"].observe((), max(0, duration_ns))

    def collect(self) -> Iterator[Metric]:
        stats, counts = self._stats(), self._ledger.counts()
        totals = _totals(stats)
        totals["splittime_invalid_accounts_total"] = counts.invalid_accounts
        totals["splittime_padded_rows_total"] = self._num_padded
        values: dict[str, Any] = {**self._counters, **{name: {(): value} for name, value in totals.items()}}
        values["splittime_ledger_drops_total"] = {("queue_full",): counts.dropped, ("disk",): counts.unwritten}
        values.update((name, {(): value}) for name, value in _gauges(stats).items())
        values["vllm:engine_sleep_state"] = {(name,): int(stats.rest.level == at) for at, name in SLEEP_STATES}
        for spec in METRICS:
            if spec.kind != "histogram":
                yield _family(spec, values[spec.name])

    def _on_record(self, record: ClosedAccount | StepRecord) -> None:
        if isinstance(record, StepRecord):
            step = self._histograms["splittime_step_seconds"]
            for part, name in _STEP_FIELDS:
                step.observe(part, getattr(record, name))
            if record.moves_ns:
                step.observe(("offload",), record.offload_ns)
                step.observe(("restore",), record.restore_ns)
            self._count("splittime_executions_total", record.execution)
            if record.execution != "host":
                self._on_device(record)
        else:
            self._on_account(record)

    def _on_device(self, record: StepRecord) -> None:
        self._count("splittime_device_seconds_total", "busy", record.busy_ns / 1e9)
        self._count("splittime_device_seconds_total", "gap", record.gap_ns / 1e9)
        self._num_padded += record.padded_rows

    def _on_account(self, account: ClosedAccount) -> None:
        stage_histogram = self._histograms["splittime_stage_seconds"]
        for (stage, cause), duration_ns in derive.stage_totals_ns(account).items():
            stage_histogram.observe((stage, cause or ""), duration_ns)
        self._count("splittime_requests_total", account.finish_reason)
        self._count("splittime_tokens_total", "prompt", account.prompt_tokens)
        self._count("splittime_tokens_total", "cached", account.cached_tokens)
        self._count("splittime_tokens_total", "output", account.output_tokens)
        self._observe_latencies(account)

    def _observe_latencies(self, account: ClosedAccount) -> None:
        bucket, gaps_ns = (derive.prompt_bucket(account.prompt_tokens),), derive.itl_ns(account)
        observations = (
            ("splittime_time_to_first_token_seconds", derive.ttft_ns(account)),
            ("splittime_time_per_output_token_seconds", derive.tpot_ns(account)),
            ("splittime_e2e_seconds", derive.e2e_ns(account)),
            ("splittime_max_stall_seconds", max(gaps_ns, default=None)),
        )
        for name, duration_ns in observations:
            if duration_ns is not None:
                self._histograms[name].observe(bucket, duration_ns)
        self._histograms["splittime_unseen_seconds"].observe((), account.unseen_ns)
        if gaps_ns:
            self._histograms["splittime_inter_token_latency_seconds"].observe_all(bucket, gaps_ns)

    def _count(self, name: str, label: str, amount: float = 1) -> None:
        series = self._counters[name]
        series[(label,)] = series.get((label,), 0) + amount


_STEP_FIELDS = tuple(((part,), f"{part}_ns") for part in STEP_PARTS)


def _totals(stats: Gauges) -> dict[str, float]:
    return {
        "splittime_steps_total": stats.num_steps,
        "splittime_preemptions_total": stats.num_preemptions,
        "splittime_prefix_query_tokens_total": stats.prefix_query_tokens,
        "splittime_prefix_hit_tokens_total": stats.prefix_hit_tokens,
        "splittime_prefix_host_hit_tokens_total": stats.prefix_host_hit_tokens,
        "splittime_offloaded_tokens_total": stats.offloaded_tokens,
        "splittime_restored_tokens_total": stats.restored_tokens,
        "splittime_gc_pause_seconds_total": stats.gc_pause_ns / 1e9,
        "splittime_gc_collections_total": stats.gc_collections,
    }


def _gauges(stats: Gauges) -> dict[str, float]:
    return {
        "splittime_requests_waiting": stats.num_waiting,
        "splittime_requests_running": stats.num_running,
        "splittime_waiting_prompt_tokens": stats.waiting_prompt_tokens,
        "splittime_blocks_used": stats.blocks_used,
        "splittime_blocks_cached": stats.blocks_cached,
        "splittime_blocks_total": stats.blocks_total,
        "splittime_host_blocks_used": stats.host_blocks_used,
        "splittime_host_blocks_total": stats.host_blocks_total,
        "splittime_paused": int(stats.is_paused),
        "splittime_asleep": stats.rest.level,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:num_requests_running": stats.num_running,
        "vllm:kv_cache_usage_perc": stats.kv_cache_usage,
    }


def _family(spec: MetricSpec, series: dict[tuple[str, ...], float]) -> Metric:
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=spec.labels)
    for labels, value in list(series.items()):
        family.add_metric(labels, value)
    return family
