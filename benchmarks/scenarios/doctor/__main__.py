"""The doctor's confusion matrix: illnesses made on the packaged model, each to be named first, and healthy runs.

    python -m benchmarks.scenarios.doctor                        all of it, about 15 minutes on an idle machine
    python -m benchmarks.scenarios.doctor --only "one slot"      some of it; what was measured before is kept
    python -m benchmarks.scenarios.doctor --piece 2/8            an eighth of it, for a machine that is shared
    python -m benchmarks.scenarios.doctor --seeds 5              each illness five times: once as tuned, four held out
    python -m benchmarks.scenarios.doctor --json

Each illness is a real `splittime serve` with settings, a load, and now and then a proxy, a client or a sabotaged engine
process that make one thing wrong. The doctor reads the run's two books, as `splittime doctor RUN.json` does.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, file_result
from benchmarks.scenarios.doctor.illnesses import HEALTHY, ILLNESSES, Ward
from benchmarks.scenarios.doctor.large_models import MemoryShort
from benchmarks.scenarios.doctor.loads import TUNED_SEED
from benchmarks.scenarios.doctor.visit import Seen, visit, visits

NAME = "doctor"
HEALTHY_RUNS = 20
Task = tuple[Ward, list[int]]


def tasks(seeds: int, healthy_runs: int) -> list[Task]:
    """A server each. Seeds begin with the tuned one."""
    each = range(TUNED_SEED, TUNED_SEED + healthy_runs // len(HEALTHY))
    made = [(ward, [TUNED_SEED + i]) for i in range(seeds) for ward in ILLNESSES]
    return made + [(ward, list(each)) for ward in HEALTHY]


def chosen(arguments: argparse.Namespace) -> list[Task]:
    found = tasks(arguments.seeds, arguments.healthy)
    if arguments.only:
        found = [task for task in found if task[0].name in arguments.only or task[0].expected in arguments.only]
    if arguments.held_out:
        found = [(ward, [seed for seed in seeds if seed != TUNED_SEED]) for ward, seeds in found]
    if arguments.piece:
        piece, of = map(int, arguments.piece.split("/"))
        found = found[piece - 1 :: of]
    return [task for task in found if task[1]]


def seen(todo: list[Task], keep: Path | None) -> Iterator[Seen]:
    for ward, seeds in todo:
        if ward.expected is None:
            yield from visits(ward, seeds, keep)
        else:
            try:
                yield from (visit(ward, seed, keep) for seed in seeds)
            except MemoryShort as short:
                print(f"skipped: {ward.name}: {short}", file=sys.stderr)


def before() -> dict[tuple[str, int], Seen]:
    """What earlier pieces have filed."""
    path = RESULTS / f"{NAME}.json"
    if not path.is_file():
        return {}
    rows = msgspec.convert(json.loads(path.read_text())["figures"]["runs"], list[Seen])
    return {(row.name, row.seed): row for row in rows}


def figures(rows: list[Seen]) -> dict[str, object]:
    ill, well = ([row for row in rows if (row.expected is None) == is_well] for is_well in (False, True))
    held_out = [row for row in rows if row.seed != TUNED_SEED]
    return {
        "tuned": counted([row for row in rows if row.seed == TUNED_SEED]),
        "held_out": counted(held_out),
        **counted(rows),
        "by_illness": {name: by_illness([r for r in ill if r.expected == name]) for name in sorted(expected(ill))},
        "false_alarms_by_rule": Counter(name for row in well for name in row.found),
        "seeds": sorted({row.seed for row in rows}),
        "commits": sorted({row.commit for row in rows}),
        "runs": [msgspec.to_builtins(row) for row in rows],
    }


def expected(ill: list[Seen]) -> set[str]:
    return {row.expected for row in ill if row.expected is not None}


def counted(rows: list[Seen]) -> dict[str, int]:
    ill, well = ([row for row in rows if (row.expected is None) == is_well] for is_well in (False, True))
    return {
        "illnesses": len(ill),
        "named_first": sum(row.is_right for row in ill),
        "named_at_all": sum(row.is_named for row in ill),
        "healthy_runs": len(well),
        "false_alarms": sum(bool(row.found) for row in well),
    }


def by_illness(rows: list[Seen]) -> dict[str, object]:
    """Of one illness, over its seeds."""
    first = sum(row.is_right for row in rows)
    named = sum(row.is_named for row in rows)
    instead = Counter(row.found[0] if row.found else "nothing" for row in rows if not row.is_right)
    told = {"named_first": first, "named": named - first, "missed": len(rows) - named}
    return {**told, "first_instead": dict(instead), "seeds": sorted(row.seed for row in rows)}


def show(rows: list[Seen]) -> None:
    table = Table("made", "must be first", "named, with the share of time", "requests", "s")
    for row in rows:
        named = ", ".join(f"{name} {share:.0%}" for name, share in zip(row.found, row.shares, strict=True))
        if row.expected in row.limits:
            named += f" (limits: {', '.join(row.limits)})"
        mark = "green" if row.is_right else "red"
        shown = f"[{mark}]{named or 'nothing'}[/{mark}]"
        table.add_row(f"{row.name} #{row.seed}", row.expected or "nothing", shown, str(row.requests), str(row.seconds))
    Console(stderr=True, width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a scenario's or a finding's name; may be repeated")
    parser.add_argument("--piece", help="I/N: every N-th scenario, beginning with the I-th")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="make each illness so many times")
    parser.add_argument("--healthy", type=int, default=HEALTHY_RUNS, metavar="N", help="healthy runs in all")
    parser.add_argument("--held-out", action="store_true", help="leave out the seed that the rules were tuned on")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--dry", action="store_true", help="file nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    new = list(seen(chosen(arguments), arguments.keep))
    show(new)
    if arguments.dry:
        return
    is_part = bool(arguments.only or arguments.piece or arguments.held_out)
    rows = {**(before() if is_part else {}), **{(row.name, row.seed): row for row in new}}
    file_result(
        NAME, figures(list(rows.values())), {"seeds": arguments.seeds, "healthy": arguments.healthy}, arguments.json
    )


if __name__ == "__main__":
    main()
