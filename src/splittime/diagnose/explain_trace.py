"""A whole request as text: the client's hops around it, where each lay in the trace, and what the answer waited for.

A line's marks stand where in the trace the hop was, by the client's clock. A hop that another clock measured has no
place on that line, and no marks. `on path` is what of the trace's length is that hop's own: the column sums to it.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterator

from rich.text import Text

from splittime.diagnose.critical_path import OUTSIDE, CriticalPath, Section
from splittime.ledger import attempts
from splittime.ledger.account import ClosedAccount
from splittime.ledger.hops import Hop
from splittime.ledger.stages import Stage

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
    if attempt.tied_to:
        lost = f", and lost: it had a prompt of about {attempt.lost_tokens} tokens"
        yield f"  it raced with {attempt.tied_to}{lost if attempt.error == attempts.TIED_LOST else ''}"
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
    by_text = "" if decision.difficulty is None else f", {_text_words(decision.difficulty)}"
    return f"routed {rule}: {model} (policy {decision.policy}){by_text}"


def _text_words(difficulty: attempts.DifficultyDecision) -> str:
    """Returns what the text decided, and by what."""
    if not difficulty.labels:
        return f"{difficulty.choice} first"
    score = ", as it has no text" if difficulty.score is None else f" by the score {difficulty.score:g}"
    bound = f"threshold {difficulty.threshold:g}, {difficulty.neighbours} neighbours, labels {difficulty.labels}"
    return f"{difficulty.choice}{score} ({bound})"


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
        text.append(textwrap.fill(f"{note}.", LINE_COLUMNS, subsequent_indent="  ") + "\n")
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
