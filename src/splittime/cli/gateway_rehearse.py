"""`splittime gateway rehearse`: what another config would have done with the requests of a ledger."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, wide, write_data

if TYPE_CHECKING:
    from splittime.gateway.routing.rehearse import Rehearsal

EXAMPLES = f"""\b
Examples:
  splittime gateway rehearse new.toml --config gateway.toml --ledger gateway.sqlite

{EXIT_CODES}"""


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
