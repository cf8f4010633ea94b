"""`splittime calibrate` on a real server of the packaged model, in a few seconds."""

import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request

import msgspec
import pytest
from rich.console import Console

from splittime.assemble import model_source
from splittime.cli.calibrate import _table
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.plan.kept import KindOfSteps, kept_for
from splittime.simulate.replica import load_replica

pytestmark = pytest.mark.timeout(600)  # processes of its own, on a busy machine

try:
    model_source.locate(None)
except ConfigError:
    pytest.skip("no packaged model yet", allow_module_level=True)

SLOTS = 4


def called(*words: str, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "splittime.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ)


@pytest.fixture(scope="module")
def url():
    flags = ["--max-num-seqs", str(SLOTS), "--kv-cache-memory-bytes", "16MiB", "--max-model-len", "512"]
    command = [sys.executable, "-m", "splittime.cli.main", "serve", *flags, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, process.stderr.read()
    yield json.loads(line)["url"]
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def calibrated(url, tmp_path_factory):
    home = tmp_path_factory.mktemp("cache")
    out = home / "replica.json"
    done = called("calibrate", "--url", url, "--seconds", "5", "--out", str(out), "--json", XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr
    return home, out, json.loads(done.stdout)


@pytest.mark.slow
def test_its_steps_are_of_every_kind_that_the_settings_allow(calibrated):
    _, out, told = calibrated
    replica = load_replica(out)
    assert replica.config.max_num_seqs == SLOTS
    rows, tokens, decode_rows, kv_tokens, pairs, _ = replica.costs.most
    assert rows == decode_rows == SLOTS
    assert tokens > 100
    assert kv_tokens > 256
    assert pairs > 100 * 100 / 2
    assert replica.costs.num_steps == told["num_steps"] > 200
    assert "calibration" in replica.source
    assert replica.mix is None, "its own stairs are nobody's requests"


def test_its_table_fits_80_columns_and_cuts_no_figure_off():
    kinds = ["decode, up to 1", "prompts, up to 16384", "all"]
    errors = [KindOfSteps(kind, 1_234_567, 1_234_000_000, 12.345, -12.345, 0.123) for kind in kinds]
    out = io.StringIO()
    Console(file=out, width=80).print(_table(errors))
    assert "…" not in out.getvalue()
    assert out.getvalue().count("1,234,567") == len(kinds)


@pytest.mark.slow
def test_it_tells_its_errors_by_kind_of_step(calibrated):
    told = calibrated[2]
    kinds = [error["kind"] for error in told["errors"]]
    assert kinds[0] == "decode, up to 1"
    assert kinds[-1] == "all"
    assert any(kind.startswith("prompts") for kind in kinds)
    assert 0 < told["errors"][-1]["median_relative"] < 3
    assert told["others_share"] == 0


@pytest.mark.slow
def test_it_is_kept_for_this_server_and_no_other(calibrated, url):
    home, out, told = calibrated
    with urllib.request.urlopen(f"{url}/ledger/facts") as answer:
        facts = msgspec.json.decode(answer.read(), type=ServerFacts)
    folder = home / "splittime" / "replicas"
    assert kept_for(facts, folder).replica == load_replica(out)
    assert str(next(folder.iterdir())) in told["files"]
    other = msgspec.structs.replace(facts, settings=facts.settings | {"num_threads": 99})
    assert kept_for(other, folder) is None
    knob = msgspec.structs.replace(facts, settings=facts.settings | {"max_num_seqs": 2})
    assert kept_for(knob, folder) is not None


@pytest.mark.slow
def test_plans_and_simulations_take_it_and_say_so(calibrated, url):
    home = calibrated[0]
    load = ("--rate", "20", "--input-tokens", "16", "--output-tokens", "4", "--draws", "2", "--duration", "3s")
    for source in ((), (url,)):
        done = called("simulate", *source, *load, "--max-num-seqs", "2", XDG_CACHE_HOME=str(home))
        assert done.returncode == 0, done.stderr
        assert "taken: the calibration of" in done.stderr
        assert "first token p50" in done.stdout
    done = called("plan", url, *load, "--slo", "ttft_p99=60s", XDG_CACHE_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "minute old" in " ".join(done.stderr.split())
    nothing = called("plan", url, *load, "--slo", "ttft_p99=60s", XDG_CACHE_HOME=str(home / "empty"))
    assert nothing.returncode == 2
    assert "no calibration of this server is kept here" in nothing.stderr


class Foreign(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


def test_another_server_is_told_apart_with_the_way_out():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    done = called("calibrate", "--url", url)
    server.shutdown()
    assert done.returncode == 2
    assert f"no splittime server: {url}/ledger/facts answered 404" in done.stderr
    assert "splittime bench run" in done.stderr


def test_a_model_is_started_for_it_and_ended_after(tmp_path):
    words = ["--max-num-seqs", "2", "--kv-cache-memory-bytes", "8MiB", "--max-model-len", "256", "--seconds", "5"]
    done = called("calibrate", *words, "--load-format", "dummy", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not re.search("bug|Error|Traceback|could not", done.stderr)
    assert "decode, up to 2" in done.stdout
    (kept,) = (tmp_path / "splittime" / "replicas").iterdir()
    assert load_replica(kept).config.max_num_seqs == 2
    assert str(kept) in done.stderr.replace("\n", "")


def test_where_nothing_can_be_kept_nothing_is_measured(tmp_path):
    (tmp_path / "splittime").write_text("a file where the folder would be")
    done = called("calibrate", "--url", "http://127.0.0.1:9", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, "cannot write" in done.stderr) == (2, True)


def test_a_server_that_is_up_keeps_its_settings():
    done = called("calibrate", "--url", "http://127.0.0.1:9", "--max-num-seqs", "2")
    assert done.returncode == 2
    assert "has its max_num_seqs already" in done.stderr
