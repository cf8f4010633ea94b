"""The store: bounded, indexed, readable while written, after a kill, and when the disk fails."""

import errno
import fcntl
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import books
import msgspec
import pytest

from patience import until
from splittime.core.errors import ConfigError, EngineError, ErrorInfo, NotFound, RequestError
from splittime.ledger import sqlite
from splittime.ledger.account import REFUSED, ClosedAccount
from splittime.ledger.attempts import Attempt, Considered, NestedStage
from splittime.ledger.facts import ServerFacts
from splittime.ledger.sqlite import ACCOUNT_BYTES, FileWriter, require_free, weight_bytes
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger, Ran, open_readonly


def test_finds_by_request_id_group_id_and_bare_id():
    ledger = Ledger()
    first, second = books.example("cmpl-a-0"), books.example("cmpl-a-1")
    ledger.add_account(first)
    ledger.add_account(second)
    assert ledger.account("cmpl-a-1") == [second]
    assert ledger.account("cmpl-a") == [first, second]
    assert ledger.account("a") == [first, second]
    assert ledger.account("b") == []


def test_ring_is_bounded_and_its_index_too():
    ledger = Ledger(max_accounts=3, max_steps=2)
    for i in range(10):
        ledger.add_account(books.example(f"cmpl-{i}-0"))
        ledger.add_step(books.step(i, i * 100))
    assert [account.request_id for account in ledger.accounts()] == ["cmpl-7-0", "cmpl-8-0", "cmpl-9-0"]
    assert [step.step_id for step in ledger.steps()] == [8, 9]
    assert ledger.account("cmpl-2-0") == []
    assert len(ledger._by_id) == 6


def test_what_is_kept_is_out_of_the_collectors_sight():
    """Else a full collection looks at all of it, and all who wait for a token wait for that."""
    ledger = Ledger()
    gc.collect()
    num_before = len(gc.get_objects())
    for number in range(1000):
        ledger.add_account(books.example(f"cmpl-{number}-0"))
    gc.collect()
    assert len(gc.get_objects()) - num_before < 100


def test_an_error_is_kept_without_a_word_of_its_request_and_our_own_words_stay():
    ledger = Ledger()
    for name, info in (("a", RequestError("hunter2", value="hunter2").info), ("b", EngineError("it died").info)):
        ledger.add_account(msgspec.structs.replace(books.example(name), error=info))
    assert [account.error.message for account in ledger.accounts()] == ["invalid_value", "it died"]


def long_account(name: str, num_tokens: int):
    tokens = tuple(range(10**15, 10**15 + num_tokens))
    each = dict.fromkeys(("token_steps", "token_ready_ns", "token_written_ns"), tokens)
    return msgspec.structs.replace(books.example(name), **each)


def test_memory_is_bounded_in_bytes_whatever_answers_are_long():
    ledger = Ledger(max_memory_bytes=2**20)
    for number in range(100):
        ledger.add_account(long_account(f"{number}", 400))
        ledger.add_step(msgspec.structs.replace(books.step(number, number), rows=(("a", 0, 1),) * 300))
    kept, steps = ledger.accounts(limit=999), ledger.steps(999)
    assert 10 < len(kept) <= 2**20 / (3 * 400 * 40)
    assert [account.request_id for account in kept] == [f"{n}" for n in range(100 - len(kept), 100)]
    assert ledger.account("0") == []
    assert 10 < len(steps) <= 2**20 / (300 * 130)
    assert steps[-1].step_id == 99
    ledger.add_account(long_account("large", 10_000))
    assert [account.request_id for account in ledger.accounts(limit=999)] == ["large"]
    assert len(ledger.account("large")) == 1


def test_an_account_weighs_what_it_takes():
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    account = msgspec.json.decode(msgspec.json.encode(long_account("a", 5_000)), type=type(books.example("b")))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.7 * taken < weight_bytes(account) < 1.5 * taken
    assert weight_bytes(books.example("b")) < 2.2 * ACCOUNT_BYTES


def kept_and_taken(record: ClosedAccount | StepRecord, names: Iterator[dict[str, object]]) -> tuple[int, int]:
    """Of a thousand that came as a server's do: from messages, each with numbers and names of its own."""
    messages = [msgspec.json.encode(msgspec.structs.replace(record, **name)) for name in islice(names, 1000)]
    ledger, decoder = Ledger(), msgspec.json.Decoder(type(record))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for message in messages:
        one = decoder.decode(message)
        ledger.add_account(one) if isinstance(one, ClosedAccount) else ledger.add_step(one)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return ledger.counts().kept_bytes, taken


