"""The page's files and its data: who gets what, that no record is told twice or lost, and that bins keep the time."""

import re
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import books
from patience import until
from splittime.diagnose.attribution import DEPRIVED
from splittime.ledger import derive
from splittime.ledger.account import StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.server import dashboard, routes_dashboard
from splittime.web import reading

from .conftest import say

HTML = {"Accept": "text/html,application/xhtml+xml"}


def fill(live, accounts, steps=()) -> None:
    live.call(lambda: [*map(live.ledger.add_account, accounts), *map(live.ledger.add_step, steps)])


def look(live, after: str = "") -> dict:
    status, fields, answer = live.get(f"/dashboard/data?after={after}")
    assert status == 200, answer
    assert fields["cache-control"] == "no-store"
    return answer


# ---- files


def colours_of(key: str) -> str:
    """The variable of the last rule of colours.css that holds for this stage, or for this stage and cause."""
    classes = dict(zip(("stage", "cause"), key.split(":"), strict=False))
    found = "unknown"
    for selectors, colour in re.findall(
        r"^(\.(?:stage|cause)-.*) \{ --ink: var\(--([a-z-]+)\); \}", COLOURS, re.MULTILINE
    ):
        if {f".{kind}-{word}" for kind, word in classes.items()} & set(selectors.split(", ")):
            found = colour
    return found


COLOURS = dashboard.COLOURS.read_text()


def test_every_colour_of_the_bars_has_its_legend() -> None:
    listed = re.search(r"const SHOWN = \[(.*?)\];", dashboard.files()["app.js"].body.decode(), re.DOTALL)
    assert listed is not None
    shown = {colours_of(key) for key in re.findall(r'"([a-z_:]+)"', listed[1])}
    drawn = {colours_of(stage) for stage in Stage} | {colours_of(f"queue:{cause}") for cause in Cause}
    assert drawn | {colours_of(stop) for stop in DEPRIVED} <= shown


def test_the_engine_s_usual_turn_has_not_the_colour_of_what_halts_it() -> None:
    usual, step, died = (colours_of(f"queue:{cause}") for cause in ("engine_loop", "step_in_flight", "engine_died"))
    assert usual == step != died


def test_a_browser_gets_the_page_and_others_json(launch) -> None:
    live = launch()
    status, fields, body = live.get("/", **HTML)
    assert (status, fields["content-type"]) == (200, "text/html; charset=utf-8")
    assert fields["content-security-policy"].startswith("default-src 'self';")
    assert b'<script type="module" src="dashboard/static/app.js">' in body
    assert live.get("/")[2]["name"] == "splittime"
    assert live.get("/", Accept="*/*")[2]["docs"] == "/docs"


def test_files_are_kept_by_the_browser_until_they_change(launch) -> None:
    live = launch()
    _, fields, body = live.get("/dashboard/static/app.js")
    assert fields["content-type"].startswith("text/javascript")
    assert fields["cache-control"] == "no-cache"
    status, again, nothing = live.get("/dashboard/static/app.js", **{"If-None-Match": fields["etag"]})
    assert (status, nothing, again["etag"]) == (304, b"", fields["etag"])
    assert live.get("/dashboard/static/app.js", **{"If-None-Match": '"other"'})[2] == body


@pytest.mark.parametrize("name", ["nothing.js", "..%2Frows.py", "rows.py", "__init__.py", "%2e%2e/app.py", "%00"])
def test_only_the_page_s_own_files_are_given(launch, name) -> None:
    assert launch().get(f"/dashboard/static/{name}")[0] == 404


def test_every_file_that_the_page_names_is_there() -> None:
    known = dashboard.files()
    for name, file in known.items():
        for part in file.body.decode().split('"'):
            if part.startswith("./") and part.endswith(".js"):
                assert part[2:] in known, (name, part)
            if part.startswith("dashboard/static/"):
                assert part.removeprefix("dashboard/static/") in known, (name, part)


def test_the_page_needs_no_key_and_the_data_does(launch) -> None:
    live = launch(config={"api_key": ("secret",)})
    fill(live, books.accounts(1))
    assert live.get("/", **HTML)[0] == 200
    assert live.get("/dashboard/static/app.css")[0] == 200
    for path in ("/", "/dashboard/data", "/dashboard/requests/r0", "/dashboard/findings", "/dashboard/static/../data"):
        assert live.get(path)[0] == 401, path
    assert live.request("POST", "/", headers=HTML)[0] == 401
    assert live.get("/dashboard/data", Authorization="Bearer secret")[0] == 200


