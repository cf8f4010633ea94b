"""`splittime doctor` and the comparison in `splittime explain`, as a user runs them: from a file, a run, a server."""

import dataclasses
import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from kept import ledger_file
from test_rules_client import buffered, with_client
from test_rules_queue import poisson
from typer.testing import CliRunner
from ward import Ward

from splittime.bench.book.records import save
from splittime.cli.doctor import _asked, _fact
from splittime.cli.main import app
from splittime.core.engine import EngineStats
from splittime.core.errors import ErrorInfo
from splittime.diagnose.finding import Fact
from splittime.ledger import derive
from splittime.ledger.account_json import account_json

run = CliRunner()


@pytest.mark.parametrize(("value", "told"), [(1_525_780.25, "1,525,780"), (12.5, "12.5"), (0.058, "0.058")])
def test_no_figure_is_told_by_a_power_of_ten(value, told):
    assert _fact(Fact("waited", value, "ms")) == f"waited: {told} ms"


def invoke(*words: str):
    return run.invoke(app, words)


@pytest.fixture(scope="module")
def ill():
    return Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))


@pytest.fixture(scope="module")
def well():
    return Ward().run(*poisson(8, 80, output=40))


def test_a_ledger_file(ill, tmp_path):
    path = ledger_file(ill, tmp_path / "l.sqlite")
    result = invoke("doctor", str(path))
    assert result.exit_code == 1
    assert "1. slot_bound" in result.stdout
    assert "splittime serve --max-num-seqs 4\n" in result.stdout  # as far as steps of two rows tell
    answer = json.loads(invoke("doctor", str(path), "--json").stdout)
    assert answer["exit_code"] == 1
    assert answer["healthy"] is False
    assert answer["findings"][0]["cure"]["command"] == "splittime serve --max-num-seqs 4"
    assert answer["findings"][0]["predicted"]["settings"] == {"max_num_seqs": 4}
    assert answer["findings"][0]["request_ids"][0].startswith("r")


def test_a_finding_says_what_its_cure_would_gain(ill, tmp_path):
    path = str(ledger_file(ill, tmp_path / "l.sqlite"))
    told = " ".join(invoke("doctor", path).stdout.split())
    assert "gains A replay of the latest 100 requests with max_num_seqs" in told
    assert "it would help" in told
    finding = json.loads(invoke("doctor", path, "--json").stdout)["findings"][0]
    assert finding["predicted"]["figures"][0]["name"] == "e2e_ms_mean"
    assert finding["predicted"]["figures"][0]["high"] < 1
    result = invoke("doctor", path, "--no-sizes")
    assert result.exit_code == 1
    assert "gains   " not in result.stdout
    finding = json.loads(invoke("doctor", path, "--json", "--no-sizes").stdout)["findings"][0]
    assert (finding["predicted"], finding["not_predicted"]) == (None, "")
    assert finding["cure"]["command"] == "splittime serve --max-num-seqs 16"


@pytest.mark.parametrize("is_live", [False, True])
def test_what_is_printed_to_look_at_works_as_it_is(server, ill, tmp_path, monkeypatch, is_live):
    monkeypatch.setenv("SPLITTIME_API_KEY", "k")
    asked = server[0] if is_live else str(ledger_file(ill, tmp_path / "of a day.sqlite"))
    shown = invoke("doctor", asked, "--no-sizes").stdout
    (first, *_) = re.findall(r"^  see     splittime (explain .*)$", shown, re.MULTILINE)
    result = invoke(*shlex.split(first))
    assert result.exit_code == 0, result.stderr
    assert first.split()[1] in result.stdout


def test_an_id_that_begins_like_a_flag_is_printed_so_that_explain_takes_it(ill, tmp_path):
    named = [msgspec.structs.replace(one, request_id=f"--json-{one.request_id}") for one in ill.accounts]
    path = ledger_file(msgspec.structs.replace(ill, accounts=tuple(named)), tmp_path / "l.sqlite")
    shown = invoke("doctor", str(path), "--no-sizes").stdout
    (first, *_) = re.findall(r"^  see     splittime (explain .* --json-.*)$", shown, re.MULTILINE)
    result = invoke(*shlex.split(first))
    assert result.exit_code == 0, result.stderr
    assert first.split()[-1] in result.stdout


def test_what_explain_cannot_read_is_named_alone(well, ill, tmp_path):
    save(with_client(well, buffered).run, tmp_path / "run.json")
    shown = invoke("doctor", str(tmp_path / "run.json")).stdout
    assert "\n  see     r" in shown
    assert "splittime explain" not in shown
    assert _asked("http://127.0.0.1:8000/v1", ill) == ""  # explain asks it without a flag


