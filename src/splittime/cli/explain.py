"""`splittime explain [URL] [REQUEST_ID]`: one request's life, and why it was slow, from a running server or a file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson
from rich.text import Text

from splittime.cli.options import ASKING_CODES, CleanConsole, JsonFlag, argument, fails_clearly, flag, talk, write_data
from splittime.core.errors import ConfigError
from splittime.diagnose.attribution import owners_between
from splittime.diagnose.bill import bill, billed_to
from splittime.diagnose.books import AccountQuestion, FoundAccounts, accounts_from_file, accounts_from_server
from splittime.diagnose.explain import compare, comparison_text, steps_of
from splittime.diagnose.explain import explain as explain_account
from splittime.diagnose.explain_trace import CriticalPath, critical_path, explain_trace
from splittime.diagnose.known_prompts import computed_again
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.steps import device_time
from splittime.wire.target import base_of, get_json, is_url

DEFAULT_URL = "http://127.0.0.1:8000"
NOBODY = "Is `splittime serve` running there? Name another with --url, or a file with --ledger."

EXAMPLES = f"""\b
Examples:
  splittime explain cmpl-5f3a                      of the server on port 8000
  splittime explain --slowest 3                    of its latest requests
  splittime explain cmpl-5f3a --ledger run.sqlite  a file, after a crash

{ASKING_CODES}"""


@fails_clearly
def explain(
    source: str | None = argument("URL", "The server to ask, as --url has it. May be left out."),
    request_id: str | None = argument("REQUEST_ID", "The id in the response, or of one of its choices."),
    slowest: int | None = flag("N", "The N slowest instead of an id.", min=1, max=100),
    url: str | None = flag("URL", f"The server to ask. Default: {DEFAULT_URL}"),
    ledger: Path | None = flag("FILE", "Read this file instead."),
    api_key: str | None = flag("KEY", "The server's.", envvar="SPLITTIME_API_KEY"),
    json: JsonFlag = False,
) -> None:
    """Show where a request's time went, why it waited, and what made it slower than its like."""
    if source is not None and request_id is None and not is_url(source):
        source, request_id = None, source
    if source is not None and (url is not None or not is_url(source)):
        raise ConfigError("give one URL and one REQUEST_ID", param="url", value=source)
    if (request_id is None) == (slowest is None):
        raise ConfigError("give a REQUEST_ID or --slowest N, one of them", param="request_id")
    question, base = AccountQuestion(request_id, slowest), base_of(source or url or DEFAULT_URL)
    if ledger is not None:
        found = accounts_from_file(ledger, question)
    else:
        get = partial(get_json, api_key=api_key, nobody=NOBODY)
        found = accounts_from_server(base, question, get, partial(_operators, get))
    if json:
        write_data(orjson.dumps(_as_json(found)))
        return
    _print(found)


def _as_json(found: FoundAccounts) -> dict[str, Any]:
    books = found.books
    compared = [compare(account, books) for account in found.accounts]
    devices = [device_time(steps_of(account, books.steps)) for account in found.accounts]
    return {
        "simulated": found.simulated,
        "accounts": [account_json(account) for account in found.accounts],
        "owners_ns": [owners_between(books, each, each.start_ns, each.end_ns) for each in found.accounts],
        "against_median": msgspec.to_builtins(compared),
        "waited_for": msgspec.to_builtins([bill(account, books) for account in found.accounts]),
        "waited_for_it": msgspec.to_builtins([billed_to(account, books) for account in found.accounts]),
        "computed_again": msgspec.to_builtins([computed_again(account, books) for account in found.accounts]),
        "device": msgspec.to_builtins(devices),
        "traces": msgspec.to_builtins([_path(account, found) for account in found.accounts]),
    }


def _print(found: FoundAccounts) -> None:
    console = CleanConsole(highlight=False, soft_wrap=True)
    if found.simulated:
        console.print(Text(f"Simulated, with {found.simulated}\n", style="bold yellow"))
    for account in found.accounts:
        console.print(explain_account(account, found.books))
        console.print(comparison_text(compare(account, found.books)))
        if (path := _path(account, found)) is not None:
            console.print(explain_trace(path))


def _path(account: ClosedAccount, found: FoundAccounts) -> CriticalPath | None:
    """Returns the critical path of the trace that an account is of; None where no hops were posted."""
    is_in_one = any(hop.trace_id == account.trace_id and hop.tenant == account.tenant for hop in found.hops)
    return critical_path(account, found.hops, found.books) if is_in_one else None


def _operators(get: Callable[[str], Any], url: str) -> Any:
    """Returns {} for a key that may read its own accounts but not this, which tells of everybody's requests."""
    try:
        return get(url)
    except ConfigError:
        talk().print(f"Without {urlsplit(url).path}, which is the operator's to read.", style="dim")
        return {}