def test_what_is_kept_of_ordinary_requests_is_what_it_takes():
    names = ({"request_id": f"cmpl-{n:032x}-0", "group_id": f"cmpl-{n:032x}"} for n in count())
    kept, taken = kept_and_taken(books.example("a", 10**15), names)
    assert 0.75 * taken < kept < 1.3 * taken


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_what_is_kept_of_ordinary_steps_is_what_it_takes(num_rows):
    step = books.step(0, 10**15, rows={f"cmpl-{n:032x}-0": 1 for n in range(num_rows)})
    kept, taken = kept_and_taken(step, ({"step_id": n + 1000} for n in count()))
    assert 0.75 * taken < kept < 1.5 * taken


LONG = "x" * 90
HEAVY_STEPS = {
    "drafts": {
        "verified": tuple((f"cmpl-{n:032x}-0", 8, 5) for n in range(64)),
        "drafts": tuple((f"cmpl-{n:032x}-0", (990, 980, 970, 960, 950, 940, 930, 920)) for n in range(64)),
    },
    "long names": {"rows": tuple((f"{LONG}{n:038x}", 1000 + n, 1) for n in range(64))},
    "victims": {"victims": tuple(f"{LONG}{n:038x}" for n in range(200))},
}


@pytest.mark.parametrize("kind", HEAVY_STEPS)
def test_no_step_takes_much_more_than_it_weighs(kind):
    step = msgspec.structs.replace(books.step(0, 10**15), **HEAVY_STEPS[kind])
    kept, taken = kept_and_taken(step, ({"step_id": n + 1000} for n in count()))
    assert 0.75 * taken < kept < 1.6 * taken


def test_no_gateways_account_takes_much_more_than_it_weighs():
    looked_at = tuple(Considered(f"upstream-{n}", 3000 + n, 100_000 + n, 10**6 + n, 10**7 + n) for n in range(8))
    nested = tuple(NestedStage(Stage.DECODE, None, 1000 + n, 2000 + n) for n in range(20))
    chosen = {"upstream": "a", "considered": looked_at, "begin_ns": 10**15, "end_ns": 10**15 + 9, "nested": nested}
    attempts = tuple(Attempt(request_id=f"gateway-{n:032x}", **chosen) for n in range(3))
    account = msgspec.structs.replace(books.example("a", 10**15), attempts=attempts)
    kept, taken = kept_and_taken(account, ({"request_id": f"gateway-{n:032x}"} for n in count()))
    assert 0.75 * taken < kept < 1.6 * taken


def test_a_step_weighs_what_it_takes_with_all_who_came_before_it():
    told = msgspec.structs.replace(books.step(0, 0), comings=tuple((f"request {n}", "came") for n in range(5_000)))
    written = msgspec.json.encode(told)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    step = msgspec.json.decode(written, type=type(told))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.7 * taken < weight_bytes(step) < 1.5 * taken


def test_each_step_tells_how_many_were_refused_before_it_however_few_are_kept():
    ledger = Ledger(max_accounts=2)
    full = ErrorInfo(kind="overloaded_error", message="full", code="queued_requests", status=429)
    bad = msgspec.structs.replace(full, code="prompt_too_long", status=400)
    over_its_limit = msgspec.structs.replace(full, code="requests_per_minute")
    ledger.add_step(books.step(1, 100))
    for i in range(30):
        error = full if i % 3 else (bad if i % 2 else over_its_limit)
        ledger.add_account(msgspec.structs.replace(books.example(f"cmpl-{i}-0"), finish_reason=REFUSED, error=error))
        ledger.add_step(books.step(2 + i, 200 + 100 * i))
    counts = [step.num_refused for step in ledger.steps()]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 20)


def test_each_step_tells_who_had_run_by_then():
    ledger = Ledger()
    ledger.add_step(books.step(1, 100))
    ledger.describe_by(None, lambda: Ran(server_ns=3, others_ns=5))
    ledger.add_step(books.step(2, 200))
    assert [(step.server_ran_ns, step.others_ran_ns) for step in ledger.steps()] == [(None, None), (3, 5)]


def test_latest_first_bound_then_oldest_first():
    ledger = Ledger()
    for i in range(5):
        ledger.add_account(books.example(f"cmpl-{i}-0", num_tokens=2 + 10 * (i % 2)))
    assert [a.request_id for a in ledger.accounts(limit=2)] == ["cmpl-3-0", "cmpl-4-0"]
    assert [a.request_id for a in ledger.accounts(slower_than_ms=40)] == ["cmpl-1-0", "cmpl-3-0"]


def test_an_account_that_does_not_verify_is_kept_and_counted(caplog):
    ledger = Ledger()
    good = books.example()
    bad = msgspec.structs.replace(good, end_ns=good.end_ns + 1)
    ledger.add_account(bad)
    assert ledger.counts().invalid_accounts == 1
    assert ledger.account("a") == [bad]
    assert "does not verify" in caplog.text


