"""`splittime bench report RUN.json`: a saved run as tables, as one HTML page, as CSV or as JSON, and against an SLO."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from splittime.cli.bench_exit import codes, exit_code
from splittime.cli.bench_flags import DefinitionsFlag
from splittime.cli.options import JsonFlag, fails_clearly, talk, wide, write_data

if TYPE_CHECKING:
    from splittime.bench.book.records import Run

EXAMPLES = f"""\b
Examples:
  splittime bench report run.json
  splittime bench report run.json --html run.html --csv run.csv
  splittime bench report run.json --slo ttft_p99=300ms,tpot_p99=40ms

Without --slo it shows and does not judge.

{codes("report")}"""


@fails_clearly
def report(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.json", help="What `splittime bench` saved.")],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row for each request.")] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="TERMS", help="Judge by this instead of the run's own.")
    ] = None,
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
    elif html is None and csv is None:
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
