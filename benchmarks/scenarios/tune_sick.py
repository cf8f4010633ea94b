"""`splittime tune` on servers that are sick in one setting, on a healthy one, and where what is faster answers worse.

    python -m benchmarks.scenarios.tune_sick [--only NAME] [--seconds 15] [--minutes 15] [--repeats 3] [--small]

The packaged model, over HTTP. Each case has a load, an SLO and a setting that is wrong; the tuner gets the load, the
SLO and the settings, and may turn every knob but those that change numbers. Rates and SLOs are those of a machine on
which a request alone takes 50 ms: one that is twice as fast gets twice the rate and half the limits. How fast this one
is, several servers tell, one after the other: a single one is off by a quarter.

Beside it all values of the sick knob that are listed here are measured, each on a server of its own, `repeats` times in
rotation, together with what the tuner ended with. ratio: its result over the best of these, of output tokens a second
where both keep the SLO; else of the SLO's weakest term. Goal: 0.95.

A healthy server must be left alone. In "worse answers" int4 weights are made to look fast (their servers alone have
more than one slot, and their steps are quicker), and the gate is held to the standard of 8 bits: the tuner must refuse
them.

The result has the score of each run, the tuner's own and those beside it.
"""

import argparse
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from benchmarks.report import file_result
from benchmarks.server_process import served
from splittime.assemble import model_source
from splittime.bench.book.requests import service_ns
from splittime.bench.book.slo import parse_slo
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import run_loop
from splittime.bench.run import run_schedule
from splittime.lab.quality.margins import EIGHT_BITS
from splittime.lab.quality.run import Competitor, Prepared, QualityComparison, Questions
from splittime.tune.goal import Goal, Score, best_of, middle
from splittime.tune.measure import DrawnLoad, Measurer, RealRuns, TimeBudget
from splittime.tune.notebook import Notebook, Tuned
from splittime.tune.servers import OwnServers
from splittime.tune.tuner import Tuner
from splittime.wire.scrape import server_limits
from splittime.wire.target import RunOptions, Target

SHORT = {"input_tokens": "100", "output_tokens": "60", "rate": 16.0}
SCHEDULING = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "policy", "num_blocks", "num_threads")
MANY_THREADS = 8
ALONE_S = 0.05  # what a request of SHORT takes alone, on the machine for which the cases are written
SERVERS = 5  # that tell what it takes here
ENOUGH_SLOTS = 64


class SickCase(NamedTuple):
    """settings: of the server. candidates: values of what is sick, as `splittime serve` takes them."""

    settings: dict[str, Any]
    load: dict[str, Any]
    slo: dict[str, float]
    candidates: tuple[dict[str, Any], ...] = ()


CASES = {
    "healthy": SickCase({"num_threads": 1}, SHORT, parse_slo("ttft_p99=1s,itl_p99=100ms")),
    "slots too few": SickCase(
        {"num_threads": 1, "max_num_seqs": 1},
        SHORT,
        parse_slo("ttft_p99=150ms,itl_p99=50ms"),
        tuple({"max_num_seqs": slots} for slots in (1, 2, 4, 8, 16, 64)),
    ),
    "KV too small": SickCase(
        {"num_threads": 1, "max_model_len": 512, "kv_cache_memory_bytes": 2**20},
        {**SHORT, "input_tokens": "300"},
        parse_slo("ttft_p99=200ms,itl_p99=100ms"),
        tuple({"kv_cache_memory_bytes": mebibytes * 2**20} for mebibytes in (1, 2, 4, 16, 64)),
    ),
    "budget too large": SickCase(
        {"num_threads": 1, "max_num_batched_tokens": 2048, "max_prefill_tokens": 2048},
        {**SHORT, "input_tokens": "400", "rate": 8.0},  # a prompt in two gaps of a hundred: p99 is not at their edge
        parse_slo("itl_p99=14ms,ttft_p99=1s"),
        tuple({"max_prefill_tokens": tokens} for tokens in (16, 32, 64, 128, 512, 2048)),
    ),
    "threads wrong": SickCase(
        {"num_threads": MANY_THREADS},
        SHORT,
        parse_slo("ttft_p99=150ms,itl_p99=14ms"),
        tuple({"num_threads": threads} for threads in (1, 2, 4, MANY_THREADS)),
    ),
}
WORSE_ANSWERS = CASES["slots too few"]._replace(candidates=())


class PlantedServers(OwnServers):
    """Those of int4 weights alone have slots enough."""

    def as_settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().as_settings(changes)
        return settings | {"max_num_seqs": ENOUGH_SLOTS} if settings.get("quantization") == "int4" else settings


class Sizes(NamedTuple):
    """seconds: of each run. minutes: of each tune. repeats: of each measurement beside it."""

    seconds: float
    minutes: float
    repeats: int


def time_alone_s(seconds: float) -> float:
    """Returns what a request of SHORT takes on this machine, alone on a healthy server: the median of `SERVERS`."""
    return statistics.median(_time_alone_s(seconds / SERVERS) for _ in range(SERVERS))


def _time_alone_s(seconds: float) -> float:
    load = {"concurrency": 1, "duration_s": seconds, **{key: value for key, value in SHORT.items() if key != "rate"}}

    async def run(url: str) -> list[float]:
        target = Target(url=url)
        done = await run_schedule(draw_for(load, await server_limits(target)), [target], RunOptions(workers=0))
        return [each / 1e9 for each in map(service_ns, done.outcomes) if each is not None]

    with served("--num-threads=1") as url:
        return statistics.median(run_loop(run(url)))


