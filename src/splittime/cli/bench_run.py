"""`splittime bench run URL`: draw a schedule, carry it out, tell what became of it.

Exit codes: 0 done, 1 an SLO was missed (or the run could not be made), 2 a usage error, 3 VOID: the client was at fault
and the figures are about it.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from splittime.cli.bench_flags import spec_of, time_ns, with_load_flags
from splittime.cli.bench_live import shown_live
from splittime.cli.options import JsonFlag, talk, wide
from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Run, save
from splittime.loadgen import schedule as schedules
from splittime.loadgen.schedule import Schedule
from splittime.loadgen.target import Interleave, RunOptions, Target

MISSED, VOID = 1, 3
LOOK_AROUND = {"concurrency": 4, "duration_s": 20.0, "warm_up_requests": 8}  # for whoever types only the URL
SAYS_HOW_MUCH = {"rate", "concurrency", "trace", "arrivals", "cv", "rate_end", "ramp_s", "warm_up_s", "cool_down_s"}
USUAL_VOCAB_SIZE = 32_000
Writer = Callable[[Run, Path], None]

EXAMPLES = """\b
Examples:
  splittime bench run http://127.0.0.1:8000                                    4 at a time for 20 s: a first look
  splittime bench run URL --rate 5 --duration 60s --input-tokens 512 --output-tokens 128
  splittime bench run URL --concurrency 16 --num-requests 200 --out run.json --html run.html
  splittime bench run URL --rate 8 --slo ttft_p99=300ms,tpot_p99=40ms          exit code 1 if it is missed
  splittime bench run URL --trace azure.csv --speed-up 2 --save-schedule s.jsonl
  splittime bench run URL_A URL_B --rate 5 --duration 60s                      both in one run, paired
"""


@with_load_flags()
def run(
    load: dict[str, Any],
    url: Annotated[
        list[str], typer.Argument(metavar="URL...", help="The server, with or without /v1; two: both in one run.")
    ],
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay this schedule instead of drawing one.")
    ] = None,
    save_schedule: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the schedule.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Everything, every request, as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="One line for each request.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The report as one page.")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="TERMS", help="Exit with 1 if missed: ttft_p99=300ms,tpot_p99=40ms.")
    ] = None,
    goodput: Annotated[
        str | None, typer.Option(metavar="TERMS", help="What makes a request good: ttft=300ms,tpot=40ms.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the server's first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="SPLITTIME_API_KEY", help="The server's.")
    ] = None,
    label: Annotated[str, typer.Option(metavar="TEXT", help="The run's name in reports.")] = "",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Of each request.")] = "10m",
    max_in_flight: Annotated[
        int | None, typer.Option(metavar="N", help="Hold requests back beyond so many; the wait counts as lateness.")
    ] = None,
    stop_on_saturation: Annotated[
        bool, typer.Option(help="End the run once a test says that the server is overloaded (open loop only).")
    ] = False,
    interleave: Annotated[
        str, typer.Option(metavar="paired|blocks", help="Two servers: together, or by turns, on one machine.")
    ] = "paired",
    block: Annotated[str, typer.Option(metavar="TIME", help="Length of a turn with --interleave blocks.")] = "10s",
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes. Default: as many as needed.")] = None,
    sample_interval: Annotated[str, typer.Option(metavar="TIME", help="Between looks at its metrics.")] = "500ms",
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="Of the server's model, where the server does not say.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Prompt and answer together, where the server does not say.")
    ] = None,
    salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of all prompts: no run finds another's. Default: random.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Send a load and measure what becomes of each request, on both clocks."""
    from splittime.loadgen.event_loop import run_loop
    from splittime.loadgen.slo import check_terms

    targets = [Target(url=_with_scheme(one), api_key=api_key, model=model) for one in url]
    asked = Asked(
        load=load,
        schedule=schedule,
        save_schedule=save_schedule,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        salt=salt,
    )
    terms, limits = _terms(slo), _terms(goodput)
    check_terms({**limits, **terms})
    options = RunOptions(
        timeout_s=time_ns(timeout, "--timeout") / 1e9,
        max_in_flight=max_in_flight,
        workers=workers,
        sample_interval_s=time_ns(sample_interval, "--sample-interval") / 1e9,
        stop_on_saturation=stop_on_saturation,
        interleave=_interleave(interleave),
        block_s=time_ns(block, "--block") / 1e9,
        slo={**limits, **terms},
        label=label,
    )
    files = [(path, write) for path, write in ((out, save), (csv, _write_csv), (html, _write_html)) if path is not None]
    for path, _ in files:
        _check_writable(path)
    found = run_loop(_carry_out(asked, targets, options))
    _tell(found, terms, files, json)
    raise typer.Exit(_exit_code(found, terms))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Where the schedule comes from."""

    load: dict[str, Any]
    schedule: Path | None
    save_schedule: Path | None
    vocab_size: int | None
    max_model_len: int | None
    salt: str | None


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def _terms(text: str | None) -> dict[str, float]:
    from splittime.loadgen.slo import parse_slo

    return parse_slo(text) if text is not None else {}


def _check_writable(path: Path) -> None:
    """Raises `ConfigError` now, rather than after the run. A device or pipe would be replaced by a file: refused."""
    if path.exists() and not path.is_file():
        hint = "Name a file; --json writes the run to standard output."
        raise ConfigError(f"cannot write {path}: it is no file", param="out", value=str(path), hint=hint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="out", value=str(path)) from error


def _interleave(text: str) -> Interleave:
    try:
        return Interleave(text)
    except ValueError:
        hint = f"one of {', '.join(Interleave)}"
        raise ConfigError(f"--interleave: {text!r} is no way to", param="interleave", value=text, hint=hint) from None


async def _carry_out(asked: Asked, targets: Sequence[Target], options: RunOptions) -> Run:
    from splittime.loadgen.run import run_schedule

    schedule = await _schedule(asked, targets[0])
    console = talk()
    for note in schedule.notes:
        console.print(f"note: {note}", markup=False)
    with shown_live(console, schedule.concurrency is not None) as on_progress:
        return await run_schedule(schedule, targets, options, on_progress, _interrupted())


def _interrupted() -> asyncio.Event:
    """Set by the first Ctrl-C, which ends the run with what was measured; the second ends the program."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def first() -> None:
        event.set()
        loop.remove_signal_handler(signal.SIGINT)

    with contextlib.suppress(NotImplementedError, ValueError):
        loop.add_signal_handler(signal.SIGINT, first)
    return event


