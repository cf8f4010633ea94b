"""The critical path: its sections sum to the trace's length, and no instants of two clocks are compared."""

import books
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ward import Case, Ward, ids

from splittime.core.trace_context import MAX_TRACE_HOPS, HopKind
from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import make_books
from splittime.diagnose.explain_trace import OUTSIDE, critical_path, explain_trace
from splittime.ledger import derive
from splittime.ledger.hops import Hop

TRACE = "ab" * 16
MS = 1_000_000


def hop(span: str, begin_ms: float, end_ms: float, parent: str = "", clock: str = "c", **more) -> Hop:
    told = {"name": span, "kind": HopKind.OTHER, **more}
    begin_ns, end_ns = int(begin_ms * MS), int(end_ms * MS)
    return Hop(trace_id=TRACE, span_id=span, begin_ns=begin_ns, end_ns=end_ns, parent_id=parent, clock=clock, **told)


def account(parent: str, request_id: str = "cmpl-a-0", **more):
    made = books.example(request_id, **more)  # 35.1 ms
    return msgspec.structs.replace(made, trace_id=TRACE, parent_id=parent)


def told(path) -> list[tuple[str, str, float]]:
    return [("" if one.hop is None else one.hop.name, one.what, one.duration_ns / MS) for one in path.sections]


def summed(path) -> int:
    return sum(section.duration_ns for section in path.sections)


def test_one_after_the_other_with_a_request_nested_by_length():
    hops = [
        hop("answer", 0, 100),
        hop("search", 5, 25, "answer"),
        hop("rerank", 25, 40, "answer"),
        hop("ask", 50, 90, "answer"),
    ]
    asked = account("ask")
    path = critical_path(asked, hops)
    stages = [("ask", stage.value, ns / MS) for (stage, _), ns in derive.stage_totals_ns(asked).items()]
    assert told(path) == [
        ("answer", "own", 5.0),
        ("search", "own", 20.0),
        ("rerank", "own", 15.0),
        ("answer", "own", 10.0),
        *stages,
        ("ask", OUTSIDE, 4.9),
        ("answer", "own", 10.0),
    ]
    assert summed(path) == path.length_ns == 100 * MS
    assert path.notes == []


def test_of_hops_at_once_the_one_that_ended_last_is_waited_for():
    hops = [hop("answer", 0, 30), hop("quick", 0, 10, "answer"), hop("slow", 0, 20, "answer")]
    hops.append(hop("in", 12, 20, "slow"))
    path = critical_path(account(""), hops)
    assert told(path) == [("slow", "own", 12.0), ("in", "own", 8.0), ("answer", "own", 10.0)]
    assert {one.name for one in path.hops} == {"answer", "quick", "slow", "in"}  # what is beside the path is shown


def test_a_hop_that_outlives_its_parent_counts_to_the_parents_end():
    path = critical_path(account(""), [hop("answer", 0, 10), hop("left", 4, 99, "answer")])
    assert told(path) == [("answer", "own", 4.0), ("left", "own", 6.0)]


def test_between_two_outermost_hops_nobody_measured():
    path = critical_path(account("b"), [hop("a", 0, 10), hop("b", 30, 31)])
    assert told(path)[:2] == [("a", "own", 10.0), ("", "between hops", 20.0)]
    assert summed(path) == path.length_ns == 31 * MS


def test_the_clock_of_a_nested_process_is_never_compared():
    hops = [hop("answer", 0, 100), hop("call", 10, 60, "answer"), hop("worker", 0, 30, "call", "w")]
    here = critical_path(account(""), hops)
    shifted = [hops[0], hops[1], hop("worker", 7_000, 7_030, "call", "w")]
    there = critical_path(account(""), shifted)
    assert told(here) == told(there)
    assert told(here)[:2] == [("answer", "own", 10.0), ("worker", "own", 30.0)]
    assert told(here)[2:] == [("call", OUTSIDE, 20.0), ("answer", "own", 40.0)]


