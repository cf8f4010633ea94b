"""`splittime plan`: a worksheet with its formulas, files, and errors that say what can be had."""

import io
import json
import time
from pathlib import Path

import msgspec
import pytest
from known_replicas import ONE_AT_A_TIME, REPLICA, unsure
from typer.testing import CliRunner, Result

import splittime
from splittime.cli import kept
from splittime.cli.main import app
from splittime.core.facts import Machine
from splittime.core.this_process import num_cores
from splittime.ledger.facts import ServerFacts
from splittime.plan.kept import keep
from splittime.plan.load import requests_for
from splittime.runner.machine import cpu_name
from splittime.simulate.change import Change
from splittime.simulate.recorded import written_ledger
from splittime.simulate.replica import Replica, save_replica

LOAD = ("--duration", "3s", "--input-tokens", "16", "--output-tokens", "1")
SLO = ("--slo", "ttft_mean=20ms")
MODEL = Path(splittime.__file__).parent / "packaged" / "code"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas") / "one.json"
    save_replica(unsure(ONE_AT_A_TIME), path)
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_each_figure_is_told_with_its_formula(replica: Path) -> None:
    result = invoke(replica, *SLO, *LOAD, "--rate", 300, "--price", 2, "--draws", 2)
    assert result.exit_code == 0, result.output
    assert "highest rate" in result.stdout
    assert "300 requests/s / highest rate" in " ".join(result.stdout.split())
    assert "a million output tokens" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert "an open loop" in result.stderr


def test_a_ledger_is_planned_with_its_own_mix(tmp_path: Path) -> None:
    lengths = {"input_tokens": "130", "output_tokens": "3"}
    requests = requests_for({"rate": 20.0, "duration_s": 4.0, "seed": 3, **lengths}, REPLICA)
    with written_ledger(REPLICA.facts, tmp_path / "run.sqlite") as ledger:
        REPLICA.run_each(requests, Change(), 0, ledger.add_account, ledger.add_step)
    plan = invoke(tmp_path / "run.sqlite", "--slo", "ttft_mean=12ms", "--duration", "1s", "--draws", 1, "--json")
    first = json.loads(plan.stdout)["plans"][0]["lines"][0]
    assert first["formula"].endswith(
        f"; 130 + 3 tokens a request in the mean, as the {len(requests)} requests that it served"
    )


