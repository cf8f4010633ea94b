"""The book of hops: what is kept, for how long, whose, and what a file keeps of it."""

import sqlite3

import pytest

from splittime.core.errors import RequestError
from splittime.core.trace_context import MAX_TRACE_HOPS, HopKind
from splittime.ledger.hops import Hop, HopBook
from splittime.ledger.store import Ledger, open_readonly

SECOND_NS = 10**9


def hop(trace: int = 1, span: int = 1, tenant: str = "a", **more) -> Hop:
    told = {"name": "search", "kind": HopKind.RETRIEVAL, "clock": "c", "begin_ns": 0, "end_ns": 5, **more}
    return Hop(trace_id=f"{trace:032x}", span_id=f"{span:016x}", tenant=tenant, **told)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_posting_again_changes_nothing():
    book = HopBook()
    assert book.add([hop(), hop(span=2), hop()]) == [hop(), hop(span=2)]
    assert book.add([hop()]) == []
    assert book.of_trace(hop().trace_id) == [hop(), hop(span=2)]
    counts = book.counts()
    assert (counts.kept, counts.known, counts.forgotten) == (2, 2, 0)


def test_a_span_is_one_hops_and_nothing_of_a_refused_post_is_kept():
    book = HopBook()
    book.add([hop()])
    with pytest.raises(RequestError, match="another hop") as caught:
        book.add([hop(span=2), hop(end_ns=6)])
    assert caught.value.info.status == 409
    assert book.of_trace(hop().trace_id) == [hop()]


def test_a_trace_is_bounded():
    book = HopBook()
    book.add([hop(span=number) for number in range(1, MAX_TRACE_HOPS + 1)])
    with pytest.raises(RequestError, match=f"may have {MAX_TRACE_HOPS} hops"):
        book.add([hop(span=MAX_TRACE_HOPS + 1)])
    assert len(book.of_trace(hop().trace_id)) == MAX_TRACE_HOPS


def test_a_tenant_pushes_out_its_own_oldest_trace_and_nobody_elses():
    book = HopBook(max_hops=3)
    book.add([hop(trace=1, tenant="b")])
    for trace in range(1, 5):
        book.add([hop(trace=trace, span=span) for span in (1, 2)])
    kept = [trace for trace in range(1, 5) if book.of_trace(f"{trace:032x}", "a")]
    assert kept == [4]
    assert book.of_trace(f"{1:032x}", "b") == [hop(tenant="b")]
    assert book.counts().forgotten == 6


def test_a_trace_is_forgotten_when_nothing_came_for_a_while():
    clock = Clock()
    book = HopBook(kept_s=10, now_ns=clock)
    book.add([hop(trace=1)])
    book.add([hop(trace=2)])
    clock.now_ns = 6 * SECOND_NS
    book.add([hop(trace=1, span=2)])
    clock.now_ns = 11 * SECOND_NS
    assert book.of_trace(f"{2:032x}") == []
    assert len(book.of_trace(f"{1:032x}")) == 2
    clock.now_ns = 17 * SECOND_NS
    assert book.of_trace(f"{1:032x}") == []
    assert book.counts().forgotten == 3


def test_hops_of_two_tenants_in_one_trace_are_each_ones_own():
    book = HopBook()
    book.add([hop(tenant="a")])
    book.add([hop(tenant="b", name="other")])
    assert book.of_trace(hop().trace_id, "b") == [hop(tenant="b", name="other")]
    assert book.of_trace(hop().trace_id, "c") == []
    assert len(book.of_trace(hop().trace_id)) == 2


def test_the_file_keeps_them_when_memory_has_forgotten(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.add_hops([hop(), hop(span=2, tenant="a")]) == 2
    assert ledger.flush()
    ledger.hop_book = HopBook()  # as after a restart
    assert ledger.hops(hop().trace_id, "a") == [hop(), hop(span=2)]
    assert ledger.hops(hop().trace_id, "b") == []
    ledger.close()
    file = open_readonly(tmp_path / "ledger.sqlite")
    assert file.hops(hop().trace_id) == [hop(), hop(span=2)]
    file.close()


def test_the_file_is_bounded(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", max_file_accounts=1)
    for trace in range(1, 9):
        ledger.add_hops([hop(trace=trace)])
        assert ledger.flush()
    ledger.close()
    file = open_readonly(tmp_path / "ledger.sqlite")
    assert [trace for trace in range(1, 9) if file.hops(f"{trace:032x}")] == [5, 6, 7, 8]
    file.close()


def test_a_file_that_is_older_than_hops_has_none_and_gets_them_when_it_is_written(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as old:
        old.execute("DROP TABLE hops")
    file = open_readonly(path)
    assert file.hops(hop().trace_id) == []
    file.close()
    ledger = Ledger(path)
    ledger.add_hops([hop()])
    ledger.close()
    file = open_readonly(path)
    assert file.hops(hop().trace_id) == [hop()]
    file.close()
