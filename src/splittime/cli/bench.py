"""`splittime bench`: load for any OpenAI-compatible server, and what became of it: single runs, search and sweep.

`bench run URL`: draw a schedule, carry it out, tell what became of it. What it shows on standard error while it goes on
is nothing where that is no terminal.

`bench search URL --slo TERMS`: the highest rate that keeps an SLO. `bench sweep URL --rates 1,2,4`. Each of their runs
is a `bench run` of its own (`bench.search`). `--out` keeps every run. Exit codes: `bench_flags`.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import orjson
import typer
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from splittime.bench.book.records import Ending, Run, save
from splittime.bench.book.slo import check_terms, falls_short, parse_slo, unanswered
from splittime.bench.event_loop import interrupted, run_loop
from splittime.bench.report.csv import write_csv
from splittime.bench.report.table import render
from splittime.bench.share import OnProgress, Progress
from splittime.cli import bench_compare
from splittime.cli.bench_flags import BenchRunOptions as Given
from splittime.cli.bench_flags import (
    SearchOptions,
    SeriesOptions,
    SweepOptions,
    codes,
    exit_code,
    time_ns,
    with_load_flags,
)
from splittime.cli.options import JsonFlag, fails_clearly, flag, talk, wide, write_data
from splittime.cli.panels import add, group
from splittime.cli.progress import LINE_EVERY_S
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable
from splittime.present.tables import FittingTable
from splittime.wire.target import Interleave, RunOptions

if TYPE_CHECKING:
    from splittime.bench.draw import LoadRequest
    from splittime.bench.search import SearchResult, Series, Swept, Trial

Found = TypeVar("Found")
STYLES = {"kept": "green", "broken": "yellow", "void": "red"}
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
GROUP_EXAMPLES = f"""\b
Examples:
  splittime bench run http://127.0.0.1:8000 --rate 5
  splittime bench search http://127.0.0.1:8000 --slo ttft_p99=300ms
  splittime bench compare before.json after.json

{codes()}"""
app = group("Load for any OpenAI-compatible server, measured and explained.", GROUP_EXAMPLES)

RARELY = (50_000, 50, 1000)
MOCK_EXAMPLES = f"""\b
Examples:
  splittime bench mock-server                        on http://127.0.0.1:8001
  splittime bench mock-server --ttft 200ms --slots 8 so that requests queue
  splittime bench mock-server --freeze 3s:2s         stands from second 3 to 5

