"""The ledger on `/metrics`: histograms fed by subscription, gauges read from the engine at each scrape.

Histograms are our own (`metrics.py`); counters and gauges go by prometheus_client. `METRICS` lists our names,
`vllm.ALIASES` the same figures under vLLM's; `vllm.alias_series` fills those of them that are counters and gauges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from splittime.core.engine_stats import EngineStats
from splittime.core.sleep import SleepReport
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import METRICS, Histogram, MetricSpec
from splittime.ledger.export.vllm import ALIASES, ENGINE, TOKENS, alias_series, request_amounts
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

STEP_PARTS = ("plan", "launch", "device", "sample", "commit", "host_gap", "idle")


class PrometheusExporter(Collector):
    """Subscribes to a ledger; `render()` is the body of `/metrics`. The ledger's facts give the model's name."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, ledger: Ledger, stats: Callable[[], EngineStats]) -> None:
        self._ledger, self._stats = ledger, stats
        self._histograms = {spec.name: Histogram() for spec in METRICS if spec.kind == "histogram"}
        for alias in ALIASES:
            if alias.spec.kind == "histogram" and alias.same_as is None:
                self._histograms[alias.spec.name] = Histogram(alias.edges)
        self._counters: dict[str, dict[tuple[str, ...], float]] = {s.name: {} for s in METRICS if s.kind == "counter"}
        self._num_padded = self._num_drafted = 0
        self._step_errors: Callable[[], Mapping[str, float | None]] = dict
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ledger.subscribe(self._on_record)

    def render(self) -> bytes:
        """Our own text for the histograms, since it takes a tenth of the time, and a scrape holds up every stream."""
        specs = [spec for spec in METRICS if spec.kind == "histogram"]
        text = "".join(line for spec in specs for line in self._histograms[spec.name].lines(spec))
        return text.encode() + "".join(self._alias_lines()).encode() + generate_latest(self._registry)

    def _alias_lines(self) -> Iterator[str]:
        facts = self._ledger.facts()
        labels = (_escaped(facts.model if facts else ""), ENGINE)
        for spec, same_as, edges in ALIASES:
            if spec.kind == "histogram":
                most = facts.max_model_len if facts and edges is TOKENS else None
                yield from self._histograms[same_as or spec.name].merged(labels).lines(spec, most)

    def tell_step_errors(self, errors: Callable[[], Mapping[str, float | None]]) -> None:
        """From now on ask this how far off the predictions of steps are, by their kind."""
        self._step_errors = errors

    def count_refusal(self, reason: str) -> None:
        self._count("splittime_refusals_total", reason)

    def count_ignored(self, kinds: Mapping[str, int]) -> None:
        for kind, count in kinds.items():
            self._count("splittime_ignored_fields_total", kind, count)

    def observe_sleep(self, report: SleepReport) -> None:
        start_ns = {"start": report.end_ns - report.begin_ns}  # its own parts have names without end
        for name, duration_ns in (start_ns if report.restarted else report.parts_ns).items():
            self._histograms["splittime_sleep_seconds"].observe((report.action, name), duration_ns)

    def observe_send_lags(self, lags_ns: Sequence[int]) -> None:
        self._histograms["splittime_send_lag_seconds"].observe_all((), lags_ns)

    def observe_cancel_to_freed(self, duration_ns: int) -> None:
        """An engine that was done before it was asked has freed the blocks earlier still: that counts as 0."""
        self._histograms["splittime_cancel_to_freed_seconds"].observe((), max(0, duration_ns))

    def observe_prompt(self, max_tokens: Sequence[int], longest: int) -> None:
        """A prompt's answers have ended: the most tokens that each might have, and how many the longest has."""
        self._histograms["vllm:request_params_n"].observe((), len(max_tokens))
        self._histograms["vllm:request_params_max_tokens"].observe_all((), max_tokens)
        self._histograms["vllm:request_max_num_generation_tokens"].observe((), longest)

    def collect(self) -> Iterator[Metric]:
        stats, counts = self._stats(), self._ledger.counts()
        totals = _totals(stats)
        totals["splittime_invalid_accounts_total"] = counts.invalid_accounts
        totals["splittime_padded_rows_total"] = self._num_padded
        totals["splittime_drafted_rows_total"] = self._num_drafted
        values: dict[str, Any] = {**self._counters, **{name: {(): value} for name, value in totals.items()}}
        values["splittime_ledger_drops_total"] = {("queue_full",): counts.dropped, ("disk",): counts.unwritten}
        values.update((name, {(): value}) for name, value in _gauges(stats).items())
        adapters = {"running": stats.adapters_running, "waiting": stats.adapters_waiting}
        values["splittime_adapters"] = {(state,): len(names) for state, names in adapters.items()}
        errors = {(kind,): each for kind, each in self._step_errors().items() if each is not None}
        values["splittime_step_prediction_error_ratio"] = errors
        for spec in METRICS:
            if spec.kind != "histogram":
                yield _family(spec, values[spec.name])
        facts = self._ledger.facts()
        own, always = alias_series(self._counters, stats, facts), (facts.model if facts else "", ENGINE)
        for alias in ALIASES:
            if alias.spec.kind != "histogram":
                series = own[alias.spec.name] if alias.same_as is None else values[alias.same_as]
                yield _family(alias.spec, {(*labels, *always): value for labels, value in series.items()})

    def _on_record(self, record: ClosedAccount | StepRecord) -> None:
        if isinstance(record, StepRecord):
            step = self._histograms["splittime_step_seconds"]
            for part, name in _STEP_FIELDS:
                step.observe(part, getattr(record, name))
            if record.moves_ns:
                step.observe(("offload",), record.offload_ns)
                step.observe(("restore",), record.restore_ns)
            self._histograms["vllm:iteration_tokens_total"].observe((), record.prefill_tokens + record.decode_tokens)
            self._count("splittime_executions_total", record.execution)
            if record.draft_ns:
                step.observe(("draft",), record.draft_ns)
            self._on_verified(record)
            if record.execution != "host":
                self._on_device(record)
        else:
            self._on_account(record)

    def _on_verified(self, record: StepRecord) -> None:
        self._num_drafted += len(record.verified)
        for _, _, num_right in record.verified:
            for position in range(num_right):
                self._count("splittime_accepted_drafts_by_position_total", str(position))

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
        self._count("splittime_tokens_total", "ahead", account.ahead_tokens)
        self._count("splittime_tokens_total", "output", account.output_tokens)
        self._observe_latencies(account)
        for name, amount in request_amounts(account):
            self._histograms[name].observe((), amount)

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


def _totals(stats: EngineStats) -> dict[str, float]:
    return {
        "splittime_steps_total": stats.num_steps,
        "splittime_preemptions_total": stats.num_preemptions,
        "splittime_prefix_query_tokens_total": stats.prefix_query_tokens,
        "splittime_prefix_hit_tokens_total": stats.prefix_hit_tokens,
        "splittime_prefix_host_hit_tokens_total": stats.prefix_host_hit_tokens,
        "splittime_draft_tokens_total": stats.draft_tokens,
        "splittime_accepted_draft_tokens_total": stats.accepted_draft_tokens,
        "splittime_offloaded_tokens_total": stats.offloaded_tokens,
        "splittime_restored_tokens_total": stats.restored_tokens,
        "splittime_gc_pause_seconds_total": stats.gc_pause_ns / 1e9,
        "splittime_gc_collections_total": stats.gc_collections,
    }


def _gauges(stats: EngineStats) -> dict[str, float]:
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
    }


def _escaped(label: str) -> str:
    """A label's value as the text form writes it."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _family(spec: MetricSpec, series: dict[tuple[str, ...], float]) -> Metric:
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=spec.labels)
    for labels, value in list(series.items()):
        family.add_metric(labels, value)
    return family
