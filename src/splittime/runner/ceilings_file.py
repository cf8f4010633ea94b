"""Ceilings that were measured, kept between starts (`kept_json`): lists by key, each entry for `MAX_AGE_S`."""

import time
from pathlib import Path
from typing import Any

from splittime.runner import kept_json

NAME = "ceilings.json"
MAX_AGE_S = 3 * 24 * 3600
Found = tuple[int, tuple[float, ...], float]
"""When (unix ns), bytes read a second by size, operations a second; 0 for what failed."""


def recall(path: Path | None) -> dict[str, list[Found]]:
    """What the file holds that is not too old; of a damaged one, nothing."""
    return _fresh(kept_json.read(path))


def _fresh(memory: dict[str, Any]) -> dict[str, list[Found]]:
    oldest_ns = time.time_ns() - MAX_AGE_S * 10**9
    try:
        lists = {
            key: [(int(at_ns), tuple(map(float, reads)), float(operations)) for at_ns, reads, operations in entries]
            for key, entries in memory.items()
        }
    except (ValueError, TypeError):
        return {}
    return {key: fresh for key, found in lists.items() if (fresh := [one for one in found if one[0] > oldest_ns])}


def remember(path: Path, key: str, found: Found) -> list[Found]:
    """Returns all that is known now."""
    memory = recall(path)
    known = [*memory.get(key, []), found]
    kept_json.write(path, memory | {key: known})
    return known
