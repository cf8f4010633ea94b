"""`splittime bench books RUN.json` and `splittime bench report RUN.json`: views of a saved run.

`books` shows what the client felt beside what the server says. At a splittime server each request is joined with its
account, and TTFT and E2E become lines that sum to them, with the residual in sight. Of others it shows what their
metrics tell, and says what they cannot. `report` gives tables, one HTML page, CSV or JSON, and a verdict on an SLO.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from splittime.cli.bench_exit import codes, exit_code
from splittime.cli.bench_flags import DefinitionsFlag
from splittime.cli.options import JsonFlag, argument, fails_clearly, flag, talk, wide, write_data

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splittime.bench.book.records import Run
    from splittime.bench.join import JoinedBooks

EXAMPLES = f"""\b
Examples:
  splittime bench books run.json
  splittime bench books run.json --request bench-5f3a-17-0

{codes("books")}"""
REPORT_EXAMPLES = f"""\b
Examples:
  splittime bench report run.json
  splittime bench report run.json --html run.html --csv run.csv
  splittime bench report run.json --slo ttft_p99=300ms,tpot_p99=40ms

Without --slo it shows and does not judge.

{codes("report")}"""


@fails_clearly
def books(
    run_file: Path = argument("RUN.json", "What `splittime bench` saved.", ...),
    request: str | None = flag("ID", "One request's lines, by its id or its number."),
    json: JsonFlag = False,
) -> None:
    """Show both books of a saved run side by side: what the client felt, and what the server did meanwhile."""
    from splittime.bench.book.records import load_run
    from splittime.bench.join import join
    from splittime.bench.join_view import find_request
    from splittime.bench.server_view import server_view

    run = load_run(run_file)
    arms = range(len(run.arms))
    joined = [join(run, arm) for arm in arms]
    chosen = find_request(joined, request) if request is not None else None
    if json:
        whole = {"books": joined, "servers": [server_view(run, arm) for arm in arms]}
        write_data(msgspec.json.encode(chosen if chosen is not None else whole))
        return
    console = wide()
    for arm in arms if chosen is None else ():
        console.print(_rendered(run, arm, joined[arm]))
    if chosen is not None:
        from splittime.bench.join_view import render_request

        console.print(render_request(chosen))


def _rendered(run: "Run", arm: int, joined: "JoinedBooks") -> "RenderableType":
    from splittime.bench.join_view import render_books
    from splittime.bench.server_view import render_server_view

    has_books = run.arms[arm].accounts or run.arms[arm].kind == "splittime"
    return render_books(joined) if has_books else render_server_view(run, arm)


@fails_clearly
def report(
    run_file: Path = argument("RUN.json", "What `splittime bench` saved.", ...),
    html: Path | None = flag("FILE", "Write one self-contained page."),
    csv: Path | None = flag("FILE", "Write a row for each request."),
    slo: str | None = flag("TERMS", "Judge by this instead of the run's own."),
    definitions: DefinitionsFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show a saved run again: as a table, an HTML page, CSV or JSON."""
    from splittime.bench.book.records import load_run
    from splittime.bench.book.slo import falls_short, with_slo

    run = load_run(run_file)
    run = with_slo(run, slo) if slo else run
    _write_files(run, html, csv)
    if json:
        from splittime.bench.report import as_json

        write_data(msgspec.json.encode(as_json(run)))
    elif definitions or (html is None and csv is None):
        from splittime.bench.report.table import render

        wide().print(render(run, with_definitions=definitions))
    if slo:
        raise typer.Exit(exit_code(is_void=run.is_void, falls_short=falls_short(run, run.slo)))


def _write_files(run: "Run", html: Path | None, csv: Path | None) -> None:
    if html is not None:
        from splittime.bench.report.html import write_html

        write_html(run, html)
        talk().print(f"wrote {html}", markup=False)
    if csv is not None:
        from splittime.bench.report.csv import write_csv

        write_csv(run, csv)
        talk().print(f"wrote {csv}", markup=False)
