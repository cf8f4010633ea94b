"""Each benchmark that BENCHMARKS.md, its pages or the Makefile name runs to its end, small; or says here why it cannot.

The names are read from those files, so a new one without an entry here fails. What needs a card is run by tests/gpu.
"""

import csv
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutation import PARTS

ROOT = Path(__file__).parents[2]
PACKAGED = str(ROOT / "src" / "splittime" / "packaged" / "code")
NAMED_WHOLE = re.compile(r"\bbenchmarks\.([a-z_]+(?:\.[a-z_]+)*)")
NAMED_SHORT = re.compile(r"`\.([a-z_]+)\b")  # after a whole name of the same package

WITH_TORCH = {
    "micro.plan_commit": ["--small"],
    "micro.ledger_cost": ["--repeats", "1"],
    "micro.model_step": ["--layers", "0", "--steps", "2"],
    "micro.host_overhead": ["--batches", "1"],
    "micro.load": ["--model", PACKAGED, "--quantization", "int8", "--rounds", "1"],
    "micro.speculation_step": ["--batches", "1", "2", "--steps", "128", "--group", "16"],
    "micro.long_context": ["--model", PACKAGED, "--context", "64", "--rounds", "2"],
    "scenarios.routes": ["--windows", "2"],
    "scenarios.ledger_price": ["--repeats", "2"],
    "scenarios.mechanisms": ["--small", "--repeats", "1"],
    "scenarios.lora": ["--adapters", "2", "--rank", "2", "--batch", "2", "--repeats", "1", "--steps", "2"],
    "scenarios.interval_coverage": ["--small"],
    "scenarios.quality_gate": ["--tokens", "600", "--only", "two halves of a short text"],
    "scenarios.quality_windows": ["--documents", "3"],
    "scenarios.quantize_quality": ["--documents", "2", "--length", "40", "--arm", "int8 rtn"],
    "scenarios.schemes": ["--tokens", "600", "--repeats", "1", "--steps", "2", "--speed-only"],
    "gpu.goals": ["RESULTS"],
}
ALONE = {
    "by_turns": [".", ".", "--rounds", "1", "--", "-m", "benchmarks.micro.plan_commit", "--small", "--json"],
    "house": ["--walk"],
    "gateway.overhead": ["--small"],
    "gateway.failover": ["--small"],
    "gateway.affinity": ["--small"],
    "gateway.overload": ["--small"],
    "gateway.routing": ["--small"],
    "cluster.events": ["--small", "--only", "kill-replica"],
    "cluster.ways_in": ["--small", "--replicas", "1"],
    "scenarios.http_edges": ["--small"],
    "scenarios.kv_handover": ["--small"],
    "scenarios.forecast": ["--small"],
    "scenarios.wait_forecast": ["--small"],
    "scenarios.plan_check": ["--small"],
    "scenarios.speculation": ["--small"],
    "scenarios.embeddings": ["--small"],
    "scenarios.forms": ["--small"],
    "scenarios.tune_sick": ["--small", "--only", "healthy"],
    "micro.simulator_speed": ["--small"],
    "scenarios.azure_replay": ["--trace", "TRACE", "--seconds", "2"],
    "scenarios.bench_golden": ["--seconds", "0.5", "--repeats", "1"],
    "scenarios.both_books": ["--requests", "30"],
    "scenarios.kv_use": ["--trace", "TRACE", "--seconds", "2"],
    "mutants": ["--list"],
    "scenarios.innocents": ["--small", "--only", "disconnects", "black-hole-empty"],
    "scenarios.storm": ["--small"],
    "scenarios.overload": ["--seconds", "1", "--tokens", "8", "--no-file"],
    "peers.speculation": ["--folder", "PEERS", "--small"],  # of an empty folder, so ours alone
}
MOST_S = 300  # of one benchmark
ENDS_WITH = {"gpu.goals": 3}  # as it must, where no card has run the rest
WHY_NOT = {
    "scenarios.foreign_servers": "needs other people's servers, installed in a folder",
    "scenarios.vllm_books": "needs vLLM, installed in a folder",
    "scenarios.vllm_doctor": "needs vLLM, installed in a folder",
    "scenarios.vllm_forecast": "needs vLLM, installed in a folder",
    "scenarios.vllm_price": "needs vLLM, installed in a folder",
    "scenarios.templates": "needs a folder of chat templates; tests/text has small ones",
    "scenarios.doctor": "makes each illness for half a minute; tests/diagnose holds its rules",
    "scenarios.quantize_memory": "measures the memory of a model of 0.6B or more; tests/lab/quantize has small ones",
    "scenarios.reversals": "is run by tests/gpu, on a card or small",
    "gpu.parity": "is run by tests/gpu, on a card or small",
    "plots": "draws the figures of a whole azure_replay",
    **dict.fromkeys(
        ("peers.make_models", "peers.convert", "peers.run", "peers.http_load", "peers.show"),
        "needs other people's engines and 30 GB",
    ),
}


