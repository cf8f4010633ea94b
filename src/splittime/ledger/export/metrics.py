"""What `/metrics` exports under our own names, each metric once. docs/reference/metrics.md is made from it.

A histogram: counts found by bisection, since prometheus_client's own searches its bounds one by one and takes a lock
for each sample. Durations share one set of edges, 10 us to 100 s, six to a decade (1, 1.5, 2, 3, 5, 7).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


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
    MetricSpec(
        "splittime_step_seconds",
        "histogram",
        ("part",),
        "A step's own split, and the gaps before it; draft is a part of launch",
    ),
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
    MetricSpec(
        "splittime_tokens_total",
        "counter",
        ("kind",),
        "Tokens of ended requests: prompt, cached, output; ahead of cached",
    ),
    MetricSpec("splittime_refusals_total", "counter", ("reason",), "Requests refused before the engine"),
    MetricSpec("splittime_ignored_fields_total", "counter", ("kind",), "Fields without effect: hint, tool, unknown"),
    MetricSpec("splittime_invalid_accounts_total", "counter", (), "Accounts that broke the ledger's first law"),
    MetricSpec("splittime_ledger_drops_total", "counter", ("reason",), "Records missing in the file: queue_full, disk"),
    MetricSpec("splittime_steps_total", "counter", (), "Steps"),
    MetricSpec("splittime_preemptions_total", "counter", (), "Requests whose blocks were taken back"),
    MetricSpec("splittime_prefix_query_tokens_total", "counter", (), "Prompt tokens looked up in the prefix cache"),
    MetricSpec("splittime_prefix_hit_tokens_total", "counter", (), "Prompt tokens found there"),
    MetricSpec("splittime_prefix_host_hit_tokens_total", "counter", (), "Of these, the ones that were in host memory"),
    MetricSpec("splittime_draft_tokens_total", "counter", (), "Guessed tokens that were verified"),
    MetricSpec("splittime_accepted_draft_tokens_total", "counter", (), "Of these, the ones that were right"),
    MetricSpec("splittime_drafted_rows_total", "counter", (), "Rows of steps that verified guesses"),
    MetricSpec(
        "splittime_accepted_drafts_by_position_total",
        "counter",
        ("position",),
        "Rows in which the guess at this position, the first is 0, and all before it were right",
    ),
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
    MetricSpec(
        "splittime_adapters", "gauge", ("state",), "Adapters (LoRA): running, with a place in the batch; waiting"
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
    MetricSpec(
        "splittime_step_prediction_error_ratio",
        "gauge",
        ("kind",),
        "Median of |predicted / taken - 1| of the steps of the last two minutes, by kind: decode, prompts; no series "
        "before the model has seen enough",
    ),
    MetricSpec("splittime_kept_bytes", "gauge", ("kind",), "Kept in memory to be asked for: records, responses"),
    MetricSpec("splittime_asleep", "gauge", (), "The level at which the engine sleeps, 0 while it is awake"),
)


class Edges(NamedTuple):
    """Upper bounds in whole units, of which `per_unit` are one of the unit that is shown."""

    bounds: tuple[int, ...]
    per_unit: float


EDGES_NS = (*(m * 10**e // 10 for e in range(4, 11) for m in (10, 15, 20, 30, 50, 70)), 10**11)
DURATIONS = Edges(EDGES_NS, 1e9)


class Histogram:
    """Counts by label values over the edges; a sample equal to an edge is within it."""

    def __init__(self, edges: Edges = DURATIONS) -> None:
        self.edges = edges
        self.series: dict[tuple[str, ...], list[int]] = {}
        self.sums: dict[tuple[str, ...], int] = {}

    def observe(self, labels: tuple[str, ...], amount: float) -> None:
        counts = self.series.get(labels) or self._begin(labels)
        counts[bisect_left(self.edges.bounds, amount)] += 1
        self.sums[labels] += int(amount)

    def observe_all(self, labels: tuple[str, ...], amounts: Sequence[int]) -> None:
        counts, bounds = self.series.get(labels) or self._begin(labels), self.edges.bounds
        for amount in amounts:
            counts[bisect_left(bounds, amount)] += 1
        self.sums[labels] += sum(amounts)

    def _begin(self, labels: tuple[str, ...]) -> list[int]:
        self.sums[labels] = 0
        return self.series.setdefault(labels, [0] * (len(self.edges.bounds) + 1))

    def merged(self, labels: tuple[str, ...]) -> "Histogram":
        """Returns all series as one, under these labels."""
        one = Histogram(self.edges)
        if self.series:
            one.series[labels] = [sum(column) for column in zip(*list(self.series.values()), strict=True)]
            one.sums[labels] = sum(list(self.sums.values()))
        return one

    def lines(self, spec: MetricSpec, most: int | None = None) -> Iterator[str]:
        """The text form; most: no edge above it is written. Nothing is escaped: stages, causes and bucket names need
        it not."""
        yield f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} histogram\n"
        bounds, per_unit = self.edges
        num_shown = len(bounds) if most is None else sum(bound <= most for bound in bounds)
        edges = [str(bound / per_unit) for bound in bounds[:num_shown]]
        for values, counts in list(self.series.items()):
            pairs = ",".join(f'{label}="{value}"' for label, value in zip(spec.labels, values, strict=True))
            head = f"{spec.name}_bucket{{{pairs}{',' if pairs else ''}le="
            total = sum(counts)
            yield "".join(f'{head}"{edge}"}} {n}.0\n' for edge, n in zip(edges, accumulate(counts), strict=False))
            tail = f"{{{pairs}}}" if pairs else ""
            yield f'{head}"+Inf"}} {total}.0\n'
            yield f"{spec.name}_sum{tail} {self.sums[values] / per_unit}\n{spec.name}_count{tail} {total}.0\n"
