"""What the hypervisor took from this machine while a run went on: time in which its cores stood still unasked.

`stolen` reads the first line of Linux's /proc/stat: its eighth number is the time "stolen" from all cores since the
boot, in clock ticks (proc(5)). On a rented machine that is the most frequent reason for a doubtful tail: our golden
test has errors of 0.5 ms at p99 where 20 ms of 9 s were taken, and of 1.7 ms where 250 ms were. It voids nothing: it
may have hit the server as well as the client, and no more can be told here. Where it is not told there is no check.
"""

import os
import time
from pathlib import Path

import msgspec

from splittime.ledger.client_book import Check

STAT = Path("/proc/stat")
STEAL_FIELD = 8  # after the word "cpu"
ALLOWED_SHARE = 0.005


class Stolen(msgspec.Struct, frozen=True):
    """From all cores since the machine began, as told at an instant of the monotonic clock."""

    taken_s: float
    cores: int
    at_s: float


def stolen(at_s: float | None = None, path: Path = STAT) -> Stolen | None:
    """None where the system does not tell."""
    at_s = time.monotonic() if at_s is None else at_s
    try:
        words = [line.split() for line in path.read_text().splitlines() if line.startswith("cpu")]
        taken_s = int(words[0][STEAL_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return Stolen(taken_s, max(1, len(words) - 1), at_s)


def audit_steal(before: Stolen | None, after: Stolen | None) -> Check | None:
    """How much was taken between the two, as a share of the time of all cores."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    taken_s, took_s = max(0.0, after.taken_s - before.taken_s), after.at_s - before.at_s
    share = taken_s / (took_s * after.cores)
    cores = f"{after.cores} core{'s' * (after.cores > 1)}"
    sentence = (
        f"the hypervisor took {1000 * taken_s:.0f} ms of {took_s:.1f} s from this machine's {cores} ({share:.1%})"
    )
    ok = share <= ALLOWED_SHARE
    if not ok:
        sentence += (
            ": what was in flight then waited for it, so p99 and above may be the neighbours' doing; repeat the run "
            "and believe the tails that come back, or take a machine of its own"
        )
    return Check(name="steal", ok=ok, value=share, limit=ALLOWED_SHARE, unit="", sentence=sentence, voids=False)
