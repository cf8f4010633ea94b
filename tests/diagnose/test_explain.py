"""A request's life as text: fits 80 columns, sums to 100 %, says why it waited and who was in the longest step."""

import re

import books
import msgspec
import pytest
from hypothesis import given, settings
from test_against_median import plain
from ward import Case, Ward, ids

from splittime.diagnose.attribution import Computed, attribution, owners_between
from splittime.diagnose.books import Books, make_books
from splittime.diagnose.explain import LETTERS, STYLES, bar, compare, explain
from splittime.ledger import derive
from splittime.ledger.stages import Stage


def kept(steps) -> Books:
    return make_books(None, [], steps, "a test")


def test_waterfall_of_a_plain_request():
    steps = [
        books.step(i, 1_000 + i * 5_000_000, (0, 0, 4_000_000, 0, 0), rows={"b": 7, "cmpl-a-0": 1}) for i in range(5)
    ]
    shown = plain(explain(books.example(), kept(steps)))
    assert "queue: kv_blocks" in shown
    assert "not enough free KV cache blocks" in shown
    assert "TTFT 20.050 ms" in shown
    assert "Longest gap 5.000 ms, before token 1" in shown
    assert "with it: b, 7 at position 0" in shown


def test_of_a_whole_answer_the_first_token_is_told_by_when_it_was_ready():
    streamed = books.example()
    count = streamed.output_tokens
    written = (streamed.token_written_ns[-1],) * count
    whole = msgspec.structs.replace(streamed, token_written_ns=written, first_chunk_tokens=count)
    ready_ms, written_ms = ((at - whole.start_ns) / 1e6 for at in (whole.token_ready_ns[0], written[0]))
    lines = plain(explain(whole, kept([]))).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines), lines
    shown = " ".join(" ".join(lines).split())
    assert f"TTFT {written_ms:.3f} ms (all at once: the first was ready after {ready_ms:.3f} ms)" in shown
    assert "all at once" not in plain(explain(streamed, kept([])))


def test_an_engine_that_was_stopped_is_told_wherever_it_is_asked():
    """The stop fell into a step's forward pass: neither the device nor decoding had that time."""
    of_ward = Ward(stops_ms=[(1500, 200)]).run(*(Case(100 * i, ids(30, i), 60) for i in range(30)))
    hit = max(of_ward.accounts, key=lambda account: max(derive.itl_ns(account)))
    shown = " ".join(plain(explain(hit, of_ward)).split())
    stopped_ms = attribution(of_ward).of(Computed.STOPPED)[hit.request_id] / 1e6
    assert stopped_ms == pytest.approx(200, abs=5)
    assert re.search(r"engine_stopped (\d+\.\d+) ms: the engine's thread is not run at all", shown)
    gap = re.search(r"Of the gap: (\d+\.\d+) ms engine_stopped;", shown)
    whole = re.search(r"By whose doing: .*?(\d+\.\d+) ms engine_stopped", shown)
    step = re.search(r"\(device (\d+\.\d+), engine_stopped (\d+\.\d+)", shown)
    assert float(gap[1]) == float(whole[1]) == pytest.approx(stopped_ms, abs=1e-3)
    assert float(step[1]) < 5 < float(step[2]) == pytest.approx(stopped_ms, abs=1)
    (first, *_) = compare(hit, of_ward).differences
    assert first.stage == Computed.STOPPED
    assert first.own_ns == pytest.approx(stopped_ms * 1e6, abs=1)