def test_a_subscriber_cannot_break_the_caller(caplog):
    ledger, seen = Ledger(), []
    ledger.subscribe(lambda record: 1 / 0)
    ledger.subscribe(seen.append)
    ledger.add_step(books.step(1, 0))
    assert len(seen) == 1
    assert ledger.counts().subscriber_errors == 1


def test_file_holds_what_was_added(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, max_accounts=1)
    for i in range(20):
        ledger.add_account(books.example(f"chatcmpl-{i}-0", start_ns=i * 10**9))
        ledger.add_step(books.step(i, i * 10**9))
    assert ledger.flush()
    assert ledger.account("3")[0].request_id == "chatcmpl-3-0"  # fallen out of the ring, found in the file
    ledger.close()
    assert not (tmp_path / "ledger.sqlite-wal").exists()  # one file to copy away
    file = open_readonly(path)
    assert [a.request_id for a in file.accounts(limit=2)] == ["chatcmpl-18-0", "chatcmpl-19-0"]
    assert file.account("7") == [books.example("chatcmpl-7-0", start_ns=7 * 10**9)]
    assert [s.step_id for s in file.steps(limit=3)] == [17, 18, 19]
    assert [s.step_id for s in file.steps_between(5 * 10**9, 7 * 10**9)] == [5, 6, 7]
    assert file.accounts(slower_than_ms=10**6) == []
    file.close()


def test_file_retention(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "MAX_BATCH_RECORDS", 7)
    ledger = Ledger(tmp_path / "l.sqlite", max_file_accounts=10, max_file_steps=5)
    for i in range(50):
        ledger.add_account(books.example(f"cmpl-{i}-0"))
        ledger.add_step(books.step(i, i * 100))
    ledger.close()
    file = open_readonly(tmp_path / "l.sqlite")
    assert [a.request_id for a in file.accounts(limit=99)] == [f"cmpl-{i}-0" for i in range(40, 50)]
    assert [s.step_id for s in file.steps(limit=99)] == list(range(45, 50))


def file_size(path) -> int:
    return sum(each.stat().st_size for each in path.parent.iterdir() if each.name.startswith(path.name))


def written(path, num_records: int, **bounds) -> None:
    """Steps of 100 rows and accounts of 1,000 tokens, about 4 and 10 kB."""
    rows = tuple((f"cmpl-{row}-0-{'x' * 16}", 0, 1) for row in range(100))
    ledger = Ledger(path, max_accounts=1, max_steps=1, **bounds)
    for i in range(num_records):
        ledger.add_step(msgspec.structs.replace(books.step(i, i * 100), rows=rows))
        ledger.add_account(msgspec.structs.replace(books.example(f"cmpl-{i}-0"), token_steps=(12_345_678,) * 1_000))
        if not i % 50:
            assert ledger.flush()
    ledger.close()


def test_a_file_has_no_more_bytes_than_it_may(tmp_path):
    """The oldest go, of accounts and of steps alike."""
    path, most = tmp_path / "l.sqlite", 2 * 2**20
    written(path, 2_000, max_file_bytes=most)
    assert most / 2 < file_size(path) < 1.5 * most  # and a batch
    file = open_readonly(path)
    steps = [step.step_id for step in file.steps(limit=9999)]
    ended = [account.request_id for account in file.accounts(limit=9999)]
    file.close()
    assert steps == list(range(2_000 - len(steps), 2_000))
    assert ended == [f"cmpl-{i}-0" for i in range(2_000 - len(ended), 2_000)]
    assert len(steps) > 50
    assert abs(len(steps) - len(ended)) < 0.2 * len(steps)


