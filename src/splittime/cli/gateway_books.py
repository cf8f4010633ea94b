"""`splittime gateway apply`, `status`, `rollback`: the config of a running gateway, asked for with its operator's key.
`audit verify`, `lint`, `rehearse`, `inventory`: reports from its audit log, prompts, ledger and config."""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer
from rich.table import Table

from splittime.cli.options import (
    ASKING_CODES,
    EXIT_CODES,
    JsonFlag,
    argument,
    fails_clearly,
    flag,
    talk,
    wide,
    write_data,
)
from splittime.cli.panels import add, group
from splittime.core.errors import ConfigError
from splittime.wire.target import base_of, get_json, patch_json

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison
    from splittime.gateway.inventory import Inventory, InventoryHop, SeenOfHop
    from splittime.gateway.routing.rehearse import Rehearsal
    from splittime.ledger.account import ClosedAccount

DEFAULT_URL = "http://127.0.0.1:8100"
NOBODY = "Is `splittime gateway` running there? Name another with --url."

VERSIONS_EXAMPLES = f"""\b
Examples:
  splittime gateway apply new.toml
  splittime gateway apply new.toml --canary 10%    a tenth of the tenants first
  splittime gateway status

{ASKING_CODES}"""

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The gateway to ask.")]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", envvar="SPLITTIME_API_KEY", help="An operator's.")]


@fails_clearly
def apply(
    new: Path = argument("NEW", "The config to change to, in TOML.", ...),
    canary: str | None = flag("SHARE", "A share of the tenants first, such as 10%."),
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    json: JsonFlag = False,
) -> None:
    """Give a running gateway another config, whole and at once, or let a share of its tenants try it first."""
    from splittime.gateway.config_file import read_config

    read_config(new)  # refused here, with its hint, if it is no config
    body: dict[str, Any] = {"toml": new.read_text(encoding="utf-8")}
    if canary is not None:
        body["canary"] = share_of(canary)
    _tell(patch_json(f"{base_of(url)}/admin/config", body, api_key, NOBODY), json)


@fails_clearly
def status(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Tell which config a running gateway has, what its canary has seen, and the latest changes."""
    _tell(get_json(f"{base_of(url)}/admin/config", api_key, NOBODY), json)


@fails_clearly
def rollback(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """End the canary; or, where none runs, go back to the config before this one."""
    _tell(patch_json(f"{base_of(url)}/admin/rollback", {}, api_key, NOBODY), json)


def share_of(told: str) -> float:
    """Returns the share that `10%` or `0.1` is. Raises `ConfigError`."""
    try:
        share = float(told[:-1]) / 100 if told.endswith("%") else float(told)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        hint = "as 10% or 0.1: more than none of the tenants, and fewer than all"
        raise ConfigError(f"--canary {told} is no share", param="canary", value=told, hint=hint)
    return share


def compare_arms(
    control: "Sequence[ClosedAccount]", tried: "Sequence[ClosedAccount]", margin: float, confidence: float
) -> "Comparison":
    """Returns `bench compare`'s verdict on two sets of a gateway's accounts."""
    from splittime.diagnose.compare import compare_accounts

    return compare_accounts(control, tried, margin, confidence)


def _tell(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_data(orjson.dumps(told))
        return
    console = talk()
    console.print(f"config {told['version']}", style="bold", markup=False)
    if (canary := told["canary"]) is not None:
        counts = f"{canary['requests']} requests, {canary['requests_of_others']} of the others"
        console.print(f"  canary {canary['version']}: {', '.join(canary['tenants'])}; {counts}", markup=False)
        console.print(f"  looked at again at {canary['next_look_at']} of each. {canary['last_look']}", markup=False)
    if (audit := told["audit"]) is not None:
        console.print(f"  audit {audit['lines']} lines, {audit['dropped']} dropped; {audit['last_hash']}", markup=False)
    for one in told["changes"]:
        at = datetime.fromtimestamp(one["at_unix_s"]).astimezone().isoformat(timespec="seconds")
        console.print(f"  {at}  {one['what']} {one['version']} {one['by']}  {one['why']}", markup=False)


AUDIT_EXAMPLES = f"""\b
Examples:
  splittime gateway audit verify audit.jsonl
  splittime gateway audit verify audit.jsonl --holds HASH     which was kept elsewhere

{EXIT_CODES}"""

app = group("Check an audit log.")
LINT_EXAMPLES = f"""\b
Examples:
  splittime gateway lint                 of a gateway whose config has [lint]
  splittime gateway lint --json

{ASKING_CODES}"""
REHEARSE_EXAMPLES = f"""\b
Examples:
  splittime gateway rehearse new.toml --config gateway.toml --ledger gateway.sqlite

{EXIT_CODES}"""


@fails_clearly
def verify(
    file: Path = argument("FILE", "The file of [audit] in the config.", ...),
    after: str = flag("HASH", "The last hash of the file before, where it is a later part.", ""),
    holds: str = flag("HASH", "A hash that it had: nothing up to there has been taken off.", ""),
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


add(app, verify, AUDIT_EXAMPLES, "Tell the first line that is broken or missing.")


@fails_clearly
def lint(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Say what the prompts of a running gateway carry for nothing: tokens by estimate, and their time to prefill."""
    told = get_json(f"{base_of(url)}/lint", api_key, NOBODY)
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
    new: Path = argument("NEW", "The config to try, in TOML.", ...),
    config: Path = flag("FILE", "The config of now.", ...),
    ledger: Path = flag("FILE", "The ledger_file of the gateway.", ...),
    last: int = flag("N", "The latest requests that are taken.", 10_000, min=1),
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
    _tell_replayed(found)


def _tell_replayed(found: "Rehearsal") -> None:
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


MAX_READ = 10_000

INVENTORY_EXAMPLES = f"""\b
Examples:
  splittime gateway inventory --config gateway.toml
  splittime gateway inventory --config gateway.toml --ledger gateway.sqlite --out hops.html
  splittime gateway inventory --config gateway.toml --url http://127.0.0.1:8100

{ASKING_CODES}"""


@fails_clearly
def inventory(
    config: Path = flag("FILE", "The gateway's config, in TOML.", ...),
    ledger: Path | None = flag("FILE", "Its ledger_file: what was seen of each hop."),
    url: str | None = flag("URL", "The gateway, running with [lint]: what its prompts carry for nothing."),
    api_key: Key = None,
    out: Path | None = flag("FILE", "Draw it, as an HTML page."),
    json: JsonFlag = False,
) -> None:
    """List each hop with its owner, time-outs, retries and cap, and what is not set. Keys are read by nobody."""
    found = _found(config, ledger, None if url is None else get_json(f"{base_of(url)}/lint", api_key, NOBODY))
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
        table.add_column(name, overflow="fold", no_wrap=name == "hop")  # an address stays whole
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
