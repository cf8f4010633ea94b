"""`splittime bench run URL`: draw a schedule, carry it out, tell what became of it. Exit codes: `bench_exit`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from splittime.cli.bench_exit import codes, exit_code, falls_short, interrupted, unanswered
from splittime.cli.bench_flags import spec_of, time_ns, with_load_flags
from splittime.cli.bench_live import shown_live
from splittime.cli.bench_options import RunOptions as Given
from splittime.cli.options import talk, wide
from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Ending, Run, save
from splittime.ledger.whole_file import check_writable
from splittime.loadgen import schedule as schedules
from splittime.loadgen.schedule import Schedule
from splittime.loadgen.target import Interleave, RunOptions

LOOK_AROUND = {"concurrency": 4, "duration_s": 20.0, "warm_up_requests": 8}  # for whoever types only the URL
SO_MANY = {"concurrency": 4, "warm_up_requests": 8}  # where a number says how long
SAYS_HOW_MUCH = {"rate", "concurrency", "trace", "arrivals", "cv", "rate_end", "ramp_s", "warm_up_s", "cool_down_s"}
Writer = Callable[[Run, Path], None]

EXAMPLES = f"""\b
Examples:
  splittime bench run http://127.0.0.1:8000    a first look: 4 at a time, 20 s
  splittime bench run URL --rate 5 --input-tokens 512 --output-tokens 128
  splittime bench run URL --concurrency 16 --out run.json --html run.html
  splittime bench run URL --rate 8 --slo ttft_p99=300ms,tpot_p99=40ms  in a CI
  splittime bench run URL --trace azure.csv --speed-up 2
  splittime bench run URL_A URL_B --rate 5      two servers in one run, paired

{codes("run")}"""


@with_load_flags(Given)
def run(given: Given, load: dict[str, Any]) -> None:
    """Send a load and measure what becomes of each request, on both clocks."""
    from splittime.loadgen.event_loop import run_loop

    if len(given.url) > 2:
        raise ConfigError(f"{len(given.url)} servers; a run has one or two", param="url", value=len(given.url), limit=2)
    terms, options = _terms(given), _options(given)
    wanted = ((given.out, save), (given.csv, _write_csv), (given.html, _write_html))
    files = [(path, write) for path, write in wanted if path is not None]
    for path, _ in files:
        check_writable(path)
    if given.save_schedule is not None:
        check_writable(given.save_schedule, "save_schedule")
    found, was_interrupted = run_loop(_carry_out(given, load, options))
    _tell(found, terms, files, given)
    if was_interrupted:
        talk().print(_of_those_sent(found), markup=False)
    short = falls_short(found, terms)
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


def _terms(given: Given) -> dict[str, float]:
    """The SLO, checked with what makes a request good."""
    from splittime.loadgen.slo import check_terms, parse_slo

    terms = parse_slo(given.slo) if given.slo is not None else {}
    check_terms({**_limits(given), **terms})
    return terms


def _limits(given: Given) -> dict[str, float]:
    from splittime.loadgen.slo import parse_slo

    return parse_slo(given.goodput) if given.goodput is not None else {}


def _options(given: Given) -> RunOptions:
    options = RunOptions(
        timeout_s=given.timeout_s,
        max_in_flight=given.max_in_flight,
        workers=given.workers,
        sample_interval_s=time_ns(given.sample_interval, "--sample-interval") / 1e9,
        stop_on_saturation=given.stop_on_saturation,
        interleave=_interleave(given.interleave),
        block_s=time_ns(given.block, "--block") / 1e9,
        slo={**_limits(given), **_terms(given)},
        label=given.label,
    )
    options.validate()
    return options


def _interleave(text: str) -> Interleave:
    try:
        return Interleave(text)
    except ValueError:
        hint = f"one of {', '.join(Interleave)}"
        raise ConfigError(f"--interleave: {text!r} is no way to", param="interleave", value=text, hint=hint) from None


async def _carry_out(given: Given, load: dict[str, Any], options: RunOptions) -> tuple[Run, bool]:
    """The run, and whether Ctrl-C cut it short."""
    from splittime.loadgen.run import run_schedule

    targets = [given.target(url) for url in given.url]
    schedule = await _schedule(given, load)
    console = talk()
    for note in schedule.notes:
        console.print(f"note: {note}", markup=False)
    stop = interrupted()
    with shown_live(console, schedule.concurrency is not None) as on_progress:
        return await run_schedule(schedule, targets, options, on_progress, stop), stop.is_set()


async def _schedule(given: Given, load: dict[str, Any]) -> Schedule:
    """Read or drawn, and kept if asked."""
    if given.schedule is not None:
        if load:
            name = next(iter(load)).replace("_", "-")
            what = f"--schedule says everything, also what --{name} would"
            raise ConfigError(what, param="schedule", value=str(given.schedule), hint=f"leave out --{name}")
        schedule = schedules.load_schedule(given.schedule)
    else:
        schedule = await _drawn(given, load)
    if given.save_schedule is not None:
        schedules.save(schedule, given.save_schedule)
    return schedule


async def _drawn(given: Given, load: dict[str, Any]) -> Schedule:
    from splittime.cli.bench_draw import corrected, drawn
    from splittime.loadgen.limits import server_limits

    if not SAYS_HOW_MUCH & set(load):
        load = {**(SO_MANY if "num_requests" in load else LOOK_AROUND), **load}
    spec_of(load).validate()
    limits = await server_limits(given.target(given.url[0]))
    return drawn(load, corrected(limits, given.vocab_size, given.max_model_len), given.salt)


def _tell(run: Run, terms: dict[str, float], files: Sequence[tuple[Path, Writer]], given: Given) -> None:
    """Data to standard output and to files; which files, to standard error. A file that cannot be written takes neither
    the others nor the table with it."""
    troubles = [trouble for path, write in files if (trouble := _written(run, path, write)) is not None]
    _show(run, terms, given)
    for arm, server in enumerate(run.arms):
        if count := unanswered(run, arm):
            talk().print(f"error: {server.url} answered none of {count} requests", style="red", markup=False)
    for trouble in troubles[1:]:
        talk().print(f"error: {trouble.info.message}", style="red", markup=False)
    if troubles:
        raise troubles[0]


def _of_those_sent(run: Run) -> str:
    sent = sum(outcome.ending is not Ending.UNSENT for outcome in run.outcomes)
    planned = len(run.outcomes)
    return f"interrupted: {sent} of {planned} requests were sent; the others have no latency, and count as errors"


def _written(run: Run, path: Path, write: Writer) -> ConfigError | None:
    try:
        write(run, path)
    except ConfigError as error:
        return error
    talk().print(f"wrote {path}", markup=False)
    return None


def _show(run: Run, terms: dict[str, float], given: Given) -> None:
    if given.json:
        sys.stdout.buffer.write(msgspec.json.encode(run) + b"\n")
        return
    from splittime.loadgen.report.table import render

    wide().print(render(run, terms, with_definitions=given.definitions))


def _write_csv(run: Run, path: Path) -> None:
    from splittime.loadgen.report.csv import write_csv

    write_csv(run, path)


def _write_html(run: Run, path: Path) -> None:
    from splittime.loadgen.report.html import write_html

    write_html(run, path)
