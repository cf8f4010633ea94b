"""What the simulator says of runs of vLLM that it has not seen, beside what they did. Over HTTP, vLLM with our books.

    python -m benchmarks.scenarios.vllm_forecast --vllm FOLDER [--rounds 3] [--seconds 40] [--only CELL ...] [--json]

FOLDER is the environment that vLLM and splittime are installed in; there `splittime simulate` runs, with vLLM's own
scheduler under a virtual clock. A cell has two servers: one as it is, and one with a change of vLLM's flags, with more
load, or with nothing changed. Both are up, and the same requests (10 a second, the load of `forecast`) go to one and
then the other, some seconds at a time: a virtual machine's pace changes within minutes, and so both have the same of
it. The first server's ledger is replayed with its own step times, and from it alone the second's figures are predicted.
Errors and cover are those of `forecast`. About 100 s a cell.
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scenarios.forecast import TOLD, file_and_tell, load
from benchmarks.server_process import served_vllm
from splittime.assemble import model_source
from splittime.simulate.figures import figures
from splittime.simulate.recorded import read_ledger

BASE = {"--max-model-len": 1024, "--max-num-seqs": 8}
WARM_UP = 10  # requests
TURNS = 5  # that each server of a cell has
TIMES = tuple(name for name in TOLD if name.endswith(("p50", "p99")))  # a server's tokens/s count its rests too


class Cell(NamedTuple):
    """A change: as `splittime simulate` is told of it, as vLLM is, and how many times the load."""

    asked: tuple[str, ...] = ()
    flags: tuple[tuple[str, int], ...] = ()
    speed: float = 1.0


CELLS = {
    "the same again": Cell(),
    "max_num_seqs 3": Cell(("--max-num-seqs", "3"), (("--max-num-seqs", 3),)),
    "max_num_batched_tokens 64": Cell(("--max-num-batched-tokens", "64"), (("--max-num-batched-tokens", 64),)),
    "num_blocks 10": Cell(("--num-blocks", "10"), (("--num-gpu-blocks-override", 11),)),  # one is the null block
    "1.3 times the load": Cell(("--speed", "1.3"), speed=1.3),
}


class Sizes(NamedTuple):
    """seconds, per_s: of each run, and of its requests. flags: of each server."""

    seconds: float
    per_s: float
    draws: int
    flags: tuple[str, ...]


class Vllm(NamedTuple):
    environment: str
    model: str

    def run(self, cell: Cell, sizes: Sizes, seed: int, recorded: Path, measured: Path) -> None:
        """Writes the ledgers of a server as it is and of one with this change, asked by turns."""
        with self._served({}, sizes, recorded) as url, self._served(dict(cell.flags), sizes, measured) as changed:
            for each in (url, changed):
                asyncio.run(load(each, WARM_UP, sizes.per_s, seed=99))
            count = round(sizes.seconds * sizes.per_s / TURNS)
            for turn in range(TURNS):
                speeds = [(url, 1.0), (changed, cell.speed)]
                for each, speed in speeds if turn % 2 == 0 else reversed(speeds):
                    asyncio.run(load(each, count, sizes.per_s * speed, TURNS * seed + turn))

    def _served(self, changed: dict[str, int], sizes: Sizes, path: Path) -> AbstractContextManager[str]:
        flags = [f"{name}={value}" for name, value in (BASE | changed).items()]
        return served_vllm(self.environment, self.model, *flags, *sizes.flags, ledger_file=str(path))

    def simulate(self, path: Path, *flags: str) -> dict[str, Any] | str:
        """Returns what `splittime simulate` answers, or why it refuses."""
        command = [f"{self.environment}/bin/python", "-m", "splittime.cli.main", "simulate", str(path), "--json"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
        if not done.stdout:
            return next(line for line in done.stderr.splitlines() if line.startswith("error:"))
        return json.loads(done.stdout)


def forecast(vllm: Vllm, sizes: Sizes, names: list[str], seed: int) -> dict[str, Any]:
    """One round: for each change and figure what was recorded, predicted and measured."""
    cells: dict[str, Any] = {}
    refused: dict[str, str] = {}
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            recorded, measured = (Path(folder) / f"{number}-{side}.sqlite" for side in ("recorded", "measured"))
            vllm.run(CELLS[name], sizes, seed, recorded, measured)
            checks.append(decisions(vllm.simulate(recorded, "--check")))
            predicted = vllm.simulate(recorded, "--draws", str(sizes.draws), *CELLS[name].asked)
            if isinstance(predicted, str):
                refused[name] = predicted
                continue
            books = read_ledger(measured)
            cells[name] = cell_of(predicted, figures(books.accounts, books.steps))
    return {**all_of(checks), "refused": refused, "cells": cells}


def all_of(checks: list[dict[str, Any]]) -> dict[str, Any]:
    counted = {name: sum(check[name] for check in checks) for name in ("steps", "same_decisions")}
    troubles = [check["not_replayed"] for check in checks if "not_replayed" in check]
    return {**counted, **({"not_replayed": troubles} if troubles else {})}


def decisions(check: dict[str, Any] | str) -> dict[str, Any]:
    """Returns how many steps there were, and of how many every decision was the same."""
    if isinstance(check, str):
        return {"steps": 0, "same_decisions": 0, "not_replayed": check}
    divergence = check["divergence"]
    return {
        "steps": check["steps"],
        "same_decisions": check["steps"] if divergence is None else divergence["step_id"] - 1,
    }


def cell_of(predicted: dict[str, Any], measured: dict[str, float]) -> dict[str, Any]:
    found = {figure["name"]: figure for figure in predicted["figures"]}
    return {
        told: {
            "recorded": found[told]["recorded"],
            "predicted": found[told]["after"],
            "low": found[told]["after_low"],
            "high": found[told]["after_high"],
            "measured": measured[told],
        }
        for told in TIMES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="FOLDER", help="the environment of vLLM and splittime")
    parser.add_argument("--model", default=str(model_source.locate(None)), help="its folder; default: the packaged one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="vLLM's --enforce-eager: its servers start sooner")
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="CELL")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    flags = ("--enforce-eager",) if arguments.eager else ()
    sizes = Sizes(arguments.seconds, arguments.rate, arguments.draws, flags)
    vllm = Vllm(arguments.vllm, arguments.model)
    rounds = [forecast(vllm, sizes, arguments.only, seed) for seed in range(arguments.rounds)]
    file_and_tell("vllm_forecast", rounds, arguments)


if __name__ == "__main__":
    main()