@pytest.mark.parametrize(
    ("hops", "others", "words"),
    [
        ([hop("ask", 0, 10)], [], "longer"),
        ([hop("ask", 0, 100)], [account("ask", "cmpl-b-0")], "several"),
        ([hop("ask", 0, 100), hop("in", 1, 2, "ask")], [], "a hop of its own"),
        ([hop("elsewhere", 0, 100)], [], "no posted hop"),
    ],
)
def test_what_cannot_be_nested_is_said_and_not_mended(hops, others, words):
    path = critical_path(account("ask"), hops, make_books(None, others, [], ""))
    assert any(words in note for note in path.notes), path.notes
    assert {section.request_id for section in path.sections} == {""}
    assert summed(path) == path.length_ns
    assert words in explain_trace(path).plain.replace("\n  ", " ")


def test_another_tenants_hops_and_other_traces_are_not_read():
    hops = [hop("ask", 0, 100), hop("spy", 0, 50, "ask", tenant="b")]
    hops.append(msgspec.structs.replace(hop("other", 0, 10), trace_id="cd" * 16))
    path = critical_path(account("ask"), hops)
    assert {one.name for one in path.hops} == {"ask"}
    assert path.notes == []


def test_parents_in_a_circle_end():
    hops = [hop("a", 0, 10, "b"), hop("b", 0, 10, "a"), hop("top", 0, 10)]
    path = critical_path(account("top"), hops)
    assert any("2 hops" in note for note in path.notes)
    through_clocks = [hop("a", 0, 10, "b"), hop("b", 0, 10, "a", "w")]
    path = critical_path(account("a"), through_clocks)
    assert summed(path) == path.length_ns == 10 * MS


def test_the_deepest_trace_is_walked():
    hops = [hop(f"{i}", i, 2000 - i, f"{i - 1}" if i else "") for i in range(4 * MAX_TRACE_HOPS)]
    path = critical_path(account("0"), hops)
    assert summed(path) == path.length_ns
    assert len(path.hops) == MAX_TRACE_HOPS
    assert max(map(len, explain_trace(path).plain.splitlines())) <= 80


def test_it_is_told_in_lines_that_fit():
    hops = [hop("answer", 0, 100), hop("ask", 50, 90, "answer")]
    hops.append(hop("search" * 10, 5, 25, "answer", error="TimeoutError"))
    text = explain_trace(critical_path(account("ask"), hops)).plain
    assert "The whole answer took 100.000 ms" in text
    assert "ended by TimeoutError" in text
    assert "queue: kv_blocks" in text
    assert text.splitlines()[-1].split() == ["sum", "100.000"]
    assert max(map(len, text.splitlines())) <= 80
    assert explain_trace(critical_path(account(""), [])).plain == ""


@st.composite
def traces(draw) -> list[Hop]:
    """Any hops that may be posted: parents of whatever clock, circles and strangers among them."""
    spans = [str(number) for number in range(draw(st.integers(1, 12)))]
    hops = []
    for span in spans:
        begin_ns, length_ns = draw(st.integers(0, 50)), draw(st.integers(0, 50))
        parent = draw(st.sampled_from([*(one for one in spans if one != span), "", "stranger"]))
        made = hop(span, 0, 0, parent, draw(st.sampled_from("cw")))
        hops.append(msgspec.structs.replace(made, begin_ns=begin_ns, end_ns=begin_ns + length_ns))
    return hops


@given(traces(), st.sampled_from(["0", "1", "stranger", ""]), st.integers(0, 3))
def test_the_sections_of_any_trace_sum_exactly(hops, parent, gap_ns):
    asked = account(parent, num_tokens=2, gap_ns=gap_ns)
    path = critical_path(asked, hops)
    assert summed(path) == path.length_ns
    assert all(section.duration_ns > 0 for section in path.sections)
    explain_trace(path)


def test_an_engine_that_was_stopped_is_no_stage_of_its_path():
    of_ward = Ward(stops_ms=[(1500, 200)]).run(*(Case(100 * i, ids(30, i), 60) for i in range(20)))
    hit = max(of_ward.accounts, key=lambda each: max(derive.itl_ns(each)))
    asked = msgspec.structs.replace(hit, trace_id=TRACE, parent_id="ask")
    path = critical_path(asked, [hop("ask", 0, 1000)], msgspec.structs.replace(of_ward, accounts=(asked,)))
    stopped = {section.what: section.duration_ns for section in path.sections}[Computed.STOPPED]
    assert stopped == pytest.approx(attribution(of_ward).of(Computed.STOPPED)[hit.request_id], abs=2)
    assert stopped > 190 * MS
    assert summed(path) == path.length_ns
