"""The books of a running server: its ledger over HTTP, or what a watcher saw of one that keeps none.

The caller asks: `get(url)` returns a decoded answer, and raises `NotFound` where the server has no such path.
"""

from collections.abc import Callable
from typing import Any

from splittime.bench.book.records import Run
from splittime.core.errors import EngineError, NotFound
from splittime.diagnose.books import LIVE_STEPS, Books, books_from_answers, books_from_run

Get = Callable[[str], Any]


def books_from_server(get: Get, base: str, limit: int) -> Books:
    """Returns the server's facts (an older one has none), its latest requests, and the steps in their time. Raises
    `EngineError` if the server was restarted meanwhile: its answers would be of two servers."""
    facts = _facts(get, base)
    accounts = get(f"{base}/ledger/requests?limit={limit}")
    steps = get(f"{base}/ledger/steps?limit={LIVE_STEPS}")
    if _starts(facts) != _starts(_facts(get, base)):
        raise EngineError(f"{base} was restarted while it was read", hint="Ask once more, when it has served a while.")
    return books_from_answers(facts, accounts, steps, base)


def books_of_observed(run: Run, is_watched: bool) -> Books:
    """Returns the books of another kind of server. `source` says what was done to it."""
    about = run.arms[0]
    name = f"{about.kind} {about.version}" if about.version else about.kind
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    how = f"watched for {seconds:.0f} s, sent nothing" if is_watched else f"idle, probed for {seconds:.0f} s"
    return books_from_run(run, source=f"{name} at {about.url}, {how}")


def _facts(get: Get, base: str) -> Any:
    try:
        return get(f"{base}/ledger/facts")
    except NotFound:
        return None


def _starts(facts: Any) -> list[Any]:
    """Returns when the server's processes began."""
    processes = facts.get("processes") if isinstance(facts, dict) else None
    return [process.get("started_ns") for process in processes or () if isinstance(process, dict)]
