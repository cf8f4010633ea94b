"""`splittime bench`: flags, files, exit codes and words, against the mock server."""

import asyncio
import http.server
import json
import re
import threading
from contextlib import contextmanager

import msgspec
import pytest
from client_runs import outcome
from client_runs import run as run_of
from rich.console import Console
from typer.testing import CliRunner

import forked
from splittime.bench.book.records import Ending, load_run
from splittime.bench.schedule import load_schedule
from splittime.bench.share import Progress
from splittime.bench.spec import LoadSpec
from splittime.cli import bench as bench_command
from splittime.cli import bench_flags
from splittime.cli.bench_flags import exit_code
from splittime.cli.main import app
from splittime.core.errors import ConfigError

SMALL = ["--input-tokens", "8", "--output-tokens", "3"]


@contextmanager
def mock_server(*flags):
    process = forked.Command(["bench", "mock-server", "--port", "0", "--json", *flags])
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def url():
    with mock_server("--ttft", "5ms", "--itl", "1ms") as url:
        yield url


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_run_leaves_its_files_and_prints_its_table(url, tmp_path):
    out, csv, html = (tmp_path / name for name in ("run.json", "run.csv", "run.html"))
    kept = tmp_path / "schedule.jsonl"
    rate = ["--rate", 50, "--duration", "500ms", "--seed", 7, "--label", "first", "--goodput", "ttft=10s"]
    done = bench("run", url, *rate, *SMALL, "--out", out, "--csv", csv, "--html", html, "--save-schedule", kept)
    assert done.exit_code in (0, 3), done.output  # a busy machine may void it
    run = load_run(out)
    assert (run.label, run.seed, run.arms[0].kind) == ("first", 7, "mock")
    assert {o.ending for o in run.outcomes} == {Ending.COMPLETE}
    assert run.slo == {"ttft": 10e9}
    assert len(csv.read_text().splitlines()) == len(run.outcomes) + 1
    assert "<html" in html.read_text()
    assert load_schedule(kept).digest == run.schedule_digest
    assert "TTFT" in done.stdout
    again = bench("run", url, "--schedule", kept, "--out", out)
    assert again.exit_code in (0, 3)
    assert load_run(out).schedule_digest == run.schedule_digest


def test_a_url_alone_is_a_first_look(url, monkeypatch):
    monkeypatch.setattr("splittime.bench.draw.FIRST_LOOK", {"concurrency": 2, "duration_s": 0.3})
    done = bench("run", url.removeprefix("http://"), *SMALL, "--json")
    assert done.exit_code in (0, 3)
    run = json.loads(done.stdout)
    assert run["settings"]["concurrency"] == 2
    assert run["outcomes"]


def test_a_number_of_requests_alone_is_measured_however_long_it_takes(url, monkeypatch):
    monkeypatch.setattr("splittime.bench.draw.FIRST_LOOK", {"concurrency": 4, "duration_s": 0.05})
    done = bench("run", url, "--num-requests", 30, *SMALL, "--json")
    assert done.exit_code in (0, 3)
    phases = [outcome["phase"] for outcome in json.loads(done.stdout)["outcomes"]]
    assert phases.count("measured") == 30


def test_definitions_are_printed_on_request(url):
    load = ["--num-requests", 5, "--concurrency", 1, *SMALL]
    assert "nearest rank" not in bench("run", url, *load).stdout
    assert "nearest rank" in bench("run", url, *load, "--definitions").stdout


def test_a_missed_slo_is_1_unless_the_run_is_void(url):
    load = ["--num-requests", 5, "--concurrency", 1, *SMALL]
    missed = bench("run", url, *load, "--slo", "ttft_p99=1ms")
    kept = bench("run", url, *load, "--slo", "ttft_p99=100s")
    assert missed.exit_code in (1, 3)
    assert kept.exit_code in (0, 3)
    assert (missed.exit_code == 3) == ("VOID" in missed.stdout)


