"""One account from two books: contiguous, exact, and each nanosecond with who had it."""

import time

import pytest

from splittime.attach import joining
from splittime.attach.joining import ApiBook, Joining, joined, unexplained
from splittime.attach.mail import Mail
from splittime.attach.request_book import EndedBook, FirstTokenBook
from splittime.ledger.account import Mark
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

EDGE_MARKS = tuple(
    Mark(stage, None, at_ns)
    for stage, at_ns in ((Stage.RECEIVE, 100), (Stage.TOKENIZE, 110), (Stage.ADMIT, 130), (Stage.HANDOFF, 140))
)
ENGINE_MARKS = [
    Mark(Stage.QUEUE, Cause.STEP_IN_FLIGHT, 150),
    Mark(Stage.QUEUE, Cause.BATCH_SLOTS, 160),
    Mark(Stage.PREFILL, None, 170),
    Mark(Stage.DECODE, None, 200),
]


def api_book(**changes) -> ApiBook:
    usual = {
        "request_id": "cmpl-a-0-12345678",
        "group_id": "cmpl-a",
        "model": "m",
        "endpoint": "completions",
        "started_at_unix_ns": 1,
        "marks": EDGE_MARKS,
        "end_ns": 260,
        "num_tokens": 3,
        "done_ns": 250,
        "finish_reason": "length",
        "written_ns": (210, 230, 255),
        "first_chunk_tokens": 1,
        "waits_ns": (),
        "cancelled_ns": None,
        "prompt_ids": range(20),
    }
    return ApiBook(**usual | changes)


def book(**changes) -> EndedBook:
    usual = {
        "request_id": "cmpl-a-0-12345678",
        "marks": ENGINE_MARKS,
        "ended_ns": 240,
        "finish_reason": "length",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "token_steps": [4, 5, 6],
        "token_ready_ns": [200, 220, 240],
        "num_preemptions": 0,
        "max_tokens": 3,
        "priority": 0,
        "computes_prompt": False,
        "answer_ids": [20, 21, 22],
    }
    return EndedBook(**usual | changes)


def spent(account) -> dict[str, int]:
    account.verify()
    found: dict[str, int] = {}
    for interval in account.intervals:
        key = interval.stage.value + (f":{interval.cause.value}" if interval.cause else "")
        found[key] = found.get(key, 0) + interval.duration_ns
    assert sum(found.values()) == account.end_ns - account.start_ns
    return found


def test_a_request_from_its_first_byte_to_its_last():
    account = joined(api_book(), book())
    assert spent(account) == {
        "receive": 10,
        "tokenize": 20,
        "admit": 10,
        "handoff": 10,
        "queue:step_in_flight": 10,
        "queue:batch_slots": 10,
        "prefill": 30,
        "decode": 40,
        "deliver": 20,
    }
    assert (account.prompt_tokens, account.cached_tokens, account.output_tokens) == (20, 16, 3)
    assert (account.token_ready_ns, account.token_written_ns) == ((200, 220, 240), (210, 230, 255))
    assert account.prefixes
    assert account.freed_ns == 240
    assert account.finish_reason == "length"


def test_a_stop_string_ends_the_answer_before_the_engine_knows():
    told = api_book(done_ns=225, finish_reason="stop", num_tokens=2, written_ns=(210, 230), end_ns=235)
    account = joined(
        told, book(ended_ns=300, finish_reason="abort", token_steps=[4, 5, 6, 7], token_ready_ns=[200, 220, 240, 280])
    )
    assert spent(account)["decode"] == 25
    assert spent(account)["deliver"] == 10
    assert (account.finish_reason, account.output_tokens, account.token_steps) == ("stop", 2, (4, 5))
    assert (account.end_ns, account.freed_ns) == (235, 300)


def test_a_client_that_went_away():
    told = api_book(done_ns=None, finish_reason=None, num_tokens=1, written_ns=(210,), end_ns=226, cancelled_ns=225)
    account = joined(told, book(ended_ns=231, finish_reason="abort", token_steps=[4, 5], token_ready_ns=[200, 220]))
    assert (account.finish_reason, account.cancelled_ns, account.freed_ns, account.end_ns) == ("abort", 225, 231, 231)
    assert account.output_tokens == 2  # that the engine made; one was written
    assert len(account.token_written_ns) == 1
    spent(account)


def test_waits_for_the_client_count_once_the_engine_owes_nothing():
    account = joined(api_book(end_ns=400, waits_ns=((205, 215), (245, 390))), book())
    assert spent(account)["client_wait"] == 145
    assert spent(account)["deliver"] == 15


def test_the_engine_is_never_in_it_before_the_hand_off():
    late = tuple(mark if mark.stage is not Stage.HANDOFF else Mark(Stage.HANDOFF, None, 155) for mark in EDGE_MARKS)
    spent(joined(api_book(marks=late), book()))


