"""`splittime gateway`: reads the config, and serves in front of the upstreams that it names.

`apply`, `status`, `rollback`: the config of a running gateway, asked for with its operator's key.
`lint`, `rehearse`, `inventory`: reports from its prompts, ledger and config.

`evaluate`: what routing by difficulty costs and is worth on prompts that were judged.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer
from rich.table import Column, Table

from splittime.cli.options import (
    ASKING_CODES,
    EXIT_CODES,
    JsonFlag,
    argument,
    fails_clearly,
    flag,
    switch,
    talk,
    wide,
    write_data,
)
from splittime.cli.panels import CommandGroup, add
from splittime.core.errors import ConfigError
from splittime.core.this_process import log_to_stderr, share_one_heap
from splittime.wire.target import base_of, get_json, patch_json

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison
    from splittime.gateway.config import DifficultyConfig, GatewayConfig
    from splittime.gateway.config_file import Secrets
    from splittime.gateway.inventory import Inventory, InventoryHop, SeenOfHop
    from splittime.gateway.routing.rehearse import CurvePoint, Evaluation, MeanFigure, Rehearsal
    from splittime.ledger.account import ClosedAccount

EXAMPLES = """\b
Examples:
  splittime gateway --config gateway.toml
  splittime gateway --config gateway.toml --check    say what is wrong with it
  splittime gateway inventory --config gateway.toml  list each hop
  splittime gateway rehearse new.toml --config gateway.toml --ledger FILE
  splittime gateway apply new.toml --canary 10%      of a running one

\b
The smallest gateway.toml:
  [[upstream]]
  name = "a"
  url = "http://127.0.0.1:8000"
  models = ["my-model"]

\b
Ctrl-C and SIGTERM let open requests end, for grace_s at most; a second one
does not.
Exit codes:
  0    ended by Ctrl-C or SIGTERM, or the config is good
  1    failed
  2    a usage or config error
  130  ended by a second one of these
"""


app = typer.Typer(
    cls=CommandGroup,
    invoke_without_command=True,
    epilog=EXAMPLES,
    subcommand_metavar="[COMMAND]",
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
@fails_clearly
def gateway(
    context: typer.Context,
    config: Path | None = flag("FILE", "The gateway's config, in TOML. It must be given."),
    check: bool = switch("--check", "Read the config and the keys; start nothing."),
    json: JsonFlag = False,
) -> None:
    """Stand in front of OpenAI-compatible servers: routing, limits, retries, and one exact account a request."""
    from splittime.drive.host_time import importing

    with importing():
        from splittime.gateway.config_file import read_config, secrets_of

    if context.invoked_subcommand is not None:
        return
    if config is None:
        hint = "splittime gateway --help has one to begin with"
        raise ConfigError("--config FILE is missing", param="config", hint=hint)
    log_to_stderr()
    told = read_config(config)
    secrets = secrets_of(told)
    if check:
        _say(told, "the config is good", json)
        return
    _serve(config, told, secrets, json)


def _serve(path: Path, config: "GatewayConfig", secrets: "Secrets", as_json: bool) -> None:
    from splittime.drive.host_time import freeze_heap, importing

    share_one_heap()
    with importing():
        import uvloop

        from splittime.cli.gateway import compare_arms
        from splittime.gateway.app import run
        from splittime.ledger.store import Ledger
        from splittime.web.ports import check_port_is_free, check_port_is_shared

    check_port_is_free(config.host, config.port)
    if config.shared_port is not None:
        check_port_is_shared(config.host, config.shared_port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.ssl_certfile else "http"

    def on_listening(port: int) -> None:
        freeze_heap()  # else each full collection walks what was imported, and all streams wait for it
        shared = None if config.shared_port is None else f"{scheme}://{host}:{config.shared_port}"
        _say(config, f"{scheme}://{host}:{port}", as_json, shared)

    with closing(Ledger(config.ledger_file, max_file_accounts=config.max_file_accounts)) as ledger:
        serving = run(config, secrets, ledger, path=path, compare=compare_arms, on_listening=on_listening)
        uvloop.run(serving)


def _say(config: "GatewayConfig", what: str, as_json: bool, shared: str | None = None) -> None:
    """Says what is served, on standard error, or as JSON on standard output. shared: the URL that other gateways have
    too."""
    if as_json:
        upstreams = [{"name": one.name, "url": one.url, "models": one.models} for one in config.upstream]
        more = {} if shared is None else {"shared": shared}
        write_data(orjson.dumps({"gateway": what, **more, "upstreams": upstreams}))
        return
    console = talk()
    console.print(
        f"splittime gateway: {what}{'' if shared is None else f', shared {shared}'}", style="bold", markup=False
    )
    for one in config.upstream:
        console.print(f"  {one.name}  {one.url}  {', '.join(one.models)}", markup=False)


EVALUATE_EXAMPLES = f"""\b
Examples:
  splittime gateway evaluate gateway.toml judged.jsonl
  splittime gateway evaluate gateway.toml judged.jsonl --large-cost 10 --json

