"""What the simulator says of runs that it has not seen, beside what they did. Over HTTP, the packaged model or another.

    python -m benchmarks.scenarios.forecast [--rounds 3] [--seconds 15] [--small] [--json]
    python -m benchmarks.scenarios.forecast --model FOLDER --quantization int8 --rate 0.6 --seconds 80 --rounds 1

A round has five cells: the same settings again, and four changes of a knob or of the load. In each a run is recorded
(30 requests a second, prompts of 8 to 400 tokens, half of them with a common beginning, answers of 1 to 120 tokens),
the simulator predicts from its ledger alone, and the changed server is run right after it, with the same requests: a
virtual machine's pace changes within minutes. The error of a figure is |predicted / measured - 1|; that of "recorded"
takes the recorded run itself for the prediction: it is what a person would do who expects no change, and for the same
settings it is the machine's own noise. An interval covers if the measured figure lies between the predicted ones of 5
and 95 % of the draws.

A cell is refused, and counted as such, where a drawn future has steps far beyond what the recorded run shows: the model
of steps answers for none of those.

Each recorded run is also replayed step by step with its own times: `same_decisions` counts the steps of which every
decision was the same.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.report import file_result
from benchmarks.server_process import served
from splittime.core.this_process import num_cores
from splittime.ledger.store import open_readonly
from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.figures import figures
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import replay
from splittime.simulate.what_if import predict

SETTINGS = {"max_num_seqs": 16}
CHANGES = {
    "the same again": Change(),
    "max_num_seqs 4": Change({"max_num_seqs": 4}),
    "max_prefill_tokens 32": Change({"max_prefill_tokens": 32}),
    "shortest_prefill": Change({"policy": "shortest_prefill"}),
    "1.3 times the load": Change(speed=1.3),
}
TOLD = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50", "e2e_ms_p99", "output_tokens_per_s")
COMMON = "def read_json(path):\n    return json.load(open(path))\n" * 6
MIN_WARM_UP = 3  # requests


class Sizes(NamedTuple):
    """flags: of the server. seconds, per_s: of each run, and of its requests. draws: of each prediction."""

    flags: tuple[str, ...]
    seconds: float
    per_s: float
    draws: int


async def load(url: str, count: int, per_s: float, seed: int) -> None:
    """Send the same requests for the same seed, at so many a second in the mean, whatever becomes of them."""
    rng, tasks = random.Random(seed), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        due_s, begin_s = 0.0, time.monotonic()
        for number in range(count):
            prompt = (COMMON if rng.random() < 0.5 else "") + f"x = {number}\n" * rng.choice((1, 6, 25, 65))
            body = {"prompt": prompt, "max_tokens": rng.choice((1, 8, 40, 120)), "stream": True, "ignore_eos": True}
            due_s += rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
            tasks.append(asyncio.create_task(read(session, f"{url}/v1/completions", body)))
        await asyncio.gather(*tasks)


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


def run(change: Change, sizes: Sizes, seed: int) -> Recorded:
    """Returns the ledger of a server with this change."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **change.settings}.items()]
        per_s = sizes.per_s * change.speed
        with served("--ledger-file", str(path), *sizes.flags, *flags) as url:
            asyncio.run(load(url, max(MIN_WARM_UP, int(sizes.per_s)), per_s, seed=99))
            asyncio.run(load(url, int(sizes.seconds * sizes.per_s), per_s, seed))
        file = open_readonly(path)
        facts = file.facts()
        assert facts is not None
        return Recorded(file.accounts(limit=10**9), file.steps(limit=10**9), facts)


def forecast(sizes: Sizes, cell_names: list[str], seed: int) -> dict[str, Any]:
    """One round: for each change and figure what was recorded, predicted and measured."""
    cells: dict[str, Any] = {}
    refused: dict[str, str] = {}
    num_steps = num_same = 0
    for name in cell_names:
        change = CHANGES[name]
        recorded = run(Change(), sizes, seed)
        divergence = replay(recorded)
        num_steps += len(recorded.steps)
        num_same += len(recorded.steps) if divergence is None else divergence.step_id - 1
        try:
            predicted = predict(recorded, change, draws=sizes.draws, processes=num_cores())
        except OutOfRange as refusal:
            refused[name] = str(refusal)
            continue
        books = run(change, sizes, seed)
        measured = figures(list(books.accounts), list(books.steps))
        cells[name] = {
            told: {
                "recorded": predicted.figure(told).recorded,
                "predicted": predicted.figure(told).after,
                "low": predicted.figure(told).after_low,
                "high": predicted.figure(told).after_high,
                "measured": measured[told],
            }
            for told in TOLD
        }
    return {"steps": num_steps, "same_decisions": num_same, "refused": refused, "cells": cells}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds and cells of the errors, by figure; how many intervals cover."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in rounds:
        for name, cell in one["cells"].items():
            kind = "same" if name == "the same again" else "changed"
            for told, values in cell.items():
                measured = values["measured"]
                errors[told][f"predicted_{kind}"].append(abs(values["predicted"] / measured - 1))
                errors[told][f"recorded_{kind}"].append(abs(values["recorded"] / measured - 1))
                errors[told]["covered"].append(float(values["low"] <= measured <= values["high"]))
    return {
        told: {key: statistics.mean(v) if key == "covered" else statistics.median(v) for key, v in kinds.items()}
        for told, kinds in errors.items()
    }


def file_and_tell(name: str, rounds: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the result file of this name, and print the summary if JSON is not asked for."""
    told: dict[str, Any] = {"summary": summary(rounds), "rounds": rounds}
    path = file_result(name, told, vars(arguments), arguments.json)
    if arguments.json:
        return
    for figure, values in told["summary"].items():
        print(f"{figure:<20}", "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
    for cell, why in ((cell, why) for one in rounds for cell, why in one["refused"].items()):
        print(f"refused: {cell}: {why}")
    print(", ".join(f"{one['same_decisions']:,} of {one['steps']:,} steps the same" for one in rounds))
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--model", help="its folder; default: the packaged one")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(CHANGES), default=list(CHANGES), metavar="CELL")
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    given = {"quantization": arguments.quantization, "num-threads": arguments.threads}
    model = () if arguments.model is None else (arguments.model,)
    flags = (*model, *(f"--{name}={value}" for name, value in given.items() if value is not None))
    sizes = Sizes(flags, arguments.seconds, arguments.rate, arguments.draws)
    if arguments.small:
        sizes = sizes._replace(seconds=2.0, draws=2)
    rounds = [forecast(sizes, arguments.only, seed) for seed in range(1 if arguments.small else arguments.rounds)]
    of_model = f"_{Path(arguments.model).name}" if arguments.model else ""
    file_and_tell(f"forecast{of_model}", rounds, arguments)


if __name__ == "__main__":
    main()
