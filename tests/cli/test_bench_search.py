"""`bench search` and `bench sweep` on a server that is a formula: what they ask, print, keep, and exit with."""

import heapq
import json
import re

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from splittime.bench import search
from splittime.bench.book.records import Arm, Ending, Outcome, Run, RunCheck, load_run
from splittime.bench.mock_server import Timings
from splittime.cli import bench, bench_flags
from splittime.core.errors import EngineError
from splittime.wire.scrape import ServerLimits

CAPACITY = 40.0
MS = 1_000_000
URL = "http://127.0.0.1:9"
SHORT = ["--duration", "2s", "--warm-up", "0s", "--cool-down", "0s", "--input-tokens", "20", "--output-tokens", "2"]


class FormulaServer:
    """TTFT of base / (1 - load) for every request; keeps the schedules it was sent."""

    def __init__(self) -> None:
        self.schedules: list = []
        self.is_void = False
        self.late_ms = 0.0
        self.interrupted_in: int | None = None  # so many runs, of which the last is cut short
        self.dies_after: int | None = None
        self.ending = Ending.COMPLETE

    async def run_schedule(self, schedule, targets, options=None, on_progress=None, stop=None) -> Run:
        if self.dies_after == len(self.schedules):
            raise EngineError("nothing answers at http://127.0.0.1:9")
        self.schedules.append(schedule)
        if self.interrupted_in == len(self.schedules):
            stop.set()
        rate = schedule.settings.get("rate") or 2.0 * schedule.concurrency
        ttft_ns = round(50 * MS / max(0.001, 1 - rate / CAPACITY))
        lag = RunCheck(name="lag", ok=not self.is_void, value=9.0, limit=1.0, unit="ms", sentence="it lagged by 9 ms")
        late = self.late_ms > 0
        loop = RunCheck(name="loop_lag", ok=not late, value=self.late_ms, limit=1.0, unit="ms", sentence="it was late")
        return Run(
            begin_ns=0,
            begin_unix_ns=0,
            measured_from_ns=0,
            measured_until_ns=2_000 * MS,
            settings=schedule.settings,
            schedule_digest=schedule.digest,
            arms=(Arm(url=URL, kind="mock"),),
            outcomes=tuple(outcome(planned, ttft_ns, self.ending) for planned in schedule.requests),
            checks=(lag, loop),
        )


def outcome(planned, ttft_ns: int, ending: Ending = Ending.COMPLETE) -> Outcome:
    at_ns = planned.at_ns or planned.index * MS
    chunks = (at_ns + ttft_ns, at_ns + ttft_ns + 10 * MS)
    return Outcome(
        index=planned.index,
        request_id=str(planned.index),
        phase=planned.phase,
        ending=ending,
        intended_ns=at_ns,
        picked_up_ns=at_ns,
        sent_ns=at_ns,
        chunk_ns=chunks,
        chunk_tokens=(1, 1),
        end_ns=chunks[-1],
        output_tokens=2,
        prompt_tokens=20,
    )


@pytest.fixture
def server(monkeypatch):
    formula = FormulaServer()

    async def limits(target) -> ServerLimits:
        return ServerLimits(vocab_size=4096, max_model_len=2048, block_size=16)

    monkeypatch.setattr(search, "run_schedule", formula.run_schedule)
    monkeypatch.setattr(search, "server_limits", limits)
    return formula


def app() -> typer.Typer:
    made = typer.Typer()
    made.command("search")(bench.search)
    made.command("sweep")(bench.sweep)
    return made


def run(*arguments: str):
    return CliRunner().invoke(app(), [*arguments, "--pause", "0s"])


def test_the_knee_is_found(server, tmp_path):
    """50 / (1 - r / 40) is 200 ms at 30 requests/s."""
    found = run("search", URL, "--slo", "ttft_p99=200ms", *SHORT, "--low", "5", "--out", str(tmp_path), "--json")
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["kept"] <= 30 <= answer["broken"] <= answer["kept"] * 1.06
    assert answer["trials"][0]["figures"]["ttft_p99"] == pytest.approx(50 * MS / (1 - 5 / 40), rel=1e-6)
    assert len(list(tmp_path.iterdir())) == len(answer["trials"]) == found.stderr.count("run ")
    assert load_run(tmp_path / "01-rate-5.json").settings["rate"] == 5.0


def test_runs_of_one_rate_are_drawn_anew_and_others_are_not(server):
    found = run("search", URL, "--slo", "ttft_p99=200ms", *SHORT, "--low", "5", "--seed", "7")
    assert found.exit_code == 0, found.output
    by_rate: dict[float, list] = {}
    for schedule in server.schedules:
        by_rate.setdefault(schedule.settings["rate"], []).append(schedule)
    assert {schedules[0].seed for schedules in by_rate.values()} == {7}
    assert max(map(len, by_rate.values())) == 2
    assert all(schedules[1].seed == 8 for schedules in by_rate.values() if len(schedules) == 2)
    assert len({schedule.settings["salt"] for schedule in server.schedules}) == len(server.schedules)


