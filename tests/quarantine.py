"""The tests that may fail beside others, if they pass alone: `make failed-again` tries these again, and no other.

Each is in `quarantine.toml` with the day on which it came there and the reason. There are at most ten, for two weeks
each: by then the race is mended at its cause, or the test says what can be held (tests/arch/test_quarantine.py).
`python tests/quarantine.py` prints them. Given pytest's file of what failed, it ends with 1 if another test did.
"""

import datetime
import json
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST, DAYS = 10, 14


class Entry(NamedTuple):
    id: str
    since: datetime.date
    reason: str


def entries(text: str | None = None) -> list[Entry]:
    """Read the file, or this text of one."""
    text = (ROOT / "tests" / "quarantine.toml").read_text(encoding="utf-8") if text is None else text
    return [Entry(**one) for one in tomllib.loads(text).get("test", [])]


def faults(found: list[Entry], today: datetime.date) -> list[str]:
    """Say what the rules have against these entries."""
    wrong = [f"{len(found)} tests are more than {MOST}"] if len(found) > MOST else []
    for entry in found:
        file, *_, name = entry.id.partition("[")[0].split("::")
        days = (today - entry.since).days
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
            wrong.append(f"{entry.id}: no such test")
        if not -1 <= days <= DAYS:  # it may be tomorrow elsewhere
            wrong.append(f"{entry.id}: {days} days are not within {DAYS}")
        if len(entry.reason.split()) < 4:
            wrong.append(f"{entry.id}: what is the reason?")
        if [other.id for other in found].count(entry.id) > 1:
            wrong.append(f"{entry.id}: it is there twice")
    return wrong


def main(lastfailed: str | None = None) -> int:
    """Print the entries and, given a file of what failed, what of it may not be tried again."""
    listed = {entry.id: entry for entry in entries()}
    failed = sorted(json.loads(Path(lastfailed).read_text())) if lastfailed else []
    print(f"Quarantined, with a second try ({len(listed)} of at most {MOST}):")
    for entry in listed.values():
        print(f"  {entry.id} since {entry.since}{' FAILED' if entry.id in failed else ''}: {entry.reason}")
    broken = [name for name in failed if name not in listed]
    print(*(f"FAILED, and is not quarantined: {name}" for name in broken), sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
