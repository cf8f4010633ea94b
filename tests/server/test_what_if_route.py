"""`POST /ledger/what-if` over HTTP: the prediction of a process beside, one at a time, and what it refuses."""

import os
import sys
import threading
import time

import msgspec
import pytest
from test_sized import few_slots
from ward import Ward

from splittime.core.errors import EngineError
from splittime.diagnose.books import Books
from splittime.server import simulation
from splittime.simulate.beside import answer
from splittime.simulate.change import Change
from splittime.simulate.recorded import Recorded, question, read_question
from splittime.simulate.what_if import predict

from .conftest import LiveServer

PATH = "/ledger/what-if"


@pytest.fixture(scope="module")
def crowded() -> Books:
    return Ward(settings={"max_num_seqs": 4}).run(*few_slots())


@pytest.fixture
def live(launch, crowded: Books) -> LiveServer:
    server = launch()
    server.engine.facts = lambda: crowded.facts
    server.call(
        lambda: [*map(server.ledger.add_account, crowded.accounts), *map(server.ledger.add_step, crowded.steps)]
    )
    return server


def figure(told: dict, name: str) -> dict:
    return next(one for one in told["figures"] if one["name"] == name)


def test_more_slots_are_said_to_help_as_the_simulator_says(live: LiveServer, crowded: Books) -> None:
    status, _, told = live.post(PATH, {"settings": {"max_num_seqs": 6}})
    assert status == 200, told
    assert (told["num_requests"], told["num_left_out"], told["draws"]) == (200, 0, simulation.DRAWS)
    assert told["settings"] == {"max_num_seqs": 6}
    assert 5 < told["span_s"] < 60
    known = predict(
        Recorded(crowded.accounts, crowded.steps, crowded.facts), Change({"max_num_seqs": 6}), simulation.DRAWS
    )
    for name in ("ttft_ms_p99", "itl_ms_p50", "e2e_ms_mean"):
        mine, true = figure(told, name), known.figure(name)
        assert mine["recorded"] == true.recorded
        assert mine["ratio"] == pytest.approx(true.ratio, rel=0.05)
    assert figure(told, "ttft_ms_p99")["high"] < 1


def test_more_load_waits_longer(live: LiveServer) -> None:
    status, _, told = live.post(PATH, {"speed": 1.5})
    assert (status, told["speed"]) == (200, 1.5)
    assert figure(told, "ttft_ms_p99")["low"] > 1


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"settings": {"max_num_seq": 2}}, 400, "invalid_value", "'max_num_seq' cannot be simulated"),
        ({"settings": {"paused": True}}, 400, "invalid_value", "'paused' cannot be simulated"),
        ({"settings": {"policy": "best"}}, 400, "invalid_value", "bad setting"),
        ({"settings": {"max_num_seqs": "x"}}, 400, "invalid_value", "bad setting"),
        ({"settings": {"max_queued_requests": "x"}}, 400, "invalid_value", "max_queued_requests is x; it must be"),
        ({"settings": {"max_queued_requests": 0}}, 400, "invalid_value", "max_queued_requests is 0; it must be"),
        ({"settings": {"num_blocks": 10**15}}, 400, "invalid_value", "num_blocks is 1000000000000000; it must be"),
        ({"speed": 0}, 400, "invalid_value", "speed is 0"),
        ({"knobs": {}}, 400, "invalid_json", "unknown field"),
        ({"settings": {"max_num_seqs": 64}}, 409, "cannot_tell", "none has more than"),
    ],
)
def test_what_cannot_be_simulated_says_why(live: LiveServer, body: dict, status: int, code: str, words: str) -> None:
    found, _, told = live.post(PATH, body)
    assert (found, told["error"]["code"]) == (status, code)
    assert words in told["error"]["message"]
    assert not live.service.simulation.is_running


def test_a_server_without_requests_cannot_tell(launch) -> None:
    status, _, told = launch().post(PATH, {})
    assert (status, told["error"]["code"]) == (409, "cannot_tell")
    assert told["error"]["message"] == "no request has been served yet. Ask again when requests have been served."


def test_requests_before_the_latest_change_of_a_knob_do_not_count(live: LiveServer) -> None:
    _, _, knobs = live.request("GET", "/knobs")
    for same in ({}, {name: knobs[name] for name in ("max_num_seqs", "max_queued_requests")}):
        assert live.request("PATCH", "/knobs", same)[0] == 200
        assert live.service.facts().knobs_changed_ns == 0
    assert live.request("PATCH", "/knobs", {"max_queued_requests": 9})[0] == 200
    assert live.service.facts().knobs_changed_ns > max(account.start_ns for account in live.service.ledger.accounts())
    status, _, told = live.post(PATH, {"speed": 1.5})
    assert status == 409
    assert "seconds ago; the latest 200 requests began before that and do not count" in told["error"]["message"]


