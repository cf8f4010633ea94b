"""What `cli.worker` reads on its standard input, made from the settings. `runner.config` holds no torch."""

from pathlib import Path

import msgspec

from splittime.cli.settings import Settings
from splittime.core.errors import ConfigError
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig

_PLENTY_BLOCKS = 2**40


def worker_settings(settings: Settings, model_path: Path) -> bytes:
    """The runner's and the scheduler's configs as one line of JSON; what is None is the runner's to decide.

    Raises ConfigError for what either would refuse, before any process is started. How many blocks there are, only the
    runner can say.
    """
    runner = RunnerConfig(model_path=str(model_path), **settings.part("runner"))
    scheduler = SchedulerConfig(num_blocks=_PLENTY_BLOCKS, **settings.part("scheduler"))
    runner.validate()
    scheduler.validate()
    if runner.kv_offload_memory_bytes and not scheduler.enable_prefix_caching:
        message = "kv_offload_memory_bytes keeps prefixes for the prefix cache, which is off"
        hint = "--enable-prefix-caching, or leave --kv-offload-memory-bytes out"
        raise ConfigError(message, param="kv_offload_memory_bytes", value=runner.kv_offload_memory_bytes, hint=hint)
    return msgspec.json.encode({"runner": runner, "scheduler": scheduler})
