"""`splittime up`: several replicas behind gateways, scaled by what they have to do."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from splittime.cli.options import JsonFlag, fails_clearly, flag, switch, talk, write_data
from splittime.core.errors import NobodyThere

if TYPE_CHECKING:
    from splittime.cluster.gateways import ManagedGateways

EXAMPLES = """\b
Examples:
  splittime up --config cluster.toml           until Ctrl-C
  splittime up --config cluster.toml --check   say what is wrong with it
  splittime up --config cluster.toml --status  what runs now
  splittime up --config cluster.toml --apply   take the file as it is now

\b
The smallest cluster.toml is an empty one: one or two replicas of the model in
the package, behind a gateway on port 8100.

\b
Ctrl-C and SIGTERM let open requests end; a second one does not.
Exit codes:
  0    ended by Ctrl-C or SIGTERM, or done
  1    failed
  2    a usage or config error
  4    --status, --apply: no cluster runs
"""


@fails_clearly
def up(
    config: Path = flag("FILE", "The cluster's config, in TOML.", ...),
    check: bool = switch("--check", "Read the config; start nothing."),
    status: bool = switch("--status", "Say what runs now."),
    apply: bool = switch("--apply", "Give the running cluster this file."),
    json: JsonFlag = False,
) -> None:
    """Start replicas, scaled by their load, and gateways in front of them; end all of them with Ctrl-C."""
    from splittime.cluster.config import folder_of, read_cluster
    from splittime.cluster.gateways import ManagedGateways
    from splittime.cluster.places import key_of
    from splittime.cluster.up import UpCluster

    if status:
        _show(_status(folder_of(config)), json)
        return
    cluster = read_cluster(config)
    ManagedGateways(cluster)  # refused here, with its hint, if [gateway] is no config
    if apply:
        _running(cluster.folder).signal(signal.SIGHUP)
        return
    key_of(cluster.launch)
    if check:
        _say("the config is good")
    else:
        UpCluster(config.absolute(), cluster, _say).run(_print_urls if json else _say_urls)


def _say(words: str) -> None:
    talk().print(words, markup=False)


def _say_urls(gateways: "ManagedGateways") -> None:
    urls = ", ".join(gateways.urls)
    _say(f"splittime up: {urls if gateways.shared_url is None else f'{gateways.shared_url} (each of {urls})'}")


def _print_urls(gateways: "ManagedGateways") -> None:
    shared = {} if gateways.shared_url is None else {"shared": gateways.shared_url}
    write_data(orjson.dumps({"gateways": gateways.urls, **shared}))


def _running(folder: Path) -> Any:
    from splittime.cluster.replica_process import read_mark
    from splittime.cluster.state import UP

    found = read_mark(folder / UP)
    if found is None:
        hint = "start it: splittime up --config FILE"
        raise NobodyThere(f"no cluster runs in {folder}", param="folder", value=str(folder), hint=hint)
    return found


def _status(folder: Path) -> dict[str, Any]:
    from splittime.cluster.up import read_status

    _running(folder)
    return read_status(folder) or {"replicas": [], "gateways": [], "events": [], "wanted": None, "trial": None}


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_data(orjson.dumps(told))
        return
    console = talk()
    console.print(f"{told['wanted']} replicas are wanted", style="bold", markup=False)
    for one in told["replicas"]:
        load = f"{one['tokens']} of {one['capacity_tokens']} tokens"
        console.print(f"  {one['name']}  {one['phase']} for {one['since_s']} s  {load}  {one['url']}", markup=False)
    for one in told["gateways"]:
        held = f"{one['held_tokens']} tokens wait" if one["is_alive"] else "is not there"
        console.print(f"  {one['url']}  {held}", markup=False)
    if told["trial"] is not None:
        console.print(f"  on trial: {told['trial']}", markup=False)
    for one in told["events"][-10:]:
        words = one.get("words")  # an earlier version wrote none
        said = f" It said: {words}" if words else ""
        console.print(f"  {one['what']} {one['name']} ({one['revision']}): {one['why']}{said}", markup=False)
