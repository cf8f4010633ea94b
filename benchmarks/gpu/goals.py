"""What must be shown on a card, and what a run of `run.sh` has found: figure, goal, measured, met or by how much short.

    python -m benchmarks.gpu.goals OUT [OUT ...]          folders with run.sh's .jsonl files, or such files
    python -m benchmarks.gpu.goals OUT --json

Ends with status 0 if every figure is there and every goal is met, 1 if one is missed, 3 if none is missed and some part
has not run (or has not come to that figure). A figure without a goal is shown. The figures are in `figures`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.collect import read
from benchmarks.gpu.figures import Figure, Result, figures

MET, MISSED, SHOWN, NOT_RUN = "met", "missed", "shown", "not run"


@dataclass(frozen=True)
class Judged:
    figure: Figure
    state: str
    value: float | None = None
    note: str = ""

    @property
    def short_by(self) -> float:
        """Of the goal; 0 if it is met."""
        if self.state != MISSED or self.value is None:
            return 0.0
        goal = self.figure.least if self.figure.least is not None else self.figure.most
        return abs(self.value - goal) / abs(goal) if goal else abs(self.value)


# ---- judging


def judge(figure: Figure, lines: dict[str, Result]) -> Judged:
    line = lines.get(figure.part)
    if line is None:
        return Judged(figure, NOT_RUN, note=f"no part {figure.part}")
    if is_tiny(line.get("result")):
        return Judged(figure, NOT_RUN, note=f"{figure.part} ran in its smallest form, which shows nothing")
    try:
        measured = figure.read(line["result"])
    except (LookupError, TypeError, ValueError, AttributeError):  # the part ended before it came to this
        measured = None
    if measured is None:
        return Judged(figure, NOT_RUN, note=f"{figure.part} ended with {line['exit']} after {line['seconds']:.0f} s")
    value, note = measured
    if figure.least is None and figure.most is None:
        return Judged(figure, SHOWN, value, note)
    is_met = (figure.least is None or value >= figure.least) and (figure.most is None or value <= figure.most)
    return Judged(figure, MET if is_met else MISSED, value, note)


def is_tiny(result: object) -> bool:
    return isinstance(result, dict) and bool(result.get("settings", {}).get("tiny"))


def status_of(judged: Sequence[Judged]) -> int:
    states = {one.state for one in judged}
    return 1 if MISSED in states else 3 if NOT_RUN in states else 0


def table_of(judged: Sequence[Judged]) -> Table:
    table = Table("figure", "goal", "measured", "", "with")
    for one in judged:
        value = "" if one.value is None else one.figure.told.format(one.value)
        state = f"short by {one.short_by:.0%}" if one.state == MISSED else one.state
        table.add_row(one.figure.name, one.figure.goal, value, state, one.note)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    lines = read(options.results)
    judged = [judge(figure, lines) for figure in figures()]
    if options.json:
        told = [{"figure": one.figure.name, "goal": one.figure.goal, "state": one.state, "value": one.value,
                 "short_by": one.short_by, "note": one.note} for one in judged]  # fmt: skip
        print(json.dumps(told, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 180).print(table_of(judged))
        _tell_parts(lines)
    return status_of(judged)


def _tell_parts(lines: dict[str, Result]) -> None:
    for part, line in lines.items():
        result = line.get("result")
        early = isinstance(result, dict) and not result.get("is_complete", True)
        print(f"{part}: exit {line['exit']} after {line['seconds']:.0f} s{', ended early' if early else ''}")


if __name__ == "__main__":
    sys.exit(main())
