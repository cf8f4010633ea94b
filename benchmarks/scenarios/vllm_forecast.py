"""What the simulator says of runs of vLLM that it has not seen, beside what they did. Over HTTP, vLLM with our books.

    python -m benchmarks.scenarios.vllm_forecast --vllm FOLDER [--rounds 3] [--seconds 40] [--only CELL ...] [--json]

FOLDER is the environment that vLLM and splittime are installed in; there `splittime simulate` runs, with vLLM's own
scheduler under a virtual clock. A round records one run (10 requests a second, the load of `forecast`), replays it
with its own step times, and predicts from its ledger alone what follows: the same settings again, three changes of
vLLM's flags, and more load, each then measured on a server of its own, with the same requests. Errors and cover are
those of `forecast`; a machine whose pace changes from one server to the next is in both. Ten minutes a round.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scenarios.forecast import TOLD, file_and_tell, load
from benchmarks.server_process import served_vllm
from splittime.assemble import model_source
from splittime.simulate.figures import figures
from splittime.simulate.recorded import read_ledger

BASE = {"--max-model-len": 1024, "--max-num-seqs": 8}
WARM_UP = 10  # requests


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

    def run(self, cell: Cell, sizes: Sizes, seed: int, path: Path) -> None:
        """Writes the ledger of a server with this change."""
        flags = [f"{name}={value}" for name, value in (BASE | dict(cell.flags)).items()]
        with served_vllm(self.environment, self.model, *flags, *sizes.flags, ledger_file=str(path)) as url:
            asyncio.run(load(url, WARM_UP, sizes.per_s, seed=99))
            asyncio.run(load(url, int(sizes.seconds * sizes.per_s), sizes.per_s * cell.speed, seed))

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
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "recorded.sqlite"
        vllm.run(Cell(), sizes, seed, recorded)
        check = vllm.simulate(recorded, "--check")
        for number, name in enumerate(names):
            predicted = vllm.simulate(recorded, "--draws", str(sizes.draws), *CELLS[name].asked)
            if isinstance(predicted, str):
                refused[name] = predicted
                continue
            path = Path(folder) / f"{number}.sqlite"
            vllm.run(CELLS[name], sizes, seed, path)
            books = read_ledger(path)
            cells[name] = cell_of(predicted, figures(books.accounts, books.steps))
    return {**decisions(check), "refused": refused, "cells": cells}


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
        for told in TOLD
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
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    flags = ("--enforce-eager",) if arguments.eager else ()
    sizes = Sizes(arguments.seconds, arguments.rate, arguments.draws, flags)
    vllm = Vllm(arguments.vllm, arguments.model)
    rounds = [forecast(vllm, sizes, arguments.only, seed) for seed in range(arguments.rounds)]
    file_and_tell("vllm_forecast", rounds, arguments)


if __name__ == "__main__":
    main()
