"""`splittime bench books RUN.json`: what the client felt beside what the server says, for a saved run.

At a splittime server each request is joined with its account, and TTFT and E2E become lines that sum to them, with the
residual in sight. Of others it shows what their metrics tell, and says what they cannot.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from splittime.cli.bench_exit import codes
from splittime.cli.options import JsonFlag, fails_clearly, wide
from splittime.core.errors import NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splittime.ledger.client_book import Run
    from splittime.loadgen.joined import JoinedBooks, JoinedRequest

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
    from splittime.ledger.client_book import load_run
    from splittime.loadgen.dialects.view import server_view
    from splittime.loadgen.join import join

    run = load_run(run_file)
    arms = range(len(run.arms))
    joined = [join(run, arm) for arm in arms]
    chosen = _find(joined, request) if request is not None else None
    if json:
        whole = {"books": joined, "servers": [server_view(run, arm) for arm in arms]}
        sys.stdout.buffer.write(msgspec.json.encode(chosen if chosen is not None else whole) + b"\n")
        return
    console = wide()
    for arm in arms if chosen is None else ():
        console.print(_of_arm(run, arm, joined[arm]))
    if chosen is not None:
        from splittime.loadgen.join_view import render_request

        console.print(render_request(chosen))


def _of_arm(run: "Run", arm: int, joined: "JoinedBooks") -> "RenderableType":
    from splittime.loadgen.dialects.view import render_server_view
    from splittime.loadgen.join_view import render_books

    return render_books(joined) if run.arms[arm].kind == "splittime" else render_server_view(run, arm)


def _find(joined: "list[JoinedBooks]", wanted: str) -> "JoinedRequest":
    """Raises `NotFound`, also for a request that is in one book only."""
    for book in joined:
        for request in book.requests:
            if wanted in (request.request_id, str(request.index)):
                return request
    hint = "It may not have been sent, not counted, or the server has no account of it."
    raise NotFound(f"no request {wanted!r} in both books", param="request", value=wanted, hint=hint)