{codes("mock-server")}"""


@with_load_flags(SearchOptions, "rate", "rate_end", "ramp_s", "concurrency", "cool_down_requests")
def search(given: SearchOptions, load: dict[str, Any]) -> None:
    """Find the highest rate that keeps an SLO, as an interval with both ends confirmed."""
    from splittime.bench.search import SearchBounds, find_rate

    series = _series(given, load, "rate", given.slo, stop_on_saturation=True)
    bounds = SearchBounds(given.low, given.high, given.resolution, given.confirmations, given.max_runs)
    bounds.check()
    found, was_interrupted = _carry_out(lambda stop: find_rate(series, bounds, _Display(series), stop))
    _print(series, found, given.json)
    short = found.kept is None or found.stopped is not None
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


@with_load_flags(SweepOptions, "rate", "concurrency")
def sweep(given: SweepOptions, load: dict[str, Any]) -> None:
    """Run one load at several rates or concurrencies and show them side by side."""
    from splittime.bench.search import sweep_levels

    level, levels = _levels(given)
    series = _series(given, load, level, given.slo)
    found, was_interrupted = _carry_out(lambda stop: sweep_levels(series, levels, _Display(series), stop))
    _print(series, found, given.json)
    short = found.stopped is not None or any(unanswered(trial.run) for trial in found.trials)
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


def _carry_out(work: Callable[[asyncio.Event], Coroutine[Any, Any, Found]]) -> tuple[Found, bool]:
    """Returns what was found, and whether Ctrl-C cut it short."""

    async def until_interrupted() -> tuple[Found, bool]:
        stop = interrupted()
        return await work(stop), stop.is_set()

    return run_loop(until_interrupted())


def _series(
    given: SeriesOptions, load: dict[str, Any], level: str, slo: str | None, stop_on_saturation: bool = False
) -> "Series":
    """Raises `ConfigError` for a flag that cannot be."""
    from splittime.bench.search import Series

    terms = parse_slo(slo) if slo is not None else {}
    check_terms(terms)
    options = RunOptions(
        timeout_s=given.timeout_s,
        workers=None,  # not in the process that draws the progress
        stop_on_saturation=stop_on_saturation,
        slo=terms,
    )
    options.validate()
    return Series(
        target=given.target(given.url),
        load=load,
        level=level,
        slo=terms,
        pause_s=time_ns(given.pause, "--pause") / 1e9,
        options=options,
        vocab_size=given.vocab_size,
        max_model_len=given.max_model_len,
        out=given.out,
    )


def _levels(given: SweepOptions) -> tuple[str, list[float]]:
    """Returns what differs from run to run, and its values in the order given."""
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


class _Display:
    """Shows a series on standard error."""

    def __init__(self, series: "Series") -> None:
        self._series, self._console = series, talk()

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False)

    def live(self, is_closed: bool) -> "AbstractContextManager[OnProgress | None]":
        return shown_live(self._console, is_closed)

    def trial(self, number: int, trial: "Trial") -> None:
        words = f"run {number:2}: {self._series.level} {trial.level:g}: {trial.verdict.upper()}"
        why = f" ({trial.run.stopped})" if trial.run.stopped else ""
        values = ", ".join(f"{name} {text}" for name, text in self._series.figures_of(trial.run).items())
        in_a_log = not self._console.is_terminal  # one line for each run, however long
        style = STYLES[trial.verdict]
        self._console.print(f"{words}{why}  {values}", style=style, markup=False, soft_wrap=in_a_log)


def _print(series: "Series", found: "SearchResult | Swept", as_json: bool) -> None:
    """Data to standard output: a table and the answer, or one JSON document."""
    if as_json:
        write_data(msgspec.json.encode(series.as_json(found)))
        return
    console = wide()
    console.print(FittingTable(*(_table(series, found, *room) for room in (("_", 1), ("\n", 1), ("\n", 0)))))
    if found.sentence:
        console.print(found.sentence, markup=False)


def _table(series: "Series", found: "SearchResult | Swept", between: str, padding: int) -> Table:
    """A row for each run, in the order of the levels. between: the words of a heading."""
    from splittime.bench.search import FIGURES

    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0))
    table.add_column(series.level, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for name in FIGURES:
        table.add_column(name.replace("_", between), justify="right", overflow="fold")
    for trial in sorted(found.trials, key=lambda one: one.level):
        figures = series.figures_of(trial.run)
        is_judged = series.slo or trial.verdict == "void"
        verdict = f"[{STYLES[trial.verdict]}]{trial.verdict}[/]" if is_judged else ""
        table.add_row(f"{trial.level:g}", verdict, *(figures.get(name, "-") for name in FIGURES))
    return table


@fails_clearly
def mock_server(
    ttft: str = flag("TIME", "To the first token.", "50ms"),
    ttft_per_token: str = flag("TIME", "And for each token of the prompt.", "0ms"),
    itl: str = flag("TIME", "Between tokens.", "10ms"),
    tokens_per_chunk: int = flag("N", "So many tokens in each event.", 1),
    buffer_chunks: int = flag("N", "Hold events back until there are so many.", 1),
    nagle_every: int = flag("N", "Each N-th chunk waits 40 ms more. 0: none.", 0),
    freeze: list[str] | None = flag("BEGIN:LENGTH", "Stand still, counted from the first request."),
    error_rate: float = flag("X", "Share of requests that are answered 500.", 0.0),
    break_rate: float = flag("X", "Share of streams that break off.", 0.0),
    slots: int | None = flag("N", "Serve so many at a time, queue the rest."),
    seed: int = flag("N", "Seed that draws who fails.", 0),
    host: str = flag("HOST", "Where to listen.", "127.0.0.1"),
    port: int = flag("N", "0: a free one.", 8001),
    json: JsonFlag = False,
) -> None:
    """Run a server with declared timings: to check a load generator against, or to try one without a model."""
    from splittime.bench.mock_server import Timings

    timings = Timings(
        ttft_ns=time_ns(ttft, "--ttft"),
        ttft_per_token_ns=time_ns(ttft_per_token, "--ttft-per-token"),
        itl_ns=time_ns(itl, "--itl"),
        tokens_per_chunk=tokens_per_chunk,
        buffer_chunks=buffer_chunks,
        nagle_every=nagle_every,
        freezes=tuple(_freeze(text) for text in freeze or ()),
        error_rate=error_rate,
        break_rate=break_rate,
        slots=slots,
        seed=seed,
    )
    run_loop(_serve_mock(timings, host, port, json))


def _freeze(text: str) -> tuple[int, int]:
    begin, _, length = text.partition(":")
    return time_ns(begin, "--freeze"), time_ns(length, "--freeze")


async def _serve_mock(timings: "object", host: str, port: int, as_json: bool) -> None:
    from splittime.bench.mock_server import MockServer

    gc.collect()
    gc.freeze()  # a collection of all that was imported takes longer than a token
    gc.set_threshold(*RARELY)
    async with MockServer(timings, host, port) as server:  # type: ignore[arg-type]
        if as_json:
            write_data(orjson.dumps({"url": server.url}))
        else:
            talk().print(f"mock server on {server.url} (Ctrl-C ends it)")
        await asyncio.Event().wait()


Writer = Callable[[Run, Path], None]

RUN_EXAMPLES = f"""\b
Examples:
  splittime bench run http://127.0.0.1:8000    a first look: 4 at a time, 20 s
  splittime bench run URL --rate 5 --input-tokens 512 --output-tokens 128
  splittime bench run URL --concurrency 16 --out run.json --html run.html
  splittime bench run URL --rate 8 --slo ttft_p99=300ms,tpot_p99=40ms  in a CI
  splittime bench run URL --trace azure.csv --speed-up 2
  splittime bench run URL_A URL_B --rate 5      two servers in one run, paired

