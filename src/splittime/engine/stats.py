"""The engine's gauges and counters, gathered from who keeps them."""

from typing import Any

from splittime.core.engine_stats import EngineStats
from splittime.scheduler.scheduler import Scheduler

NOT_TOLD = "not_told"  # the cause of who waits before any plan has looked at it


def engine_stats(now_ns: int, scheduler: Scheduler, num_steps: int, knobs: dict[str, Any]) -> EngineStats:
    cache, host = scheduler.cache, scheduler.cache.host
    num_waiting, waiting_for = scheduler.num_waiting, {}
    if num_waiting:
        waiting_for = {cause or NOT_TOLD: count for cause, count in scheduler.waiting_for().items()}
    return EngineStats(
        now_ns=now_ns,
        num_waiting=num_waiting,
        waiting_for=waiting_for,
        num_running=scheduler.num_running,
        waiting_prompt_tokens=scheduler.num_waiting_tokens,
        blocks_used=cache.num_used,
        blocks_total=cache.num_blocks,
        blocks_cached=cache.num_cached,
        num_steps=num_steps,
        is_paused=scheduler.config.paused,
        knobs=knobs,
        **vars(scheduler.counts),
        host_blocks_used=0 if host is None else host.num_held,
        host_blocks_total=0 if host is None else host.num_slots,
        offloaded_tokens=0 if host is None else host.num_offloaded * cache.block_size,
        restored_tokens=0 if host is None else host.num_restored * cache.block_size,
    )
