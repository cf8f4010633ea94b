"""What went on beside an engine's thread that was kept from running: who had the processors, and whether its group had
used up its quota.

`beside` divides the engine's wait for a processor (`StepRecord.cpu_wait_ns`) in proportion to who ran in that time, by
what the kernel counted (`drive.host_time`). What is counted is told about once a second: from one reading to the next
is a stretch, and a stretch counts by the wait in it. What ran in an hour without requests made no step wait, and one
minute of other work is not thinned by ten quiet ones.

`quota_part` is stated, not divided: a group that is throttled runs nothing, whoever else would. Kernels differ in what
they call that time of a thread, a wait or no wish to run (`off_cpu_ns`), so it is taken from both.
"""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from splittime.diagnose.books import Books
from splittime.diagnose.rules.evidence import threads_and_cores
from splittime.ledger.steps import StepRecord

_Reading = tuple[int, int, int, int]  # when, what this server had run, what others had, how long it was throttled
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LEAST_NS = 3 * 10**9  # of counters that are read once a second: over less their ends matter


class Beside(msgspec.Struct, frozen=True):
    """How many cores each kept busy while the engine waited for one, on average. server: this server's other threads
    and processes. client: the load generator, as far as it says how busy it was; nothing where it is
    on another machine. others: all other processes."""

    server: float
    client: float
    others: float

    @property
    def others_part(self) -> float:
        return self.others / max(1e-9, self.server + self.client + self.others)


class _Stretch(msgspec.Struct):
    """From one reading to the next. server_ns: without the engine's thread. waited_ns, off_ns: by the engine's
    thread."""

    lasted_ns: int
    server_ns: int
    others_ns: int
    throttled_ns: int
    waited_ns: int
    off_ns: int


def beside(books: Books) -> Beside | None:
    stretches = list(_stretches(books.steps))
    waited_ns = sum(one.waited_ns for one in stretches)
    if sum(one.lasted_ns for one in stretches) < LEAST_NS or not waited_ns:
        return None
    server = sum(one.server_ns / one.lasted_ns * one.waited_ns for one in stretches) / waited_ns
    others = sum(one.others_ns / one.lasted_ns * one.waited_ns for one in stretches) / waited_ns
    client = min(_client_cores(books), others)
    return Beside(server, client, others - client)


def quota_part(books: Books) -> tuple[float, float]:
    """Returns how much of the time in which the engine's thread was kept from running its group was throttled: at the
    least, if that was on all processors at once, over which the kernel sums, and at the most."""
    kept = [(one.waited_ns + one.off_ns, one.throttled_ns) for one in _stretches(books.steps)]
    threads, cores = threads_and_cores(books)
    has_quota = books.facts is not None and books.facts.machine is not None and books.facts.machine.quota is not None
    # One for each thread that computes and one for the rest; no more than it may use, unless that is the quota itself.
    at_once = threads + 1 if has_quota else min(threads + 1, max(1, cores))
    kept_ns = max(1, sum(kept_ns for kept_ns, _ in kept))
    return sum(min(ns, counted / at_once) for ns, counted in kept) / kept_ns, sum(map(min, kept)) / kept_ns


def _stretches(steps: Sequence[StepRecord]) -> Iterator[_Stretch]:
    """From one new reading to the next, since the first step's may be a second old; without those in which a counter
    went back: another server's, or a process that was not seen for a moment."""
    latest: tuple[int, int, int] | None = None
    begin: _Reading | None = None
    engine_ns = waited_ns = off_ns = 0
    for step in steps:
        engine_ns += step.length_ns - (step.cpu_wait_ns or 0) - (step.off_cpu_ns or 0)
        waited_ns, off_ns = waited_ns + (step.cpu_wait_ns or 0), off_ns + (step.off_cpu_ns or 0)
        if step.server_ran_ns is None or step.others_ran_ns is None:
            continue
        reading = step.server_ran_ns, step.others_ran_ns, step.throttled_ns or 0
        if reading == latest:
            continue
        now = (step.end_ns, *reading) if latest is not None else None
        if begin is not None and now is not None:
            lasted_ns, server_ns, others_ns, throttled_ns = (b - a for a, b in zip(begin, now, strict=True))
            if lasted_ns > 0 and min(server_ns, others_ns, throttled_ns) >= 0:
                own_ns = max(0, server_ns - engine_ns)
                yield _Stretch(lasted_ns, own_ns, others_ns, throttled_ns, waited_ns, off_ns)
        latest, begin, engine_ns, waited_ns, off_ns = reading, now, 0, 0, 0


def _client_cores(books: Books) -> float:
    """The load generator's, where it asks this machine as its own; one that is elsewhere takes nothing here."""
    if books.run is None or books.served is None or urlsplit(books.served.url).hostname not in LOOPBACK:
        return 0.0
    return sum(check.value or 0.0 for check in books.run.checks if check.name == "cpu")
