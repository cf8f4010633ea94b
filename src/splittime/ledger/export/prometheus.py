"""The ledger on `/metrics`: histograms fed by subscription, gauges read from the engine at each scrape.

Histograms are our own (`metrics.py`); counters and gauges go by prometheus_client. `METRICS` lists our names,
`ALIASES` the same figures under vLLM's; `alias_series` fills those of them that are counters and gauges.

This server's figures under vLLM's names, so that the dashboards and routers made for it read this server too.

Where the definitions differ, so do the figures: our time to first token ends when the token is written, our prefill and
decode times leave out preempted time, and tokens are counted when their request ends. Every series has the labels that
those dashboards select by, `model_name` and `engine`. The names are those of vLLM 0.32; a test compares them with a
recorded `/metrics` of it, and lists the ones that this server has nothing to say under.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from splittime.core.engine import EngineStats, SleepReport
from splittime.core.request import FinishReason
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import DURATIONS, METRICS, Edges, Histogram, MetricSpec
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

Series = Mapping[tuple[str, ...], float]
LABELS = ("model_name", "engine")
ENGINE = "0"
FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
REJECTED = {"queued_requests": "max_num_queued_reqs", "queued_prompt_tokens": "max_num_queued_tokens"}
TOKENS = Edges(tuple(m * 10**e for e in range(9) for m in (1, 2, 5)), 1)  # shown as far as the model's context goes
STEP_TOKENS = Edges((1, *(2**e for e in range(3, 15))), 1)
PREEMPTIONS = Edges((1, 2, 3, 4, 5, 10, 20), 1)
ANSWERS = Edges((1, 2, 5, 10, 20), 1)
SLEEP_STATES = ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all"))
CACHE_CONFIG = ("block_size", "cache_dtype", "enable_prefix_caching", "num_cpu_blocks", "num_gpu_blocks")

ADAPTERS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class Alias(NamedTuple):
    """A metric under vLLM's name, and ours where it is the same series (a histogram: all of its series together)."""

    spec: MetricSpec
    same_as: str | None = None
    edges: Edges = DURATIONS


def _alias(name: str, kind: str, meaning: str, same_as: str | None = None, labels: tuple[str, ...] = ()) -> Alias:
    return Alias(MetricSpec(f"vllm:{name}", kind, (*labels, *LABELS), meaning), same_as)


def _counts(name: str, edges: Edges, meaning: str) -> Alias:
    return _alias(name, "histogram", meaning)._replace(edges=edges)


def _same(name: str, kind: str, same_as: str) -> Alias:
    return _alias(name, kind, f"Same as {same_as}", same_as)


