"""`splittime gateway audit verify`, `lint` and `rehearse`: reports from a gateway's audit log, prompts and ledger."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer
from rich.table import Table

from splittime.cli.gateway_versions import DEFAULT_URL, NOBODY, Key, Url
from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, wide, write_data
from splittime.wire.get_json import get_json

if TYPE_CHECKING:
    from splittime.gateway.routing.rehearse import Rehearsal

AUDIT_EXAMPLES = f"""\b
Examples:
  splittime gateway audit verify audit.jsonl
  splittime gateway audit verify audit.jsonl --holds HASH     which was kept elsewhere

{EXIT_CODES}"""

app = typer.Typer(no_args_is_help=True)
LINT_EXAMPLES = f"""\b
Examples:
  splittime gateway lint                 of a gateway whose config has [lint]
  splittime gateway lint --json

{EXIT_CODES}"""
REHEARSE_EXAMPLES = f"""\b
Examples:
  splittime gateway rehearse new.toml --config gateway.toml --ledger gateway.sqlite

{EXIT_CODES}"""


@app.callback()
def audit() -> None:
    """Check an audit log."""


@app.command(epilog=AUDIT_EXAMPLES)
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


@fails_clearly
def lint(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Say what the prompts of a running gateway carry for nothing: tokens by estimate, and their time to prefill."""
    told = get_json(f"{url.rstrip('/')}/lint", api_key, NOBODY)
    typer.echo(orjson.dumps(told).decode() if json else "\n".join(_lines(told)))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    from splittime.gateway.lint.words import fault_lines

    yield f"{told['share']:.3g} of the requests were looked at; {told['skipped']} of those were skipped"
    for model, found in told["models"].items():
        yield f"{model}: {found['requests']} requests, about {found['tokens']} tokens"
        yield from (f"  {line}" for line in fault_lines(found))
        if not found["faults"]:
            yield "  nothing found"


@fails_clearly
def rehearse(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The config to try, in TOML.")],
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The config of now.")],
    ledger: Annotated[Path, typer.Option("--ledger", metavar="FILE", help="The ledger_file of the gateway.")],
    last: Annotated[
        int, typer.Option("--last", metavar="N", min=1, help="The latest requests that are taken.")
    ] = 10_000,
    json: JsonFlag = False,
) -> None:
    """Replay a ledger's requests through the rules and keys' limits of two configs, and tell what differs."""
    from splittime.gateway.config_file import read_config
    from splittime.gateway.routing.rehearse import rehearse as replay
    from splittime.ledger.store import open_readonly

    old_config, new_config = read_config(config), read_config(new)
    with closing(open_readonly(ledger)) as file:
        found = replay(file.accounts(limit=last), old_config, new_config)
    if json:
        write_data(msgspec.json.encode(found))
        return
    _tell(found)


def _tell(found: "Rehearsal") -> None:
    """Print the differences; what the replay cannot know, on standard error."""
    same = found.requests - sum(one.requests for one in found.differences)
    talk().print(f"{found.requests} requests, {same} of them treated alike", markup=False)
    if found.unknown_headers:
        names = ", ".join(found.unknown_headers)
        talk().print(f"the ledger has no {names}: rules that ask for it matched nothing", style="yellow", markup=False)
    if found.strange:
        talk().print(f"{found.strange} decisions of this config are not made again: a fault", style="red", markup=False)
    if not found.differences:
        return
    table = Table("requests", "now", "then", "for example", box=None)
    for one in found.differences:
        table.add_row(str(one.requests), one.old, one.new, ", ".join(one.examples))
    wide().print(table)