def running(live: LiveServer) -> int:
    """The process's id, once there is one."""
    for _ in range(1000):
        process = live.service.simulation._process
        if process is not None and process.poll() is None:
            return process.pid
        time.sleep(0.01)
    raise AssertionError("no process")


def test_one_at_a_time_at_the_lowest_priority_while_the_server_serves(live: LiveServer) -> None:
    answers: list[tuple] = []
    asking = threading.Thread(target=lambda: answers.append(live.post(PATH, {"settings": {"max_num_seqs": 5}})))
    asking.start()
    pid = running(live)
    status, headers, told = live.post(PATH, {"speed": 2})
    assert (status, told["error"]["code"], headers["retry-after"]) == (429, "simulation_running", "5")
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    nices = set()
    while asking.is_alive():
        try:
            nices.add(os.getpriority(os.PRIO_PROCESS, pid))
        except ProcessLookupError:
            break
        time.sleep(0.01)
    asking.join(60)
    assert answers[0][0] == 200
    assert 19 in nices
    assert live.post(PATH, {"speed": 0})[0] == 400, "the next may ask"


def test_one_that_takes_too_long_is_ended(live: LiveServer, monkeypatch) -> None:
    monkeypatch.setattr(simulation, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(simulation, "TIME_S", 0.2)
    status, _, told = live.post(PATH, {})
    assert (status, told["error"]["code"]) == (503, "simulation_too_long")
    assert live.service.simulation._process.returncode == -9


def test_one_that_uses_up_its_processor_time_says_so(live: LiveServer, monkeypatch) -> None:
    limited = "from splittime.simulate import beside; beside.CPU_S = 1; beside.main(); [None for _ in iter(int, 1)]"
    monkeypatch.setattr(simulation, "COMMAND", (sys.executable, "-c", limited))
    status, headers, told = live.post(PATH, {})
    assert (status, told["error"]["code"], headers["retry-after"]) == (503, "simulation_too_long", "60")
    assert "processor time" in told["error"]["message"]


def test_none_starts_on_a_server_that_has_ended(monkeypatch) -> None:
    monkeypatch.setattr(simulation, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    ended = simulation.Simulation()
    ended.close()
    with pytest.raises(EngineError, match="ended with -9"):
        ended.run([b""])


def test_one_that_dies_is_the_servers_fault(live: LiveServer, monkeypatch) -> None:
    monkeypatch.setattr(simulation, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"))
    status, _, told = live.post(PATH, {})
    assert (status, told["error"]["message"]) == (500, "the simulation's process ended with 3")


def test_the_servers_end_ends_it(live: LiveServer, monkeypatch) -> None:
    monkeypatch.setattr(simulation, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    asking = threading.Thread(target=lambda: live.post(PATH, {}), daemon=True)
    asking.start()
    pid = running(live)
    live.call(live.service.close)
    asking.join(60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_tenant_may_not_ask(launch) -> None:
    live = launch(config={"api_key": ("operators", "search")})
    assert live.post(PATH, {}, {"Authorization": "Bearer search"})[0] in (403, 404)
    assert live.post(PATH, {})[0] == 401
    assert live.post(PATH, {}, {"Authorization": "Bearer operators"})[0] == 409


def test_a_question_is_read_as_it_was_written(crowded: Books) -> None:
    recorded = Recorded(list(crowded.accounts), list(crowded.steps), crowded.facts)
    lines = list(question(recorded, Change({"policy": "fcfs"}, 2.0), 3))
    asked, again = read_question(lines)
    assert (asked.change, asked.draws) == (Change({"policy": "fcfs"}, 2.0), 3)
    assert again == recorded
    assert b"\n" not in b"".join(lines)


def test_too_few_requests_are_an_error_of_the_books(crowded: Books) -> None:
    few = Recorded(crowded.accounts[:3], crowded.steps, crowded.facts)
    found = answer(list(question(few, Change(speed=2.0), 2)))
    assert not found.is_bad_change
    assert found.error is not None
    assert "3 requests are too few" in found.error.message
    assert msgspec.json.decode(msgspec.json.encode(found))["figures"] == []
