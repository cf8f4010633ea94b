"""Decode and prefill of the same model in several engines, interleaved, beside what the machine could do at most.

    python -m benchmarks.peers.run --folder PEERS --model llama-1b --precision int8 --repeats 5
    python -m benchmarks.peers.run --folder PEERS --precision bf16 --cells decode:1,32 prefill:512 --json

All engines of a precision class are loaded at once and asleep but one. A round is one cell in every engine, each time
another first, between two probes of the machine's limits. A figure is the median of the rounds with its quartiles; the
ratio to a peer is the median of the rounds' own ratios, so that a slow minute hits both sides. What the words mean:
`protocol.py`; who takes part, and who is left out: `contenders.py`; the bounds: `ceilings.py`. Results:
benchmarks/results, one file for a model, a class and a kind of processor; cells that were not run this time stay in it,
each with the commit and the time of its own measurement. `--lock FILE` holds that file locked through each round, for a
machine shared with other measurements.
"""

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.peers import show
from benchmarks.peers.ceilings import Limits, Prober, Shape, bounds, scratch
from benchmarks.peers.contenders import CLASSES, OURS, Contender, Ended, entries, started, without_folders
from benchmarks.report import RESULTS, conditions, file_result, processor

DEFAULT_CELLS = ["decode:1,2,4,8,16,32", "prefill:128,512,2048"]
PROMPT_TOKENS = 16
BOUNDS = ("bandwidth", "arithmetic")
READ, HELD = "read_gb_per_s", "_held_"
SETTLE_S = 0.5  # some engines' threads go on looking for work so long after their turn
STAMPED = ("commit", "is_dirty", "date", "load_1min")
Samples = dict[str, dict[int, float]]  # tokens/s by contender and round


