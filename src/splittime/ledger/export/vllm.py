"""This server's figures under vLLM's names, so that the dashboards and routers made for it read this server too.

Where the definitions differ, so do the figures: our time to first token ends when the token is written, our prefill and
decode times leave out preempted time, and tokens are counted when their request ends. Every series has the labels that
those dashboards select by, `model_name` and `engine`. The names are those of vLLM 0.32; a test compares them with a
recorded `/metrics` of it, and lists the ones that this server has nothing to say under.
"""

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from splittime.core.engine_stats import EngineStats
from splittime.core.request import FinishReason
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import DURATIONS, Edges, MetricSpec
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause, Stage

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