{codes("run")}"""


@contextmanager
def shown_live(console: Console, is_closed: bool) -> Iterator[OnProgress]:
    """Gives what is to be called with the progress: a bar on a terminal, in a log a line every ten seconds."""
    if not console.is_terminal:
        told_s = 0.0

        def tell(progress: Progress) -> None:
            nonlocal told_s
            if progress.elapsed_s >= told_s + LINE_EVERY_S:
                told_s = progress.elapsed_s
                told = [*_figures(progress, is_closed), *_waiting(progress)]
                console.print(f"{progress.elapsed_s:.0f} s:", *told, soft_wrap=True)

        yield tell
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(view(progress, is_closed))


def view(progress: Progress, is_closed: bool) -> RenderableType:
    """One bar, and the figures in as many lines as they need: none is broken in two."""
    done, whole, end = float(progress.ended), max(1.0, progress.planned), " s"
    if progress.ends_at_s:
        done, whole = min(progress.elapsed_s, progress.ends_at_s), progress.ends_at_s
        end = f" / {whole:.0f} s"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=whole, completed=done, width=40), f"{progress.elapsed_s:.0f}{end}")
    figures = [Text.from_markup(figure) for figure in _figures(progress, is_closed)]
    return Group(bar, Columns(figures, padding=(0, 2)), *map(Text, _waiting(progress)))


def _waiting(progress: Progress) -> list[str]:
    """Returns, once all is sent, for how long answers may be waited for: as they came so far."""
    if not progress.in_flight or progress.elapsed_s <= (progress.ends_at_s or progress.elapsed_s):
        return []
    left_s = progress.in_flight * progress.elapsed_s / max(1, progress.ended)
    more = f"about {left_s:,.0f} s more" if progress.ended else "none has ended"
    return [f"all sent: waits for answers, {more}; Ctrl-C keeps those that ended"]


def _figures(progress: Progress, is_closed: bool) -> list[str]:
    rate = f"sent [bold]{progress.per_s(progress.begun):.1f}/s[/bold]"
    if not is_closed:
        rate += f" of {progress.per_s(progress.due):.1f}/s"
    ttft = "TTFT [bold]-[/bold]"
    if progress.ttft_p50_s is not None and progress.ttft_p99_s is not None:
        ttft = f"TTFT p50 [bold]{progress.ttft_p50_s * 1e3:.0f} ms[/bold]  p99 {progress.ttft_p99_s * 1e3:.0f} ms"
    failed = f"[red]{progress.failed} failed[/red]" if progress.failed else "0 failed"
    return [rate, f"in flight [bold]{progress.in_flight}[/bold]", ttft, f"{progress.ended} ended", failed]


@with_load_flags(Given)
def run(given: Given, load: dict[str, Any]) -> None:
    """Send a load and measure what becomes of each request, on both clocks."""
    if len(given.url) > 2:
        raise ConfigError(f"{len(given.url)} servers; a run has one or two", param="url", value=len(given.url), limit=2)
    terms, options = _terms(given), _options(given)
    wanted = ((given.out, save), (given.csv, write_csv), (given.html, _write_html))
    files = [(path, write) for path, write in wanted if path is not None]
    for path, _ in files:
        check_writable(path)
    if given.save_schedule is not None:
        check_writable(given.save_schedule, "save_schedule")
    found, was_interrupted = run_loop(_sent(given, load, options))
    _tell(found, terms, files, given)
    if was_interrupted:
        talk().print(_of_those_sent(found), markup=False)
    short = falls_short(found, terms)
    raise typer.Exit(exit_code(is_interrupted=was_interrupted, is_void=found.is_void, falls_short=short))


def _terms(given: Given) -> dict[str, float]:
    """The SLO, checked with what makes a request good."""
    terms = parse_slo(given.slo) if given.slo is not None else {}
    check_terms({**_limits(given), **terms})
    return terms


def _limits(given: Given) -> dict[str, float]:
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


def _load_request(given: Given, load: dict[str, Any]) -> "LoadRequest":
    from splittime.bench.draw import LoadRequest

    return LoadRequest(
        load=load,
        schedule=given.schedule,
        keep_as=given.save_schedule,
        vocab_size=given.vocab_size,
        max_model_len=given.max_model_len,
        salt=given.salt,
    )


async def _sent(given: Given, load: dict[str, Any], options: RunOptions) -> tuple[Run, bool]:
    """Returns the run, and whether Ctrl-C cut it short."""
    from splittime.bench.draw import planned
    from splittime.bench.run import run_schedule

    targets = [given.target(url) for url in given.url]
    schedule = await planned(_load_request(given, load), targets[0])
    console = talk()
    for note in schedule.notes:
        console.print(f"note: {note}", markup=False)
    stop = interrupted()
    with shown_live(console, schedule.concurrency is not None) as on_progress:
        return await run_schedule(schedule, targets, options, on_progress, stop), stop.is_set()


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
    """Says what became of those that have no latency: as the table counts them."""
    endings, planned = [outcome.ending for outcome in run.outcomes], len(run.outcomes)
    unsent, cut = endings.count(Ending.UNSENT), endings.count(Ending.CANCELLED)
    told = f"interrupted: {planned - unsent} of {planned} requests were sent"
    told += f"; cancelled: {cut}, neither good nor bad" if cut else ""
    return told + (f"; not sent: {unsent}, errors" if unsent else "")


def _written(run: Run, path: Path, write: Writer) -> ConfigError | None:
    try:
        write(run, path)
    except ConfigError as error:
        return error
    talk().print(f"wrote {path}", markup=False)
    return None


def _show(run: Run, terms: dict[str, float], given: Given) -> None:
    if given.json:
        write_data(msgspec.json.encode(run))
        return
    wide().print(render(run, terms, with_definitions=given.definitions))


def _write_html(run: Run, path: Path) -> None:
    from splittime.bench.report.html import write_html

    write_html(run, path)


for _command, _examples, _summary in (
    (run, RUN_EXAMPLES, "Send a load and measure each request."),
    (search, SEARCH_EXAMPLES, "Find the highest rate that keeps an SLO."),
    (sweep, SWEEP_EXAMPLES, "Run one load at several rates or concurrencies."),
    (bench_compare.compare, bench_compare.EXAMPLES, "Say whether B is better than A, from saved runs."),
    (bench_compare.report, bench_compare.REPORT_EXAMPLES, "Show a saved run again: table, HTML, CSV or JSON."),
    (bench_compare.books, bench_compare.BOOKS_EXAMPLES, "Show what the client felt beside what the server did."),
):
    add(app, _command, _examples, _summary)
add(app, mock_server, MOCK_EXAMPLES, "Run a server with declared timings, to try a load on.", "mock-server")