# ---- data


def test_whole_answers_and_streams_are_told_by_when_tokens_were_ready(launch) -> None:
    stream = books.account("stream", time.monotonic_ns())
    count = stream.output_tokens
    whole = msgspec.structs.replace(stream, token_written_ns=(stream.end_ns,) * count, first_chunk_tokens=count)
    live = launch()
    fill(live, [stream, whole, books.account("refused", time.monotonic_ns(), error="no")])
    first, second, refused = look(live)["rows"]
    assert (second["ttft_ns"], second["tpot_ns"]) == (second["e2e_ns"], None)
    for field in ("first_ready_ns", "per_token_ns"):
        assert first[field] == second[field] < second["e2e_ns"], field
        assert refused[field] is None


def test_each_record_is_told_once(launch) -> None:
    live = launch()
    fill(live, books.accounts(5), books.steps(7, ("r1",)))
    first = look(live)
    assert first["reset"]
    assert [row["id"] for row in first["rows"]] == ["r0", "r1", "r2", "r3", "r4"]
    assert sum(told[1] for told in first["step_bins"]) == 7
    nothing = look(live, first["cursor"])
    assert (nothing["reset"], nothing["rows"], nothing["step_bins"], nothing["presence"]) == (False, [], [], {})
    fill(live, [books.account("new", time.monotonic_ns())])
    assert [row["id"] for row in look(live, nothing["cursor"])["rows"]] == ["new"]


def test_a_cursor_of_another_process_gets_everything_anew(launch) -> None:
    live = launch()
    fill(live, books.accounts(2))
    for cursor in ("", "0123456789ab.1.1", f"{routes_dashboard.PROCESS}.999.0"):
        answer = look(live, cursor)
        assert answer["reset"]
        assert len(answer["rows"]) == 2


@pytest.mark.parametrize("rest", ["", "1", "1.2.3", "-1.2", "x.y", "1.²", "9" * 30 + ".0"])
def test_a_cursor_that_is_none_is_refused(launch, rest) -> None:
    from urllib.parse import quote

    status, _, answer = launch().get(f"/dashboard/data?after={routes_dashboard.PROCESS}.{quote(rest)}")
    assert status == 400
    assert answer["error"]["param"] == "after"


def test_an_answer_is_bounded_and_says_what_it_left_out(launch, monkeypatch) -> None:
    monkeypatch.setattr(routes_dashboard, "MAX_ROWS", 10)
    monkeypatch.setattr(routes_dashboard, "MAX_STEPS", 20)
    live = launch()
    fill(live, books.accounts(25), books.steps(50, ("r1",)))
    answer = look(live)
    assert answer["left_out"] == {"accounts": 15, "steps": 30}
    assert [row["id"] for row in answer["rows"]] == [f"r{i}" for i in range(15, 25)]
    assert look(live, answer["cursor"])["left_out"] == {"accounts": 0, "steps": 0}


def test_a_request_is_open_and_then_closed_and_never_both(launch) -> None:
    live = launch(say("abc"), step_s=0.005)
    live.engine.paused = True
    thread = threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 3}))
    thread.start()
    while not (answer := look(live))["open"]:
        time.sleep(0.01)
    assert answer["rows"] == []
    assert answer["open"][0]["stages"][-1][0] == "queue:not_told"
    assert sum(ns for _, ns in answer["open"][0]["stages"]) == answer["open"][0]["e2e_ns"]
    live.engine.paused = False
    thread.join()
    answer = look(live)
    assert (answer["open"], len(answer["rows"])) == ([], 1)
    assert sum(ns for _, ns in answer["rows"][0]["stages"]) == answer["rows"][0]["e2e_ns"]


def test_those_who_wait_now_are_told_by_cause(launch) -> None:
    live = launch(say("abc"))
    assert look(live)["engine"]["waiting_for"] == {}
    live.engine.paused = True
    threads = [threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "x"})) for _ in range(3)]
    for thread in threads:
        thread.start()
    while (engine := look(live)["engine"])["num_waiting"] < 3:
        time.sleep(0.01)
    assert engine["waiting_for"] == {"batch_slots": 3}
    assert live.get("/stats")[2]["engine"]["waiting_for"] == {"batch_slots": 3}
    live.engine.paused = False
    for thread in threads:
        thread.join()