def test_a_run_that_nobody_answers_is_1_without_an_slo(monkeypatch):
    with mock_server("--error-rate", "1") as url:
        monkeypatch.setattr("splittime.bench.book.records.Run.is_void", property(lambda run: False))
        done = bench("run", url, "--num-requests", 3, "--concurrency", 1, *SMALL)
    assert done.exit_code == 1
    assert "answered none of 3 requests" in " ".join(done.stderr.split())


def interrupted_when(monkeypatch, is_time):
    """Ctrl-C as soon as the progress of the load says that it is time."""
    stop = asyncio.Event()

    @contextmanager
    def watched(console, is_closed):
        yield lambda progress: stop.set() if is_time(progress) else None

    monkeypatch.setattr("splittime.cli.bench.interrupted", lambda: stop)
    monkeypatch.setattr("splittime.cli.bench.shown_live", watched)
    return stop


def test_ctrl_c_keeps_what_was_measured_and_says_of_how_many(url, monkeypatch, tmp_path):
    interrupted_when(monkeypatch, lambda progress: progress.ended > 2)
    done = bench("run", url, "--rate", 20, "--duration", "60s", *SMALL, "--out", tmp_path / "run.json")
    assert done.exit_code == 130
    run = load_run(tmp_path / "run.json")
    sent = sum(outcome.ending is not Ending.UNSENT for outcome in run.outcomes)
    assert 2 < sent < len(run.outcomes)
    cut = sum(outcome.ending is Ending.CANCELLED for outcome in run.outcomes)
    told = f"; cancelled: {cut}, neither good nor bad" if cut else ""  # none is under way where answers are quick
    told = f"interrupted: {sent} of {len(run.outcomes)} requests were sent{told}"
    assert f"{told}; not sent: {len(run.outcomes) - sent}, errors\n" in done.stderr


def test_nothing_is_said_of_requests_that_there_are_not():
    cut_off = run_of([outcome(0), outcome(1, ending=Ending.CANCELLED)])
    told = bench_command._of_those_sent(cut_off)
    assert told == "interrupted: 2 of 2 requests were sent; cancelled: 1, neither good nor bad"
    assert bench_command._of_those_sent(run_of([outcome(0)])) == "interrupted: 1 of 1 requests were sent"


def test_ctrl_c_before_the_load_is_130_too(url, monkeypatch):
    interrupted_when(monkeypatch, lambda progress: False).set()
    done = bench("run", url, "--rate", 20, "--duration", "60s", *SMALL)
    assert done.exit_code == 130
    assert "nothing was measured" in done.stderr


def test_one_code_for_each_meaning():
    assert exit_code(is_interrupted=True, is_void=True, falls_short=True, is_unclear=True) == 130
    assert exit_code(is_void=True, falls_short=True, is_unclear=True) == 3
    assert exit_code(falls_short=True, is_unclear=True) == 1
    assert exit_code(is_unclear=True) == 2
    assert exit_code() == 0


