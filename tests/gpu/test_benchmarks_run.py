"""Every script of benchmarks/gpu runs to its end in its smallest form, and run.sh asks each for what it has: a mistake
in one shows here, and not on a card that is lent for half an hour. What is timed is not looked at."""

import json
import os
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import tiny_model
import torch

pytest.importorskip("triton")

from benchmarks.gpu import card, figures, parity, reversals
from benchmarks.scenarios.workloads import TINY

pytestmark = pytest.mark.timeout(600)  # the interpreter is slow
ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
ARGUMENTS = {
    "attention": ["--peers"],
    "linear": ["--tokens", "2"],
    "grouped": ["--scheme", "int4"],
    "sampling": ["--rows", "1"],
    "engine": ["--streams", "1"],
    "generate": ["--concurrent", "1", "--arms", "splittime", "generate"],  # the third has a thread of its own: below
    "variants": ["decode", "linear", "experts", "sampling"],
}


READERS = {  # of the figures that `goals` takes from what a script tells
    "engine": (
        figures.decode_share(1, "share_of_floor"),
        figures.idle(1),
        figures.plan_commit(1),
        figures.prompt_share(12),
    ),
    "attention": (figures.beside_peers, figures.attention_prefill(20)),
    "generate": (figures.beside_transformers(1),),
}


def benches() -> list[tuple[str, list[str]]]:
    """Module and arguments of each benchmark in run.sh."""
    lines = [shlex.split(line) for line in RUN.read_text().splitlines() if line.strip().startswith("bench ")]
    return [(words[3], [word for word in words[4:] if "$" not in word]) for words in lines]