def test_one_name_has_one_figure_and_the_lines_sum():
    """Of a request that queues while the engine is stopped: the stop was in its queue above, and not in it below."""
    cases = [Case(20 * i, ids(30, i), 60) for i in range(30)]
    of_ward = Ward(settings={"max_num_seqs": 2}, stops_ms=[(600, 200)]).run(*cases)
    for account in of_ward.accounts:
        shown = plain(explain(account, of_ward))
        lines = re.findall(r"^(\w+(?:: \w+)?) +\|.{32}\| *([\d.]+) +[\d.]+$", shown, re.MULTILINE)
        table = {name: float(ms) for name, ms in lines}
        assert sum(table.values()) == pytest.approx(derive.e2e_ns(account) / 1e6, abs=0.1)  # seconds have one digit
        told = dict(re.findall(r"^(\w+(?:: \w+)?) ([\d.]+) ms: ", shown, re.MULTILINE))
        assert {name: float(ms) for name, ms in told.items()}.items() <= table.items()
        owned = owners_between(of_ward, account, account.start_ns, account.end_ns)
        assert table.get("engine_stopped", 0.0) == pytest.approx(owned.get("engine_stopped", 0.0) / 1e6, abs=1e-3)
        (whole,) = re.findall(r"By whose doing: ([^.]+(?:\.\d[^.]+)*)\.", " ".join(shown.split()))
        by = {name: float(ms) for ms, name in re.findall(r"([\d.]+) ms ([\w() ]+)", whole)}
        assert {name for name in by.keys() & table.keys() if abs(by[name] - table[name]) > 2e-3} == set()
        assert min(by.values()) > 0
        assert sum(by.values()) == pytest.approx(derive.e2e_ns(account) / 1e6, abs=0.02)
        small = [ns for ns in owned.values() if ns < 0.01 * derive.e2e_ns(account)]
        assert len(by) == len(owned) - len(small) + (sum(small) >= 500), whole
        if sum(small) >= 500:
            assert whole.endswith(f"{sum(small) / 1e6:.3f} ms {len(small)} other{'s' * (len(small) > 1)}")
    assert {"engine_stopped", "queue: batch_slots"} <= told.keys() | table.keys()


def test_a_line_is_marked_where_its_time_was():
    of_ward = Ward(stops_ms=[(300, 200)]).run(Case(0, ids(30, 1), 100))
    (account,) = of_ward.accounts
    marks = dict(re.findall(r"^(\w+)(?:: \w+)? +\|(.{32})\|", plain(explain(account, of_ward)), re.MULTILINE))
    stopped = max(of_ward.steps, key=lambda step: step.end_ns - step.begin_ns)
    edges = (stopped.begin_ns, stopped.end_ns)
    begin, end = (round(32 * (at_ns - account.start_ns) / derive.e2e_ns(account)) for at_ns in edges)
    assert end - begin > 6
    assert set(marks["engine_stopped"][begin + 1 : end - 1]) == {"#"}, marks
    assert set(marks["engine_stopped"][: begin - 1] + marks["engine_stopped"][end + 1 :]) == {" "}, marks
    assert set(marks["decode"][end + 1 : 31]) == {"#"}, marks


def test_a_pause_is_no_want_of_work():
    pause = Ward(knobs=[(500.0, {"paused": True}), (900.0, {"paused": False})])
    of_ward = pause.run(*(Case(50 * i, ids(30, i), 60) for i in range(30)))
    asked = max(of_ward.accounts, key=lambda account: max(derive.itl_ns(account)))
    shown = " ".join(plain(explain(asked, of_ward)).split())
    assert re.search(r"Of the gap: 39\d\.\d+ ms paused", shown)
    assert "nothing to do" not in shown


def test_one_is_no_plural():
    steps = [msgspec.structs.replace(books.step(2, 20_001_000), prefill_tokens=0, decode_tokens=1)]
    account = msgspec.structs.replace(books.example(), prompt_tokens=1, num_preemptions=1)
    shown = " ".join(plain(explain(account, kept(steps))).split())
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
    shown = plain(explain(books.example(), kept(steps)))
    words = " ".join(shown.split())
    assert "(device 4.000, captured with 6 rows padded, 1.000 waited before)" in words
    assert "worked 80.0% of the time of 5 steps and waited 20.0% between them; 100% of them captured" in words
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())


@settings(max_examples=50)
@given(books.accounts())
def test_any_account_fits_80_columns_and_is_ascii(account):
    account = msgspec.structs.replace(account, finish_reason="length")
    lines = plain(explain(account, kept([books.step(3, account.start_ns)]))).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines), lines
    assert plain(explain(account)).isascii()
    assert all(len(line.rstrip()) <= 80 for line in plain(bar(account)).splitlines())


def test_every_stage_has_a_letter_of_its_own():
    assert set(LETTERS) == set(STYLES) == set(Stage)
    assert len(set(LETTERS.values())) == len(Stage)