def test_a_void_run_is_3(url, monkeypatch):
    for name in ("LOOP_LAG_FLOOR_MS", "ALLOWED_SHARE", "VOID_SHARE"):
        monkeypatch.setattr(f"splittime.bench.audit.{name}", 0.0)
    done = bench("run", url, "--num-requests", 5, "--concurrency", 1, *SMALL, "--slo", "ttft_p99=1ms")
    assert done.exit_code == 3
    assert "VOID" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "5", "--duration", "soon"], "is no time"),
        (["--rate", "-1"], "rate"),
        (["--rate", "5", "--concurrency", "2"], "--concurrency"),
        (["--arrivals", "sometimes", "--rate", "1"], "--arrivals"),
        (["--slo", "ttft_p99=fast"], "no number"),
        (["--goodput", "speed=1"], "speed"),
        (["--interleave", "somehow"], "paired, blocks"),
        (["--schedule", "nowhere.jsonl"], "no schedule"),
        (["--schedule", "nowhere.jsonl", "--rate", "1"], "leave out --rate"),
        (["--timeout", "0s"], "above 0"),
        (["--rate", "1", "--out", "/"], "cannot write /"),
        (["--warm-up", "1s"], "Give --rate"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_usage_errors_are_2_and_say_what_to_do(url, flags, words):
    done = bench("run", url, *flags)
    assert done.exit_code == 2
    assert words in done.output


def test_a_mock_server_says_why_it_cannot(url):
    taken = bench("mock-server", "--port", url.rpartition(":")[2])
    assert taken.exit_code == 2
    assert "cannot listen" in taken.output
    assert bench("mock-server", "--freeze", "1s").exit_code == 2


@pytest.mark.parametrize("command", [[], ["run"], ["mock-server"], ["search"], ["sweep"], ["compare"], ["report"]])
def test_help_has_examples(command):
    done = bench(*command, "--help")
    assert done.exit_code == 0
    assert not command or "Examples:" in done.output


def test_every_field_of_a_load_is_a_flag():
    shown = bench("run", "--help-all").output
    for name in LoadSpec.__struct_fields__:
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b", shown), name


@pytest.mark.parametrize(
    ("text", "unit", "expected_ns"),
    [("300ms", "s", 300e6), ("5", "s", 5e9), ("5", "ms", 5e6), ("1.5m", "s", 90e9), ("2 us", "s", 2000)],
)
def test_times(text, unit, expected_ns):
    assert bench_flags.time_ns(text, "--flag", unit) == expected_ns
    for wrong in ("", "s", "-1s", "1 year"):
        with pytest.raises(ConfigError, match="is no time"):
            bench_flags.time_ns(wrong, "--flag")


def test_times_that_may_be_distributions():
    given = {"think_s": "250ms", "cancel_after_s": "exponential:2", "slow_reader_delay_ms": "1s", "duration_s": "2m"}
    values = {name: bench_flags._value(name, value) for name, value in given.items()}
    assert values == {
        "think_s": "0.25",
        "cancel_after_s": "exponential:2",
        "slow_reader_delay_ms": 1000.0,
        "duration_s": 120.0,
    }
    msgspec.convert(values, LoadSpec)


def shown(elapsed_s, is_closed, **changed):
    progress = Progress(
        elapsed_s=elapsed_s,
        planned=100,
        due=52,
        begun=50,
        ended=40,
        failed=2,
        in_flight=10,
        output_tokens=400,
        ttft_p50_s=0.1,
        ttft_p99_s=0.25,
        ends_at_s=20.0,
    )
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_command.view(msgspec.structs.replace(progress, **changed), is_closed))
    return console.export_text()


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_is_shown_meanwhile(is_closed):
    text = shown(10, is_closed)
    for words in ("5.0/s", "in flight 10", "p50 100 ms", "p99 250 ms", "2 failed", "10 / 20 s"):
        assert words in text
    assert ("of 5.2/s" in text) != is_closed
    assert "waits" not in text


def test_after_the_last_request_is_sent_the_wait_for_answers_is_named():
    """And the rate stays that of the time in which they were sent."""
    text = shown(80, False)
    waits = "all sent: waits for answers, about 20 s more; Ctrl-C keeps those that ended"
    for words in ("80 / 20 s", waits, "sent 2.5/s of 2.6/s"):
        assert words in text
    assert "waits" not in shown(80, False, in_flight=0)
    assert "waits for answers, none has ended;" in shown(80, False, ended=0)
    assert "waits" not in shown(80, True, ends_at_s=None)


def test_a_device_is_not_replaced_by_a_file_and_a_time_is_finite(url, tmp_path):
    assert bench("run", url, "--out", "/dev/null").exit_code == 2
    assert bench("run", url, "--timeout", f"{'9' * 400}s").exit_code == 2


class StillLoading(http.server.BaseHTTPRequestHandler):
    """As our server and llama.cpp's answer while they load a model."""

    def do_GET(self):
        body = b'{"error": {"message": "the engine is not ready yet"}}'
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_server_that_still_loads_is_not_measured():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StillLoading) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            done = bench("run", f"http://127.0.0.1:{server.server_port}", "--rate", 1, "--duration", "1s")
        finally:
            server.shutdown()
            thread.join()
    assert done.exit_code == 1
    assert "is not ready: " in done.stderr
    assert "the engine is not ready yet" in done.stderr
    assert "when its model is loaded" in done.stderr