{EXIT_CODES}"""
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
def evaluate(
    config: Path = argument("CONFIG", "The gateway's config, in TOML.", ...),
    data: Path = argument("DATA", "JSONL: small_right, large_right and small_logprob a line.", ...),
    model: str | None = flag("NAME", "The [[difficulty]], if there are several."),
    small_cost: float = flag("X", "Of a request, if the data have none.", 0.1, min=0),
    large_cost: float = flag("X", "Of a request, if the data have none.", 1.0, min=0),
    json: JsonFlag = False,
) -> None:
    """Say what a [[difficulty]] costs and is worth on judged prompts, beside always-small, always-large and chance."""
    from splittime.gateway.config_file import read_config
    from splittime.gateway.routing.difficulty import bounds_of, read_labels
    from splittime.gateway.routing.rehearse import Costs
    from splittime.gateway.routing.rehearse import evaluate as evaluated
    from splittime.stats.paired import means

    told = read_config(config)
    route = _route(told, model)
    bound = bounds_of(told).get(route.model)
    found = evaluated(route, read_labels(data, "DATA"), Costs(small_cost, large_cost), means, bound)
    if json:
        write_data(msgspec.json.encode(found))
        return
    _tell_evaluation(found)


def _route(config: "GatewayConfig", model: str | None) -> "DifficultyConfig":
    names = [route.model for route in config.difficulty]
    if model is None and len(names) != 1:
        hint = f"name one with --model: {', '.join(names)}" if names else "give the config a [[difficulty]]"
        raise ConfigError(f"the config has {len(names)} [[difficulty]]", param="model", hint=hint)
    found = next((route for route in config.difficulty if model in (None, route.model)), None)
    if found is None:
        raise ConfigError(
            f"no [[difficulty]] is {model!r}", param="model", value=model, hint=f"there are {', '.join(names)}"
        )
    return found


def _tell_evaluation(found: "Evaluation") -> None:
    talk().print(f"{found.model}: {found.prompts} prompts, costs {found.costs}; intervals of 95 %", markup=False)
    heads = ("below", "small", "cost", "worth", "gain over chance")
    table = Table(Column("", no_wrap=True), *heads, box=None, pad_edge=False)
    for name, point in (("always small", found.always_small), ("always large", found.always_large)):
        table.add_row(name, "-", *_cells(point)[1:])
    table.add_row("best possible", "-", *_cells(found.best)[1:])
    for point in found.by_first_tokens:
        table.add_row("tokens", *_cells(point))
    table.add_row("chosen", *_cells(found.chosen), style="bold")
    wide().print(table)
    if (expected := found.expected) is not None:
        low, mean = f"{expected.quality_low:.3f}", f"{expected.quality:.3f}"
        print(f"{expected.prompts} labels promise a worth of {low} at the least (95 %), {mean} on the mean")
    anew = 1 - found.chosen.share_small
    if anew > found.at_most:
        print(f"{anew:.0%} would be asked anew, and at_most lets {found.at_most:.0%}: the rest is kept")
    wrong = found.misroutes
    print(f"large for nothing: {_share(wrong.wasted)} of requests, {_figure(wrong.wasted_cost)} a request")
    print(f"small, and worse: {_share(wrong.lost)} of requests, {_figure(wrong.lost_worth)} of worth a request")


def _cells(point: "CurvePoint") -> tuple[str, ...]:
    figures = (_figure(point.cost), _figure(point.worth), _figure(point.gain))
    return f"{point.threshold:.4g}", f"{point.share_small:.0%}", *figures


def _figure(figure: "MeanFigure") -> str:
    return f"{figure.value:.3f} ({figure.low:.3f}, {figure.high:.3f})"


def _share(figure: "MeanFigure") -> str:
    return f"{figure.value:.1%} ({figure.low:.1%} to {figure.high:.1%})"


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
        console.print(f"  audit {audit['lines']} lines, {audit['dropped']} dropped", markup=False)
    for one in told["changes"]:
        at = datetime.fromtimestamp(one["at_unix_s"]).astimezone().isoformat(timespec="seconds")
        console.print(f"  {at}  {one['what']} {one['version']} {one['by']}  {one['why']}", markup=False)


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
def lint(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Say what the prompts of a running gateway carry for nothing: tokens by estimate, and their time to prefill."""
    told = get_json(f"{base_of(url)}/lint", api_key, NOBODY)
    typer.echo(orjson.dumps(told).decode() if json else "\n".join(_lines(told)))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    from splittime.gateway.lint import fault_lines

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


for _command, _examples, _summary in (
    (inventory, INVENTORY_EXAMPLES, "List each hop, and what is not set."),
    (lint, LINT_EXAMPLES, "What prompts carry for nothing."),
    (rehearse, REHEARSE_EXAMPLES, "Say what another config would have done."),
    (evaluate, EVALUATE_EXAMPLES, "Cost and worth of routing by difficulty."),
    (apply, VERSIONS_EXAMPLES, "Give a running gateway another config."),
    (status, VERSIONS_EXAMPLES, "Which config a running gateway has, and its canary."),
    (rollback, VERSIONS_EXAMPLES, "End the canary, or go back to the config before."),
):
    add(app, _command, _examples, _summary)