def test_the_answer_is_a_sentence_and_a_table(server):
    found = run("search", URL, "--slo", "ttft_p99=200ms", *SHORT, "--low", "5")
    assert "requests/s keep the promise" in found.stdout
    assert found.stdout.count("ttft") == 2  # p50 and p99, in the line below
    assert found.stdout.count("kept") > 2


def test_no_rate_keeps_it(server):
    found = run("search", URL, "--slo", "ttft_p99=1ms", *SHORT)
    assert found.exit_code == bench_flags.SHORT
    assert "not even 1 requests/s" in found.stdout


def test_a_client_at_fault_is_void(server):
    server.is_void = True
    for command, tried in ((["search", URL, "--slo", "ttft_p99=1s"], 2), (["sweep", URL, "--rates", "5,10"], 4)):
        found = run(*command, *SHORT)
        assert found.exit_code == 3
        assert "lagged by 9 ms" in found.stdout.replace("\n", " ")
        assert len(server.schedules) == tried
        server.schedules.clear()


@pytest.mark.parametrize(
    ("limit", "late_ms", "words"),
    [
        ("1s", 40.0, "the most that was asked for, keep the promise"),  # kept with all its lateness
        ("1ms", 7.0, "not even 5 requests/s"),  # missed by far more than it was late
        ("50ms", 40.0, "the client itself was at fault"),  # missed by less
    ],
)
def test_a_late_client_is_judged_by_the_margin_that_decides(server, limit, late_ms, words):
    server.late_ms = late_ms
    found = run("search", URL, "--slo", f"ttft_p99={limit}", "--low", "5", "--high", "10", *SHORT)
    assert words in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("command", "num_left"),
    [(["search", URL, "--slo", "ttft_p99=200ms", "--low", "5"], 2), (["sweep", URL, "--rates", "5,10,15"], 2)],
)
def test_ctrl_c_keeps_what_was_measured(server, tmp_path, command, num_left):
    """As Ctrl-C does it: the event is set while the third run goes on."""
    server.interrupted_in = 3
    found = run(*command, *SHORT, "--out", str(tmp_path), "--json")
    assert found.exit_code == 130
    answer = json.loads(found.stdout)
    assert len(answer["trials"]) == num_left
    assert "interrupted" in answer["stopped"]
    assert len(list(tmp_path.iterdir())) == len(server.schedules) == 3


def test_ctrl_c_between_two_loads_is_told_as_one(server, monkeypatch):
    """As `run_schedule` has it: before the load there is nothing to keep."""

    async def before_the_load(schedule, targets, options=None, on_progress=None, stop=None):
        if not server.schedules:
            return await server.run_schedule(schedule, targets)
        stop.set()
        raise EngineError("interrupted before the load began: nothing was measured", code="interrupted")

    monkeypatch.setattr(search, "run_schedule", before_the_load)
    found = run("sweep", URL, "--rates", "5,10", *SHORT)
    assert found.exit_code == 130
    said = " ".join(found.stdout.split())
    assert "ended early: interrupted; the run at 10 was cut short and is left out (1 run)" in said


@pytest.mark.parametrize(
    "command", [["search", URL, "--slo", "ttft_p99=200ms", "--low", "5"], ["sweep", URL, "--rates", "5,10,15"]]
)
def test_a_server_that_dies_between_two_runs_leaves_those_that_were_made(server, command):
    server.dies_after = 2
    found = run(*command, *SHORT)
    assert found.exit_code == 1
    assert "ended early: nothing answers" in found.stdout
    assert found.stdout.count("kept") + found.stdout.count("0%") >= 2
    server.schedules.clear()
    server.dies_after = 0
    found = run(*command, *SHORT)
    assert (found.exit_code, found.stdout) == (1, "")
    assert "nothing answers" in found.stderr


def test_a_sweep_in_which_nobody_was_answered_fails_without_an_slo(server):
    server.ending = Ending.FAILED
    assert run("sweep", URL, "--rates", "5", *SHORT).exit_code == 1


class SlotQueue(FormulaServer):
    """`bench mock-server --slots 4 --ttft 190ms --itl 10ms`, reckoned instead of waited for: first come, first served.
    Two tokens each hold a slot for 200 ms: 20 requests/s, and not one more."""

    async def run_schedule(self, schedule, targets, options=None, on_progress=None, stop=None) -> Run:
        made = await super().run_schedule(schedule, targets, options, on_progress, stop)
        timings = Timings(ttft_ns=190 * MS, itl_ns=10 * MS, slots=4)
        free_ns, outcomes = [0] * timings.slots, []
        for planned in sorted(schedule.requests, key=lambda one: one.at_ns):
            begin_ns = max(planned.at_ns, heapq.heappop(free_ns))
            work_ns = timings.ttft_ns + (planned.output_tokens - 1) * timings.itl_ns
            heapq.heappush(free_ns, begin_ns + work_ns)
            outcomes.append(outcome(planned, begin_ns + timings.ttft_ns - planned.at_ns))
        return msgspec.structs.replace(made, outcomes=tuple(outcomes))


