"""`splittime serve` asleep: what bench and doctor make of it, and its end by SIGTERM, asleep and on the way there."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import forked
from patience import until

WORKER = str(Path(__file__).with_name("sleepy_serve_worker.py"))
SERVE = f"""
import sys
from splittime.cli import serve
from splittime.cli.main import main
serve.WORKER_COMMAND = [sys.executable, {WORKER!r}]
main()
"""
PATIENCE_S = 100


@pytest.fixture
def server(model_folder):
    command = [sys.executable, "-c", SERVE, "serve", str(model_folder), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, process.stderr.read()
    yield process, json.loads(line)
    if process.poll() is None:
        process.kill()
    process.wait()


def call(url, body=None, method="POST"):
    """(status, JSON)."""
    request = urllib.request.Request(url, json.dumps(body).encode() if body else b"", method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_bench_and_doctor_of_a_sleeping_server_and_sigterm(server):
    process, report = server
    url, body = report["url"], {"model": report["model"], "prompt": "hello", "max_tokens": 5}
    assert call(f"{url}/v1/completions", body)[0] == 200
    assert call(f"{url}/sleep?level=2")[1]["changed"] is True
    status, answer = call(f"{url}/v1/completions", body)
    assert (status, answer["error"]["code"]) == (503, "asleep")
    bench = forked.run(["bench", "run", url, "--num-requests", "2", "--concurrency", "1"])
    assert bench.returncode in (1, 3), bench.stderr  # 3: on a busy machine the client itself may be late
    assert "2 refused: the server is asleep" in bench.stdout
    doctor = forked.run(["doctor", url])
    assert doctor.returncode == 1, doctor.stderr
    assert "1. sleeping" in doctor.stdout
    assert "Traceback" not in doctor.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0, process.stderr.read()


def test_abort_ends_a_request_with_the_reason_in_its_answer_and_its_account(server):
    """The engine is paused, so that the request cannot end by itself."""
    _, report = server
    url, answers = report["url"], []
    body = {"model": report["model"], "prompt": "hello", "max_tokens": 5}
    assert call(f"{url}/knobs", {"paused": True}, "PATCH")[0] == 200
    thread = threading.Thread(target=lambda: answers.append(call(f"{url}/v1/completions", body)))
    thread.start()
    until(lambda: get(f"{url}/stats")["server"]["open_requests"] == 1)
    status, slept = call(f"{url}/sleep?mode=abort")
    assert (status, slept["changed"]) == (200, True)
    thread.join(PATIENCE_S)
    status, answer = answers[0]
    assert (status, answer["error"]["code"]) == (503, "asleep")
    until(lambda: len(get(f"{url}/ledger/requests")["accounts"]) == 1)
    (account,) = get(f"{url}/ledger/requests")["accounts"]
    assert account["error"]["code"] == "asleep"
    assert call(f"{url}/wake")[1]["changed"] is True
    assert call(f"{url}/knobs", {"paused": False}, "PATCH")[0] == 200
    assert call(f"{url}/v1/completions", body)[0] == 200


def test_sigterm_while_it_falls_asleep(server):
    process, report = server
    url, body = report["url"], {"model": report["model"], "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    answers: dict = {}

    def ask(name, *words):
        try:
            answers[name] = call(*words)
        except OSError as error:  # the connection was closed at the end
            answers[name] = error

    threads = [threading.Thread(target=ask, args=("generation", f"{url}/v1/completions", body))]
    threads[0].start()
    until(lambda: get(f"{url}/stats")["engine"]["output_tokens"] > 0)
    threads.append(threading.Thread(target=ask, args=("sleep", f"{url}/sleep")))
    threads[1].start()
    until(lambda: get(f"{url}/is_sleeping")["state"] != "awake")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 0, process.stderr.read()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers["generation"][0] == 200
    assert answers["generation"][1]["usage"]["completion_tokens"] == 200
    assert "sleep" in answers


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return json.load(response)
