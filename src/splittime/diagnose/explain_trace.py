"""A whole request as text: the client's hops around it, where each lay in the trace, and what the answer waited for.

A line's marks stand where in the trace the hop was, by the client's clock. A hop that another clock measured has no
place on that line, and no marks. `on path` is what of the trace's length is that hop's own: the column sums to it.

What an answer waited for, from its trace's beginning to its end: hops of the client, and stages of its requests.

The path is walked backwards from the end of the outermost hop: what it waited for last is the hop inside it that ended
last; before that hop began, the one that had ended last by then; and so on, within each of these again. What no hop
inside accounts for is the hop's own. The sections telescope: their sum is the trace's length with `==`.

Only instants of one clock are compared. What another clock measured (a request's account, the hops of another process)
is nested by its length, as an upstream's account is (ADR 23): where one such thing lies in a hop that has no other hop
inside it, the hop's time on the path is that thing's time first, and `outside` for what is left. Which of the two came
first nobody knows. What is longer than its hop, or one of several, is not nested, and a note says so.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
from rich.text import Text

from splittime.core.trace_context import MAX_TRACE_HOPS
from splittime.diagnose.attribution import stages_and_stops
from splittime.diagnose.books import NO_BOOKS, Books
from splittime.ledger import attempts
from splittime.ledger.account import ClosedAccount
from splittime.ledger.hops import Hop
from splittime.ledger.stages import Stage

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


WHY = {
    "over_cap": "which had more to do than [affinity] allows",
    "no_room": "which had no room",
    "unseen": "nobody had served its beginning",
    "shared": "its known beginning is everybody's",
    "short": "it is too short",
    "unread": "it was too long, or could not be read",
}


def attempt_lines(account: ClosedAccount) -> Iterator[str]:
    """Yields lines without an end; what belongs to the line before is indented."""
    if account.routing is not None:
        yield _rule_words(account.routing)
    if account.degraded:
        yield f"a lesser answer, of the stage {account.degraded} of the gateway's ladder"
    for attempt in account.attempts:
        yield from _lines_of(attempt)


def in_ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.3f}" if duration_ns < 1e9 else f"{duration_ns / 1e6:.1f}"


def wrapped(words: str) -> str:
    """Returns a sentence in lines that fit."""
    return textwrap.fill(words, LINE_COLUMNS, subsequent_indent="  ") + "\n"


def _lines_of(attempt: attempts.Attempt) -> Iterator[str]:
    others = ", ".join(map(_considered_words, attempt.considered))
    ending = attempt.error or f"answered {attempt.status}"
    yield f"upstream {attempt.upstream} ({in_ms(attempt.end_ns - attempt.begin_ns)} ms): {ending}; chosen of {others}"
    if attempt.affinity is not None:
        yield f"  {_affinity_words(attempt.affinity)}"
    if attempt.first_tokens is not None:
        yield f"  {_first_words(attempt.first_tokens)}"
    if attempt.resumed_by:
        yield f"  it went on after {attempt.resumed_after} tokens of the one before, by {attempt.resumed_by}"
    if attempt.nested:
        yield f"  its own account, ms: {_stages(attempt)}"
    if attempt.nested_fault:
        yield f"  its own account is not nested: {attempt.nested_fault}"


def _stages(attempt: attempts.Attempt) -> str:
    totals_ns: dict[Stage, int] = {}
    for stage in attempt.nested:
        totals_ns[stage.stage] = totals_ns.get(stage.stage, 0) + stage.end_ns - stage.begin_ns
    return ", ".join(f"{stage.value} {in_ms(ns)}" for stage, ns in totals_ns.items())


def _considered_words(one: attempts.Considered) -> str:
    """Returns how much an upstream had to do, how far away it was and how long its queue."""
    told = {"away": one.rtt_ns, "to wait": one.wait_ns}
    costs = ", ".join(f"{in_ms(ns)} ms {what}" for what, ns in told.items() if ns is not None)
    return f"{one.upstream} with {one.requests} requests{f' ({costs})' if costs else ''}"


def _affinity_words(decision: attempts.AffinityDecision) -> str:
    """Returns what prefix affinity went by."""
    why = WHY.get(decision.why, decision.why)
    if decision.result not in (attempts.HIT, attempts.CAPPED):
        return f"its prompt said nothing of whom to choose: {why}"
    begun = f"{decision.upstream} had served {decision.matched_bytes} bytes of the prompt's beginning"
    shared = f" ({decision.shared_bytes} of them everybody's)" if decision.shared_bytes else ""
    load = f"with {decision.tokens} tokens in flight of {decision.cap_tokens} that it might have"
    return f"{begun}{shared}, {load}" if decision.result == attempts.HIT else f"{begun}{shared}, {why}: {load}"


def _rule_words(decision: attempts.RouteDecision) -> str:
    """Returns what a gateway's rules said, and under which config."""
    rule = f"by the rule {decision.rule}" if decision.rule else "by no rule"
    model = decision.model if decision.model == decision.asked_model else f"{decision.asked_model} as {decision.model}"
    first = "" if decision.difficulty is None else f", {decision.difficulty.choice} first"
    return f"routed {rule}: {model} (policy {decision.policy}){first}"


