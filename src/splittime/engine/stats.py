"""The engine's gauges and counters, gathered from who keeps them."""

from splittime.core.sleep import Rest
from splittime.engine.gc_pauses import GcPauses
from splittime.engine.messages import EngineStats
from splittime.kv.cache import KVCache
from splittime.scheduler.scheduler import Scheduler

NOT_TOLD = "not_told"  # the cause of who waits before any plan has looked at it


def engine_stats(now_ns: int, scheduler: Scheduler, rest: Rest, num_steps: int, pauses: GcPauses | None) -> EngineStats:
    cache = scheduler.cache
    return EngineStats(
        now_ns=now_ns,
        num_waiting=scheduler.num_waiting,
        waiting_for={cause or NOT_TOLD: count for cause, count in scheduler.queue.waiting_for().items()},
        num_running=scheduler.num_running,
        waiting_prompt_tokens=scheduler.queue.num_tokens,
        blocks_used=cache.num_used,
        blocks_total=cache.num_blocks,
        blocks_cached=cache.num_cached,
        num_steps=num_steps,
        num_preemptions=scheduler.num_preemptions,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        prefix_host_hit_tokens=scheduler.prefix_host_hit_tokens,
        prompt_tokens=scheduler.prompt_tokens,
        output_tokens=scheduler.output_tokens,
        is_paused=scheduler.config.paused,
        rest=rest,
        gc_pause_ns=pauses.total_ns if pauses else 0,
        gc_collections=pauses.num_collections if pauses else 0,
        knobs=scheduler.config.knobs(),
        **_host_figures(cache),
    )


def _host_figures(cache: KVCache) -> dict[str, int]:
    """Of `EngineStats`."""
    host = cache.host
    if host is None:
        return {}
    return {
        "host_blocks_used": host.num_held,
        "host_blocks_total": host.num_slots,
        "offloaded_tokens": host.num_offloaded * cache.block_size,
        "restored_tokens": host.num_restored * cache.block_size,
    }