ALIASES = (
    _same("time_to_first_token_seconds", "histogram", "splittime_time_to_first_token_seconds"),
    _same("inter_token_latency_seconds", "histogram", "splittime_inter_token_latency_seconds"),
    _same("request_time_per_output_token_seconds", "histogram", "splittime_time_per_output_token_seconds"),
    _same("e2e_request_latency_seconds", "histogram", "splittime_e2e_seconds"),
    _alias("request_queue_time_seconds", "histogram", "Time of a request in the engine's queue"),
    _alias("request_prefill_time_seconds", "histogram", "Time of a request in prefill and its stalls"),
    _alias("request_decode_time_seconds", "histogram", "Time of a request in decode and its stalls"),
    _alias("request_inference_time_seconds", "histogram", "The two together"),
    _counts("request_prompt_tokens", TOKENS, "Prompt tokens of a request"),
    _counts("request_generation_tokens", TOKENS, "Output tokens of a request"),
    _counts("request_prefill_kv_computed_tokens", TOKENS, "Prompt tokens of a request that no cache had"),
    _counts("request_num_preemptions", PREEMPTIONS, "How often a request lost its blocks"),
    _counts("request_params_n", ANSWERS, "Answers asked for to a prompt"),
    _counts("request_params_max_tokens", TOKENS, "Most output tokens of a request: as asked, or what the context left"),
    _counts("request_max_num_generation_tokens", TOKENS, "Output tokens of the longest answer to a prompt"),
    _counts("iteration_tokens_total", STEP_TOKENS, "Tokens that a step computed"),
    _alias("prompt_tokens_total", "counter", "Prompt tokens of ended requests"),
    _alias("prompt_tokens_cached_total", "counter", "Of these, found in the prefix cache"),
    _alias("prompt_tokens_by_source_total", "counter", "Of these, computed, and found there", labels=("source",)),
    _alias(
        "prompt_tokens_cached_by_source_total",
        "counter",
        "Prompt tokens found in the prefix cache at admission, by where they lay: device, host",
        labels=("source",),
    ),
    _alias("generation_tokens_total", "counter", "Output tokens of ended requests"),
    _alias("request_success_total", "counter", "Ended: stop, length, abort, error", labels=("finished_reason",)),
    _alias("admission_rejections_total", "counter", "Requests refused at a queue's limit", labels=("reason",)),
    _same("num_preemptions_total", "counter", "splittime_preemptions_total"),
    _same("prefix_cache_queries_total", "counter", "splittime_prefix_query_tokens_total"),
    _same("prefix_cache_hits_total", "counter", "splittime_prefix_hit_tokens_total"),
    _same("spec_decode_num_draft_tokens_total", "counter", "splittime_draft_tokens_total"),
    _same("spec_decode_num_drafts_total", "counter", "splittime_drafted_rows_total"),
    _alias(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Same as splittime_accepted_drafts_by_position_total",
        "splittime_accepted_drafts_by_position_total",
        ("position",),
    ),
    _same("spec_decode_num_accepted_tokens_total", "counter", "splittime_accepted_draft_tokens_total"),
    _same("num_requests_waiting", "gauge", "splittime_requests_waiting"),
    _alias(
        "num_requests_waiting_by_reason",
        "gauge",
        "The same: they wait for capacity, or are deferred until their adapter has a place",
        labels=("reason",),
    ),
    _same("num_requests_running", "gauge", "splittime_requests_running"),
    _alias("kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1"),
    _alias("engine_sleep_state", "gauge", "1 for what it is, in vLLM's words", labels=("sleep_state",)),
    _alias(
        "lora_requests_info",
        "gauge",
        "When it was read, in seconds since 1970: the adapters with a place in the batch, and those that wait for one, "
        "are its labels",
        labels=ADAPTERS,
    ),
    _alias("cache_config_info", "gauge", "Always 1: the KV cache's settings are its labels", labels=CACHE_CONFIG),
)


def request_amounts(account: ClosedAccount) -> Iterator[tuple[str, int]]:
    """Yields what this account adds to each histogram that is no other's. A request that no step computed adds none."""
    by_stage = derive.stage_ns(account)
    prefill_ns = by_stage.get(Stage.PREFILL, 0) + by_stage.get(Stage.PREFILL_STALL, 0)
    decode_ns = by_stage.get(Stage.DECODE, 0) + by_stage.get(Stage.DECODE_STALL, 0)
    if prefill_ns or decode_ns:
        yield "vllm:request_queue_time_seconds", by_stage.get(Stage.QUEUE, 0)
        yield "vllm:request_prefill_time_seconds", prefill_ns
        yield "vllm:request_decode_time_seconds", decode_ns
        yield "vllm:request_inference_time_seconds", prefill_ns + decode_ns
        yield "vllm:request_prompt_tokens", account.prompt_tokens
        yield "vllm:request_generation_tokens", account.output_tokens
        yield "vllm:request_prefill_kv_computed_tokens", account.prompt_tokens - account.cached_tokens
        yield "vllm:request_num_preemptions", account.num_preemptions


