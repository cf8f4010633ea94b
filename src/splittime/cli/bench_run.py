"""`splittime bench run URL`: draw a schedule, carry it out, tell what became of it. Exit codes: `bench_flags`.

What `splittime bench run` shows on standard error while it goes on. Nothing where that is no terminal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from splittime.bench.book.records import Ending, Run, save
from splittime.bench.event_loop import interrupted, run_loop
from splittime.bench.share import OnProgress, Progress
from splittime.cli.bench_flags import BenchRunOptions as Given
from splittime.cli.bench_flags import codes, exit_code, time_ns, with_load_flags
from splittime.cli.options import talk, wide, write_data
from splittime.cli.progress import LINE_EVERY_S
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable
from splittime.wire.target import Interleave, RunOptions

if TYPE_CHECKING:
    from splittime.bench.draw import LoadRequest

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


@contextmanager
def shown_live(console: Console, is_closed: bool) -> Iterator[OnProgress]:
    """Gives what is to be called with the progress: a bar on a terminal, in a log a line every ten seconds."""
    if not console.is_terminal:
        told_s = 0.0

        def tell(progress: Progress) -> None:
            nonlocal told_s
            if progress.elapsed_s >= told_s + LINE_EVERY_S:
                told_s = progress.elapsed_s
                console.print(f"{progress.elapsed_s:.0f} s:", *_figures(progress, is_closed), soft_wrap=True)

        yield tell
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(view(progress, is_closed))


def view(progress: Progress, is_closed: bool) -> RenderableType:
    """One bar, and the figures in as many lines as they need: none is broken in two."""
    done, whole, end = float(progress.ended), max(1.0, progress.planned), " s"
    if progress.ends_at_s:
        done, whole = min(progress.elapsed_s, progress.ends_at_s), progress.ends_at_s
        end = f" / {whole:.0f} s{', all sent: waits for answers' * (progress.elapsed_s > whole)}"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=whole, completed=done, width=40), f"{progress.elapsed_s:.0f}{end}")
    figures = [Text.from_markup(figure) for figure in _figures(progress, is_closed)]
    return Group(bar, Columns(figures, padding=(0, 2)))


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
    from splittime.bench.book.slo import falls_short

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
    from splittime.bench.book.slo import check_terms, parse_slo

    terms = parse_slo(given.slo) if given.slo is not None else {}
    check_terms({**_limits(given), **terms})
    return terms


def _limits(given: Given) -> dict[str, float]:
    from splittime.bench.book.slo import parse_slo

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


async def _carry_out(given: Given, load: dict[str, Any], options: RunOptions) -> tuple[Run, bool]:
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
    from splittime.bench.book.slo import unanswered

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
        write_data(msgspec.json.encode(run))
        return
    from splittime.bench.report.table import render

    wide().print(render(run, terms, with_definitions=given.definitions))


def _write_csv(run: Run, path: Path) -> None:
    from splittime.bench.report.csv import write_csv

    write_csv(run, path)


def _write_html(run: Run, path: Path) -> None:
    from splittime.bench.report.html import write_html

    write_html(run, path)
