"""A JSON object kept in a file between starts. Trouble with the file costs what it held, never the start."""

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("splittime.runner")


def read(path: Path | None) -> dict[str, Any]:
    """Returns what the file holds; nothing if there is none. A damaged one is told, and taken for empty."""
    try:
        text = path.read_text(encoding="utf-8") if path is not None else "{}"
        found = json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is ignored: %s", path, error)
        return {}
    if not isinstance(found, dict):
        log.warning("%s holds no JSON object and is ignored", path)
        return {}
    return found


def write(path: Path, memory: dict[str, Any]) -> None:
    """Replace the file whole; of two writers the last one wins."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(memory, file, indent=1)
            os.replace(waiting, path)
        except OSError:
            os.unlink(waiting)
