"""What an answer waited for, from its trace's beginning to its end: hops of the client, and stages of its requests.

The path is walked backwards from the end of the outermost hop: what it waited for last is the hop inside it that ended
last; before that hop began, the one that had ended last by then; and so on, within each of these again. What no hop
inside accounts for is the hop's own. The sections telescope: their sum is the trace's length with `==`.

Only instants of one clock are compared. What another clock measured (a request's account, the hops of another process)
is nested by its length, as an upstream's account is (ADR 23): where one such thing lies in a hop that has no other hop
inside it, the hop's time on the path is that thing's time first, and `outside` for what is left. Which of the two came
first nobody knows. What is longer than its hop, or one of several, is not nested, and a note says so.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from splittime.core.trace_context import MAX_TRACE_HOPS
from splittime.diagnose.attribution import stages_and_stops
from splittime.diagnose.books import NO_BOOKS, Books
from splittime.ledger.account import ClosedAccount
from splittime.ledger.hops import Hop

OUTSIDE = "outside"
BETWEEN = "between hops"


class Section(msgspec.Struct, frozen=True):
    """A part of the path. hop: whose time it is; None for between the outermost. what: `own`, `outside`, or a stage."""

    hop: Hop | None
    what: str
    duration_ns: int
    cause: str = ""
    request_id: str = ""


class CriticalPath(msgspec.Struct, frozen=True):
    """Sections in the order of time, which sum to `length_ns`. hops: of the clock that the path is told by, and those
    nested in them. notes: what could not be placed, and why."""

    trace_id: str
    length_ns: int
    sections: list[Section]
    hops: list[Hop]
    notes: list[str]


def critical_path(account: ClosedAccount, hops: Sequence[Hop], books: Books = NO_BOOKS) -> CriticalPath:
    """Returns the path of the trace that this account is of. books: of its server; accounts of other traces are left
    out."""
    mine = {hop.span_id: hop for hop in hops if (hop.trace_id, hop.tenant) == (account.trace_id, account.tenant)}
    mine = dict(islice(mine.items(), MAX_TRACE_HOPS))  # a file may have more, which came when others were forgotten
    of_trace = {each.request_id: each for each in (account, *books.accounts)}.values()
    requests = [each for each in of_trace if (each.trace_id, each.tenant) == (account.trace_id, account.tenant)]
    return _Walk(mine, requests, books).path(account)


class _Walk:
    """by_span: all hops of the trace."""

    def __init__(self, by_span: dict[str, Hop], requests: Sequence[ClosedAccount], books: Books) -> None:
        self._by_span, self._requests, self._books = by_span, requests, books
        self._inside: dict[str, list[Hop]] = {}  # of the same clock, by the hop that they lie in
        self._joined: dict[str, dict[str, list[Hop]]] = {}  # of other clocks, by that hop and by their clock
        self._outermost: dict[str, list[Hop]] = {}  # by clock
        self._shown: dict[str, Hop] = {}
        self._notes: list[str] = []
        for hop in by_span.values():
            self._place(hop)

    def _place(self, hop: Hop) -> None:
        above = self._by_span.get(hop.parent_id)
        if above is not None and above.clock == hop.clock:
            self._inside.setdefault(above.span_id, []).append(hop)
            return
        self._outermost.setdefault(hop.clock, []).append(hop)
        if above is not None:
            self._joined.setdefault(above.span_id, {}).setdefault(hop.clock, []).append(hop)

    def path(self, account: ClosedAccount) -> CriticalPath:
        clock = self._clock_of(account)
        tops = self._outermost.get(clock, [])
        begin_ns = min((hop.begin_ns for hop in tops), default=0)
        end_ns = max((hop.end_ns for hop in tops), default=0)
        sections = [one for one in self._between(None, tops, begin_ns, end_ns) if one.duration_ns]
        self._note_unplaced(account)
        shown = list(self._shown.values())
        return CriticalPath(account.trace_id, end_ns - begin_ns, sections, shown, list(dict.fromkeys(self._notes)))

    def _clock_of(self, account: ClosedAccount) -> str:
        """Returns the clock of the outermost hop around the account; of one that lies in no hop, the clock that
        measured longest of those that nobody joined to another."""
        hop, seen = self._by_span.get(account.parent_id), set[str]()
        if hop is None:
            joined = {clock for clocks in self._joined.values() for clock in clocks}
            free = [clock for clock in self._outermost if clock not in joined]
            return max(free or self._outermost, key=lambda clock: _length_ns(self._outermost[clock]), default="")
        while hop.span_id not in seen and hop.parent_id in self._by_span:
            seen.add(hop.span_id)
            hop = self._by_span[hop.parent_id]
        return hop.clock

    def _between(self, owner: Hop | None, hops: Iterable[Hop], begin_ns: int, end_ns: int) -> list[Section]:
        """Returns the sections from `begin_ns` to `end_ns` inside a hop, or between outermost ones."""
        until_ns, backwards = end_ns, list[list[Section]]()
        for hop in sorted(hops, key=lambda each: (each.end_ns, each.begin_ns), reverse=True):
            self._shown.setdefault(hop.span_id, hop)
            hop_end_ns, hop_begin_ns = min(hop.end_ns, end_ns), max(hop.begin_ns, begin_ns)
            if hop_end_ns > until_ns or hop_begin_ns > hop_end_ns:
                self._see_inside(hop)
                continue
            backwards.append([Section(owner, "own" if owner is not None else BETWEEN, until_ns - hop_end_ns)])
            backwards.append(self._of_hop(hop, hop_begin_ns, hop_end_ns))
            until_ns = hop_begin_ns
        backwards.append([Section(owner, "own" if owner is not None else BETWEEN, until_ns - begin_ns)])
        return [section for sections in reversed(backwards) for section in sections]

    def _see_inside(self, hop: Hop) -> None:
        """Show what is inside a hop that is beside the path."""
        for inner in self._inside.get(hop.span_id, ()):
            if inner.span_id not in self._shown:
                self._shown[inner.span_id] = inner
                self._see_inside(inner)

    def _of_hop(self, hop: Hop, begin_ns: int, end_ns: int) -> list[Section]:
        inside = self._inside.get(hop.span_id, [])
        nested = self._nested(hop, is_leaf=not inside, is_whole=end_ns - begin_ns == hop.duration_ns)
        return nested or self._between(hop, inside, begin_ns, end_ns)

    # ---- by length

    def _nested(self, hop: Hop, *, is_leaf: bool, is_whole: bool) -> list[Section]:
        """Returns a hop's sections by what another clock measured of it; [] if that cannot be said."""
        requests = [each for each in self._requests if each.parent_id == hop.span_id]
        clocks = self._joined.get(hop.span_id, {})
        if not requests and not clocks:
            return []
        if not is_leaf or not is_whole or len(requests) + len(clocks) > 1:
            why = "several lie in it" if is_leaf and is_whole else "other hops lie in it, or it outlasts its own"
            way_out = "put each request into a hop of its own"
            self._notes.append(f"what other clocks measured of {hop.name!r} is not in the path: {why}; {way_out}")
            return []
        sections = self._stages(hop, requests[0]) if requests else self._elsewhere(hop, *clocks.values())
        left_ns = hop.duration_ns - sum(section.duration_ns for section in sections)
        if left_ns < 0:
            self._notes.append(f"what another clock measured of {hop.name!r} is {-left_ns / 1e6:.3f} ms longer")
            return []
        return [*sections, Section(hop, OUTSIDE, left_ns)]

    def _stages(self, hop: Hop, account: ClosedAccount) -> list[Section]:
        return [
            Section(hop, str(stage), ns, str(cause or ""), account.request_id)
            for (stage, cause), ns in next(stages_and_stops(self._books, [account])).items()
        ]

    def _elsewhere(self, hop: Hop, tops: Sequence[Hop]) -> list[Section]:
        begin_ns, end_ns = min(each.begin_ns for each in tops), max(each.end_ns for each in tops)
        if any(each.span_id in self._shown for each in tops):
            return []  # parents in a circle, through several clocks
        return self._between(hop, tops, begin_ns, end_ns)

    def _note_unplaced(self, account: ClosedAccount) -> None:
        if self._by_span and account.parent_id not in self._by_span:
            self._notes.append("the request lies in a span that is no posted hop, and is not in the path")
        missing = len(self._by_span) - len(self._shown)
        if missing:
            self._notes.append(f"{missing} hops of the trace lie in none of these, and are not in the path")


def _length_ns(tops: Sequence[Hop]) -> int:
    return max(hop.end_ns for hop in tops) - min(hop.begin_ns for hop in tops)