def alias_series(counters: Mapping[str, Series], stats: EngineStats, facts: ServerFacts | None) -> dict[str, Series]:
    """Returns the counters and gauges that are not one of ours, without the labels that all have. counters: ours."""
    tokens, refusals = counters["splittime_tokens_total"], counters["splittime_refusals_total"]
    ended, kinds = counters["splittime_requests_total"], ("prompt", "cached", "output")
    prompt, cached, output = (tokens.get((kind,), 0) for kind in kinds)
    found, in_host = stats.prefix_hit_tokens, stats.prefix_host_hit_tokens
    return {
        "vllm:prompt_tokens_total": {(): prompt},
        "vllm:prompt_tokens_cached_total": {(): cached},
        "vllm:prompt_tokens_by_source_total": {("local_compute",): prompt - cached, ("local_cache_hit",): cached},
        "vllm:prompt_tokens_cached_by_source_total": {("device",): found - in_host, ("host",): in_host},
        "vllm:generation_tokens_total": {(): output},
        "vllm:request_success_total": {(word,): ended.get((why,), 0) for why, word in FINISHED.items()},
        "vllm:admission_rejections_total": {(word,): refusals.get((why,), 0) for why, word in REJECTED.items()},
        "vllm:num_requests_waiting_by_reason": _waiting(stats),
        "vllm:kv_cache_usage_perc": {(): stats.kv_cache_usage},
        "vllm:engine_sleep_state": {(name,): int(stats.rest.level == at) for at, name in SLEEP_STATES},
        "vllm:lora_requests_info": _adapters(stats, facts),
        "vllm:cache_config_info": _cache_config(stats, facts),
    }


def _waiting(stats: EngineStats) -> Series:
    deferred = stats.waiting_for.get(Cause.LORA_SLOTS, 0)
    return {("capacity",): stats.num_waiting - deferred, ("deferred",): deferred}


def _adapters(stats: EngineStats, facts: ServerFacts | None) -> Series:
    """Empty where no adapters are served."""
    if facts is None or not facts.settings.get("enable_lora"):
        return {}
    names = ",".join(stats.adapters_running), ",".join(stats.adapters_waiting)
    return {(str(facts.settings.get("max_loras")), *names): time.time()}


def _cache_config(stats: EngineStats, facts: ServerFacts | None) -> Series:
    """Returns how the cache is set; empty until the engine has said how large its blocks are."""
    settings = facts.settings if facts is not None else {}
    if "block_size" not in settings:
        return {}
    known = {**settings, "cache_dtype": settings.get("kv_cache_dtype")}
    known |= {"num_cpu_blocks": stats.host_blocks_total, "num_gpu_blocks": stats.blocks_total}
    return {tuple(str(known.get(name)) for name in CACHE_CONFIG): 1}


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
        self._told: dict[str, Callable[[], Mapping[str, float | None]]] = {}
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
        labels = ((facts.model if facts else "").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"), ENGINE)
        for spec, same_as, edges in ALIASES:
            if spec.kind == "histogram":
                most = facts.max_model_len if facts and edges is TOKENS else None
                yield from self._histograms[same_as or spec.name].merged(labels).lines(spec, most)

    def tell(self, gauge: str, values: Callable[[], Mapping[str, float | None]]) -> None:
        """From now on ask this for what a gauge is, by its label; None: it is not known."""
        self._told[gauge] = values

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
        for name, told in self._told.items():
            values[name] = {(label,): each for label, each in told().items() if each is not None}
        for spec in METRICS:
            if spec.kind != "histogram":
                yield family(spec, values.get(spec.name, {}))
        facts = self._ledger.facts()
        own, always = alias_series(self._counters, stats, facts), (facts.model if facts else "", ENGINE)
        for alias in ALIASES:
            if alias.spec.kind != "histogram":
                series = own[alias.spec.name] if alias.same_as is None else values[alias.same_as]
                yield family(alias.spec, {(*labels, *always): value for labels, value in series.items()})

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
        for name, amount in () if account.is_refused else request_amounts(account):
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


def family(spec: MetricSpec, series: Mapping[tuple[str, ...], float]) -> Metric:
    """Returns the samples of a counter or gauge."""
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    made = make(spec.name, spec.help, labels=spec.labels)
    for labels, value in list(series.items()):
        made.add_metric(labels, value)
    return made