SCRIPTS = sorted({module for module, _ in benches()} - {"parity", "reversals"})


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found_by(script: str, arguments: list[str], capsys) -> dict:
    if script == "generate":
        pytest.importorskip("transformers")
    import_module(f"benchmarks.gpu.{script}").main([*arguments, "--tiny", "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.sweep
def test_a_script_runs_to_its_end(script, capsys):
    found = found_by(script, ARGUMENTS.get(script, []), capsys)
    assert found["is_complete"]
    if not torch.cuda.is_available():
        assert "mean nothing" in found["device"]
    module = import_module(f"benchmarks.gpu.{script}")
    assert module.table_of(found).row_count > 0
    assert all(read(found) is not None for read in READERS.get(script, ()))
    assert module.table_of({"is_complete": False}).row_count == 0  # ended before it found anything


@pytest.mark.sweep
def test_beside_continuous_batching_of_transformers():
    """In a process of its own, since its thread is transformers'. What goes wrong inside it is told, not raised."""
    pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    arguments = ["--tiny", "--json", "--concurrent", "1", "--arms", "continuous"]
    command = [sys.executable, "-m", "benchmarks.gpu.generate", *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("transformers' thread did not answer in time")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["concurrent"]["1"]["continuous"]
    ours = ("AttributeError", "TypeError", "NameError", "KeyError", "ImportError")
    assert not found.get("error", "").startswith(ours), found


@pytest.mark.sweep
def test_reversals(reversals_found):
    assert reversals_found["is_complete"]
    found = reversals_found["reversals"]
    assert {"weights", "cache", "batching", "reservation", "chunking", "prefix_cache_90%"} <= set(found)
    told = list(reversals.lines(found))
    assert len(told) == 2 * len(reversals.COUNTS[:2]) + 1 + 4 + 2 + 2 + (1 + len(TINY.budgets)) + 3 * 2
    assert all(cause for *_, cause in told)
    read = [one.read(reversals_found) for one in figures.figures() if one.part.startswith("reversals")]
    assert len(read) == 10
    assert None not in read


@pytest.mark.sweep
def test_small_models_on_the_card_and_off_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parity, "PACKAGED", tiny_model.write(tmp_path))
    found = found_by("parity", [], capsys)
    (model,) = found["models"].values()
    assert all(arm == {"equal": True, "differences": []} for arm in model["float32"]["arms"].values())
    assert model["float32"]["tokens"] == sum(1 for _ in parity.TINY.prompts) * parity.TINY.outputs
    assert 0 < model["bfloat16"]["all"]["kl"] < parity.MAX_KL
    assert model["bfloat16"]["all"]["tokens"] == parity.TINY.text_tokens - 1
    assert model["bfloat16"]["decoded"]["tokens"] == parity.TINY.decoded
    assert parity.table_of(found).row_count == 1
    assert figures.worst_kl(found)[0] == model["bfloat16"]["all"]["kl"]
    assert figures.equal_tokens(found)[0] == 1


def ended_early(options):
    with card.telling(options, attention_table) as found:
        found["first"] = 1
        signal.raise_signal(signal.SIGTERM)
        found["second"] = 2


def test_what_was_found_is_told_though_the_time_is_over(capsys):
    options = card.parse(card.parser(None), ["--tiny", "--json"])
    with pytest.raises(SystemExit) as ended:
        ended_early(options)
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code, told["first"], told["is_complete"]) == (card.ENDED_EARLY, 1, False)
    assert "second" not in told


def attention_table(found):
    return import_module("benchmarks.gpu.attention").table_of(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("script", [*SCRIPTS, "parity", "reversals"])
def test_without_a_card_nothing_is_measured(script):
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.gpu.{script}").main([])
    assert ended.value.code == 2


# ---- run.sh


STAND_IN = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if "benchmarks.gpu.collect" in sys.argv or "benchmarks.gpu.goals" in sys.argv:
    import runpy
    sys.path.insert(0, {root!r})
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__")
elif "-m" in sys.argv:
    print(json.dumps({{"is_complete": True}}))
"""


def commands(folder: Path, *which: str) -> list[list[str]]:
    """What run.sh calls Python with."""
    log, stand_in = folder / "log", folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, log=str(log), root=str(ROOT)))
    stand_in.chmod(0o755)
    subprocess.run(["sh", str(RUN), str(folder / "out"), str(stand_in), *which], cwd=ROOT, check=False, timeout=300)
    return [json.loads(line) for line in log.read_text().splitlines()]


def benchmarks_of(called: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Module and arguments, of the benchmarks alone."""
    found = [(one[1].removeprefix("benchmarks.gpu."), one[2:]) for one in called if one[:1] == ["-m"]]
    return [(module, arguments) for module, arguments in found if module not in ("collect", "goals", "pytest")]


def test_run_sh_asks_for_what_there_is(tmp_path, capsys):
    """The first of its calls runs; of the others the lines are read."""
    called = benchmarks_of(commands(tmp_path, "first"))
    assert [module for module, _ in called][:2] == ["parity", "engine"]
    lines = (tmp_path / "out" / "first.jsonl").read_text().splitlines()
    assert [json.loads(line)["part"] for line in lines][:2] == ["parity", "engine_8b"]
    for module, arguments in called + benches():
        with pytest.raises(SystemExit) as ended:
            import_module(f"benchmarks.gpu.{module}").main([*arguments, "--help"])
        assert ended.value.code == 0, (module, arguments, capsys.readouterr().err)


def test_each_call_of_run_sh_takes_less_than_ten_minutes():
    """By the bounds of its parts; the last may be cut short."""
    calls: dict[str, int] = {}
    for line in RUN.read_text().splitlines():
        words = line.split()
        if words and words[0].startswith("call="):
            call = words[0].removeprefix("call=")
        elif words[:1] in (["bench"], ["part"]) and words[2].isdigit():
            calls[call] = calls.get(call, 0) + int(words[2])
    assert list(calls) == ["first", "second", "third", "fourth"]
    assert all(seconds < 600 for seconds in calls.values()), calls


def test_run_sh_refuses_what_it_does_not_know(tmp_path):
    done = subprocess.run(
        ["sh", str(RUN), str(tmp_path), "python", "fifth"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"fifth" in done.stderr


def test_every_benchmark_is_in_run_sh():
    scripts = {path.stem for path in RUN.parent.glob("*.py") if "\ndef main(" in path.read_text()}
    assert scripts - {"collect", "goals", "pictures"} == {module for module, _ in benches()}