def test_a_request_is_closed_though_the_engine_has_not_let_go_yet(launch, monkeypatch) -> None:
    live = launch(say("abc", end=False), step_s=0.005)
    let_go = live.engine.abort
    monkeypatch.setattr(live.engine, "abort", lambda request_id: None)
    assert live.post("/v1/completions", {"prompt": "x", "stop": "b", "max_tokens": 4000})[0] == 200
    assert live.service.groups
    answer = look(live)
    assert (answer["open"], len(answer["rows"])) == ([], 1)
    live.call(lambda: let_go(live.engine.submitted[0].request_id))
    until(lambda: not live.service.groups)


def test_a_waterfall_tells_the_steps_and_who_shared_them(launch) -> None:
    live = launch()
    steps = books.steps(40, ("one", "two", "three"))
    fill(live, [books.account("one", steps[-1].end_ns)], steps)
    status, _, told = live.get("/dashboard/requests/one")
    assert status == 200
    assert {n["id"] for n in told["neighbours"]} == {"two", "three"}
    assert told["num_steps"] == len(told["steps"])
    waited_ns = sum(ns for _, _, ns in told["waited_for"])
    assert {who for who, _, _ in told["waited_for"]} == {"two", "three"}
    assert 0 < waited_ns <= told["derived"]["e2e_ns"]
    prompts = [step for step in told["steps"] if step["own_tokens"] == 256]
    assert prompts
    assert all(step["other_decode_tokens"] == 2 for step in told["steps"])
    owned = {owner: ns for owner, ns, meaning in told["owners"] if meaning}
    assert sum(owned.values()) == pytest.approx(told["derived"]["e2e_ns"], abs=len(owned))
    assert list(owned.values()) == sorted(owned.values(), reverse=True)
    assert live.get("/dashboard/requests/nobody")[0] == 404


def test_a_request_that_met_a_stop_shows_it_on_the_page(launch) -> None:
    live = launch()
    steps = books.steps(40, ("one", "two"))
    length_ns = steps[37].end_ns - steps[37].begin_ns
    steps[37] = msgspec.structs.replace(steps[37], off_cpu_ns=length_ns - 1000, cpu_wait_ns=0)
    steps[:37] = [msgspec.structs.replace(step, off_cpu_ns=0, cpu_wait_ns=0) for step in steps[:37]]
    fill(live, [books.account("one", steps[-1].end_ns)], steps)
    owned = {owner: ns for owner, ns, _ in live.get("/dashboard/requests/one")[2]["owners"]}
    assert owned["engine_stopped"] == pytest.approx(length_ns - 1000, abs=2)
    drawn = look(live)
    kept = [dict(zip(drawn["step_fields"], row, strict=True))["kept_ns"] for row in drawn["step_bins"]]
    assert sum(kept) == pytest.approx(length_ns - 1000, rel=0.2), (
        "the chart's stop has a share of the gap before it too"
    )


