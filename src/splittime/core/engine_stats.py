"""The engine's gauges and counters at one instant: the engine fills them in, drivers and exporters pass them on."""

from typing import Any

import msgspec

from splittime.core.sleep import Rest


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters of the engine at one instant. `waiting_for`: of `num_waiting`, how many by cause. `host_*`,
    `offloaded_*`, `restored_*`: of the copies of evicted blocks in host memory; all 0 where there are none.
    `draft_tokens`, `accepted_draft_tokens`: drafts that were verified, and those that were right. `adapters_running`,
    `adapters_waiting`: names of those that have a place in the batch, and of those whose requests wait for one. `rest`,
    `gc_*`: filled in by the driver."""

    now_ns: int
    num_waiting: int = 0
    waiting_for: dict[str, int] = {}
    num_running: int = 0
    waiting_prompt_tokens: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_paused: bool = False
    rest: Rest = Rest()
    gc_pause_ns: int = 0
    gc_collections: int = 0
    knobs: dict[str, Any] = {}
    prefix_host_hit_tokens: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    offloaded_tokens: int = 0
    restored_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0
