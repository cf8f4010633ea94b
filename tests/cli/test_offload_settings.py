"""`--kv-offload-memory-bytes` from the command line to the scheduler: read as a size, refused where it is of no use."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from splittime.assemble import settings
from splittime.assemble.settings import worker_settings
from splittime.assemble.worker import WorkerSettings, _fit
from splittime.core.errors import ConfigError


def sent(**arguments: object) -> WorkerSettings:
    chosen = settings.from_arguments(arguments)
    return msgspec.json.decode(worker_settings(chosen, Path("model")), type=WorkerSettings)


def test_a_size_is_read_as_other_sizes_are_and_off_is_the_default() -> None:
    assert sent().runner.kv_offload_memory_bytes == 0
    assert sent(kv_offload_memory_bytes="16GiB").runner.kv_offload_memory_bytes == 16 << 30
    assert sent(kv_offload_memory_bytes=0).runner.kv_offload_memory_bytes == 0
    with pytest.raises(ConfigError, match="must be at least 0"):
        sent(kv_offload_memory_bytes=-1)


def test_without_the_prefix_cache_there_is_nothing_to_keep() -> None:
    with pytest.raises(ConfigError, match="prefix cache, which is off") as caught:
        sent(kv_offload_memory_bytes=1 << 30, enable_prefix_caching=False)
    assert "--enable-prefix-caching" in (caught.value.info.hint or "")
    assert sent(enable_prefix_caching=False).scheduler.enable_prefix_caching is False


def test_the_scheduler_hands_out_the_slots_that_the_runner_has() -> None:
    sizes = {"num_blocks": 256, "num_host_slots": 77, "num_state_slots": 9}
    resolved = SimpleNamespace(**sizes, block_size=16, max_model_len=2048)
    fitted = _fit(sent(max_prefill_tokens=64).scheduler, SimpleNamespace(resolved=resolved))  # type: ignore[arg-type]
    assert {name: getattr(fitted, name) for name in sizes} == sizes
