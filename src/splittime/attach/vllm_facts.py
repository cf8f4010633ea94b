"""What vLLM's engine says of itself, as the facts of a ledger.

Settings that mean the same as ours have our names; the others vLLM's own, by their flags. What is not known (ceilings
of a device, what a token costs) is left out, never guessed.
"""

import time
from typing import Any

from splittime import __version__
from splittime.attach.engine_books import UNKNOWN, UNKNOWN_AHEAD
from splittime.attach.versions import is_tested, vllm_version
from splittime.core.this_process import process_start_ns
from splittime.ledger.facts import Process, ServerFacts

SCHEDULING = (  # what else decides; no release has all
    *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_active_seqs"),
    *("watermark", "scheduler_reserve_full_isl"),
)


def facts_of(scheduler: Any) -> ServerFacts:
    """Returns the facts of the engine whose scheduler this is."""
    config = scheduler.vllm_config
    now_ns = time.monotonic_ns()
    return ServerFacts(
        version=__version__,
        engine=_engine(),
        model=str(config.model_config.served_model_name or config.model_config.model),
        max_model_len=config.model_config.max_model_len,
        settings=_settings(scheduler),
        processes=(Process(name="engine", started_ns=process_start_ns(), ready_ns=now_ns),),
        unknown=UNKNOWN + (UNKNOWN_AHEAD if config.scheduler_config.async_scheduling else ()),
    )


def engine_alone() -> ServerFacts:
    """Returns which engine it is, where nothing else of it could be read."""
    return ServerFacts(version=__version__, engine=_engine(), model="", max_model_len=0, unknown=UNKNOWN)


def _engine() -> str:
    found = vllm_version() or ""
    return f"vllm {found}" + ("" if is_tested(found) else " (untested)")


def _settings(scheduler: Any) -> dict[str, Any]:
    config = scheduler.vllm_config
    scheduling, cache, parallel = config.scheduler_config, config.cache_config, config.parallel_config
    return {
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": config.model_config.max_model_len,
        "policy": str(scheduler.policy.value),
        "enable_chunked_prefill": bool(scheduling.enable_chunked_prefill),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "block_size": scheduler.block_size,
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is the null block
        "kv_cache_groups": [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        "kv_connector": config.kv_transfer_config is not None,
        **{name: getattr(scheduling, name) for name in SCHEDULING if hasattr(scheduling, name)},
        "async_scheduling": bool(scheduling.async_scheduling),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "num_speculative_tokens": scheduler.num_spec_tokens,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "vocab_size": config.model_config.get_vocab_size(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "kv_cache_dtype": cache.cache_dtype,
        "device": config.device_config.device_type,
    }
