"""Copies of blocks to host memory and back, in every book: exact sums, old files, the trace, metrics, explain."""

import json

import books
import msgspec
import pytest

from splittime.core.engine import EngineStats
from splittime.diagnose.books import make_books
from splittime.diagnose.explain import explain
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json, account_json
from splittime.ledger.derive import device_book, verify_device_book
from splittime.ledger.export.chrome_trace import trace
from splittime.ledger.export.prometheus import PrometheusExporter
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.ledger.store import Ledger
from splittime.server import routes_dashboard

NEW_OF_STEPS = ("offload_ns", "restore_ns", "offloaded_blocks", "restored_blocks")


def moving(step_id: int, begin_ns: int, rows=None) -> StepRecord:
    """Of 1,000,042 ns; a third of it copies."""
    record = books.step(step_id, begin_ns, (1, 2, 666_030, 4, 5), rows=rows)
    moved = {"offload_ns": 200_000, "restore_ns": 134_000, "offloaded_blocks": 3, "restored_blocks": 1}
    return msgspec.structs.replace(record, end_ns=record.end_ns + 334_000, **moved)


def test_copies_are_part_of_a_steps_sum_and_of_the_devices_work() -> None:
    records = [moving(1, 5_000_000), moving(2, 6_000_042)]
    verify_steps(records)
    book = device_book(records)
    verify_device_book(book, records)
    assert sum(book.share_ns.values()) == 2 * (666_030 + 4 + 334_000)
    with pytest.raises(ValueError, match="parts"):
        verify_steps([msgspec.structs.replace(records[0], offload_ns=0)])
    with pytest.raises(ValueError, match="copies of no block"):
        verify_steps([msgspec.structs.replace(records[0], restored_blocks=0)])


def test_books_from_before_there_were_copies_are_read() -> None:
    step = json.loads(msgspec.json.encode(books.step(1, 10)))
    for name in NEW_OF_STEPS:
        del step[name]
    read = msgspec.json.decode(json.dumps(step), type=StepRecord)
    assert read == books.step(1, 10)
    assert [getattr(read, name) for name in NEW_OF_STEPS] == [0, 0, 0, 0]
    account = json.loads(msgspec.json.encode(books.example()))
    del account["host_tokens"]
    assert msgspec.json.decode(json.dumps(account), type=ClosedAccount) == books.example()
    told = account_json(books.example())
    del told["host_tokens"]
    assert account_from_json(told) == books.example()


def test_an_account_says_what_came_from_host_memory() -> None:
    account = msgspec.structs.replace(books.example(), cached_tokens=32, host_tokens=16)
    assert account_from_json(json.loads(json.dumps(account_json(account)))) == account
    begin_ns = account.start_ns + 10_000_000
    moved = [moving(1, begin_ns, {account.request_id: 8}), moving(2, begin_ns + 1_000_042, {"b": 1})]
    shown = explain(account, make_books(None, [], moved, ""))
    assert "(32 cached, 16 of them in host memory)" in shown.plain.replace("\n  ", " ")
    words = "Its steps copied 1 block from host memory in 0.134 ms and 3 blocks to host memory in 0.200 ms."
    assert words in shown.plain.replace("\n  ", " ")
    assert (
        "copied"
        not in explain(account, make_books(None, [], [books.step(1, begin_ns, rows={account.request_id: 8})], "")).plain
    )


def test_the_pages_bins_hold_all_of_a_steps_time() -> None:
    records = [moving(1, 5_000_000), moving(2, 6_000_042)]
    columns = dict(
        zip(
            routes_dashboard.SUMS,
            zip(*(row[1:] for row in routes_dashboard.step_bins(records, since_ns=0)), strict=True),
            strict=False,
        )
    )
    times = ("device_ns", "sample_ns", "moves_ns", "host_ns", "host_gap_ns", "idle_ns")
    assert sum(sum(columns[name]) for name in times) == sum(record.end_ns - record.begin_ns for record in records)
    assert sum(columns["moves_ns"]) == 2 * 334_000


def test_the_trace_shows_copies_where_there_are_any() -> None:
    events = json.loads(trace([], [moving(1, 5_000_000), books.step(2, 6_000_042)]))["traceEvents"]
    slices = [(event["name"], event["dur"]) for event in events if event.get("ph") == "X"]
    assert slices.count(("offload", 200.0)) == slices.count(("restore", 134.0)) == 1
    assert sum(name in ("offload", "restore") for name, _ in slices) == 2


def test_metrics_tell_blocks_tokens_and_time() -> None:
    ledger = Ledger()
    stats = EngineStats(
        now_ns=0, host_blocks_used=5, host_blocks_total=8, offloaded_tokens=80, restored_tokens=32,
        prefix_host_hit_tokens=16,
    )  # fmt: skip
    exporter = PrometheusExporter(ledger, lambda: stats)
    for record in (moving(1, 5_000_000), books.step(2, 6_000_042)):
        ledger.add_step(record)
    text = exporter.render().decode()
    for line in (
        "splittime_host_blocks_used 5.0",
        "splittime_host_blocks_total 8.0",
        "splittime_offloaded_tokens_total 80.0",
        "splittime_restored_tokens_total 32.0",
        "splittime_prefix_host_hit_tokens_total 16.0",
        'splittime_step_seconds_count{part="offload"} 1.0',
        'splittime_step_seconds_sum{part="restore"} 0.000134',
    ):
        assert line in text