def test_a_row_tells_what_kept_the_engine_from_running_as_the_doctor_does(launch) -> None:
    live = launch()
    steps = [msgspec.structs.replace(step, cpu_wait_ns=step.length_ns // 2) for step in books.steps(40, ("one", "two"))]
    fill(live, [books.account("one", steps[-1].end_ns), books.account("before", steps[0].begin_ns - 10**9)], steps)
    one, before = (dict(row["stages"]) for row in look(live)["rows"])
    owned = {owner: ns for owner, ns, _ in live.get("/dashboard/requests/one")[2]["owners"]}
    assert one["cpu_wait"] == pytest.approx(owned["cpu_wait"], abs=2)
    in_engine_ns = sum(ms for _, _, ms in books.PLAN[2:-1]) * books.MS  # the server's own stages wait for no engine
    assert one["cpu_wait"] == pytest.approx(in_engine_ns / 2, rel=0.01)
    assert sum(one.values()) == sum(before.values()) == sum(int(ms * books.MS) for _, _, ms in books.PLAN)
    assert "cpu_wait" not in before, "no step of its time is known"


def test_a_diagnosis_is_of_the_live_ledger_and_kept_a_while(launch, monkeypatch) -> None:
    live = launch()
    told = live.get("/dashboard/findings")[2]
    assert (told["findings"], told["thin"]) == ([], True)
    fill(live, books.accounts(60, seconds=60), books.steps(400, ("r58", "r59")))
    assert live.get("/dashboard/findings")[2] == told
    monkeypatch.setattr(routes_dashboard, "DIAGNOSED_FOR_S", 0.0)
    told = live.get("/dashboard/findings")[2]
    assert (told["num_requests"], told["thin"]) == (60, False)
    assert told["findings"], "an hour of waiting for slots, and nothing found"


def test_the_interpreter_s_turns_are_as_long_as_before(launch) -> None:
    import sys

    before_s = sys.getswitchinterval()
    assert before_s > reading.TURN_S
    live = launch()
    look(live)
    assert live.get("/dashboard/requests/nobody")[0] == 404
    assert sys.getswitchinterval() == before_s


# ---- bins

instants = st.integers(0, 20 * routes_dashboard.BIN_NS)


@given(st.lists(st.tuples(instants, instants), max_size=20), instants)
def test_bins_hold_all_the_time_after_since_and_no_more(pairs, since_ns) -> None:
    spans = [("decode", min(pair), max(pair)) for pair in pairs]
    found = routes_dashboard.presence([spans], since_ns).get("decode", {})
    expected_ns = sum(max(0, end - max(begin, since_ns)) for _, begin, end in spans)
    assert sum(found.values()) == expected_ns
    for at, ns in found.items():
        assert 0 < ns <= len(spans) * routes_dashboard.BIN_NS
        assert any(
            begin < (at + 1) * routes_dashboard.BIN_NS and end > at * routes_dashboard.BIN_NS for _, begin, end in spans
        )


@given(st.integers(1, 30), st.integers(20, 3 * routes_dashboard.BIN_NS))
def test_the_parts_of_steps_keep_their_time(count, length_ns) -> None:
    records = books.steps(count, ("a", "b"), length_ns)
    rows = routes_dashboard.step_bins(records, since_ns=-(2**60))
    columns = {name: sum(row[1 + i] for row in rows) for i, name in enumerate(routes_dashboard.SUMS)}
    assert columns["steps"] == count
    assert columns["device_ns"] == sum(record.device_ns for record in records)
    assert columns["host_ns"] == sum(r.plan_ns + r.launch_ns + r.commit_ns for r in records)
    assert columns["host_gap_ns"] == sum(record.host_gap_ns for record in records)
    times = sum(columns[name] for name in ("device_ns", "sample_ns", "moves_ns", "host_ns", "host_gap_ns", "idle_ns"))
    assert times == records[-1].end_ns - records[0].begin_ns + records[0].host_gap_ns


def test_tokens_of_a_long_step_are_shared_out_as_its_time_is() -> None:
    second = routes_dashboard.BIN_NS
    (step,) = books.steps(1, ("a",), 4 * second)
    step = msgspec.structs.replace(
        step, begin_ns=10 * second + second // 2, end_ns=14 * second + second // 2, prefill_tokens=800, decode_tokens=3
    )
    rows = {row[0]: row[1:4] for row in routes_dashboard.step_bins([step], since_ns=0)}
    assert {at: row[1] for at, row in rows.items()} == {10: 100, 11: 200, 12: 200, 13: 200, 14: 100}
    assert sum(row[2] for row in rows.values()) == 3
    assert {at: row[0] for at, row in rows.items() if row[0]} == {14: 1}
    later = {row[0]: row[2] for row in routes_dashboard.step_bins([step], since_ns=12 * second)}
    assert later == {12: 200, 13: 200, 14: 100}, "what lies before the horizon is not crowded behind it"


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 0.5))
def test_a_step_in_which_the_engine_did_not_run_is_divided_as_the_doctor_divides_it(wait_ns, off_ns, usual) -> None:
    (record,) = books.steps(1, ("a", "b"), 10**9)
    kept = msgspec.structs.replace(record, cpu_wait_ns=wait_ns, off_cpu_ns=off_ns)
    plain, told = (routes_dashboard.step_bins([one], -(2**60), usual) for one in (record, kept))
    plain, told = (
        [sum(row[1 + i] for row in rows) for i in range(len(routes_dashboard.SUMS))] for rows in (plain, told)
    )
    at = routes_dashboard.SUMS.index("kept_ns")
    assert told[at] == pytest.approx(min(record.length_ns, wait_ns + derive.stopped_ns(kept, usual)), abs=10)
    assert sum(told[3:]) == sum(plain[3:]), "no time is lost"
    left = 1 - told[at] / record.length_ns
    for before, now in zip(plain[3:at], told[3:at], strict=True):
        assert now == pytest.approx(before * left, abs=3)


def test_a_stage_s_key_names_its_cause() -> None:
    found = routes_dashboard.spans(
        [StageInterval(Stage.QUEUE, Cause.KV_BLOCKS, 1, 2), StageInterval(Stage.DECODE, None, 2, 3)]
    )
    assert found == [("queue:kv_blocks", 1, 2), ("decode", 2, 3)]
