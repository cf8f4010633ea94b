"""Who had the processors beside the engine's thread, by what the kernel counted (`engine.machine_time`).

    beside(books) -> Beside | None        None where the books do not tell

The engine's wait for a processor is stated (`StepRecord.cpu_wait_ns`); whose turn it was meanwhile is not, and is
divided in proportion to who ran in that time.
"""

import msgspec

from splittime.diagnose.books import Books
from splittime.diagnose.rules.step_cost import length_ns

LEAST_NS = 3 * 10**9  # of counters that are read once a second: over less their ends matter


class Beside(msgspec.Struct, frozen=True):
    """In ns. server_ns: this server's other threads and processes. client_ns: the load generator, as far as it says how
    busy it was; it is taken to run on this machine. others_ns: all other processes."""

    server_ns: float
    client_ns: float
    others_ns: float

    @property
    def others_part(self) -> float:
        return self.others_ns / max(1.0, self.server_ns + self.client_ns + self.others_ns)


def beside(books: Books) -> Beside | None:
    told = [(s.end_ns, s.server_ran_ns, s.others_ran_ns) for s in books.steps]
    known = [(at, own, others) for at, own, others in told if own is not None and others is not None]
    if not known or known[-1][0] - known[0][0] < LEAST_NS:
        return None
    lasted_ns, own_ns, others_ns = (after - before for before, after in zip(known[0], known[-1], strict=True))
    client_ns = min(_client_share(books) * lasted_ns, float(others_ns))
    return Beside(max(0.0, own_ns - _engine_ns(books)), client_ns, others_ns - client_ns)


def _engine_ns(books: Books) -> float:
    """What the engine's thread ran."""
    return float(sum(length_ns(s) - (s.cpu_wait_ns or 0) - (s.off_cpu_ns or 0) for s in books.steps))


def _client_share(books: Books) -> float:
    """Of a core."""
    checks = books.run.checks if books.run is not None else ()
    return sum(check.value or 0.0 for check in checks if check.name == "cpu")
