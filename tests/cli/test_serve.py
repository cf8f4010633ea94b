"""`splittime serve`, whole, over an engine process with a fake runner: announcement, requests, explain, SIGTERM."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import forked
from patience import until

WORKER = str(Path(__file__).with_name("fake_serve_worker.py"))
SERVE = f"""
import sys
from splittime.cli import serve
from splittime.cli.main import main
serve.WORKER_COMMAND = [sys.executable, {WORKER!r}]
main()
"""


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    ledger = tmp_path_factory.mktemp("ledger") / "l.sqlite"
    process = start(str(model_folder), "--port", "0", "--ledger-file", str(ledger), "--json")
    line = process.stdout.readline()
    assert line, process.stderr.read()
    yield process, json.loads(line), ledger
    if process.poll() is None:
        process.kill()
    process.wait()


def post(url, body):
    headers = {"Content-Type": "application/json", "X-Include-Timing": "1"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.load(response)


def test_announces_itself_as_one_json_line(server):
    _, report, _ = server
    assert report["url"].startswith("http://127.0.0.1:")
    assert report["resolved"]["max_model_len"] == 2048
    names = [phase["name"] for phase in report["timeline_ms"]]
    assert names[0] == "import"
    assert "engine: load" in names
    assert names[-1] == "ready"
    assert report["timeline_ms"][-1]["end_ms"] > 0


def test_its_start_is_in_the_facts_and_sums_exactly(server):
    _, report, _ = server
    with urllib.request.urlopen(f"{report['url']}/ledger/facts", timeout=100) as response:
        process = json.load(response)["processes"][0]
    begins, ends = [part[1] for part in process["start"]], [part[2] for part in process["start"]]
    assert [*begins, process["ready_ns"]] == [process["started_ns"], *ends]
    parts = ["import", "read settings", "import server", "load tokenizer", "start server", "wait for engine"]
    assert [part[0] for part in process["start"]][: len(parts)] == parts


def test_answers_and_explains(server):
    _, report, _ = server
    body = {"model": report["model"], "prompt": "hello", "max_tokens": 5, "temperature": 0}
    answer = post(f"{report['url']}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 5
    said = []  # the account is closed after the answer is written
    until(lambda: said.append(forked.run(["explain", answer["id"], "--url", report["url"]])) or not said[-1].returncode)
    (*_, shown) = said
    assert "decode" in shown.stdout
    assert "TTFT" in shown.stdout
    assert forked.run(["explain", "nobody", "--url", report["url"]]).returncode == 2


def test_sigterm_ends_it_with_the_ledger_written(server):
    process, report, ledger = server
    post(f"{report['url']}/v1/completions", {"model": report["model"], "prompt": "hello", "max_tokens": 5})
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 0, process.stderr.read()
    from splittime.ledger.store import open_readonly

    file = open_readonly(ledger)
    assert len(file.accounts()) >= 1
    assert len(file.steps()) >= 5


def told_at_start(*flags):
    """What a person reads until the server is up, line by line."""
    process = start(*flags)
    told = []
    while not any("splittime explain" in line for line in told):
        told.append(process.stderr.readline())
        assert told[-1], told
    process.terminate()
    assert process.wait(timeout=100) == 0
    assert process.stdout.read() == ""
    return told


def test_for_people_on_stderr_there_are_few_lines(model_folder):
    told = told_at_start(str(model_folder), "--port", "0")
    assert f"starting the engine for {model_folder.name}" in told[0]
    ready = next(i for i, line in enumerate(told) if line.startswith(f"{model_folder.name} on http://"))
    assert all(" s\n" in line for line in told[1 : ready - 1]), "until then a line a second"
    assert len(told[ready:]) <= 12
    assert "temperature 0.5, as its makers advise" in "".join(told)
    url = told[ready].split(" on ")[1].strip()
    assert f"page   {url}/" in "".join(told)


def test_verbose_tells_everything(model_folder):
    told = "".join(told_at_start(str(model_folder), "--port", "0", "--max-num-seqs", "7", "--verbose"))
    assert "default_sampling.temperature" in told
    assert "flag --max-num-seqs" in told
    assert "start-up, ms" in told


def test_an_engine_that_cannot_start_is_a_failure_with_its_reason(model_folder, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.exit(3)")
    code = SERVE.replace(WORKER, str(broken))
    command = [sys.executable, "-c", code, "serve", str(model_folder), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1
    assert "exit status 3" in result.stderr
