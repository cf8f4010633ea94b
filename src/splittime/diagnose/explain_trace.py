"""A whole request as text: the client's hops around it, where each lay in the trace, and what the answer waited for.

A line's marks stand where in the trace the hop was, by the client's clock. A hop that another clock measured has no
place on that line, and no marks. `on path` is what of the trace's length is that hop's own: the column sums to it.
"""

import textwrap
from collections import defaultdict

from rich.text import Text

from splittime.diagnose.critical_path import OUTSIDE, CriticalPath, Section
from splittime.ledger.hops import Hop

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
