"""What `innocents` and `storm` conclude from what they measured: each verdict can be the other one."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pytest
from books import example

from benchmarks.scenarios.attacks import ATTACKS, LARGE, hostile_form
from benchmarks.scenarios.black_hole import KINDS, answer
from benchmarks.scenarios.guarded import used
from benchmarks.scenarios.innocents import holds, scenes
from benchmarks.scenarios.storm import (
    FILLING,
    FLAT,
    GROWS,
    Sample,
    checked_accounts,
    judged,
    kept_by,
    slope,
)
from splittime.ledger.account import ClosedAccount
from splittime.ledger.sqlite import ACCOUNT_TABLES
from splittime.ledger.store import Ledger

QUIET = {name: {"p50": 10.0, "p99": 20.0, "max": 30.0} for name in ("ttft", "gap", "short", "form")}
STEP_MS = 5.0


def beside(late_ms: float = 0.0, failed: dict | None = None, **changed: dict) -> dict:
    late = dict.fromkeys(("p50", "p99", "max"), late_ms)
    return {**QUIET, "late": late, "failed": failed or {}, **{name: QUIET[name] | new for name, new in changed.items()}}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (beside(), "yes"),
        (beside(gap={"p99": 45.0}), "yes"),  # twice 20 and one step
        (beside(gap={"p99": 45.1}), "no: gap p99 45.1 of 45.0 ms"),
        (beside(short={"p50": 25.1}), "no: short p50 25.1 of 25.0 ms"),
        (beside(late_ms=0.2, ttft={"p99": 45.1}), "VOID: ttft p99 45.1 of 45.0 ms, the client 0.2 late"),
        (beside(late_ms=0.2, ttft={"p99": 45.1}, short={"p50": 90.0}), "no: short p50 90.0 of 25.0 ms"),
        (beside(form={"max": 1001.0}), "no: a form took 1001 ms"),
        (beside(failed={"short: 429": 1}), "no: failed {'short: 429': 1}"),
        ({name: told for name, told in beside().items() if name != "gap"}, "no: nothing came of gap"),
    ],
)
def test_an_innocent_is_held_to_its_own_quiet_figures(found, verdict):
    assert holds(QUIET, found, STEP_MS) == verdict


def test_what_was_never_quiet_is_void():
    quiet = {name: told for name, told in QUIET.items() if name != "form"}
    assert holds(quiet, beside(), STEP_MS) == "VOID: nothing came of form when all was quiet"


def test_black_holes_are_for_the_gateway_alone():
    everywhere, at_server = scenes(["server", "gateway"], None), scenes(["server"], None)
    assert len(at_server) == len(ATTACKS)
    assert len(everywhere) == 2 * len(ATTACKS) + len(KINDS)
    assert {one.on for one in everywhere if one.black_hole} == {"gateway"}
    assert [one.black_hole for one in scenes(["gateway"], ["black-hole-cut", "forms"])] == [None, "cut"]


def test_hostile_forms_are_small_but_for_one_and_seldom_the_same():
    draw = random.Random(1)
    forms = [msgspec.json.encode(hostile_form(draw)) for _ in range(100)]
    assert len(set(forms)) > 90
    assert max(map(len, forms)) < LARGE / 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_black_hole_never_answers(kind):
    head, _, body = answer(kind, b"authorization: Bearer secret").partition(b"\r\n\r\n")
    assert (b"secret" in body) == (kind == "refusing")
    assert b'"choices": [{"text"' not in body
    assert head.startswith(b"HTTP/1.1 " + {"refusing": b"401", "missing": b"404"}.get(kind, b"200"))


FORKED = """
import os, sys
held = b"x" * 2**26
_ = os.fork(), os.fork()
os.write(1, b"here\\n")
sys.stdin.read()
"""


def test_memory_that_forked_processes_share_is_counted_once():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKED], stdin=pipe, stdout=pipe, text=True) as parent:
        assert [parent.stdout.readline() for _ in range(4)] == ["here\n"] * 4
        (use,) = used(SimpleNamespace(pid=parent.pid, name="it")).values()
        parent.stdin.close()  # all four end
    assert 2**26 < use.rss_bytes < 2 * 2**26


def series(mb_an_hour: float, kept_mb_an_hour: float = 0.0, most_mb: float = 90.0) -> list[Sample]:
    draw, found = random.Random(3), []
    for i in range(120):
        mib, kept_mb = 100 + mb_an_hour * i / 120 + draw.gauss(0, 0.2), min(most_mb, 50 + kept_mb_an_hour * i / 120)
        kept = {"records": 2**20, "responses": int((kept_mb - 1) * 2**20)}
        found.append(Sample(30.0 * i, int(mib * 2**20), 20 + i % 3, 7, kept if kept_mb_an_hour else {}))
    return found


SLOPES = [(-1.0, FLAT), (0.0, FLAT), (1.0, FLAT), (4.0, GROWS), (50.0, GROWS)]


@pytest.mark.parametrize(("mb_an_hour", "judgement"), SLOPES)
def test_memory_is_flat_where_its_slope_may_be_nothing_or_is_little(mb_an_hour, judgement):
    found = slope(series(mb_an_hour), 600)
    assert found["from"] < mb_an_hour < found["to"]
    assert found["judgement"] == judgement
    assert (found["open_files"], found["threads"]) == (22, 7)


def test_growth_before_the_warm_up_is_none():
    filling = [Sample(float(second), (100 + min(second, 500)) << 20, 20, 7, {}) for second in range(0, 1000, 10)]
    assert [slope(filling, from_s)["judgement"] for from_s in (500, 0)] == [FLAT, GROWS]


KEEPS = [(4.0, 4.0, 90.0, FILLING), (4.0, 0.5, 90.0, GROWS), (4.0, 8.0, 50.5, GROWS), (0.0, 4.0, 90.0, FLAT)]


@pytest.mark.parametrize(("mb_an_hour", "kept_mb_an_hour", "most_mb", "judgement"), KEEPS)
def test_growth_that_what_is_kept_explains_is_filling(mb_an_hour, kept_mb_an_hour, most_mb, judgement):
    found = judged(series(mb_an_hour, kept_mb_an_hour, most_mb), 600)
    assert found["judgement"] == judgement
    end_mb = min(most_mb, 50 + kept_mb_an_hour * 119 / 120)
    assert found["kept_mb"]["responses"]["end"] == pytest.approx(end_mb - 1, abs=1e-4)


def test_what_is_kept_is_read_of_both_kinds_of_metrics():
    ours = b'# TYPE splittime_kept_bytes gauge\nsplittime_kept_bytes{kind="records"} 1.5e+06\n'
    ours += b'splittime_kept_bytes{kind="responses"} 7.0\n'
    assert kept_by(ours) == {"records": 1_500_000, "responses": 7}
    assert kept_by(b'splittime_gateway_kept_bytes{kind="records"} 9.0\n') == {"records": 9}


def test_accounts_that_do_not_sum_are_counted(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger:
        for number in range(3):
            ledger.add_account(example(f"r{number}"))
    assert checked_accounts(path) == {"accounts": 3, "wrong": 0}
    with closing(sqlite3.connect(path)) as connection:
        table = next(iter(ACCOUNT_TABLES))
        (body,) = connection.execute(f"SELECT body FROM {table} LIMIT 1").fetchone()
        account = msgspec.json.decode(body, type=ClosedAccount)
        torn = msgspec.structs.replace(account, end_ns=account.end_ns + 1)
        connection.execute(f"UPDATE {table} SET body = ? WHERE seq = 1", (msgspec.json.encode(torn).decode(),))
        connection.commit()
    assert checked_accounts(path) == {"accounts": 3, "wrong": 1}