def named() -> set[str]:
    found: set[str] = set()
    pages = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
    for path in (*pages, ROOT / "BENCHMARKS.md", ROOT / "Makefile", ROOT / "README.md"):
        for line in path.read_text().splitlines():
            whole = [name for name in NAMED_WHOLE.findall(line) if (ROOT / "benchmarks" / _file(name)).exists()]
            found |= set(whole)
            if whole:
                package = whole[-1].rpartition(".")[0]
                found |= {f"{package}.{name}" for name in NAMED_SHORT.findall(line)}
    return found


def _file(name: str) -> str:
    """Of a module or a package with a `__main__`; `peers.x` in prose may be neither."""
    path = name.replace(".", "/")
    return f"{path}.py" if (ROOT / "benchmarks" / f"{path}.py").exists() else f"{path}/__main__.py"


def test_every_name_has_an_entry_and_every_entry_a_name():
    entries = [*WITH_TORCH, *ALONE, *WHY_NOT]
    assert len(entries) == len(set(entries))
    assert set(entries) == named()


@pytest.mark.parametrize("part", PARTS)
def test_what_is_mutated_and_its_tests_are_there(part: str):
    places, tests = PARTS[part]
    assert all((ROOT / "src" / "splittime" / place).exists() for place in places.split())
    assert all((ROOT / "tests" / folder).is_dir() for folder in tests.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("benchmarks")
    with gzip.open(made / "trace.csv.gz", "wt") as file:
        rows = csv.writer(file)
        rows.writerow(["arrival_s", "input_tokens", "output_tokens"])
        rows.writerows([[0.1 * i, 20 + i, 4] for i in range(10)])
    (made / "results").mkdir()
    return made


def run(folder: Path, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    results, places = str(folder / "results"), {"TRACE": f"{folder}/trace.csv.gz", "PEERS": f"{folder}/peers"}
    settings = {"BENCHMARK_RESULTS": results, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *(places.get(part, part) for part in command)],
        cwd=ROOT,
        env={**os.environ, **settings},
        input=stdin.replace('"RESULTS"', json.dumps(results)),
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )


@pytest.fixture(scope="module")
def endings(folder) -> dict[str, int | str]:
    wanted = json.dumps([[f"benchmarks.{name}", arguments] for name, arguments in WITH_TORCH.items()])
    done = run(folder, str(Path(__file__).with_name("one_after_another.py")), stdin=wanted)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", WITH_TORCH)
@pytest.mark.sweep
@pytest.mark.timeout(MOST_S + 30)  # the first waits for all of them
def test_it_runs_to_its_end(name, endings):
    assert endings[f"benchmarks.{name}"] == ENDS_WITH.get(name, 0)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.sweep
@pytest.mark.timeout(MOST_S + 30)
def test_it_runs_to_its_end_with_processes_of_its_own(name, folder):
    done = run(folder, "-m", f"benchmarks.{name}", *ALONE[name])
    assert done.returncode == 0, done.stderr[-3000:]
