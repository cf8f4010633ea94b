"""`splittime bench search URL --slo TERMS`: the highest rate that keeps an SLO. `bench sweep URL --rates 1,2,4`.

Each run is a `bench run` of its own, with prompts of its own; a rate that is run again gets another seed. `--out` keeps
every run. Exit codes: `bench_exit`.
"""

from typing import Any

import typer

from splittime.cli.bench_exit import codes, exit_code, unanswered
from splittime.cli.bench_flags import with_load_flags
from splittime.cli.bench_options import SearchOptions, SweepOptions
from splittime.core.errors import ConfigError

SEARCH_EXAMPLES = f"""\b
Examples:
  splittime bench search http://127.0.0.1:8000 --slo ttft_p99=300ms
  splittime bench search URL --slo ttft_p99=1s,tpot_p99=40ms --low 2 --high 64
  splittime bench search URL --slo ttft_p99=1s --confirmations 3 --out runs/

{codes("search")}"""
SWEEP_EXAMPLES = f"""\b
Examples:
  splittime bench sweep http://127.0.0.1:8000 --rates 1,2,4,8 --duration 30s
  splittime bench sweep URL --concurrencies 1,4,16,64 --num-requests 200
  splittime bench sweep URL --rates 1,2,4 --slo tpot_p99=40ms --out runs/

{codes("sweep")}"""


@with_load_flags(SearchOptions, "rate", "rate_end", "ramp_s", "concurrency", "cool_down_requests")
def search(given: SearchOptions, load: dict[str, Any]) -> None:
    """Find the highest rate that keeps an SLO, as an interval with both ends confirmed."""
    from splittime.cli.bench_levels import Runs, print_trials, setup
    from splittime.loadgen.event_loop import run_loop
    from splittime.loadgen.search import Found, check_search, highest_rate

    made = setup(given, load, "rate", given.slo, stop_on_saturation=True)
    bounds = given.low, given.high, given.resolution, given.confirmations, given.max_runs
    check_search(*bounds)

    async def work() -> tuple[Found, bool]:
        runs = await Runs.on(made, [given.low])
        return await highest_rate(runs.measure, runs.keeps, *bounds, on_trial=runs.tell), runs.is_interrupted

    found, was_interrupted = run_loop(work())
    print_trials(made, found.trials, found, found.sentence, given.json)
    short = found.kept is None or found.stopped is not None
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


@with_load_flags(SweepOptions, "rate", "concurrency")
def sweep(given: SweepOptions, load: dict[str, Any]) -> None:
    """Run one load at several rates or concurrencies and show them side by side."""
    from splittime.cli.bench_levels import Runs, print_trials, setup
    from splittime.loadgen.event_loop import run_loop
    from splittime.loadgen.search import Swept
    from splittime.loadgen.search import sweep as run_sweep

    level, levels = _levels(given)
    made = setup(given, load, level, given.slo)

    async def work() -> tuple[Swept, bool]:
        runs = await Runs.on(made, levels)
        return await run_sweep(runs.measure, levels, runs.keeps, on_trial=runs.tell), runs.is_interrupted

    found, was_interrupted = run_loop(work())
    print_trials(made, found.trials, found, found.sentence, given.json)
    short = found.stopped is not None or any(unanswered(trial.run) for trial in found.trials)
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


def _levels(given: SweepOptions) -> tuple[str, list[float]]:
    """What differs from run to run, and its values in the order given."""
    if (given.rates is None) == (given.concurrencies is None):
        raise ConfigError("a sweep is over rates or over concurrencies", param="rates", hint="Give --rates 1,2,4.")
    name, text = ("rate", given.rates) if given.rates is not None else ("concurrency", given.concurrencies)
    try:
        levels = [float(one) for one in (text or "").split(",")]
    except ValueError:
        levels = []
    is_whole = name == "rate" or all(one == one // 1 for one in levels)
    if not levels or not is_whole or not all(0 < one < float("inf") for one in levels):
        hint = "Give numbers above 0 with commas between; concurrencies are whole."
        raise ConfigError(f"{text!r} are no levels to sweep over", param=name, value=text, hint=hint)
    if len(set(levels)) < len(levels):
        raise ConfigError(f"{text!r} names a level twice", param=name, value=text, hint="Name each once.")
    return name, levels
