"""What a server knows of itself and a diagnosis needs: its settings, what a token costs, what the machine can do.

Facts only: measured, counted, or read from the model's shape. What follows from them (a step's floor, a share of the
roofline) is an estimate, made in `diagnose` and stored nowhere.

A server tells them at `GET /ledger/facts`, as this structure in JSON (`msgspec.json.decode(body, type=ServerFacts)`),
and its ledger file keeps them (`LedgerFile.facts`). `settings` and `processes` are as of the moment of asking.

A start as a book: parts that touch, from the making of a process to its readiness, and sum to the time between with
`==`. What no part was told for is `unattributed`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from splittime.core.engine import Part, SleepReport
from splittime.core.facts import Machine, RefusedValues, TokenCost

UNATTRIBUTED = "unattributed"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a server, on the host's monotonic clock. name: `server`, `engine`, or `llm` for both in one.

    started_ns: when it was made; ready_ns: when it could first serve. restarts: how often it died and was replaced.
    pauses: (begin, duration) in ns of the latest collections of garbage that took a millisecond or more; all of them
        are in `/stats`.
    sleeps: how it fell asleep and woke, the latest times.
    start: what was done from `started_ns` to `ready_ns`: name, begin and end in ns; the parts touch (`start_book`).
    """

    name: str
    started_ns: int
    ready_ns: int | None = None
    restarts: int = 0
    pauses: tuple[tuple[int, int], ...] = ()
    sleeps: tuple[SleepReport, ...] = ()
    start: tuple[tuple[str, int, int], ...] = ()


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` are the resolved ones, by their flags' names (`max_num_seqs`, `block_size`, `num_blocks`, ...), with
    what was changed on the live server, the last time at `knobs_changed_ns` (0: never). simulated: what was changed in
    the simulation that wrote this ledger; empty for a server's own. engine: whose books these are, with its version,
    where it is not ours. unknown: quantities of an account or a step that its books leave at 0, since nobody could
    measure them. refuses: values of the runner's settings that only it can tell to be impossible here."""

    version: str
    model: str
    max_model_len: int
    settings: dict[str, Any] = {}
    cost: TokenCost | None = None
    machine: Machine | None = None
    processes: tuple[Process, ...] = ()
    simulated: str = ""
    engine: str = ""
    knobs_changed_ns: int = 0
    unknown: tuple[str, ...] = ()
    refuses: tuple[RefusedValues, ...] = ()

    def process(self, name: str) -> Process | None:
        return next((process for process in self.processes if process.name == name), None)


def start_book(started_ns: int, ready_ns: int, told: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts from `started_ns` to `ready_ns`. told: in any order. Of two that overlap the earlier has what
    they share, and what lies outside the start is in no part."""
    parts: list[Part] = []
    at_ns = started_ns
    for name, begin_ns, end_ns in sorted(told, key=lambda part: part[1:]):
        begin_ns, end_ns = max(begin_ns, at_ns), min(end_ns, ready_ns)
        if begin_ns >= end_ns:
            continue
        if at_ns < begin_ns:
            parts.append((UNATTRIBUTED, at_ns, begin_ns))
        parts.append((name, begin_ns, end_ns))
        at_ns = end_ns
    if at_ns < ready_ns:
        parts.append((UNATTRIBUTED, at_ns, ready_ns))
    return tuple(parts)
