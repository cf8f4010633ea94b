"""Ceilings that were measured, kept between starts: a JSON file of lists by key, each entry for `MAX_AGE_S`.

Trouble with the file costs a measurement, never the start.
"""

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

NAME = "ceilings.json"
MAX_AGE_S = 3 * 24 * 3600
Found = tuple[int, float, float]  # when (unix ns), bytes read a second, operations a second; 0 for what failed


def recall(path: Path | None) -> dict[str, list[Found]]:
    """What the file holds that is not too old; of a damaged one, nothing."""
    oldest_ns = time.time_ns() - MAX_AGE_S * 10**9
    try:
        memory = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        lists = {
            key: [(int(at_ns), float(read), float(operations)) for at_ns, read, operations in entries]
            for key, entries in memory.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {key: fresh for key, found in lists.items() if (fresh := [one for one in found if one[0] > oldest_ns])}


def remember(path: Path, key: str, found: Found) -> list[Found]:
    """Returns all that is known now. The file is replaced whole; of two writers the last one wins."""
    memory = recall(path)
    known = [*memory.get(key, []), found]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{NAME}.", path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(memory | {key: known}, file, indent=1)
            os.replace(waiting, path)
        except OSError:
            os.unlink(waiting)
    return known
