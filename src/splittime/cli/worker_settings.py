"""What `cli.worker` reads on its standard input, made from the settings. Imports no torch: the server sends it."""

from pathlib import Path

import msgspec

from splittime.cli.settings import Settings
from splittime.scheduler.config import SchedulerConfig

_PLENTY_BLOCKS = 2**40


def worker_settings(settings: Settings, model_path: Path) -> bytes:
    """The runner's and the scheduler's configs as one line of JSON; what is None is the runner's to decide.

    Raises ConfigError for what the scheduler would refuse, before any process is started. How many blocks there are,
    only the runner can say.
    """
    parts = {part: {k: v for k, v in settings.part(part).items() if v is not None} for part in ("runner", "scheduler")}
    SchedulerConfig(**parts["scheduler"], num_blocks=_PLENTY_BLOCKS).validate()
    parts["runner"]["model_path"] = str(model_path)
    return msgspec.json.encode(parts)