def test_nobody_knows_where_the_time_of_a_lost_engine_went():
    account = unexplained(api_book(finish_reason=None, done_ns=None, num_tokens=0, written_ns=()))
    assert spent(account)["unattributed"] == 120
    assert account.finish_reason == "error"
    left = unexplained(api_book(finish_reason=None, done_ns=None, num_tokens=0, written_ns=(), cancelled_ns=130))
    assert left.finish_reason == "abort"


@pytest.fixture
def kept():
    ledgers = {}
    both = Joining(lambda engine: ledgers.setdefault(engine, Ledger()))
    return both, ledgers[0]


@pytest.mark.parametrize("is_engine_first", [True, False])
def test_whichever_book_comes_last_closes_the_account(kept, is_engine_first):
    both, ledger = kept
    now_ns = time.monotonic_ns()
    come = [lambda: both.take(Mail(engine=0, ended=[book(ended_ns=now_ns)])), lambda: both.add(api_book(end_ns=now_ns))]
    for arrive in come if is_engine_first else reversed(come):
        assert ledger.accounts() == []
        arrive()
        both.join()
    assert [account.request_id for account in ledger.accounts()] == ["cmpl-a-0-12345678"]
    assert ledger.account("a")[0].group_id == "cmpl-a"  # by the id that the client sent
    assert ledger.counts().invalid_accounts == 0


def test_an_engine_that_does_not_answer_is_waited_for_no_longer_than_it_must(kept, monkeypatch):
    both, ledger = kept
    both.add(api_book(end_ns=time.monotonic_ns()))
    both.join()
    assert ledger.accounts() == []
    monkeypatch.setattr(joining, "PATIENCE_NS", 0)
    both.join()
    assert [each.intervals[-1].stage for each in ledger.accounts()] == [Stage.UNATTRIBUTED]


def test_books_of_nobodys_requests_are_not_kept_for_ever(kept, monkeypatch):
    both, _ = kept
    both.take(Mail(engine=0, ended=[book()]))
    monkeypatch.setattr(joining, "PATIENCE_NS", 0)
    both.join()
    assert both.engine_part("cmpl-a-0-12345678") is None


def test_a_book_is_kept_as_long_as_its_answer_is_open(kept):
    """A request with many answers, or a slow reader: the engine's end lies long before the answer's."""
    both, ledger = kept
    both.expect("cmpl-a-0-12345678")
    both.take(Mail(engine=0, ended=[book()]))  # ended long ago
    both.join()
    both.add(api_book(end_ns=time.monotonic_ns()))
    both.join()
    assert [account.output_tokens for account in ledger.accounts()] == [3]


def test_what_is_open_at_the_end_is_closed(kept):
    both, ledger = kept
    both.add(api_book(end_ns=time.monotonic_ns()))
    both.close()
    assert [each.intervals[-1].stage for each in ledger.accounts()] == [Stage.UNATTRIBUTED]


def test_who_waits_for_the_engines_word_is_called_once(kept):
    both, _ = kept
    calls = []
    both.take(Mail(engine=0, first_tokens=[FirstTokenBook("cmpl-a-0-12345678", ENGINE_MARKS)]))
    assert both.engine_part("cmpl-a-0-12345678").marks == ENGINE_MARKS
    both.call_when_ended("cmpl-a-0-12345678", lambda: calls.append(1))
    assert calls == []
    both.take(Mail(engine=0, ended=[book()]))
    both.call_when_ended("cmpl-a-0-12345678", lambda: calls.append(2))
    assert calls == [1, 2]


def test_steps_go_to_the_ledger(kept):
    both, ledger = kept
    zero = dict.fromkeys(
        ("plan_ns", "launch_ns", "device_ns", "sample_ns", "commit_ns", "host_gap_ns", "idle_ns", "prefill_tokens",
         "decode_tokens", "kv_tokens_read", "blocks_used", "num_running", "num_waiting"), 0)  # fmt: skip
    record = StepRecord(step_id=1, begin_ns=1, end_ns=1, rows=(), **zero)
    both.take(Mail(engine=0, steps=[record], lost=3, stopped="why"))
    assert ledger.steps() == [record]
    assert (both.engines[0].num_lost, both.engines[0].stopped) == (3, "why")


def test_each_engine_has_a_ledger(kept):
    both, first = kept
    now_ns = time.monotonic_ns()
    both.take(Mail(engine=1, ended=[book(ended_ns=now_ns)]))
    both.add(api_book(end_ns=now_ns))
    both.join()
    assert first.accounts() == []
    assert len(both.engines[1].ledger.accounts()) == 1
