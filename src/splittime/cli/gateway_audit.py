"""`splittime gateway audit verify`: is an audit log as it was written?"""

from pathlib import Path
from typing import Annotated

import orjson
import typer

from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, write_data

EXAMPLES = f"""\b
Examples:
  splittime gateway audit verify audit.jsonl
  splittime gateway audit verify audit.jsonl --holds HASH     which was kept elsewhere

{EXIT_CODES}"""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Check an audit log."""


@app.command(epilog=EXAMPLES)
@fails_clearly
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of [audit] in the config.")],
    after: Annotated[
        str, typer.Option("--after", metavar="HASH", help="The last hash of the file before, where it is a later part.")
    ] = "",
    holds: Annotated[
        str, typer.Option("--holds", metavar="HASH", help="A hash that it had: nothing up to there has been taken off.")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Follow the chain of hashes, and tell the first line that is broken or missing (exit code 1)."""
    from splittime.gateway.audit.chain import FIRST, verify_file

    found = verify_file(file, after=after or FIRST, holds=holds)
    if json:
        told = {**found._asdict(), "end": found.end._asdict()}
        write_data(orjson.dumps(told))
    elif found.broken_line is None:
        talk().print(f"{found.lines} lines, whole; the last has the hash {found.end.digest}", markup=False)
    else:
        talk().print(f"line {found.broken_line} is broken: {found.why}", style="red", markup=False)
    if found.dropped and not json:
        talk().print(f"the log says that it lacks {found.dropped} lines", style="yellow", markup=False)
    if found.broken_line is not None:
        raise typer.Exit(1)
