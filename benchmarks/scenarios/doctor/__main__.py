"""The doctor's confusion matrix: illnesses made on a real server, each to be named first, and healthy servers.

    python -m benchmarks.scenarios.doctor                        all of it, on the packaged model
    python -m benchmarks.scenarios.doctor --model FILE.gguf      on another one, with loads that it can serve
    python -m benchmarks.scenarios.doctor --cures                and each printed flag tried, each figure measured
    python -m benchmarks.scenarios.doctor --only "one slot"      some of it; what was measured before is kept
    python -m benchmarks.scenarios.doctor --piece 2/8            an eighth of it, for a machine that is shared
    python -m benchmarks.scenarios.doctor --one-each             one of each illness: two thirds of the time
    python -m benchmarks.scenarios.doctor --seeds 5              each five times: once as tuned, four held out

Twenty minutes a model on an idle machine, and about twice as long with `--cures`. Each illness is a real `splittime
serve` with settings, a load, and now and then a proxy, a client or a sabotaged engine process that make one thing
wrong. The doctor reads the run's two books and replays its cures, as `splittime doctor RUN.json` does; what counts is
the order in which it tells its findings then. Results are filed by model.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, file_result
from benchmarks.scenarios.doctor.beside import NoGroups
from benchmarks.scenarios.doctor.cures import Applied, applied
from benchmarks.scenarios.doctor.healthy import HEALTHY
from benchmarks.scenarios.doctor.illnesses import ILLNESSES
from benchmarks.scenarios.doctor.large_models import MemoryShort
from benchmarks.scenarios.doctor.loads import TUNED_SEED
from benchmarks.scenarios.doctor.patients import Pace, Patient, patient_of
from benchmarks.scenarios.doctor.visit import Seen, visit
from benchmarks.scenarios.doctor.wards import Ward
from splittime.core.errors import SplittimeError

Task = tuple[Ward, int]


class Row(msgspec.Struct, frozen=True):
    """A ward's outcome, and what became of its prescriptions."""

    seen: Seen
    cures: tuple[Applied, ...] = ()


def chosen(arguments: argparse.Namespace, patient: Patient) -> list[Task]:
    """The wards that this model can have, with each seed; they begin with the tuned one."""
    first = TUNED_SEED + arguments.held_out
    ill, well = ([ward for ward in wards if ward.can_have(patient)] for wards in (ILLNESSES, HEALTHY))
    if arguments.one_each:
        ill, well = (
            list({ward.expected: ward for ward in reversed(ill)}.values()),
            [one for place, one in enumerate(well) if place % 5 < 3],
        )
    wards = [*ill, *well]
    found = [(ward, seed) for seed in range(first, TUNED_SEED + arguments.seeds) for ward in wards]
    if arguments.only:
        found = [task for task in found if {task[0].name, task[0].expected or "healthy"} & set(arguments.only)]
    if arguments.piece:
        piece, of = map(int, arguments.piece.split("/"))
        found = found[piece - 1 :: of]
    return found


def rows(todo: list[Task], patient: Patient, arguments: argparse.Namespace) -> Iterator[Row]:
    for ward, seed in todo:
        try:
            visited = visit(ward, patient, seed, arguments.keep)
            cures = applied(ward, patient, visited) if arguments.cures else []
        except (MemoryShort, NoGroups) as lacking:
            print(f"skipped: {ward.name}: {lacking}", file=sys.stderr)
            continue
        except (RuntimeError, OSError, SplittimeError) as error:  # the others are still to be seen
            print(f"BROKEN {ward.name}: {error!r}", file=sys.stderr)
            continue
        row = Row(visited.seen, tuple(cures))
        print(line(row), file=sys.stderr, flush=True)
        yield row


def line(row: Row) -> str:
    """A ward's outcome in a line, and a line for each prescription."""
    seen = row.seen
    named = ", ".join(f"{name} {share:.0%}" for name, share in zip(seen.found, seen.shares, strict=True)) or "nothing"
    limits = f" (limits: {', '.join(seen.limits)})" if seen.limits else ""
    is_right = seen.is_clean if seen.expected is None else seen.is_right
    mark = "ok   " if is_right else "later" if seen.is_named and seen.expected else "WRONG"
    false = f" FALSE: {', '.join(seen.false)}" if seen.false else ""
    asked = f"{seen.requests} requests, {seen.seconds:.0f} s, {seen.cpu_wait:.0%} without a processor"
    told = [f"{mark} {seen.name} #{seen.seed} [{seen.expected or 'healthy'}]: {named}{limits}{false}; {asked}"]
    return "\n".join([*told, *(f"      {cure_words(cure)}" for cure in row.cures)])


def cure_words(cure: Applied) -> str:
    start = "starts" if cure.starts else f"REFUSED ({cure.why})"
    told = [
        f"{one.name} {one.recorded or 0:.4g} -> {one.measured:.4g} (-> {one.again or 0:.4g} without) in "
        f"{one.low or 0:.4g} to {one.high or 0:.4g}{'' if one.is_inside else ' NO'}"
        f"{'' if one.is_ratio_inside else ', by turns NO'}"
        for one in cure.figures
    ]
    return f"{cure.name} {' '.join(cure.flags)}: {start}; {'; '.join(told) or cure.why or 'not measured'}"