def test_doctor_and_simulate_count_the_same_requests(tmp_path):
    """Two choices of one request have an account each; one that was refused is told apart."""
    pairs = [[dataclasses.replace(case, n=2)] * 2 for case in poisson(25, 40)]
    books = Ward(settings={"max_num_seqs": 2}).run(*(case for pair in pairs for case in pair))
    full = ErrorInfo("overloaded_error", "full", "overloaded", 429)
    turned_away = msgspec.structs.replace(
        books.accounts[0], request_id="away", group_id="away", finish_reason="refused", error=full
    )
    path = ledger_file(msgspec.structs.replace(books, accounts=(*books.accounts, turned_away)), tmp_path / "l.sqlite")
    assert invoke("doctor", str(path), "--no-sizes").stdout.startswith("40 requests and 1 refused one, ")
    told = json.loads(invoke("simulate", str(path), "--json").stdout)
    assert (told["num_requests"], told["num_refused"]) == (40, 1)


def test_a_healthy_one_and_a_thin_one(well, tmp_path):
    path = ledger_file(well, tmp_path / "l.sqlite")
    result = invoke("doctor", str(path))
    assert result.exit_code == 0
    assert "Nothing found" in result.stdout
    result = invoke("doctor", str(path), "--limit", "5")
    assert result.exit_code == 3
    assert "requests served: only 5" in " ".join(result.stdout.split())
    untold = result.stdout.partition("Could not be told, or would not help\n")[2]
    assert " more: requests served: only 5" in " ".join(untold.split())  # a few of many names
    assert len(untold.splitlines()) < 12
    assert invoke("doctor", str(path), "--limit", "1").stdout.startswith("1 request, ")


def test_a_run_of_a_bench(well, tmp_path):
    save(with_client(well, buffered).run, tmp_path / "run.json")
    result = invoke("doctor", str(tmp_path / "run.json"))
    assert result.exit_code == 1
    assert "1. buffering_proxy" in result.stdout
    assert "only a splittime server" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("doctor", "missing.sqlite"), 2, "neither a URL nor a file"),
        (("doctor", "http://127.0.0.1:9"), 4, "Name another: `splittime doctor http://host:port`"),
        (("explain", "x", "--url", "http://127.0.0.1:9"), 4, "Name another with --url"),
        (("doctor", "--url", "http://127.0.0.1:9"), 4, "Name another: `splittime doctor http://host:port`"),
        (("doctor", "--url", "ftp://127.0.0.1"), 2, "a server is named as in http://127.0.0.1:8000"),
        (("doctor", "a.sqlite", "--url", "http://127.0.0.1:9"), 2, "give a source or --url, one of them"),
        (("doctor", __file__), 2, "neither a ledger file nor a run"),
        (("explain", "http://127.0.0.1:9", "x"), 4, "Name another with --url"),
        (("explain", "http://127.0.0.1:9", "x", "--url", "http://127.0.0.1:9"), 2, "one URL and one REQUEST_ID"),
        (("explain", "x", "y"), 2, "one URL and one REQUEST_ID"),
        (("explain", "http://127.0.0.1:9"), 2, "REQUEST_ID or --slowest"),
        (("explain",), 2, "REQUEST_ID or --slowest"),
        (("explain", "x", "--slowest", "2"), 2, "REQUEST_ID or --slowest"),
    ],
)
def test_what_cannot_be(words, code, told):
    result = invoke(*words)
    assert result.exit_code == code
    assert told in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.fixture
def server(ill):
    """The ledger's routes of a server, over the books."""
    answers = {
        "/ledger/facts": msgspec.to_builtins(ill.facts),
        "/ledger/requests": {"accounts": [account_json(account) for account in ill.accounts]},
        "/ledger/steps": {"steps": [msgspec.to_builtins(step) for step in ill.steps]},
        **{f"/ledger/requests/{account.request_id}": account_json(account) for account in ill.accounts},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            found = answers.get(path) if self.headers.get("Authorization") == "Bearer k" else None
            self.send_response(200 if found is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(found or {"error": {"message": "not here"}}).encode())

        def log_message(self, *args: object) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_address[1]}", answers
    serving.shutdown()
    serving.server_close()


def test_a_live_server(server):
    url, answers = server
    result = invoke("doctor", url, "--api-key", "k")
    assert result.exit_code == 1, result.stderr
    assert "1. slot_bound" in result.stdout
    assert "100 requests" in result.stdout
    assert "A replay of the latest 100 requests" in " ".join(result.stdout.split())
    assert invoke("doctor", "--url", url, "--api-key", "k").stdout == result.stdout
    del answers["/ledger/facts"]  # an older server
    result = invoke("doctor", url, "--api-key", "k")
    assert "1. slot_bound" in result.stdout
    assert "gains not known: too little of the books can be replayed" in " ".join(result.stdout.split())
    result = invoke("doctor", url)  # answers 404, as another's server does
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert f"`splittime bench run {url} --out run.json`, then `splittime doctor run.json`" in told
    answers["/ledger/requests"] = {"odd": 1}
    assert "splittime bench run" in invoke("doctor", url, "--api-key", "k").stderr


