"""`splittime gateway inventory`: what stands between a user and an answer, from the config and a ledger."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer
from rich.table import Table

from splittime.cli.gateway_versions import NOBODY, Key
from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, wide, write_data
from splittime.core.errors import ConfigError
from splittime.wire.get_json import get_json

if TYPE_CHECKING:
    from splittime.gateway.inventory import Inventory, InventoryHop, SeenOfHop

MAX_READ = 10_000

EXAMPLES = f"""\b
Examples:
  splittime gateway inventory --config gateway.toml
  splittime gateway inventory --config gateway.toml --ledger gateway.sqlite --out hops.html
  splittime gateway inventory --config gateway.toml --url http://127.0.0.1:8100

{EXIT_CODES}"""


@fails_clearly
def inventory(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The gateway's config, in TOML.")],
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="FILE", help="Its ledger_file: what was seen of each hop.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="The gateway, running with [lint]: what its prompts carry for nothing."
        ),
    ] = None,
    api_key: Key = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Draw it, as an HTML page.")] = None,
    json: JsonFlag = False,
) -> None:
    """List each hop with its owner, time-outs, retries and cap, and what is not set. Keys are read by nobody."""
    found = _found(config, ledger, None if url is None else get_json(f"{url.rstrip('/')}/lint", api_key, NOBODY))
    if out is not None:
        _draw(found, out)
    if json:
        write_data(orjson.dumps({"hops": msgspec.to_builtins(found.hops)}))
        return
    wide().print(_table(found))


def _found(config: Path, ledger: Path | None, lint: dict[str, Any] | None) -> "Inventory":
    from splittime.gateway.config_file import read_config
    from splittime.gateway.inventory import inventory_of
    from splittime.ledger.store import open_readonly

    read_config(config)  # refused with its name, if it is no config
    told: dict[str, Any] = tomllib.loads(config.read_text(encoding="utf-8"))
    if ledger is None:
        return inventory_of(told, lint=lint)
    file = open_readonly(ledger)
    try:
        return inventory_of(told, file.accounts(limit=MAX_READ), file.latest_hops(MAX_READ), lint)
    finally:
        file.close()


def _table(found: "Inventory") -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("hop", "owner", "time-outs, s", "tries", "cap", "seen", "not set, and notes"):
        table.add_column(name, overflow="fold")
    for hop in found.hops:
        missing = [", ".join(hop.not_set), *hop.notes]
        table.add_row(
            f"{hop.name}\n{_where(hop)}",
            hop.owner or "-",
            "\n".join(f"{name.removesuffix('_s')} {value:g}" for name, value in hop.timeouts_s.items()) or "-",
            "-" if hop.attempts is None else str(hop.attempts),
            "-" if hop.cap is None else str(hop.cap),
            _seen(hop.seen),
            "\n".join(line for line in missing if line) or "-",
        )
    return table


def _where(hop: "InventoryHop") -> str:
    shared = f", shared {hop.shared_address}" if hop.shared_address else ""
    return f"{hop.address or hop.kind}{shared}"


def _seen(seen: "SeenOfHop | None") -> str:
    if seen is None:
        return "-"
    failed = f", {seen.failed} failed" if seen.failed else ""
    lasted = f"\np50 {seen.lasted_ms['p50']:.0f} p99 {seen.lasted_ms['p99']:.0f} ms" if seen.lasted_ms else ""
    return f"{seen.count}{failed}{lasted}"


def _draw(found: "Inventory", out: Path) -> None:
    from splittime.present.flow import flow_page

    columns = [[_box(hop) for hop in column] for column in (found.client, [found.gateway], found.upstreams)]
    said = f"{len(found.client)} hops of clients, the gateway, and {len(found.upstreams)} upstreams; red: not set."
    try:
        out.write_text(flow_page("Hops of a gateway", columns, said), encoding="utf-8")
    except OSError as error:
        hint = "name a file in a folder that exists and can be written"
        raise ConfigError(f"cannot write {out}: {error}", param="out", value=str(out), hint=hint) from error
    talk().print(f"Drawn: {out}", markup=False)


def _box(hop: "InventoryHop") -> Any:
    from splittime.present.flow import Box

    lines = [(_where(hop), False)]
    lines += [(f"owner {hop.owner}", False)] if hop.owner else []
    lines += [(f"{name} {value:g}", name in hop.not_set) for name, value in hop.timeouts_s.items()]
    lines += [(f"tries {hop.attempts}, cap {hop.cap}", False)] if hop.cap is not None else []
    lines += [(_seen(hop.seen).replace("\n", ", "), False)] if hop.seen is not None else []
    lines += [(f"not set: {name}", True) for name in hop.not_set if name not in hop.timeouts_s]
    return Box(hop.name, [*lines, *((note, True) for note in hop.notes)])