async def _schedule(asked: Asked, target: Target) -> Schedule:
    """Read or drawn, and kept if asked."""
    if asked.schedule is not None:
        if asked.load:
            name = next(iter(asked.load)).replace("_", "-")
            what = f"--schedule says everything, also what --{name} would"
            raise ConfigError(what, param="schedule", value=str(asked.schedule), hint=f"leave out --{name}")
        schedule = schedules.load_schedule(asked.schedule)
    else:
        schedule = await _drawn(asked, target)
    if asked.save_schedule is not None:
        schedules.save(schedule, asked.save_schedule)
    return schedule


async def _drawn(asked: Asked, target: Target) -> Schedule:
    import secrets

    from splittime.loadgen.draw import draw
    from splittime.loadgen.limits import server_limits

    load = dict(asked.load)
    if not SAYS_HOW_MUCH & set(load):
        load = {**LOOK_AROUND, **load}
    spec = spec_of(load)
    spec.validate()
    limits = await server_limits(target)
    if spec.prompt_form is None and not limits.takes_ids:
        spec = msgspec.structs.replace(spec, prompt_form="text")
    vocab_size = asked.vocab_size or limits.vocab_size
    if vocab_size is None:
        vocab_size = USUAL_VOCAB_SIZE
        if spec.prompt_form in (None, "ids"):
            say = f"note: the server does not tell its vocabulary: ids below {vocab_size:,} are used (--vocab-size)"
            talk().print(say, markup=False)
    return draw(
        spec,
        vocab_size=vocab_size,
        max_model_len=asked.max_model_len or limits.max_model_len,
        block_size=limits.block_size,
        salt=None if spec.reuse_prompts else asked.salt or secrets.token_hex(6),
    )


def _tell(run: Run, terms: dict[str, float], files: Sequence[tuple[Path, Writer]], as_json: bool) -> None:
    """Data to standard output and to files; which files, to standard error. A file that cannot be written takes neither
    the others nor the table with it."""
    troubles = [trouble for path, write in files if (trouble := _written(run, path, write)) is not None]
    _show(run, terms, as_json)
    if troubles:
        raise troubles[0]


def _written(run: Run, path: Path, write: Writer) -> ConfigError | None:
    try:
        write(run, path)
    except ConfigError as error:
        return error
    talk().print(f"wrote {path}", markup=False)
    return None


def _show(run: Run, terms: dict[str, float], as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(run) + b"\n")
        return
    from splittime.loadgen.report.table import render

    wide().print(render(run, terms))


def _write_csv(run: Run, path: Path) -> None:
    from splittime.loadgen.report.csv import write_csv

    write_csv(run, path)


def _write_html(run: Run, path: Path) -> None:
    from splittime.loadgen.report.html import write_html

    write_html(run, path)


def _exit_code(run: Run, terms: dict[str, float]) -> int:
    from splittime.loadgen.slo import check_slo

    if run.is_void:
        return VOID
    missed = [result for arm in range(len(run.arms)) if terms for result in check_slo(run, terms, arm) if not result.ok]
    return MISSED if missed else 0