def test_the_capacity_of_a_mock_server_with_slots_is_found(monkeypatch, server):
    """Above the capacity the queue grows for as long as the run lasts; below it, steady arrivals never queue."""
    monkeypatch.setattr(search, "run_schedule", SlotQueue().run_schedule)
    load = ["--duration", "5s", *SHORT[2:], "--arrivals", "constant", "--low", "12", "--high", "60"]
    found = run("search", URL, "--slo", "ttft_p99=200ms", *load, "--resolution", "0.1", "--json")
    assert found.exit_code == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["kept"] <= 20 < answer["broken"] <= 1.1 * answer["kept"]


def test_a_sweep_of_rates(server):
    found = run("sweep", URL, "--rates", "5,20,38", *SHORT, "--slo", "ttft_p99=200ms", "--json")
    assert found.exit_code == 0, found.stderr
    trials = json.loads(found.stdout)["trials"]
    assert [(trial["level"], trial["verdict"]) for trial in trials] == [(5, "kept"), (20, "kept"), (38, "broken")]
    assert [trial["slo"][0]["ok"] for trial in trials] == [True, True, False]


def test_a_sweep_of_concurrencies(server):
    found = run("sweep", URL, "--concurrencies", "1,4", "--num-requests", "10", *SHORT[-4:])
    assert found.exit_code == 0, found.stderr
    assert [schedule.concurrency for schedule in server.schedules] == [1, 4]
    assert [len(schedule.requests) for schedule in server.schedules] == [10, 10]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", URL], "--rates 1,2,4"),
        (["sweep", URL, "--rates", "1", "--concurrencies", "1"], "over rates or over"),
        (["sweep", URL, "--rates", "1,x"], "no levels"),
        (["sweep", URL, "--concurrencies", "1.5"], "whole"),
        (["sweep", URL, "--rates", "5", "--cv", "2"], "gamma"),
        (["search", URL, "--slo", "ttft=1s", "--low", "9", "--high", "3"], "no rates lie"),
        (["search", URL, "--slo", "speed=1"], "speed"),
        (["search", URL, "--slo", "ttft=1s", "--resolution", "2"], "resolution"),
        (["search", URL, "--slo", "ttft=1s", "--out", __file__], "is a file"),
        (["search", URL, "--slo", "ttft=1s", "--max-runs", "1"], "cannot confirm"),
        (["search", URL, "--slo", "goodput=90%"], "goodput needs a limit"),
        (["search", URL, "--slo", "ttft=1s", "--low", "nan"], "no rates lie"),
        (["search", URL, "--slo", "ttft=1s", "--timeout", "0s"], "above 0"),
        (["sweep", URL, "--rates", "4,4"], "twice"),
        (["sweep", URL, "--rates", "nan"], "no levels"),
        (["sweep", URL, "--rates", "2,1e9"], "too many"),
        (["sweep", URL, "--concurrencies", "inf"], "no levels"),
        (["sweep", URL, "--concurrencies", "1,1e9"], "1 to 100000"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(server, arguments, said):
    found = run(*arguments)
    assert found.exit_code == 2
    assert said in found.stderr
    assert server.schedules == []


@pytest.mark.parametrize(
    ("command", "words"),
    [("search", ("--slo", "--confirmations", "--prefix-share")), ("sweep", ("--rates", "--turns"))],
)
def test_help_names_the_flags(command, words):
    found = CliRunner().invoke(app(), [command, "--help"], env={"COLUMNS": "200"})
    assert all(word in found.stdout for word in words)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_sweep_keeps_its_headings_apart_on_a_terminal(server, width):
    """`FORCE_COLOR` makes a terminal of any output."""
    command = ["sweep", URL, "--rates", "5,20", *SHORT, "--slo", "ttft_p99=200ms", "--pause", "0s"]
    found = CliRunner().invoke(app(), command, env={"FORCE_COLOR": "1", "COLUMNS": str(width)})
    assert found.exit_code == 0, found.output
    assert "…" not in found.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found.stdout)
    assert all(len(line.rstrip()) <= width for line in plain.splitlines())
    if width >= 80:
        words = set(plain.split())
        assert all(name in words or set(name.split("_")) <= words for name in search.FIGURES)
        assert "57.14ms" in plain
        assert "100.0ms" in plain
