"""Decisions that depend on the machine: dtype, threads, how much memory the KV cache gets. Each comes with its reason.

Measured on two cores without bfloat16 instructions (Zen 3): a bfloat16 product of 32 rows with a 3072 x 2048 weight
runs at 20 GFLOP/s, float32 at 110; so "auto" takes bfloat16 only where the CPU has instructions for it.

There, with a 4 M-parameter model and a busy neighbour, a decode step of 32 rows took 20 to 31 ms on one thread, 160 to
370 on two: a thread that spins for another which the system has put aside loses whole time slices. (45 ms on two with
OMP_WAIT_POLICY=passive in the environment before torch is imported.)
"""

import os
from pathlib import Path

import torch

from splittime.core.errors import ConfigError
from splittime.models.config import ModelConfig
from splittime.runner.config import RunnerConfig

SMALL_MODEL_BYTES = 128 << 20
FREE_MEMORY_SHARE = 0.5


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX512-BF16 or AMX), not merely an emulation."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in checks)


def choose_dtype(asked: str, checkpoint_dtype: str) -> tuple[torch.dtype, str]:
    """The dtype of weights, activations and KV, and why."""
    if asked != "auto":
        return getattr(torch, asked), "as asked"
    if checkpoint_dtype == "float32":
        return torch.float32, "the checkpoint is float32"
    if multiplies_bfloat16():
        return torch.bfloat16, f"the checkpoint is {checkpoint_dtype} and the CPU multiplies bfloat16"
    return torch.float32, f"the CPU has no bfloat16 instructions (checkpoint is {checkpoint_dtype})"


def choose_num_threads(asked: int | None, weights_bytes: int) -> tuple[int, str]:
    """Threads for torch, and why. A small model's products gain less from a second thread than waiting for it costs."""
    if asked is not None:
        return asked, "as asked"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if weights_bytes <= SMALL_MODEL_BYTES:
        return 1, f"weights are {weights_bytes >> 20} MiB, at most {SMALL_MODEL_BYTES >> 20}: one thread is faster"
    return cores, "one for each core"


def free_memory_bytes() -> int:
    """What the system could give to a new process now: MemAvailable, within the control group's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return min(free, _cgroup_room_bytes())


def _cgroup_room_bytes() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())  # ValueError when it says "max"
        return max(0, limit - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        return 1 << 62


def choose_max_model_len(config: RunnerConfig, model: ModelConfig) -> int:
    """Raises `ConfigError` when more is asked than the checkpoint was made for."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {asked}, above the checkpoint's max_position_embeddings {model.max_position_embeddings}",
            param="max_model_len",
            value=asked,
            limit=model.max_position_embeddings,
        )
    return asked or model.max_position_embeddings


def _refuse_beyond(total_bytes: int, asked_bytes: int) -> None:
    """What the machine has is a bound that holds; what is free is not, since the page cache gives way."""
    if asked_bytes > total_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {asked_bytes}, more than the machine's memory, {total_bytes} bytes",
            param="kv_cache_memory_bytes",
            value=asked_bytes,
            limit=total_bytes,
        )


def choose_num_blocks(config: RunnerConfig, max_model_len: int, bytes_per_block: int) -> tuple[int, str]:
    """Blocks of KV cache, and why. Raises `ConfigError` when one full context does not fit."""
    blocks_per_context = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * blocks_per_context
    if config.kv_cache_memory_bytes is not None:
        num_blocks, reason = config.kv_cache_memory_bytes // bytes_per_block, "kv_cache_memory_bytes"
        budget = config.kv_cache_memory_bytes
        _refuse_beyond(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), budget)
    else:
        budget = int(free_memory_bytes() * FREE_MEMORY_SHARE)
        num_blocks = min(wanted, budget // bytes_per_block)
        reason = f"max_num_seqs={config.max_num_seqs} full contexts"
        if num_blocks < wanted:
            reason = f"{FREE_MEMORY_SHARE:.0%} of {budget / FREE_MEMORY_SHARE / 2**30:.1f} GiB free memory"
    if num_blocks < blocks_per_context:
        raise ConfigError(
            f"a KV cache of {budget} bytes holds {num_blocks} blocks; one context of max_model_len {max_model_len} "
            f"needs {blocks_per_context} blocks, {blocks_per_context * bytes_per_block} bytes",
            param="kv_cache_memory_bytes",
            value=budget,
            limit=blocks_per_context * bytes_per_block,
            hint="lower max_model_len",
        )
    return num_blocks, reason
