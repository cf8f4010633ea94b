"""How many evicted blocks host memory keeps: `kv_offload_memory_bytes`, refused where it would be of no use."""

from splittime.core.errors import ConfigError
from splittime.runner import machine
from splittime.runner.config import RunnerConfig

PARAM = "kv_offload_memory_bytes"


def num_host_slots(config: RunnerConfig, kernels: str, bytes_per_block: int) -> int:
    """0: none asked for. Raises `ConfigError`: the cache is in host memory already, not one block fits, or that much
    is not free; pinned memory is taken whole, at start."""
    asked = config.kv_offload_memory_bytes
    if not asked:
        return 0
    if kernels != "triton":
        message = f"{PARAM} is {asked}, but the KV cache of the {kernels} kernels is in host memory already"
        raise ConfigError(message, param=PARAM, value=asked, limit=0, hint="kv_cache_memory_bytes makes it larger")
    if asked < bytes_per_block:
        message = f"{PARAM} is {asked}, less than one block of KV cache, {bytes_per_block} bytes"
        raise ConfigError(message, param=PARAM, value=asked, limit=bytes_per_block)
    room, ranks = machine.free_memory_bytes(), config.tensor_parallel_size
    if asked * ranks > room:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        message = f"{PARAM} is {asked}{each}, but {room} bytes of host memory are free"
        raise ConfigError(message, param=PARAM, value=asked, limit=room // ranks)
    return asked // bytes_per_block


def story(num_slots: int, block_size: int, bytes_per_block: int) -> str:
    """For the start-up's list."""
    if not num_slots:
        return "off: evicted blocks are lost"
    num_bytes = num_slots * bytes_per_block
    return f"{num_slots * block_size} tokens of evicted blocks in {num_bytes} bytes of host memory"
