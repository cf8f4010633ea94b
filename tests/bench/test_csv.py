"""A run as CSV: a row a request, a header that stays, numbers to the nanosecond."""

import csv
import io

import client_runs as runs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book import requests
from splittime.bench.report.csv import write_csv, write_rows
from splittime.core.errors import ConfigError

HEADER = (
    "index,arm,request_id,phase,ending,session,turn,worker,intended_ms,held_ms,picked_up_ms,connect_ms,sent_ms,"
    "headers_ms,first_chunk_ms,last_chunk_ms,end_ms,response_ttft_ms,service_ttft_ms,response_ms,service_ms,tpot_ms,"
    "max_stall_ms,schedule_lag_ms,chunks,prompt_tokens,output_tokens,cached_tokens,expected_prompt_tokens,"
    "expected_output_tokens,expected_cached_tokens,status,finish_reason,error,tags,resent"
)


def rows(outcomes) -> list[dict[str, str]]:
    file = io.StringIO()
    write_rows(outcomes, file)
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def test_the_header_is_what_others_rely_on():
    """New columns go to the end; a change of this text breaks somebody's spreadsheet."""
    file = io.StringIO()
    write_rows([], file)
    assert file.getvalue() == HEADER + "\n"


def test_a_row_by_hand():
    (row,) = rows([runs.outcome(7, tags={"kind": "chat", "a": "b"}, error='said "no", and\nleft')])
    assert (row["index"], row["ending"], row["sent_ms"], row["service_ttft_ms"]) == (
        "7",
        "complete",
        "10.000000",
        "50.000000",
    )
    assert (row["chunks"], row["tpot_ms"], row["cached_tokens"]) == ("3", "20.000000", "")
    assert (row["tags"], row["error"]) == ("a=b kind=chat", 'said "no", and\nleft')


def test_no_text_is_taken_for_a_formula():
    said = ["=1+1", "+1", "-1", "@a", "\t=1"]
    for text in said:
        (row,) = rows([runs.outcome(request_id=text, finish_reason=text, error=text, tags={text: ""})])
        assert row["request_id"] == row["finish_reason"] == row["error"] == f"'{text}"
        assert row["tags"].startswith("'")
    assert rows([runs.outcome(error="a\rb\r\nc")])[0]["error"] == "a\nb\nc"
    (row,) = rows([runs.outcome(intended_ns=-3 * 10**6, error="a=b")])
    assert (row["error"], row["tags"]) == ("a=b", "")
    assert row["service_ttft_ms"] == "50.000000"
    assert row["intended_ms"] == "-3.000000", "a number stays a number"


@settings(max_examples=60, deadline=None)
@given(st.lists(runs.outcomes(), max_size=8))
def test_any_outcomes_come_back_in_their_order_with_their_figures(outcomes):
    found = rows(outcomes)
    assert [int(row["index"]) for row in found] == sorted(one.index for one in outcomes)
    for one, row in zip(sorted(outcomes, key=lambda o: (o.index, o.arm)), found, strict=True):
        ttft_ns = requests.response_ttft_ns(one)
        assert row["response_ttft_ms"] == ("" if ttft_ns is None else f"{ttft_ns / 1e6:.6f}")
        if one.ending.value == row["ending"] and one.sent_ns is not None and row["sent_ms"]:
            assert round(float(row["sent_ms"]) * 1e6) == one.sent_ns


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_csv(runs.run([runs.outcome(1), runs.outcome(0)]), tmp_path / "new" / "run.csv")
    assert [row.split(",")[0] for row in (tmp_path / "new" / "run.csv").read_text().splitlines()] == ["index", "0", "1"]
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_csv(runs.run([]), tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "taken"]
