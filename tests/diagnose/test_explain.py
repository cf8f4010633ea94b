"""A request's life as text: fits 80 columns, sums to 100 %, says why it waited and who was in the longest step."""

import io

import books
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from splittime.diagnose.explain import LETTERS, STYLES, bar, explain, gap_parts_ns
from splittime.ledger.stages import Stage


def plain(text) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(text)
    return out.getvalue()


def test_waterfall_of_a_plain_request():
    steps = [
        books.step(i, 1_000 + i * 5_000_000, (0, 0, 4_000_000, 0, 0), rows={"b": 7, "cmpl-a-0": 1}) for i in range(5)
    ]
    shown = plain(explain(books.example(), steps))
    assert "queue: kv_blocks" in shown
    assert "not enough free KV cache blocks" in shown
    assert "TTFT 20.050 ms" in shown
    assert "Longest gap 5.000 ms, before token 1" in shown
    assert "with it: b, 7 at position 0" in shown


@given(books.step_runs(), st.data())
def test_the_parts_of_a_gap_sum_to_it(steps, data):
    """From a token that is ready some time before its step's end to a later step's; all but the unknown is named."""
    before, last = sorted(data.draw(st.tuples(*[st.integers(0, len(steps) - 1)] * 2)))
    begin_ns, end_ns = (steps[i].end_ns - steps[i].commit_ns for i in (before, last))
    parts = gap_parts_ns(begin_ns, end_ns, steps, steps[before].step_id)
    between = steps[before + 1 : last + 1]
    assert sum(parts.values()) == end_ns - begin_ns
    assert parts["unrecorded"] == 0
    assert (parts["idle"], parts["host"]) == (sum(s.idle_ns for s in between), sum(s.host_gap_ns for s in between))
    lost = gap_parts_ns(begin_ns, end_ns, steps[:before], steps[before].step_id)
    assert lost["unrecorded"] == end_ns - begin_ns


def test_the_longest_gap_is_told_whole():
    steps = [
        books.step(i, 1_000 + i * 5_000_000, (0, 0, 1_000_000, 0, 0), gap_ns=3_000_000, idle_ns=1_000_000)
        for i in range(6)
    ]
    words = " ".join(plain(explain(books.example(), steps)).split())
    told = (
        "Of the gap: 3.000 ms between steps, of the host's own work; 1.000 ms in these steps; 1.000 ms between steps,"
    )
    assert told in words


def test_one_is_no_plural():
    steps = [msgspec.structs.replace(books.step(2, 20_001_000), prefill_tokens=0, decode_tokens=1)]
    account = msgspec.structs.replace(books.example(), prompt_tokens=1, num_preemptions=1)
    shown = " ".join(plain(explain(account, steps)).split())
    assert "1 prompt token, " in shown
    assert "1 preemption," in shown
    assert "1 step ran meanwhile" in shown
    assert "0 prefill and 1 decode token." in shown


def test_a_device_that_waited():
    told = {"execution": "captured", "padded_rows": 6, "gap_ns": 1_000_000}
    steps = [
        msgspec.structs.replace(books.step(i, 1_000 + i * 5_000_000, (0, 1_000_000, 4_000_000, 0, 0)), **told)
        for i in range(5)
    ]
    shown = plain(explain(books.example(), steps))
    words = " ".join(shown.split())
    assert "(device 4.000, captured with 6 rows padded, 1.000 waited before)" in words
    assert "worked 80.0% of the time of 5 steps and waited 20.0% between them; 100% of them captured" in words
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())


@settings(max_examples=50)
@given(books.accounts())
def test_any_account_fits_80_columns_and_is_ascii(account):
    account = msgspec.structs.replace(account, finish_reason="length")
    lines = plain(explain(account, [books.step(3, account.start_ns)])).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines), lines
    assert plain(explain(account)).isascii()
    assert all(len(line.rstrip()) <= 80 for line in plain(bar(account)).splitlines())


def test_every_stage_has_a_letter_of_its_own():
    assert set(LETTERS) == set(STYLES) == set(Stage)
    assert len(set(LETTERS.values())) == len(Stage)