def parse_cells(words: list[str]) -> dict[str, dict[str, Any]]:
    """By name, such as "decode:8": what a contender is sent. A small batch decodes longer, to have enough to time."""
    cells: dict[str, dict[str, Any]] = {}
    for word in words:
        kind, _, sizes = word.partition(":")
        if kind not in ("decode", "prefill") or not sizes:
            raise SystemExit(f"--cells {word}: write decode:BATCH,... or prefill:TOKENS,...")
        for size in map(int, sizes.split(",")):
            decode = {"batch": size, "prompt_tokens": PROMPT_TOKENS, "new_tokens": max(8, 48 // size)}
            cells[f"{kind}:{size}"] = {"cell": kind, **(decode if kind == "decode" else {"tokens": size})}
    return cells


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def play_round(
    racing: dict[str, Contender], prober: Prober, cell: dict[str, Any], number: int
) -> tuple[dict[str, dict[str, Any]], list[Limits]]:
    """Everyone's answer to one cell, and the limits before and after. The first to go is another in each round."""
    names = list(racing)
    first = number % len(names)
    limits = [prober.probe()]
    answers = {}
    for name in names[first:] + names[:first]:
        time.sleep(SETTLE_S)
        answers[name] = _answer(racing[name], {**cell, "seed": number})
    limits.append(prober.probe())
    return answers, limits


def _answer(contender: Contender, cell: dict[str, Any]) -> dict[str, Any]:
    """{"ended": how} of one that is no more."""
    try:
        return contender.ask(cell)
    except Ended as ended:
        return {"ended": str(ended)}


def spread(samples: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median": statistics.median(samples), "p25": quartiles[0], "p75": quartiles[2], "samples": samples}


def summary(samples: Samples, most: dict[str, float]) -> dict[str, Any]:
    """One cell's figures: each contender's spread, what share of each bound it reached, ours over the best peer."""
    top = min(most[bound] for bound in BOUNDS) if all(bound in most for bound in BOUNDS) else None
    found: dict[str, Any] = {"roofline_tokens_per_s": top, "bounds_tokens_per_s": most}
    found["tokens_per_s"] = {name: spread(list(rounds.values())) for name, rounds in samples.items() if rounds}
    medians = {name: value["median"] for name, value in found["tokens_per_s"].items()}
    found["share_of_roofline"] = {name: value / top for name, value in medians.items()} if top else {}
    found["share_of_bounds"] = {
        bound: {name: value / rate for name, value in medians.items()} for bound, rate in most.items()
    }
    peers = [name for name in medians if name != OURS]
    if OURS in medians and peers:
        best = max(peers, key=medians.__getitem__)
        ratios = [rate / samples[best][number] for number, rate in samples[OURS].items() if number in samples[best]]
        found["best_peer"], found["ours_over_best_peer"] = best, spread(ratios) if ratios else None
    return found


def typical(probes: list[Limits]) -> Limits:
    """Returns the medians of what moves with the host, which is reading and products that are kept up, and the best of
    the rest, which other load only hides."""
    rates: dict[str, list[float]] = {}
    for one in probes:
        for name, value in one.items():
            if name != "by":
                rates.setdefault(name, []).append(value)
    return {
        name: statistics.median(all_) if name == READ or HELD in name else max(all_) for name, all_ in rates.items()
    }


class Book:
    """What came of all rounds."""

    def __init__(self, cells: dict[str, dict[str, Any]]) -> None:
        self.cells = cells
        self.errors: dict[str, str] = {}
        self._samples: dict[str, Samples] = {name: {} for name in cells}
        self._limits: dict[str, list[Limits]] = {name: [] for name in cells}

    def add(self, cell: str, number: int, answers: dict[str, dict[str, Any]], limits: list[Limits]) -> None:
        self._limits[cell] += limits
        for name, answer in answers.items():
            if "tokens_per_s" not in answer:
                self.errors[f"{name}, {cell}"] = without_folders(answer.get("error") or answer["ended"])
            else:
                self._samples[cell].setdefault(name, {})[number] = answer["tokens_per_s"]

    def figures(self, shape: Shape, precision: str) -> dict[str, Any]:
        """By cell."""
        found = {}
        for name, cell in self.cells.items():
            limits = typical(self._limits[name])
            most = bounds(shape, cell, precision, limits)
            probes = {"limits": limits, "limits_samples": self._limits[name]}
            found[name] = {"asked": cell, **probes, **summary(self._samples[name], most)}
        return found


def race(
    racing: dict[str, Contender],
    about: dict[str, Any],
    prober: Prober,
    book: Book,
    repeats: int,
    lock: Path | None = None,
) -> Iterator[None]:
    """One round after another; every cell once before any comes again. Who ends is left out from then on."""
    for number in range(repeats):
        for name, cell in book.cells.items():
            with locked(lock):
                answers, limits = play_round(racing, prober, cell, number)
            book.add(name, number, answers, limits)
            for gone in [one for one, answer in answers.items() if "ended" in answer]:
                about[gone]["left_out"] = f"from {name}, round {number + 1}: {without_folders(answers[gone]['ended'])}"
                racing.pop(gone).stop()
            yield
            if not racing:
                return


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    folder, book = arguments.folder.resolve(), Book(parse_cells(arguments.cells))
    shape = Shape.of(json.loads((folder / "models" / arguments.model / "config.json").read_text()))
    found = entries(folder, arguments.model, arguments.precision, arguments.threads, dict(arguments.setting))
    found = [entry for entry in found if not arguments.only or entry.name.split()[0] in arguments.only]
    with scratch() as logs, started(found, Path(logs)) as (racing, about), bars(console) as progress:
        if not racing:
            raise SystemExit(f"no contender came up: {about}")
        with Prober(arguments.threads, Path(logs)) as prober:
            ceilings = prober.by_threads()
            bar = progress.add_task(", ".join(racing), total=arguments.repeats * len(book.cells))
            for _ in race(racing, about, prober, book, arguments.repeats, arguments.lock):
                progress.advance(bar)
    kept = {"model": arguments.model, "precision": arguments.precision, "ceilings": ceilings}
    return {**kept, "cells": book.figures(shape, arguments.precision), "contenders": about, "errors": book.errors}


def with_filed(name: str, cells: dict[str, Any]) -> dict[str, Any]:
    """These cells, each stamped with when it was measured, and those filed under this name that they do not replace."""
    stamp = {key: value for key, value in conditions().items() if key in STAMPED}
    found = {cell: {**figures, "measured": stamp} for cell, figures in cells.items()}
    path = RESULTS / f"{name}.json"
    if path.exists():
        filed = json.loads(path.read_text())
        then = {key: value for key, value in filed["conditions"].items() if key in STAMPED}
        found = {cell: {"measured": then, **old} for cell, old in filed["figures"]["cells"].items()} | found
    return dict(sorted(found.items(), key=lambda item: (item[0].split(":")[0], int(item[0].split(":")[1]))))


def bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, where the value is JSON or else a word."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the peers' folder; see contenders.py")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--precision", choices=CLASSES, default="int8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", nargs="+", default=DEFAULT_CELLS)
    parser.add_argument("--only", nargs="+", help="contenders by their first word, such as splittime openvino")
    parser.add_argument(
        "--setting", nargs="+", type=setting, default=[], metavar="NAME=VALUE", help="of our runner, over the class's"
    )
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    before = conditions()
    figures = measure(arguments, console)
    figures["load_1min_before"] = before["load_1min"]
    if not arguments.no_file:
        name = f"peers_{arguments.model}_{arguments.precision}_{processor(before)}"
        figures["cells"] = with_filed(name, figures["cells"])
        file_result(name, figures, {**vars(arguments), "setting": dict(arguments.setting)}, arguments.json)
    elif arguments.json:
        print(json.dumps(figures))
    if not arguments.json:
        show.wide().print(show.table(figures))


if __name__ == "__main__":
    main()