def test_the_slowest_of_a_server(server, ill):
    url, _ = server
    result = invoke("explain", "--slowest", "2", "--url", url, "--api-key", "k")
    assert invoke("explain", url, "--slowest", "2", "--api-key", "k").stdout == result.stdout  # as doctor and bench
    assert result.exit_code == 0, result.stderr
    slowest = sorted(ill.accounts, key=derive.e2e_ns)[-2:]
    assert all(account.request_id in result.stdout for account in slowest)
    assert result.stdout.count("Against the median of") == 2
    assert "longer in queue (batch_slots)" in " ".join(result.stdout.split())


def test_explain_compares_in_json(ill, tmp_path):
    path = ledger_file(ill, tmp_path / "l.sqlite")
    answer = json.loads(invoke("explain", "--slowest", "1", "--ledger", str(path), "--json").stdout)
    compared = answer["against_median"][0]
    assert compared["request_id"] == answer["accounts"][0]["request_id"]
    assert compared["differences"][0]["stage"] == "queue"
    assert compared["differences"][0]["blamed"]


def test_it_says_which_key_waited_for_which(tmp_path):
    books = Ward(settings={"max_num_seqs": 1}).run(*poisson(20, 40, output=20))
    keyed = [msgspec.structs.replace(a, tenant=f"team-{n % 2}") for n, a in enumerate(books.accounts)]
    path = ledger_file(msgspec.structs.replace(books, accounts=tuple(keyed)), tmp_path / "keyed.sqlite")
    assert "requests of team-0 waited for those of team-1" in invoke("doctor", str(path), "--no-sizes").stdout
    told = json.loads(invoke("doctor", str(path), "--no-sizes", "--json").stdout)
    assert {(wait["waited"], wait["had_it"]) for wait in told["waits"]} == {("team-0", "team-1"), ("team-1", "team-0")}


OPEN = {
    "server": {"open_requests": 171, "predicted_wait_ms": 859_000.0},
    "engine": msgspec.to_builtins(EngineStats(now_ns=0, num_running=64)),
}


@pytest.mark.parametrize(
    ("waiting_for", "told", "not_told"),
    [
        (
            {"token_budget": 7, "batch_slots": 100},
            "\nStill open: 171. Running: 64. Waiting for: 100 batch_slots, 7 token_budget. One more would wait about"
            " 859.0 s. More came than is computed at once. If this grows, send fewer a second or add a server. Ask"
            " again when they have ended.\n",
            "not what is looked for",
        ),
        ({}, "\nStill open: 171. Running: 64. Ask again when they have ended.\n", "More came"),
        (
            {"grammar": 1},
            "\nStill open: 171. Running: 64. Waiting for: 1 grammar. One more would wait about 859.0 s. Ask again when"
            " they have ended.\n",
            "More came",
        ),
        (
            {"paused": 3},
            "\nStill open: 171. Running: 64. Waiting for: 3 paused. One more would wait about 859.0 s. The engine is"
            " paused.\n",
            "Ask again",
        ),
    ],
)
def test_what_has_not_ended_is_told_with_what_it_waits_for(server, waiting_for, told, not_told):
    """A server that is overloaded at once has ended few requests when one asks, and no rule reads the others."""
    url, answers = server
    answers["/ledger/requests"] = {"accounts": answers["/ledger/requests"]["accounts"][:3]}
    answers["/stats"] = {**OPEN, "engine": {**OPEN["engine"], "waiting_for": waiting_for}}
    result = invoke("doctor", url, "--api-key", "k")
    assert result.exit_code == 3, result.stderr
    shown = result.stdout.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n")
    assert told.strip() in shown
    assert not_told not in shown
    stated = json.loads(invoke("doctor", url, "--api-key", "k", "--json").stdout)["still_open"]
    assert stated == {
        "open_requests": 171, "num_running": 64, "waiting_for": waiting_for, "predicted_wait_ms": 859_000.0
    }  # fmt: skip


@pytest.mark.parametrize("stats", [None, {"upstreams": []}, {"server": OPEN["server"], "engine": None}])
def test_nothing_is_said_of_open_requests_where_none_are_or_nobody_tells(server, stats):
    url, answers = server
    if stats is not None:
        answers["/stats"] = stats
    shown = invoke("doctor", url, "--api-key", "k", "--no-sizes").stdout
    assert "1. slot_bound" in shown
    assert "Still open" not in shown
    answers["/stats"] = {"server": {"open_requests": 0}, "engine": {"num_running": 0, "waiting_for": {}}}
    result = invoke("doctor", url, "--api-key", "k", "--no-sizes")
    assert result.exit_code == 1, result.stderr
    assert "Still open" not in result.stdout
