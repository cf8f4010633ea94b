"""`splittime explain REQUEST_ID`: one request's life, from a running server or from a ledger file."""

import http.client
import json as json_module
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer
from rich.console import Console

from splittime.cli.options import JsonFlag, fails_clearly
from splittime.core.errors import ConfigError, EngineError, NotFound
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export import account_from_json, account_json
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import open_readonly

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_STEPS = 10_000
TIMEOUT_S = 10.0

EXAMPLES = """\b
Examples:
  splittime explain cmpl-5f3a                              from the server on port 8000
  splittime explain cmpl-5f3a --ledger runs/today.sqlite   from a ledger file, also after a crash
"""

Found = tuple[list[ClosedAccount], list[StepRecord]]


@fails_clearly
def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The id in the response, or of one of its choices.")
    ],
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server to ask.")] = DEFAULT_URL,
    ledger: Annotated[Path | None, typer.Option("--ledger", metavar="FILE", help="Read this file instead.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="SPLITTIME_API_KEY", help="The server's.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show where a request's time went, and why it waited."""
    accounts, steps = _from_file(ledger, request_id) if ledger else _from_server(url, request_id, api_key)
    if json:
        sys.stdout.buffer.write(orjson.dumps({"accounts": [account_json(account) for account in accounts]}) + b"\n")
        return
    from splittime.diagnose.explain import explain as explain_account

    console = Console(highlight=False, soft_wrap=True)
    for account in accounts:
        console.print(explain_account(account, steps))


def _from_file(path: Path, request_id: str) -> Found:
    file = open_readonly(path)
    try:
        accounts = file.account(request_id)
        if not accounts:
            raise NotFound(f"no request {request_id!r} in {path}", param="request_id", value=request_id)
        return accounts, file.steps_between(*_step_range(accounts))
    finally:
        file.close()


def _step_range(accounts: list[ClosedAccount]) -> tuple[int, int]:
    """The instants between which the requests' steps ran."""
    return min(account.start_ns for account in accounts), max(account.end_ns for account in accounts)


def _from_server(url: str, request_id: str, api_key: str | None) -> Found:
    base = url.rstrip("/")
    answer = _get(f"{base}/ledger/requests/{urllib.parse.quote(request_id, safe='')}", api_key)
    steps = _get(f"{base}/ledger/steps?limit={MAX_STEPS}", api_key)
    try:
        accounts = [account_from_json(entry) for entry in answer.get("choices", [answer])]
        return accounts, msgspec.convert(steps["steps"], list[StepRecord])
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise EngineError(f"what {base} answered is no account: {error}", hint="Is it a splittime server?") from None


def _get(url: str, api_key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as response:
            return json_module.load(response)
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        hint = "Is `splittime serve` running there? Name another with --url, or a file with --ledger."
        raise EngineError(f"cannot ask {url}: {reason}", hint=hint) from None


def _refused(error: urllib.error.HTTPError, url: str) -> Exception:
    try:
        message = json_module.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered {error.code}"
    if error.code == 404:
        return NotFound(message)
    if error.code in (401, 403):
        return ConfigError(message, hint="Give the server's key with --api-key or SPLITTIME_API_KEY.")
    return EngineError(message)
