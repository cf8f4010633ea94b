"""`splittime gateway apply`, `status` and `rollback`: the config of a running gateway, asked for with its operator's
key."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, write_data
from splittime.core.errors import ConfigError
from splittime.wire.get_json import get_json, patch_json

if TYPE_CHECKING:
    from splittime.diagnose.comparison import Comparison
    from splittime.ledger.account import ClosedAccount

DEFAULT_URL = "http://127.0.0.1:8100"
NOBODY = "Is `splittime gateway` running there? Name another with --url."

EXAMPLES = f"""\b
Examples:
  splittime gateway apply new.toml
  splittime gateway apply new.toml --canary 10%    a tenth of the tenants first
  splittime gateway status

{EXIT_CODES}"""

Url = Annotated[str, typer.Option("--url", metavar="URL", help="The gateway to ask.")]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", envvar="SPLITTIME_API_KEY", help="An operator's.")]


@fails_clearly
def apply(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The config to change to, in TOML.")],
    canary: Annotated[
        str | None, typer.Option("--canary", metavar="SHARE", help="A share of the tenants first, such as 10%.")
    ] = None,
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
    _tell(patch_json(f"{url.rstrip('/')}/admin/config", body, api_key, NOBODY), json)


@fails_clearly
def status(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """Tell which config a running gateway has, what its canary has seen, and the latest changes."""
    _tell(get_json(f"{url.rstrip('/')}/admin/config", api_key, NOBODY), json)


@fails_clearly
def rollback(url: Url = DEFAULT_URL, api_key: Key = None, json: JsonFlag = False) -> None:
    """End the canary; or, where none runs, go back to the config before this one."""
    _tell(patch_json(f"{url.rstrip('/')}/admin/rollback", {}, api_key, NOBODY), json)


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
    from splittime.diagnose.compare_accounts import compare_accounts

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
