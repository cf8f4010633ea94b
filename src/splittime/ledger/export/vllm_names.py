"""The same figures under vLLM's names, so that the dashboards and routers made for it read this server too.

Where the definitions differ, so do the figures: our time to first token ends when the token is written, our prefill and
decode times leave out preempted time, and tokens are counted when their request ends. Every series has the labels that
those dashboards select by, `model_name` and `engine`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from splittime.core.request import FinishReason
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import MetricSpec
from splittime.ledger.stages import Stage

LABELS = ("model_name", "engine")
ENGINE = "0"
FINISHED = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class Alias(NamedTuple):
    """A metric under vLLM's name, and ours where it is the same series (a histogram: all of its series together)."""

    spec: MetricSpec
    same_as: str | None = None


def _alias(name: str, kind: str, meaning: str, same_as: str | None = None, labels: tuple[str, ...] = ()) -> Alias:
    return Alias(MetricSpec(f"vllm:{name}", kind, (*labels, *LABELS), meaning), same_as)


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
    _alias("prompt_tokens_total", "counter", "Prompt tokens of ended requests"),
    _alias("generation_tokens_total", "counter", "Output tokens of ended requests"),
    _alias("request_success_total", "counter", "Requests ended: stop, length, abort", labels=("finished_reason",)),
    _same("num_preemptions_total", "counter", "splittime_preemptions_total"),
    _same("prefix_cache_queries_total", "counter", "splittime_prefix_query_tokens_total"),
    _same("prefix_cache_hits_total", "counter", "splittime_prefix_hit_tokens_total"),
    _same("num_requests_waiting", "gauge", "splittime_requests_waiting"),
    _same("num_requests_running", "gauge", "splittime_requests_running"),
    _alias("kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1"),
    _alias("engine_sleep_state", "gauge", "1 for what it is, in vLLM's words", labels=("sleep_state",)),
)


def request_times_ns(account: ClosedAccount) -> Iterator[tuple[str, int]]:
    """Yields what this account adds to each histogram that is no other's. A request that no step computed adds none."""
    by_stage = derive.stage_ns(account)
    prefill_ns = by_stage.get(Stage.PREFILL, 0) + by_stage.get(Stage.PREFILL_STALL, 0)
    decode_ns = by_stage.get(Stage.DECODE, 0) + by_stage.get(Stage.DECODE_STALL, 0)
    if prefill_ns or decode_ns:
        yield "vllm:request_queue_time_seconds", by_stage.get(Stage.QUEUE, 0)
        yield "vllm:request_prefill_time_seconds", prefill_ns
        yield "vllm:request_decode_time_seconds", decode_ns
        yield "vllm:request_inference_time_seconds", prefill_ns + decode_ns
