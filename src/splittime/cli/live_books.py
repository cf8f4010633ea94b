"""A live server's answers as the books that a diagnosis reads. Who asks, over HTTP, is `cli.doctor`."""

from typing import TYPE_CHECKING, Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.diagnose.books import Books, books_from_run, live_books
from splittime.ledger.export.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

if TYPE_CHECKING:
    from splittime.loadgen.look import Look


def another_server(url: str) -> str:
    """The hint where there is no ledger of ours: what a client sees can be told of any server."""
    run = f"`splittime bench run {url} --out run.json`, then `splittime doctor run.json`"
    return f"Is it a splittime server, and of this version? Any other is measured from outside: {run}."


def books_from_look(found: "Look") -> Books:
    """Returns the books of another kind of server. `source` says what was done to it."""
    about = found.run.arms[0]
    name = f"{about.kind} {about.version}" if about.version else about.kind
    seconds = (found.run.measured_until_ns - found.run.measured_from_ns) / 1e9
    how = (
        f"watched for {seconds:.0f} s, sent nothing" if found.kind == "watched" else f"idle, probed for {seconds:.0f} s"
    )
    return books_from_run(found.run, source=f"{name} at {about.url}, {how}")


def books_from_answers(facts_json: Any, requests_json: Any, steps_json: Any, source: str) -> Books:
    """The decoded bodies of `/ledger/facts` (None if there was none), `/ledger/requests` and `/ledger/steps`.

    Raises `ConfigError` for what no splittime server answers.
    """
    try:
        facts = None if facts_json is None else msgspec.convert(facts_json, ServerFacts)
        accounts = [account_from_json(entry) for entry in requests_json["accounts"]]
        steps = msgspec.convert(steps_json["steps"], list[StepRecord])
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        told = f"the ledger of {source} cannot be read: {error!r}"
        raise ConfigError(told, param="url", hint=another_server(source)) from error
    return live_books(facts, accounts, steps, source)