def test_few_accounts_beside_many_steps_go_back_at_least_as_far(tmp_path):
    path, most = tmp_path / "l.sqlite", 2 * 2**20
    ledger = Ledger(path, max_file_bytes=most)
    for i in range(6_000):
        ledger.add_step(msgspec.structs.replace(books.step(i, i * 100), rows=(("x" * 1_000, 0, 1),)))
        if i % 100 == 0:
            ledger.add_account(books.example(f"cmpl-{i}-0", start_ns=i * 100))
            assert ledger.flush()
    ledger.close()
    file = open_readonly(path)
    oldest_step = min(step.step_id for step in file.steps(limit=9999))
    kept = {int(account.request_id.split("-")[1]) for account in file.accounts(limit=9999)}
    file.close()
    assert oldest_step > 3_000
    assert kept >= set(range(-(-oldest_step // 100) * 100, 6_000, 100))


def test_a_file_that_is_too_large_already_loses_its_oldest_and_counts_its_steps_on(tmp_path):
    path, most = tmp_path / "l.sqlite", 2**20
    written(path, 300)
    before = path.stat().st_size
    assert before > 3 * most
    written(path, 2, max_file_bytes=most)
    file = open_readonly(path)
    steps = [step.step_id for step in file.steps(limit=9999)]
    file.close()
    assert steps[-2:] == [301 - 1, 302 - 1]
    assert 20 < len(steps) < 150
    assert path.stat().st_size < 1.1 * before  # no smaller: its pages are free for what comes


def test_one_record_that_is_larger_than_all_may_be_is_kept_as_the_latest(tmp_path):
    path, most = tmp_path / "l.sqlite", 2**20
    rows = tuple((f"{row}-{'x' * 1_000}", 0, 1) for row in range(2_000))
    ledger = Ledger(path, max_file_bytes=most)
    for i in range(3):
        ledger.add_step(msgspec.structs.replace(books.step(i, i * 100), rows=rows))
        assert ledger.flush()
    assert ledger.counts().unwritten == 0
    ledger.close()
    file = open_readonly(path)
    assert [step.step_id for step in file.steps()] == [2]
    file.close()


def test_what_was_refused_pushes_nobody_out(tmp_path):
    """In memory and in the file; both tell of all in the order in which they ended."""
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path, max_accounts=10, max_file_accounts=10)
    for i in range(100):
        account = books.example(f"cmpl-{i}-0", start_ns=i * 10**9)
        is_served = i in (3, 95)
        ledger.add_account(account if is_served else msgspec.structs.replace(account, finish_reason=REFUSED))
    kept = [3, *range(89, 100)]
    assert [a.request_id for a in ledger.accounts(limit=99)] == [f"cmpl-{i}-0" for i in kept]
    assert [a.request_id for a in ledger.accounts(limit=2)] == ["cmpl-98-0", "cmpl-99-0"]
    ledger.close()
    file = open_readonly(path)
    for source in (ledger, file):
        assert source.account("cmpl-3")[0].finish_reason == "stop"
        assert source.account("cmpl-99")[0].is_refused
        assert not source.account("cmpl-88")
    assert {a.request_id for a in file.accounts(limit=99)} == {f"cmpl-{i}-0" for i in kept}


def test_readers_while_one_writes(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite", max_accounts=50, max_steps=50)
    ledger.flush()
    stop, errors = threading.Event(), []

    def read() -> None:
        file = open_readonly(tmp_path / "l.sqlite")
        try:
            while not stop.is_set():
                for found in (ledger.accounts(limit=20), file.accounts(limit=20), ledger.account("cmpl-7-0")):
                    for account in found:
                        account.verify()
                ids = [step.step_id for step in ledger.steps()]
                assert ids == sorted(ids)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(1500):
        ledger.add_account(books.example(f"cmpl-{i}-0"))
        ledger.add_step(books.step(i, i * 100))
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    ledger.close()
    assert len(open_readonly(tmp_path / "l.sqlite").accounts(limit=9999)) == 1500


_WRITER = """
import sys; sys.path.insert(0, sys.argv[2])
import books
from splittime.ledger.store import Ledger
ledger = Ledger(sys.argv[1])
i = 0
while True:
    ledger.add_account(books.example(f"cmpl-{i}-0")); ledger.add_step(books.step(i, i * 100)); i += 1
    if i % 50 == 0: ledger.flush(); print(i, flush=True)
"""


def test_kill_9_leaves_a_readable_file(tmp_path):
    path = tmp_path / "l.sqlite"
    command = [sys.executable, "-c", _WRITER, str(path), str(Path(__file__).parent)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    written = [int(writer.stdout.readline()) for _ in range(6)][-1]
    time.sleep(0.05)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    file = open_readonly(path)
    accounts = file.accounts(limit=10**6)
    assert len(accounts) >= written
    assert [a.request_id for a in accounts] == [f"cmpl-{i}-0" for i in range(len(accounts))]
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(Ledger(path).account("3")) == 1  # and can be written again


def test_a_full_queue_drops_and_counts(tmp_path):
    writer = FileWriter(tmp_path / "l.sqlite", 10, 10, max_queued_records=3)
    blocker = sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # the writer's thread now waits for us
    for i in range(10):
        writer.put(books.step(i, i))
        time.sleep(0.03)
    took_s = []
    for i in range(3):
        begin_s = time.monotonic()
        writer.put(books.step(11 + i, 11))
        took_s.append(time.monotonic() - begin_s)
    assert min(took_s) < 2.5  # who waited for the lock would wait for five seconds each time
    assert writer.num_dropped >= 3
    blocker.execute("ROLLBACK")
    writer.close()


def test_a_record_that_cannot_be_encoded_does_not_end_the_file(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.add_account(books.example("half of two codes \ud800", start_ns=0))
    assert ledger.flush()
    ledger.add_account(books.example("whole", start_ns=1))
    assert ledger.flush()
    ledger.close()
    assert ledger.counts().unwritten == 1
    assert [account.request_id for account in open_readonly(tmp_path / "l.sqlite").accounts()] == ["whole"]


def test_a_failing_disk_is_logged_once_and_survived(tmp_path, caplog):
    ledger = Ledger(tmp_path / "l.sqlite")
    other = sqlite3.connect(tmp_path / "l.sqlite")
    other.execute("ALTER TABLE steps RENAME TO away")
    other.commit()
    for i in range(3):
        ledger.add_step(books.step(i, i))
        ledger.add_account(books.example(f"{i}", start_ns=i))
        assert not ledger.flush(0.02)
    assert caplog.text.count("records wait") == 1
    other.execute("ALTER TABLE away RENAME TO steps")
    other.commit()
    ledger.add_step(books.step(9, 9))
    assert ledger.flush()
    ledger.close()
    assert (ledger.counts().unwritten, ledger.counts().dropped) == (0, 0)
    assert [s.step_id for s in open_readonly(tmp_path / "l.sqlite").steps()] == [0, 1, 2, 9]
    assert [a.request_id for a in open_readonly(tmp_path / "l.sqlite").accounts()] == ["0", "1", "2"]


def test_who_ends_while_the_disk_fails_says_what_it_did_not_write(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    other = sqlite3.connect(tmp_path / "l.sqlite")
    other.execute("ALTER TABLE steps RENAME TO away")
    other.commit()
    for i in range(3):
        ledger.add_step(books.step(i, i))
    ledger.close()
    assert ledger.counts().unwritten == 3


def test_what_waits_for_the_disk_is_bounded_in_bytes_and_room_comes_back(tmp_path, caplog):
    one = weight_bytes(books.step(0, 0))
    writer = FileWriter(tmp_path / "l.sqlite", 10, 10, max_queued_bytes=3 * one)
    other = sqlite3.connect(tmp_path / "l.sqlite")
    other.execute("ALTER TABLE steps RENAME TO away")
    other.commit()
    for i in range(5):
        writer.put(books.step(i, i))
    assert writer.num_dropped == 2
    assert caplog.text.count("those that come are lost") == 1
    other.execute("ALTER TABLE away RENAME TO steps")
    other.commit()
    assert writer.flush(10)
    writer.put(books.step(6, 6))
    writer.close()
    assert [s.step_id for s in open_readonly(tmp_path / "l.sqlite").steps()] == [0, 1, 2, 6]


def test_a_bad_record_costs_none_of_its_batch(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    blocker = sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # so that all come in one batch
    for name in ("before", "half of two codes \ud800", "behind"):
        ledger.add_account(books.example(name, start_ns=0))
    blocker.execute("ROLLBACK")
    ledger.close()
    assert ledger.counts().unwritten == 1
    assert [account.request_id for account in open_readonly(tmp_path / "l.sqlite").accounts()] == ["before", "behind"]


def test_a_path_that_cannot_be_written_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot write the ledger file") as caught:
        Ledger(tmp_path / "no" / "such" / "folder.sqlite")
    assert "folder that exists" in caught.value.info.hint
    (tmp_path / "text").write_text("this is no database, " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(tmp_path / "text")
    with pytest.raises(ConfigError, match="not a readable ledger"):
        open_readonly(tmp_path / "text")
    with pytest.raises(NotFound, match="no ledger file"):
        open_readonly(tmp_path / "nothing")


def test_a_damaged_record_is_told_as_a_damaged_file(tmp_path):
    path = tmp_path / "l.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO accounts(request_id, group_id, e2e_ns, body) VALUES('a', 'a', 1, '{}')")
    with pytest.raises(ConfigError, match=r"l\.sqlite is not a readable ledger file"):
        open_readonly(path).account("a")


FACTS = ServerFacts(version="1", model="code", max_model_len=9, settings={"a": 1})


def test_the_file_keeps_the_latest_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "FACTS_INTERVAL_S", 0.0)
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    ledger.add_step(books.step(1, 0))
    assert ledger.flush()
    assert open_readonly(path).facts() is None  # nobody has told any
    told = [FACTS]
    ledger.describe_by(lambda: told[-1])
    until(lambda: open_readonly(path).facts() == FACTS)
    told.append(msgspec.structs.replace(FACTS, settings={"a": 2}))
    until(lambda: open_readonly(path).facts() == told[-1])
    time.sleep(0.3)
    ledger.close()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM facts").fetchone() == (2,)  # only what is new


def test_facts_of_the_end_are_kept(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.describe_by(lambda: FACTS)
    ledger.close()
    assert open_readonly(tmp_path / "l.sqlite").facts() == FACTS


def test_who_tells_facts_cannot_break_the_file(tmp_path, caplog):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.describe_by(lambda: 1 / 0)
    ledger.add_step(books.step(1, 0))
    ledger.close()
    assert len(open_readonly(tmp_path / "l.sqlite").steps()) == 1
    assert "facts could not be had" in caplog.text


def old_file(path: Path, version: int) -> None:
    """As version 1 wrote it: no facts, and accounts without prompt parts."""
    ledger = Ledger(path)
    ledger.add_account(books.example())
    ledger.close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE facts")
    connection.execute("UPDATE accounts SET body = json_remove(body, '$.prompt_parts')")
    connection.execute(f"PRAGMA user_version={version}")
    connection.commit()
    connection.close()


def test_a_file_of_format_1_is_read_and_continued(tmp_path):
    path = tmp_path / "l.sqlite"
    old_file(path, 1)
    assert open_readonly(path).facts() is None
    assert open_readonly(path).accounts() == [books.example()]
    ledger = Ledger(path)
    ledger.describe_by(lambda: FACTS)
    ledger.add_account(books.example("cmpl-b-0"))
    ledger.close()
    assert open_readonly(path).facts() == FACTS
    assert len(open_readonly(path).accounts()) == 2


def test_a_file_of_a_later_format_is_left_alone(tmp_path):
    path = tmp_path / "l.sqlite"
    old_file(path, 4)
    with pytest.raises(ConfigError, match="format 4"):
        Ledger(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'facts'").fetchone() is None


def test_a_file_has_one_writer_at_a_time_and_says_who(tmp_path):
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    (tmp_path / "other.sqlite").symlink_to(path)
    for name in ("l.sqlite", "other.sqlite", "../" + tmp_path.name + "/l.sqlite"):
        with pytest.raises(ConfigError, match="is being written by another splittime") as caught:
            Ledger(tmp_path / name)
        assert str(os.getpid()) in caught.value.info.message
        assert name in caught.value.info.message
        assert "--ledger-file" in caught.value.info.hint
    ledger.add_account(books.example())  # who was refused has taken nothing from it
    assert ledger.flush()
    assert open_readonly(path).accounts() == [books.example()]
    ledger.close()
    Ledger(path).close()


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_has_one_writer_by_whatever_name(tmp_path, link):
    path, alias = tmp_path / "l.sqlite", tmp_path / "other.sqlite"
    ledger = Ledger(path)
    link(path, alias)
    for refused in (lambda: Ledger(alias), lambda: require_free(alias)):
        with pytest.raises(ConfigError, match="is being written by another splittime"):
            refused()
    ledger.add_step(books.step(1, 1))
    ledger.close()
    Ledger(alias).close()
    assert [step.step_id for step in open_readonly(alias).steps()] == [1]


def test_a_file_is_locked_against_another_process_until_its_writer_ends_however(tmp_path):
    path = tmp_path / "l.sqlite"
    command = [sys.executable, "-c", _WRITER, str(path), str(Path(__file__).parent)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    writer.stdout.readline()
    with pytest.raises(ConfigError, match=f"process {writer.pid}"):
        Ledger(path)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    Ledger(path).close()


def test_a_file_that_could_not_be_opened_is_not_locked(tmp_path):
    path = tmp_path / "l.sqlite"
    path.write_text("this is no database, " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(path)
    path.unlink()
    Ledger(path).close()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_and_those_beside_it_are_their_owners_alone(tmp_path, umask: int):
    before = os.umask(umask)
    try:
        ledger = Ledger(tmp_path / "l.sqlite")
        ledger.add_account(books.example())
        assert ledger.flush()
        names = {path.name: mode(path) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert names == dict.fromkeys(("l.sqlite", "l.sqlite-wal", "l.sqlite-shm", "l.sqlite.lock"), 0o600)
    ledger.close()
    assert mode(tmp_path / "l.sqlite") == 0o600


def test_a_file_of_before_becomes_its_owners_alone(tmp_path):
    path = tmp_path / "l.sqlite"
    Ledger(path).close()
    path.chmod(0o644)
    ledger = Ledger(path)
    ledger.add_account(books.example())
    assert ledger.flush()
    assert {mode(each) for each in tmp_path.iterdir()} == {0o600}
    ledger.close()


def test_step_ids_are_unique_over_restarts_and_accounts_name_the_same(tmp_path):
    path = tmp_path / "l.sqlite"
    for _ in range(3):
        ledger = Ledger(path)
        for i in range(1, 6):
            ledger.add_step(books.step(i, i * 100))
        ledger.add_account(books.example(num_tokens=4))  # made by the steps 1 to 4
        ledger.close()
    steps, accounts = open_readonly(path).steps(), open_readonly(path).accounts()
    ids = [step.step_id for step in steps]
    assert ids == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17]  # 6 and 12: no step follows another server's
    assert [account.token_steps for account in accounts] == [tuple(ids[i : i + 4]) for i in (0, 5, 10)]
    assert ledger.account("cmpl-a-0")[-1].token_steps == accounts[-1].token_steps  # the memory tells the same
    assert [step.step_id for step in ledger.steps()] == ids[-5:]


def test_a_ledger_in_memory_counts_as_the_engine_does():
    ledger = Ledger()
    ledger.add_step(books.step(1, 0))
    assert [step.step_id for step in ledger.steps()] == [1]


def test_a_tenant_is_told_of_its_own_accounts_in_memory_and_file(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite", max_accounts=2)
    for number in range(3):
        for tenant in ("a", "b"):
            account = books.example(f"cmpl-{number}-0", start_ns=1000 + number)
            ledger.add_account(msgspec.structs.replace(account, tenant=tenant))
    assert ledger.flush()
    assert [(a.request_id, a.tenant) for a in ledger.accounts(tenant="a")] == [("cmpl-2-0", "a")]
    assert [a.tenant for a in ledger.accounts()] == ["a", "b"]
    assert [a.tenant for a in ledger.account("cmpl-0-0", "a")] == ["a"]  # in the file alone
    assert [a.tenant for a in ledger.account("cmpl-0-0")] == ["a", "b"]
    assert [a.tenant for a in ledger.account("cmpl-2-0", "b")] == ["b"]
    assert ledger.account("cmpl-2-0", "c") == ledger.account("cmpl-0-0", "") == []
    ledger.close()


def test_slower_is_not_as_slow_as(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    account = books.example()
    ledger.add_account(account)
    assert ledger.flush()
    took_ms = (account.end_ns - account.start_ns) / 1e6
    for source in (ledger, open_readonly(tmp_path / "l.sqlite")):
        assert source.accounts(slower_than_ms=took_ms) == []
        assert source.accounts(slower_than_ms=took_ms - 0.001) == [account]
    ledger.close()


def test_of_many_the_latest_are_told_oldest_first():
    ledger = Ledger()
    for number in range(1, 6):
        ledger.add_step(books.step(number, number * 100))
        ledger.add_account(books.example(f"cmpl-{number}-0", start_ns=number * 10**9))
    assert [step.step_id for step in ledger.steps(2)] == [4, 5]
    assert [account.request_id for account in ledger.accounts(limit=2)] == ["cmpl-4-0", "cmpl-5-0"]


class Noted(FileWriter):
    """Notes how many records each try has."""

    def _insert(self, batch):
        self.__dict__.setdefault("tries", []).append(len(batch))
        super()._insert(batch)


def test_each_outage_tells_that_records_are_lost_and_a_try_has_one(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sqlite, "RETRY_S", 0.01)
    writer = Noted(tmp_path / "l.sqlite", 10, 99, max_queued_records=8)
    other = sqlite3.connect(tmp_path / "l.sqlite")
    for outage in (1, 2):
        other.execute("ALTER TABLE steps RENAME TO away")
        other.commit()
        for i in range(20):
            writer.put(books.step(i, i))
        num_tries = len(writer.__dict__.get("tries", ()))
        writer._wake.set()
        while len(writer.__dict__.get("tries", ())) < num_tries + 4:
            time.sleep(0.005)
        assert set(writer.tries[-2:]) == {1}
        assert caplog.text.count("those that come are lost") == outage
        other.execute("ALTER TABLE away RENAME TO steps")
        other.commit()
        assert writer.flush(10)
        assert max(writer.tries) > 1
    assert writer.num_dropped >= 20
    writer.close()


def test_a_batch_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "MAX_BATCH_BYTES", 3 * weight_bytes(books.step(0, 0)))
    writer = Noted(tmp_path / "l.sqlite", 10, 99)
    for i in range(10):
        writer.put(books.step(i, i))
    writer.close()
    assert max(writer.tries) <= 3
    assert len(open_readonly(tmp_path / "l.sqlite").steps()) == 10


def test_a_queue_with_no_room_takes_nothing(tmp_path):
    writer = FileWriter(tmp_path / "l.sqlite", 10, 10, max_queued_records=0)
    writer.put(books.step(1, 0))
    assert writer.num_dropped == 1
    writer.close()
    assert open_readonly(tmp_path / "l.sqlite").steps() == []


def test_counts_tell_what_was_added():
    ledger = Ledger()
    for number in range(3):
        ledger.add_account(books.example(f"cmpl-{number}-0"))
    ledger.add_step(books.step(1, 0))
    counts = ledger.counts()
    assert (counts.accounts, counts.steps, counts.invalid_accounts, counts.subscriber_errors) == (3, 1, 0, 0)


def test_counts_tell_what_was_dropped_and_what_was_unwritten(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger._file.num_dropped, ledger._file.num_unwritten = 3, 5
    assert (ledger.counts().dropped, ledger.counts().unwritten) == (3, 5)
    ledger.close()


def test_a_flush_that_takes_too_long_says_so(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    blocker = sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    ledger.add_step(books.step(1, 0))
    assert not ledger.flush(timeout_s=0.05)
    blocker.execute("ROLLBACK")
    assert ledger.flush()
    ledger.close()


def test_steps_between_are_those_of_that_time_bounds_included(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    for number in range(1, 6):
        ledger.add_step(books.step(number, number * 100))
    ledger.close()
    file = open_readonly(tmp_path / "l.sqlite")
    for span, ids in {
        (200, 400): [2, 3, 4],
        (230, 400): [2, 3, 4],
        (250, 400): [3, 4],
        (0, 150): [1],
        (900, 950): [],
    }.items():
        assert [step.step_id for step in file.steps_between(*span)] == ids, "the step in which it begins too"
    assert [step.step_id for step in file.steps_between(0, 900, 2)] == [4, 5]


def test_a_file_of_a_later_format_is_not_read(tmp_path):
    path = tmp_path / "l.sqlite"
    old_file(path, 99)
    with pytest.raises(ConfigError, match="format 99"):
        open_readonly(path)


def test_a_lock_names_its_present_holder_alone(tmp_path):
    (tmp_path / "l.sqlite.lock").write_text("9" * 15)
    ledger = Ledger(tmp_path / "l.sqlite")
    with pytest.raises(ConfigError, match=rf"\(process {os.getpid()}\)"):
        Ledger(tmp_path / "l.sqlite")
    ledger.close()


def test_one_choice_is_forgotten_and_the_other_is_found_by_their_response(tmp_path):
    ledger = Ledger(max_accounts=2)
    for number in range(3):
        ledger.add_account(msgspec.structs.replace(books.example(f"r-{number}"), group_id="cmpl-r"))
    assert [account.request_id for account in ledger.account("cmpl-r")] == ["r-1", "r-2"]
    assert ledger.account("r-0") == []


def test_a_second_outage_is_logged_again(tmp_path, caplog):
    ledger = Ledger(tmp_path / "l.sqlite")
    other = sqlite3.connect(tmp_path / "l.sqlite")
    for outage in (1, 2):
        other.execute("ALTER TABLE steps RENAME TO away")
        other.commit()
        ledger.add_step(books.step(outage, outage))
        assert not ledger.flush(0.02)
        other.execute("ALTER TABLE away RENAME TO steps")
        other.commit()
        ledger.add_step(books.step(outage + 10, outage))
        assert ledger.flush()
    assert caplog.text.count("records wait") == 2
    ledger.close()


def test_a_last_step_that_cannot_be_read_is_told_and_the_file_let_go(tmp_path):
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    ledger.add_step(books.step(1, 100))
    ledger.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE steps SET body = '{\"x\": 1}'")
    connection.close()
    for _ in range(2):  # the second finds no lock left
        with pytest.raises(ConfigError, match="its last step cannot be read") as caught:
            Ledger(path)
        assert caught.value.info.hint


def test_an_account_is_found_before_the_file_has_it(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    blocker = sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    ledger.add_account(books.example())
    assert ledger.account("cmpl-a-0") == [books.example()]
    blocker.execute("ROLLBACK")
    ledger.close()


def test_facts_are_asked_for_until_there_are_some_and_then_at_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "FACTS_INTERVAL_S", 1e6)
    asked, told = [], [None, None, None, FACTS]
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.describe_by(lambda: asked.append(1) or told[min(len(asked) - 1, 3)])
    until(lambda: open_readonly(tmp_path / "l.sqlite").facts() == FACTS)
    for i in range(5):
        ledger.add_step(books.step(i, i))
        assert ledger.flush()
    assert len(asked) == 4
    ledger.close()
    assert len(asked) == 5


def test_another_programs_database_is_no_ledger(tmp_path):
    with sqlite3.connect(tmp_path / "notes.sqlite") as connection:
        connection.execute("CREATE TABLE notes(body TEXT)")
    connection.close()
    with pytest.raises(ConfigError, match="not a readable ledger file: no such table"):
        open_readonly(tmp_path / "notes.sqlite")


def open_handles() -> int:
    gc.collect()  # what other tests have left is no handle of ours
    return len(os.listdir("/proc/self/fd"))


def test_who_is_refused_a_file_keeps_no_handle_of_it(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "l.sqlite")
    before = open_handles()
    with pytest.raises(ConfigError, match="another splittime"):
        Ledger(tmp_path / "l.sqlite")
    assert open_handles() == before
    ledger.close()

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")  # as over NFS without its lock service

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = open_handles()
    with pytest.raises(ConfigError, match=r"cannot write the ledger file .*: No locks available"):
        Ledger(tmp_path / "m.sqlite")
    assert open_handles() == before