def test_servers_stand_side_by_side(replica: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("side")
    other = folder / "other.json"
    other.write_bytes(replica.read_bytes())
    page, table = folder / "plan.html", folder / "plan.csv"
    result = invoke(replica, other, *SLO, *LOAD, "--draws", 1, "--json", "--out", page, "--csv", table)
    plans = json.loads(result.stdout)["plans"]
    assert [plan["label"] for plan in plans] == ["one.json", "other.json"]
    assert plans[0]["lines"] == plans[1]["lines"]
    assert "<svg" in page.read_text()
    assert table.read_text().startswith("server,source,name,value")


def test_a_device_is_planned_from_its_data_sheet() -> None:
    flags = ("--device", "L40S", "--model-config", MODEL, "--slo", "ttft_p99=100ms", "--draws", 1)
    load = ("--duration", "500ms", "--input-tokens", "32", "--output-tokens", "32")
    result = invoke(*flags, *load, "--max-num-seqs", 4, "--json")
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["source"].startswith("a data sheet, nothing measured (NVIDIA L40S")
    assert plan["capacity"]["rate"][1] > 100
    assert "decode floor" in {line["name"] for line in plan["lines"]}
    (kv,) = (line for line in plan["lines"] if line["name"] == "KV bytes of a token")
    said = json.loads((MODEL / "config.json").read_text())
    layers, heads = said["num_hidden_layers"], said["num_key_value_heads"]
    assert f"2 x ({layers} layers x {heads} KV heads x " in kv["formula"]
    assert kv["formula"].endswith(f" x {kv['value'] // (2 * layers * heads * _head_size(said))} bytes of a number")


def _head_size(config: dict[str, int]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def test_a_source_that_is_named_twice_is_two_servers(replica: Path) -> None:
    result = invoke(replica, replica, *SLO, *LOAD, "--price", 1, "--price", 2, "--draws", 1, "--json")
    plans = json.loads(result.stdout)["plans"]
    assert [plan["label"] for plan in plans] == ["one.json", "one.json 2"]
    first, second = ({line["name"]: line["value"] for line in plan["lines"]} for plan in plans)
    assert second["a million input tokens"] == pytest.approx(2 * first["a million input tokens"])


def test_limits_of_each_request_have_a_page(replica: Path, tmp_path: Path) -> None:
    result = invoke(replica, "--slo", "ttft=40ms,goodput=90%", *LOAD, "--draws", 1, "--out", tmp_path / "plan.html")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("width", [80, 120])
def test_the_answer_comes_first_and_fits_the_terminal(replica: Path, width: int) -> None:
    from rich.console import Console

    from splittime.cli.plan import _alone
    from splittime.plan.worksheet import Sheet

    words = (replica, *SLO, *LOAD, "--rate", 300, "--price", 2, "--draws", 1, "--json")
    (plan,) = json.loads(invoke(*words).stdout)["plans"]
    out = io.StringIO()
    Console(file=out, width=width).print(_alone(msgspec.convert(plan, Sheet)))
    told = out.getvalue()
    assert all(len(line) <= width for line in told.splitlines())
    assert "…" not in told
    assert told.index("highest rate") < told.index("servers") < told.index("knee")


def test_a_trace_with_its_own_times_says_the_peak(replica: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5 * number, "input_length": 16, "output_length": 1} for number in range(301)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke(replica, *SLO, "--trace", trace, "--draws", 1)
    assert result.exit_code == 0, result.output
    assert "200 requests/s / highest rate" in " ".join(result.stdout.split())


def test_without_a_peak_tokens_have_a_price_at_the_highest_rate(replica: Path) -> None:
    result = invoke(replica, *SLO, *LOAD, "--price", 2, "--draws", 1, "--json")
    lines = {line["name"]: line["value"] for line in json.loads(result.stdout)["plans"][0]["lines"]}
    paid = sum(lines[f"a million {kind} tokens"] * tokens for kind, tokens in (("input", 16), ("output", 1)))
    assert paid * lines["highest rate"] * 3600 / 1e6 == pytest.approx(2)
    assert "servers" not in lines
    assert "give the load's --rate" in result.stderr or "give the load's --rate" in result.stdout


def test_a_device_takes_prompts_as_long_as_the_model_does(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = ("--duration", "50ms", "--input-tokens", "2100", "--output-tokens", "1")
    flags = ("--device", "L40S", "--model-config", tmp_path, "--slo", "ttft_p99=500ms", "--draws", 1)
    result = invoke(*flags, *load, "--json")
    assert result.exit_code == 0, result.output
    short = invoke(*flags, *load, "--num-blocks", 100)
    assert "the model holds 1600" in short.stderr


@pytest.mark.parametrize(("name", "words"), [("cpu", "measured now"), ("slow:256:2:0.01", "given by the user")])
def test_a_processor_is_planned_as_measured_here_or_from_figures(name: str, words: str) -> None:
    flags = ("--device", name, "--model-config", MODEL, "--slo", "ttft_p99=500ms", "--draws", 1)
    load = ("--duration", "500ms", "--input-tokens", "32", "--output-tokens", "32", "--max-num-seqs", 2)
    result = invoke(*flags, *load, "--num-blocks", 512, "--json")
    assert result.exit_code == 0, result.output
    assert words in json.loads(result.stdout)["plans"][0]["source"]


def test_another_setting_is_another_plan(replica: Path) -> None:
    rates = {
        count: json.loads(invoke(replica, *SLO, *LOAD, "--max-num-seqs", count, "--draws", 1, "--json").stdout)
        for count in (1, 4)
    }
    one, four = (rates[count]["plans"][0]["capacity"]["rate"][1] for count in (1, 4))
    assert four > 2 * one


def test_an_slo_that_cannot_be_kept_says_what_can(replica: Path) -> None:
    result = invoke(replica, "--slo", "ttft_p50=1ms", *LOAD, "--draws", 1)
    assert result.exit_code == 1
    assert "no rate keeps the SLO" in result.stderr
    assert "ttft_p50 from the intended start is 10" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.sqlite", *SLO), "there is no file none.sqlite"),
        (("--device", "H100", *SLO), "Give --model-config"),
        (("--device", "H101", "--model-config", "{model}", *SLO), "no data sheet of 'H101' is known"),
        (("{replica}", *SLO, "--price", "1", "--price", "2"), "2 prices for 1 server"),
        (("{replica}", "--slo", "speed=3"), "speed"),
        (("{replica}", "--slo", "p99_ttft=2s"), "did you mean 'ttft_p99'?"),
        (("{replica}", *SLO, "--out", "{replica}"), "is there already, and is no former plan"),
        (("http://127.0.0.1:9", *SLO), "hint: Is the server running there?"),
        (("{replica}", *SLO, "--start-up", "soon"), "is no time"),
        (("{replica}", *SLO, "--growth", "2"), "growth says nothing without a peak rate"),
        (("{replica}", *SLO, "--model-config", "{model}"), "--model-config is for --device"),
        (("{replica}", *SLO, "--precision", "fp8"), "--precision is for --device"),
        (("{replica}", *SLO, "--turns", "3"), "No such option"),
        (("none.sqlite", *SLO, "--out", "/dev/full"), "cannot write /dev/full"),  # before anything is read
        (("none.sqlite", *SLO, "--csv", "/dev/full"), "cannot write /dev/full"),
    ],
)
def test_what_cannot_be_is_refused(replica: Path, arguments: tuple[str, ...], words: str) -> None:
    paths = {"{replica}": str(replica), "{model}": str(MODEL)}
    result = invoke(*(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code != 0
    assert words in " ".join(result.stderr.split())


def test_without_a_source_it_is_the_calibration_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = (*SLO, *LOAD, "--rate", 300, "--draws", 1, "--json")
    nothing = invoke(*words)
    assert nothing.exit_code == 2
    assert "splittime calibrate" in nothing.stderr
    kept = tmp_path / "splittime" / "replicas" / "one.json"
    kept.parent.mkdir(parents=True)
    save_replica(of_machine("another", 2), kept)
    other = invoke(*words)
    assert other.exit_code == 2
    assert "of another machine than this one" in " ".join(other.stderr.split())
    save_replica(of_machine(cpu_name(), num_cores()), kept)
    taken = invoke(*words)
    assert taken.exit_code == 0, taken.output
    assert json.loads(taken.stdout)["plans"][0]["label"] == "one.json"
    assert "less than a minute old" in " ".join(taken.stderr.split())


def test_a_url_is_the_calibration_of_that_server_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    settings = {"max_num_seqs": 4, "num_blocks": 4096, "max_num_batched_tokens": 64}
    facts = ServerFacts(version="1", model="small", max_model_len=1024, settings=settings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "get_json", lambda url, key: asked.append(url) or msgspec.to_builtins(facts))
    keep(ONE_AT_A_TIME, facts)
    page = tmp_path / "plan.html"
    words = (*SLO, *LOAD, "--draws", 1, "--json")
    result = invoke("http://127.0.0.1:1/v1/", *words, "--out", page)
    assert result.exit_code == 0, result.output
    assert asked == ["http://127.0.0.1:1/ledger/facts"]
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["label"] == "http://127.0.0.1:1/v1/"
    assert f"16 + 1 tokens, duration_s 3.0; made {time.strftime('%Y-')}" in page.read_text()
    assert any("max_num_seqs 4," in note for note in plan["notes"])
    assert "max_num_seqs 2," in " ".join(invoke("http://127.0.0.1:1", *words, "--max-num-seqs", 2).stdout.split())


def of_machine(cpu: str, cores: int) -> Replica:
    costs = msgspec.structs.replace(ONE_AT_A_TIME.costs, about={"model": "small", "version": splittime.__version__})
    return msgspec.structs.replace(ONE_AT_A_TIME, costs=costs, machine=Machine(cpu=cpu, threads=1, cores=cores))