def scaled(case: SickCase, factor: float) -> SickCase:
    """Returns the case for a machine on which everything takes so many times as long."""
    load = {**case.load, "rate": case.load["rate"] / factor}
    slo = {name: limit * factor for name, limit in case.slo.items()}
    return case._replace(load=load, slo=slo)


def quiet(what: str, share: float | None) -> None:
    """Says nothing."""


def measurer(case: SickCase, servers: OwnServers, sizes: Sizes) -> tuple[Measurer, DrawnLoad]:
    goal = Goal(slo=case.slo)
    load = DrawnLoad({**case.load, "duration_s": sizes.seconds})
    return Measurer(RealRuns(servers, load, goal, quiet), goal, Notebook(None, {})), load


def runs_of(taker: Measurer) -> list[dict[str, Any]]:
    """Returns each run that was made, with its score."""
    return [{"changes": one.changes, "number": one.number, "score": one.score} for one in taker.notebook.measured]


def tuned(case: SickCase, sizes: Sizes) -> tuple[Tuned, dict[str, Any], list[dict[str, Any]]]:
    """Returns what the tuner says, the settings that it ends with, and its runs."""
    servers = OwnServers(None, case.settings)
    taker, load = measurer(case, servers, sizes)
    found = Tuner(taker, load, TimeBudget(sizes.minutes), quiet, names=SCHEDULING).run()
    return found, servers.as_settings(found.changes), runs_of(taker)


def measured(case: SickCase, changes: list[dict[str, Any]], sizes: Sizes) -> tuple[list[Score], list[dict[str, Any]]]:
    """Returns the middle score of each, all in rotation, and the runs."""
    taker, _ = measurer(case, OwnServers(None, case.settings), sizes)
    for number in range(sizes.repeats):
        for change in changes if number % 2 == 0 else reversed(changes):
            taker.run(change, number)
    return [middle(taker.scores(change)) for change in changes], runs_of(taker)


def ratio(ours: Score, best: Score) -> float:
    """Returns the tuner's result over the best one."""
    if ours.keeps and best.keeps:
        return math.exp(ours.worth - best.worth)
    return math.exp(min(0.0, ours.slack) - min(0.0, best.slack))


def examined(case: SickCase, sizes: Sizes) -> dict[str, Any]:
    """One case: the tune, then everything beside each other."""
    found, ended_with, runs = tuned(case, sizes)
    told: dict[str, Any] = {
        "outcome": found.outcome,
        "settings": ended_with,
        "seconds": found.seconds,
        "trials": found.trials,
    }
    told = {**told, "notes": found.notes, "tune_runs": runs}
    if not case.candidates:
        return {**told, "is_left_alone": not found.changes}
    changes = [ended_with, *(change for change in case.candidates if change != ended_with)]
    scores, runs = measured(case, changes, sizes)
    names = [str(change) for change in changes]
    best = best_of(dict(zip(names, scores, strict=True)))[0]
    rows = [{"settings": change, "score": score} for change, score in zip(changes, scores, strict=True)]
    return {**told, "best": best, "ratio": ratio(scores[0], scores[names.index(best)]), "measured": rows, "runs": runs}


def refused(case: SickCase, sizes: Sizes) -> dict[str, Any]:
    """The planted regression: int4 is faster, and must not be kept."""
    asked: list[dict[str, Any]] = []

    def gate(change: Mapping[str, Any]) -> str | None:
        asked.append(dict(change))
        path = str(model_source.locate(None))
        both = Competitor(path), Competitor(path, dict(change))
        margins = msgspec.structs.asdict(EIGHT_BITS)
        comparison = QualityComparison(*both, Questions(length="short", tokens=20_000), margins=margins)
        report = Prepared(comparison).measure(lambda what, done, total: None)
        return None if report.verdict == "PASS" else f"{report.verdict}: {' '.join(report.reasons)}"

    taker, load = measurer(case, PlantedServers(None, case.settings), sizes)
    found = Tuner(taker, load, TimeBudget(sizes.minutes), quiet, gate, ("quantization",)).run()
    is_kept = found.changes.get("quantization") == "int4"
    told = {"asked": asked, "changes": found.changes, "is_refused": {"quantization": "int4"} in asked and not is_kept}
    return {**told, "trials": found.trials, "notes": found.notes, "tune_runs": runs_of(taker)}


def line(name: str, told: Mapping[str, Any]) -> str:
    """Returns a case in a line."""
    if "is_refused" in told:
        return f"{name:<18} gate asked of {told['asked']}; kept {told['changes']}; refused: {told['is_refused']}"
    if "is_left_alone" in told:
        return f"{name:<18} left alone: {told['is_left_alone']}, {told['seconds']:.0f} s"
    outcome, settings, seconds = told["outcome"], told["settings"], told["seconds"]
    return f"{name:<18} {outcome}: {settings}, {seconds:.0f} s; best {told['best']}, ratio {told['ratio']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*CASES, "worse answers"])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(2.0, 0.2, 1) if arguments.small else Sizes(arguments.seconds, arguments.minutes, arguments.repeats)
    factor = time_alone_s(sizes.seconds) / ALONE_S
    figures: dict[str, Any] = {"factor": factor}
    for name in [arguments.only] if arguments.only else [*CASES, "worse answers"]:
        case = scaled(CASES.get(name, WORSE_ANSWERS), factor)
        if arguments.small:
            case = case._replace(candidates=case.candidates[-1:])
        told = examined(case, sizes) if name in CASES else refused(case, sizes)
        figures[name] = msgspec.to_builtins(told)
        if not arguments.json:
            print(line(name, told), flush=True)
    path = file_result("tune_sick", figures, vars(arguments), arguments.json)
    if not arguments.json:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
