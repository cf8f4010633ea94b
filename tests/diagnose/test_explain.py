"""A request's life as text: fits 80 columns, sums to 100 %, says why it waited and who was in the longest step."""

import io
import sys
from pathlib import Path

from hypothesis import given, settings
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "ledger"))
import books
import msgspec

from splittime.diagnose.explain import LETTERS, STYLES, bar, explain
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