def _first_words(found: attempts.FirstTokens) -> str:
    """Returns what the first tokens of a small model's answer said."""
    mean = "" if found.mean_logprob is None else f", mean log-probability {found.mean_logprob:.3f}"
    held = f"held back {in_ms(found.held_ns)} ms"
    why = f" ({found.why})" if found.why else ""
    return f"first tokens: {found.verdict}{why}{mean}; {held}"


LINE_COLUMNS, NAME_COLUMNS, TIMELINE_COLUMNS = 80, 30, 28


def explain_trace(path: CriticalPath) -> Text:
    """Returns the hops as a waterfall, and the critical path beside it; empty where no hops were posted."""
    if not path.hops:
        return Text()
    text = Text(f"The whole answer took {_ms(path.length_ns)} ms by the client's clock\n")
    text.append(f"trace {path.trace_id}\n")
    text.append(f"{'hop':<{NAME_COLUMNS}}{'from 0 to end':<{TIMELINE_COLUMNS + 2}}{'ms':>9}{'on path':>11}\n", "dim")
    own_ns, stages = _by_hop(path)
    for depth, hop in _in_order(path.hops):
        text.append_text(_line(path, depth, hop, own_ns.get(hop.span_id, 0)))
        for section in stages.get(hop.span_id, ()):
            text.append(_stage_line(depth, section))
    for section in (one for one in path.sections if one.hop is None):
        text.append(f"{section.what:<{NAME_COLUMNS + TIMELINE_COLUMNS + 2}}{'':>9}{_ms(section.duration_ns):>11}\n")
    total_ns = sum(section.duration_ns for section in path.sections)
    text.append(f"{'sum':<{NAME_COLUMNS + TIMELINE_COLUMNS + 2}}{'':>9}{_ms(total_ns):>11}\n")
    for note in path.notes:
        text.append(wrapped(f"{note}."))
    return text


def _by_hop(path: CriticalPath) -> tuple[dict[str, int], dict[str, list[Section]]]:
    """Returns each hop's own time on the path, and the stages of requests that are nested in it."""
    own_ns, stages = defaultdict[str, int](int), defaultdict[str, list[Section]](list)
    for section in path.sections:
        if section.hop is None:
            continue
        if section.request_id or section.what == OUTSIDE:
            stages[section.hop.span_id].append(section)
        else:
            own_ns[section.hop.span_id] += section.duration_ns
    return own_ns, stages


def _in_order(hops: list[Hop]) -> list[tuple[int, Hop]]:
    """Returns the hops as a tree reads, with their depths: each before what lies in it, brothers as they began."""
    known = {hop.span_id for hop in hops}
    inside = defaultdict[str, list[Hop]](list)
    for hop in sorted(hops, key=lambda each: (each.clock, each.begin_ns, -each.end_ns)):
        inside[hop.parent_id if hop.parent_id in known else ""].append(hop)
    ordered, open_hops = list[tuple[int, Hop]](), [(0, hop) for hop in reversed(inside[""])]
    while open_hops:
        depth, hop = open_hops.pop()
        ordered.append((depth, hop))
        open_hops += [(depth + 1, each) for each in reversed(inside[hop.span_id])]
    return ordered


def _line(path: CriticalPath, depth: int, hop: Hop, own_ns: int) -> Text:
    name = f"{'  ' * min(depth, 5)}{hop.name}: {hop.kind.value}"
    text = Text(_cut(name))
    text.append(f"|{_marks(path, hop)}|", style="red" if hop.error else "green")
    on_path = _ms(own_ns) if own_ns else "-"
    text.append(f"{_ms(hop.duration_ns):>9}{on_path:>11}\n")
    if hop.error:
        text.append(f"{'  ' * min(depth, 5)}  ended by {hop.error}\n", style="red")
    return text


def _stage_line(depth: int, section: Section) -> str:
    name = f"{section.what}: {section.cause}" if section.cause else section.what
    width = NAME_COLUMNS + TIMELINE_COLUMNS + 2
    return f"{_cut('  ' * min(depth, 5) + '  ' + name):<{width}}{'':>9}{_ms(section.duration_ns):>11}\n"


def _marks(path: CriticalPath, hop: Hop) -> str:
    """`#` where the hop was, at least one."""
    clock = path.hops[0].clock
    mine = [each for each in path.hops if each.clock == clock]
    begin_ns, length_ns = min(each.begin_ns for each in mine), max(1, path.length_ns)
    if hop.clock != clock:
        return " " * TIMELINE_COLUMNS
    first = min(TIMELINE_COLUMNS - 1, (hop.begin_ns - begin_ns) * TIMELINE_COLUMNS // length_ns)
    last = max(first + 1, min(TIMELINE_COLUMNS, -(-(hop.end_ns - begin_ns) * TIMELINE_COLUMNS // length_ns)))
    return " " * first + "#" * (last - first) + " " * (TIMELINE_COLUMNS - last)


def _cut(name: str) -> str:
    return f"{name[: NAME_COLUMNS - 1]:<{NAME_COLUMNS}}"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:,.3f}"
