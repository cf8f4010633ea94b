"""Runs the same benchmark in two trees by turns, and prints the ratio of each figure, after over before.

    python -m benchmarks.by_turns ../before . -- -m benchmarks.micro.host_overhead --threads 1 --json

The command is given to this Python, with `src` of the tree before everything else; it must print one JSON object, whose
`figures` are compared if it has them. A ratio is the median over the rounds of the ratio within a round, so what slows
the machine for a minute slows both; `from` and `to` are the smallest and the largest. Each tree needs its kernels
built (`python setup.py build_ext --inplace`). Which of the two begins changes from round to round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result

RATIOS = ("ratio", "of_quartiles", "from", "to")


def run_once(tree: Path, command: Sequence[str]) -> dict[str, float]:
    """Returns the numbers that the command prints in this tree, by their dotted names. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as results:
        paths = os.pathsep.join((str(tree / "src"), str(tree)))
        environment = {**os.environ, "PYTHONPATH": paths, "BENCHMARK_RESULTS": results}
        done = subprocess.run(
            [sys.executable, *command], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    printed = json.loads(done.stdout.strip().splitlines()[-1])
    return dict(numbers(printed.get("figures", printed)))


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def compare(trees: tuple[Path, Path], command: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Returns, for each figure that both trees print in each round, its medians and the ratio with its range."""
    runs: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(rounds):
        for tree in trees[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number + 1} of {rounds}: {tree}", file=sys.stderr, flush=True)
            runs[tree].append(run_once(tree, command))
    before, after = runs[trees[0]], runs[trees[1]]
    shared = [name for name in before[0] if all(one.get(name) for one in (*before, *after))]
    return {name: ratio([one[name] for one in before], [one[name] for one in after]) for name in shared}


def ratio(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return {
        "before": statistics.median(before),
        "after": statistics.median(after),
        "ratio": statistics.median(ratios),
        "of_quartiles": lower_quartile(after) / lower_quartile(before),
        "from": min(ratios),
        "to": max(ratios),
    }


def lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def show(figures: dict[str, dict[str, float]]) -> None:
    table = Table("figure", "before", "after", *RATIOS)
    for name, one in figures.items():
        table.add_row(name, f"{one['before']:.4g}", f"{one['after']:.4g}", *(f"{one[k]:.3f}" for k in RATIOS))
    Console(stderr=True, width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("command", nargs="+", help="after `--`: what Python is to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="by_turns", help="of the file of results")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = compare((arguments.before.resolve(), arguments.after.resolve()), arguments.command, arguments.rounds)
    file_result(arguments.name, figures, vars(arguments), arguments.json)
    if not arguments.json:
        show(figures)


if __name__ == "__main__":
    main()
