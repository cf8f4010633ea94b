"""The counters and gauges under vLLM's names that are not one of ours, made of ours."""

from collections.abc import Mapping

from splittime.ledger.export.gauges import Gauges
from splittime.ledger.export.vllm_names import CACHE_CONFIG, FINISHED, REJECTED
from splittime.ledger.facts import ServerFacts

Series = Mapping[tuple[str, ...], float]

SLEEP_STATES = ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all"))


def alias_series(counters: Mapping[str, Series], stats: Gauges, facts: ServerFacts | None) -> dict[str, Series]:
    """Each metric's series, without the labels that all have. counters: ours, by name."""
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
        "vllm:num_requests_waiting_by_reason": {("capacity",): stats.num_waiting, ("deferred",): 0},
        "vllm:kv_cache_usage_perc": {(): stats.kv_cache_usage},
        "vllm:engine_sleep_state": {(name,): int(stats.rest.level == at) for at, name in SLEEP_STATES},
        "vllm:cache_config_info": _cache_config(stats, facts),
    }


def _cache_config(stats: Gauges, facts: ServerFacts | None) -> Series:
    """Nothing until the engine has said how large its blocks are."""
    settings = facts.settings if facts is not None else {}
    if "block_size" not in settings:
        return {}
    known = {**settings, "cache_dtype": settings.get("kv_cache_dtype")}
    known |= {"num_cpu_blocks": stats.host_blocks_total, "num_gpu_blocks": stats.blocks_total}
    return {tuple(str(known.get(name)) for name in CACHE_CONFIG): 1}
