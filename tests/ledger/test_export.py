"""The exports: JSON that reads back, a trace whose slices nest, a header that conforms."""

import json
import re
from collections import defaultdict
from itertools import pairwise

import books
import msgspec
import orjson
from hypothesis import given

from splittime.core.errors import ErrorInfo
from splittime.ledger.account import Account
from splittime.ledger.account_json import account_from_json, account_json
from splittime.ledger.derive import server_timing
from splittime.ledger.export.chrome_trace import trace
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage


@given(books.accounts())
def test_account_json_reads_back(account):
    data = orjson.loads(orjson.dumps(account_json(account)))
    assert account_from_json(data) == account
    ends_ns = [stage["end_ns"] for stage in data["stages"]]
    assert [stage["begin_ns"] for stage in data["stages"]] == [0, *ends_ns[:-1]]
    assert ends_ns[-1] == data["end_ns"] - data["start_ns"]


def test_account_json_tokens():
    tokens = account_json(books.example(num_tokens=2))["tokens"]
    assert tokens[1] == {"index": 1, "step_id": 2, "ready_ns": 25_000_000, "written_ns": 25_050_000}


@given(books.accounts(), books.step_runs())
def test_trace_slices_nest_and_do_not_overlap(account, steps):
    events = [e for body in (trace([account], []), trace([], steps)) for e in json.loads(body)["traceEvents"]]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin_ns = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000), event["name"]))
    for slices in tracks.values():
        outer = [s for s in slices if s[2] == "request" or s[2].startswith("step ")]
        inner = [s for s in slices if s not in outer]
        for level in (outer, inner):
            assert all(before[1] <= after[0] for before, after in pairwise(level))
        assert all(any(o[0] <= i[0] and i[1] <= o[1] for o in outer) for i in inner)


def test_trace_names_and_links():
    events = json.loads(trace([books.example()], [books.step(1, 0)]))["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert ("process_name", "engine") in names
    assert ("thread_name", "cmpl-a-0") in names
    assert [e["args"]["step_id"] for e in events if e["ph"] == "i"] == [1, 2, 3, 4]
    assert {e["ph"] for e in json.loads(trace([], []))["traceEvents"]} == {"M"}


def test_a_trace_counts_from_the_earliest_instant_and_each_request_has_its_track():
    accounts = [books.example("cmpl-a-0", start_ns=2_000), books.example("cmpl-b-0", start_ns=9_000, num_tokens=2)]
    events = json.loads(trace(accounts, [books.step(7, 1_000, rows={"cmpl-a-0": 3, "x": 1})]))["traceEvents"]
    shown = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown[:6] == [
        (1, 1, "step 7", 0, 0.042),
        (1, 1, "plan", 0, 0.001),
        (1, 1, "launch", 0.001, 0.002),
        (1, 1, "device", 0.003, 0.03),
        (1, 1, "sample", 0.033, 0.004),
        (1, 1, "commit", 0.037, 0.005),
    ]
    assert shown[6:10] == [
        (2, 1, "request", 1, 35_100),
        (2, 1, "receive", 1, 200),
        (2, 1, "tokenize", 201, 100),
        (2, 1, "handoff", 301, 200),
    ]
    assert (2, 2, "queue (kv_blocks)", 508, 9_500) in shown
    tokens = [(e["tid"], e["args"]["index"], e["args"]["step_id"], e["ts"]) for e in events if e["ph"] == "i"]
    assert tokens[-2:] == [(2, 0, 1, 20_008), (2, 1, 2, 25_008)]
    assert events[4]["tid"] == 2
    step = next(e["args"] for e in events if e["name"] == "step 7")
    assert (step["step_id"], step["rows"], step["requests"], step["victims"]) == (7, 2, ["cmpl-a-0", "x"], [])
    queue = next(e["args"] for e in events if e["name"].startswith("queue"))
    assert queue == {"meaning": STAGE_MEANING[Stage.QUEUE], "why": CAUSE_MEANING[Cause.KV_BLOCKS]}
    assert next(e["args"]["why"] for e in events if e["name"] == "prefill") is None


def test_the_json_of_one_that_went_away_and_of_a_refusal():
    account = msgspec.structs.replace(
        books.example(), cancelled_ns=1_500, freed_ns=3_500, token_written_ns=(), error=ErrorInfo("t", "m", "c", 400)
    )
    data = json.loads(json.dumps(account_json(account)))
    assert account_from_json(data) == account
    assert (data["cancelled_ns"], data["freed_ns"], data["ttft_ns"]) == (500, 2_500, None)
    assert data["error"]["code"] == "c"
    assert data["tokens"][3] == {"index": 3, "step_id": 4, "ready_ns": 35_000_000, "written_ns": None}
    assert data["stages"][3] == {"stage": "queue", "cause": "kv_blocks", "begin_ns": 500_000, "end_ns": 10_000_000}
    derived = data["derived"]
    assert derived["cancel_to_freed_ns"] == 2_000
    assert derived["max_stall"] == {"duration_ns": 5_000_000, "token_index": 1, "step_id": 2}
    assert derived["queue_by_cause"] == [{"cause": "kv_blocks", "duration_ns": 9_500_000}]
    assert derived["itl_ns"]["p50"] == 5_000_000
    assert derived["send_lag_ns"] == {}
    assert derived["stage_ns"]["decode"] == 15_000_000


def test_json_of_before_there_were_tenants_is_read():
    data = account_json(books.example())
    for name in ("prompt_parts", "unseen_ns", "tenant"):
        del data[name]
    assert account_from_json(data) == books.example()


def test_server_timing_adds_stages_up_and_tells_causes():
    account = Account("r", 1_000_000, Stage.RECEIVE)
    for stage, at_ms, cause in (
        (Stage.QUEUE, 2, Cause.KV_BLOCKS),
        (Stage.PREFILL, 14, None),
        (Stage.QUEUE, 15, Cause.KV_BLOCKS),
        (Stage.QUEUE, 16, Cause.POLICY),
    ):
        account.enter(stage, at_ms * 10**6, cause)
    told = server_timing(account.intervals(until_ns=17_250_400), account.start_ns)
    assert told == (
        'receive;dur=1.000, queue;dur=13.000;desc="kv_blocks", prefill;dur=1.000, '
        'queue;dur=1.250;desc="policy", total;dur=16.250'
    )
    assert server_timing([], 5) == "total;dur=0.000"


@given(books.accounts())
def test_server_timing_conforms(account):
    token = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    entry = rf'{token};dur=[0-9.]+(;desc="[^"\\]*")?'
    value = server_timing(account.intervals, account.start_ns)
    assert re.fullmatch(rf"{entry}(, {entry})*", value)
    assert value.isascii()
