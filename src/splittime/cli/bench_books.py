"""`splittime bench books RUN.json`: what the client felt beside what the server says, for a saved run.

At a splittime server each request is joined with its account, and TTFT and E2E become lines that sum to them, with the
residual in sight. Of others it shows what their metrics tell, and says what they cannot.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from splittime.cli.bench_exit import codes
from splittime.cli.options import JsonFlag, fails_clearly, wide, write_data

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splittime.bench.book.records import Run
    from splittime.bench.join import JoinedBooks

EXAMPLES = f"""\b
Examples:
  splittime bench books run.json
  splittime bench books run.json --request bench-5f3a-17-0

{codes("books")}"""


@fails_clearly
def books(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.json", help="What `splittime bench` saved.")],
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="One request's lines, by its id or its number.")
    ] = None,
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
