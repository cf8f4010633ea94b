"""What `cli.worker` reads on its standard input, made from the settings. Imports no torch: the server sends it."""

from pathlib import Path

import msgspec

from splittime.cli.settings import Settings


def worker_settings(settings: Settings, model_path: Path) -> bytes:
    """The runner's and the scheduler's configs as one line of JSON; what is None is the runner's to decide."""
    parts = {part: {k: v for k, v in settings.part(part).items() if v is not None} for part in ("runner", "scheduler")}
    parts["runner"]["model_path"] = str(model_path)
    return msgspec.json.encode(parts)