def before(name: str) -> dict[tuple[str, int], Row]:
    """What earlier pieces have filed."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return {}
    told = json.loads(path.read_text())["figures"]["runs"]
    found = msgspec.convert([one for one in told if "seen" in one], list[Row])  # others are of an earlier form
    return {(row.seen.name, row.seen.seed): row for row in found}


def figures(found: list[Row]) -> dict[str, object]:
    ill = [row.seen for row in found if row.seen.expected is not None]
    names = sorted({seen.expected for seen in ill if seen.expected is not None})
    return {
        **counted(found),
        "tuned": counted([row for row in found if row.seen.seed == TUNED_SEED]),
        "held_out": counted([row for row in found if row.seen.seed != TUNED_SEED]),
        "by_illness": {name: by_illness([seen for seen in ill if seen.expected == name]) for name in names},
        "false_by_rule": Counter(name for row in found for name in row.seen.false),
        "seeds": sorted({row.seen.seed for row in found}),
        "commits": sorted({row.seen.commit for row in found}),
        "runs": [msgspec.to_builtins(row) for row in found],
    }


def counted(found: Iterable[Row]) -> dict[str, int]:
    """What the summary says. figures: printed ones, of the cures that were applied with the whole load."""
    every = list(found)
    ill = [row.seen for row in every if row.seen.expected is not None]
    well = [row.seen for row in every if row.seen.expected is None]
    cures = [cure for row in every for cure in row.cures]
    printed = [figure for cure in cures for figure in cure.figures]
    return {
        "illnesses": len(ill),
        "right_first": sum(seen.is_right for seen in ill),
        "later": sum(seen.is_named and not seen.is_right for seen in ill),
        "missed": sum(not seen.is_named for seen in ill),
        "false_names": sum(len(seen.false) for seen in (*ill, *well)),
        "healthy": len(well),
        "healthy_clean": sum(seen.is_clean for seen in well),
        "flags": len(cures),
        "flags_that_start": sum(cure.starts for cure in cures),
        "figures": len(printed),
        "figures_inside": sum(figure.is_inside for figure in printed),
        "ratios_inside": sum(figure.is_ratio_inside for figure in printed),
    }


def summary(name: str, told: dict[str, int]) -> str:
    return (
        f"{name}: {told['right_first']} of {told['illnesses']} right first, {told['later']} later, {told['missed']} "
        f"missed; {told['false_names']} false names; {told['healthy_clean']} of {told['healthy']} healthy clean; "
        f"{told['flags_that_start']} of {told['flags']} flags start; {told['figures_inside']} of {told['figures']} "
        f"figures inside, {told['ratios_inside']} ratios"
    )


def by_illness(seen: list[Seen]) -> dict[str, object]:
    """Of one illness, over its seeds."""
    first = sum(one.is_right for one in seen)
    named = sum(one.is_named for one in seen)
    instead = Counter(one.found[0] if one.found else "nothing" for one in seen if not one.is_right)
    told = {"named_first": first, "named": named - first, "missed": len(seen) - named}
    return {**told, "first_instead": dict(instead), "seeds": sorted(one.seed for one in seen)}


def show(found: list[Row]) -> None:
    table = Table("made", "must be first", "named, with the share of time", "requests", "s")
    for row in found:
        seen = row.seen
        named = ", ".join(f"{name} {share:.0%}" for name, share in zip(seen.found, seen.shares, strict=True))
        limits = f" (limits: {', '.join(seen.limits)})" if seen.limits else ""
        mark = "green" if (seen.is_clean if seen.expected is None else seen.is_right) else "red"
        shown = f"[{mark}]{named or 'nothing'}{limits}[/{mark}]"
        place = f"{seen.name} #{seen.seed}"
        table.add_row(place, seen.expected or "nothing", shown, str(seen.requests), f"{seen.seconds:.0f}")
    Console(stderr=True, width=150).print(table)


def _pace(text: str) -> Pace:
    step_ms, token_ms = map(float, text.split(","))
    return Pace(step_ms / 1e3, token_ms / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what to serve, as `splittime serve` takes it. Default: the packaged model")
    parser.add_argument("--pace", type=_pace, metavar="MS,MS", help="what a token of an answer and of a prompt take")
    parser.add_argument("--only", action="append", help="a scenario's or a finding's name, or healthy; may be repeated")
    parser.add_argument("--piece", help="I/N: every N-th scenario, beginning with the I-th")
    parser.add_argument("--one-each", action="store_true", help="one of each illness, and three of five healthy ones")
    parser.add_argument("--cures", action="store_true", help="start each printed flag, and measure its figures")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="make each scenario so many times")
    parser.add_argument("--held-out", action="store_true", help="leave out the seed that the rules were tuned on")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--dry", action="store_true", help="file nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    patient = patient_of(arguments.model, arguments.pace)
    name = "doctor" if patient.is_packaged else f"doctor_{patient.name}"
    print(
        f"{patient.name}: {1e3 * patient.pace.step_s:.2f} ms a token, {1e3 * patient.pace.token_s:.3f} ms a token of "
        f"a prompt; lengths times {patient.scale:.2f}",
        file=sys.stderr,
    )
    todo, new = chosen(arguments, patient), list[Row]()
    try:
        new += rows(todo, patient, arguments)
    except KeyboardInterrupt:  # what there is counts
        print("interrupted", file=sys.stderr)
    show(new)
    print(summary(patient.name, counted(new)), file=sys.stderr)
    if arguments.dry:
        return
    is_chosen = bool(arguments.only or arguments.piece or arguments.held_out or arguments.one_each)
    is_part = is_chosen or len(new) < len(todo)
    every = {**(before(name) if is_part else {}), **{(row.seen.name, row.seen.seed): row for row in new}}
    settings: dict[str, Any] = {"seeds": arguments.seeds, "model": patient.name, "pace": list(patient.pace)}
    file_result(name, figures(list(every.values())), settings, arguments.json)
    print(summary(f"{patient.name}, all that is filed", counted(every.values())), file=sys.stderr)


if __name__ == "__main__":
    main()
