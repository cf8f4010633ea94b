"""What a diagnosis reads: closed accounts, step records and the server's facts, from wherever they come. Values only.

books_from_file(path)       a ledger file, or what `splittime bench` saved; which, its content says; of a file
                                that several servers have written to, what belongs to the last one, whose facts it has
books_from_run(run, arm)    of one server of a run
books_from_server(get, ...)  of a live server's answers; the caller's `get` raises `NotFound` for a path it lacks

accounts_from_file, accounts_from_server     the accounts to explain, with the others they are held against
"""

import contextlib
import math
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from splittime.bench.book.records import Arm, Run, load_run
from splittime.core.errors import ConfigError, EngineError, NotFound
from splittime.core.files import SQLITE
from splittime.ledger.account import PREFILL, ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import LedgerFile, open_readonly

Get = Callable[[str], Any]
MAX_ACCOUNTS = 100_000
MAX_STEPS = 1_000_000
NEVER_NS = 2**63 - 1
LIVE_ACCOUNTS, LIVE_STEPS = 1_000, 10_000  # of a live server, whoever asks: its page and `splittime doctor URL`


class StillOpen(msgspec.Struct, frozen=True):
    """Requests that have not ended, as a live server's `/stats` tells them, of which there is no account yet.
    waiting_for: of those in its engine that do not run, how many by cause. predicted_wait_ms: of a newcomer."""

    open_requests: int
    num_running: int
    waiting_for: dict[str, int]
    predicted_wait_ms: float | None = None


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """facts: None from a server that tells none. accounts by their ends, steps by their begins.
    run, arm: with what the client saw, and which of its servers this is. source: for people, where this is from.
    num_unsound: accounts and steps that were left out, as their own times contradict each other (a clock that jumped,
    a file that was tampered with). most_times: by which a cure may raise a setting, where a replay tells of no more.
    still_open: of a live server that tells it."""

    facts: ServerFacts | None
    accounts: tuple[ClosedAccount, ...]
    steps: tuple[StepRecord, ...]
    run: Run | None
    source: str
    arm: int = 0
    num_unsound: int = 0
    most_times: float = math.inf
    still_open: StillOpen | None = None

    @property
    def engine(self) -> str:
        """Whose books these are, by its name as of a kind of server (`vllm`), where they are kept inside another's."""
        return self.facts.engine.partition(" ")[0] if self.facts is not None else ""

    @property
    def served(self) -> Arm | None:
        """The server's own side of `run`."""
        return None if self.run is None else self.run.arms[self.arm]


MadeT = TypeVar("MadeT")


def once(make: Callable[[Books], MadeT]) -> Callable[[Books], MadeT]:
    """Keep what was made of the latest books: the rules of one diagnosis ask for the same."""
    latest: list[tuple[Books, MadeT]] = []

    @wraps(make)
    def known(books: Books) -> MadeT:
        found = next((made for of, made in latest if of is books), None)
        if found is None:
            found = make(books)
            latest[:] = [(books, found)]
        return found

    return known


def books_from_file(path: Path, limit: int = MAX_ACCOUNTS) -> Books:
    """limit: of a ledger file, the latest so many requests, and the steps in their time.

    Raises `NotFound` for no file, `ConfigError` for one that is neither.
    """
    if not path.is_file():
        raise NotFound(f"no file at {path}", param="file", value=str(path))
    try:
        with path.open("rb") as file:
            begin = file.read(len(SQLITE))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", param="file", value=str(path)) from error
    if begin == SQLITE:
        with closing(open_readonly(path)) as file:
            return books_from_ledger(file, f"ledger file {path.name}", limit)
    if begin.lstrip()[:1] == b"{":
        return books_from_run(load_run(path), source=f"run {path.name}")
    hint = "give a ledger file (splittime serve --ledger-file) or a run (splittime bench --out)"
    raise ConfigError(f"{path} is neither a ledger file nor a run", param="file", value=str(path), hint=hint)


def books_from_run(run: Run, arm: int = 0, source: str = "") -> Books:
    """Raises `NotFound` if the run has no such server."""
    if not 0 <= arm < len(run.arms):
        raise NotFound(f"the run has {len(run.arms)} servers, no number {arm}", param="arm", value=arm)
    served = run.arms[arm]
    return make_books(served.facts, served.accounts, served.steps, source or f"run {run.label}".strip(), run, arm)


def make_books(
    facts: ServerFacts | None,
    accounts: Sequence[ClosedAccount],
    steps: Sequence[StepRecord],
    source: str,
    run: Run | None = None,
    arm: int = 0,
) -> Books:
    """In order, whatever order they came in, and without what is unsound, or prompts that were computed ahead: these
    wait for everybody by their nature. The source of a simulated ledger says so."""
    if facts is not None and facts.simulated:
        source = f"{source}, simulated with {facts.simulated}"
    accounts = [account for account in accounts if account.endpoint != PREFILL]
    sound_accounts = sorted(filter(_is_sound, accounts), key=lambda account: account.end_ns)
    sound_steps = sorted((s for s in steps if s.end_ns >= s.begin_ns), key=lambda step: step.begin_ns)
    return Books(
        facts=facts,
        accounts=tuple(sound_accounts),
        steps=tuple(sound_steps),
        run=run,
        source=source,
        arm=arm,
        num_unsound=len(accounts) + len(steps) - len(sound_accounts) - len(sound_steps),
    )


NO_BOOKS = Books(facts=None, accounts=(), steps=(), run=None, source="")


def live_books(
    facts: ServerFacts | None, accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord], source: str
) -> Books:
    """Returns the books of a live server's latest `LIVE_ACCOUNTS` and `LIVE_STEPS`: without the requests that began
    before the first of these steps, since where their time went is not known any more."""
    begin_ns = min((step.begin_ns for step in steps), default=0) if len(steps) >= LIVE_STEPS else 0
    return make_books(facts, [a for a in accounts if a.start_ns >= begin_ns], steps, source)


def books_from_answers(facts_json: Any, requests_json: Any, steps_json: Any, source: str) -> Books:
    """Returns the books of a live server, from the decoded bodies of `/ledger/facts` (None if there was none),
    `/ledger/requests` and `/ledger/steps`.

    Raises `ConfigError` for what no splittime server answers.
    """
    try:
        facts = None if facts_json is None else msgspec.convert(facts_json, ServerFacts)
        accounts = [account_from_json(entry) for entry in requests_json["accounts"]]
        steps = msgspec.convert(steps_json["steps"], list[StepRecord])
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        message = f"the ledger of {source} cannot be read: {error!r}"
        raise ConfigError(message, param="url", hint=another_server(source)) from error
    return live_books(facts, accounts, steps, source)


def another_server(url: str) -> str:
    """Returns the hint where there is no ledger of ours: `splittime bench` measures any server."""
    run = f"`splittime bench run {url} --out run.json`, then `splittime doctor run.json`"
    return f"Is it a splittime server, and of this version? Any other is measured from outside: {run}."


def _is_sound(account: ClosedAccount) -> bool:
    """The account's intervals follow each other from its begin to its end, and its tokens too."""
    at_ns = account.start_ns
    for interval in account.intervals:
        if interval.begin_ns != at_ns or interval.end_ns < at_ns:
            return False
        at_ns = interval.end_ns
    ready_ns = account.token_ready_ns
    return at_ns == account.end_ns and all(before <= after for before, after in pairwise(ready_ns))


def books_from_ledger(file: LedgerFile, source: str, limit: int = MAX_ACCOUNTS) -> Books:
    """limit: as of `books_from_file`."""
    facts = file.facts()
    since_ns = min((process.started_ns for process in facts.processes), default=0) if facts is not None else 0
    accounts = [account for account in file.accounts(limit=min(limit, MAX_ACCOUNTS)) if account.start_ns >= since_ns]
    begin_ns = min((account.start_ns for account in accounts), default=since_ns)
    steps = [step for step in file.steps_between(begin_ns, NEVER_NS, MAX_STEPS) if step.begin_ns >= since_ns]
    return make_books(facts, accounts, steps, source)


def with_steps(books: Books, steps: Sequence[StepRecord]) -> Books:
    """Returns the books with these steps too, where they do not have them yet."""
    known = {step.step_id for step in books.steps}
    more = [step for step in steps if step.step_id not in known]
    if not more:
        return books
    return msgspec.structs.replace(books, steps=tuple(sorted((*more, *books.steps), key=lambda step: step.begin_ns)))


def books_from_server(get: Get, base: str, limit: int) -> Books:
    """Returns the server's facts (an older one has none), its latest requests, and the steps in their time. Raises
    `EngineError` if the server was restarted meanwhile: its answers would be of two servers."""
    facts = _facts(get, base)
    accounts = get(f"{base}/ledger/requests?limit={limit}")
    steps, still_open = get(f"{base}/ledger/steps?limit={LIVE_STEPS}"), _still_open(get, base)
    if _starts(facts) != _starts(_facts(get, base)):
        raise EngineError(f"{base} was restarted while it was read", hint="Ask once more, when it has served a while.")
    return msgspec.structs.replace(books_from_answers(facts, accounts, steps, base), still_open=still_open)


def _still_open(get: Get, base: str) -> StillOpen | None:
    """Returns None where nothing tells it: an older server, a gateway, books inside vLLM."""
    with contextlib.suppress(NotFound, KeyError, TypeError, msgspec.ValidationError):
        told = get(f"{base}/stats")
        return msgspec.convert(told["server"] | told["engine"], StillOpen)
    return None


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


MAX_OTHERS = 1_000


class AccountQuestion(NamedTuple):
    """Which accounts: one by its id, or the slowest so many."""

    request_id: str | None
    slowest: int | None


class FoundAccounts(msgspec.Struct, frozen=True):
    """What to explain, and the books to hold it against, with the steps in its time. hops: of the traces that the
    accounts are of."""

    accounts: list[ClosedAccount]
    books: Books
    hops: list[Hop] = []

    @property
    def simulated(self) -> str:
        """As in `ServerFacts`."""
        return "" if self.books.facts is None else self.books.facts.simulated


def accounts_from_file(path: Path, question: AccountQuestion) -> FoundAccounts:
    file = open_readonly(path)
    try:
        return _read(file, path, question)
    finally:
        file.close()


def accounts_from_server(
    base: str, question: AccountQuestion, get: Callable[[str], Any], get_operators: Callable[[str], Any]
) -> FoundAccounts:
    """get(url) returns a decoded answer; get_operators of what is the operator's to read, {} for others. Raises
    `EngineError` for what no splittime server answers."""
    asked = None
    if question.request_id is not None:
        asked = get(f"{base}/ledger/requests/{urllib.parse.quote(question.request_id, safe='')}")
    listed = get(f"{base}/ledger/requests?limit={MAX_OTHERS}")
    facts, steps = get_operators(f"{base}/ledger/facts"), get_operators(f"{base}/ledger/steps?limit={LIVE_STEPS}")
    try:
        told = msgspec.convert(facts, ServerFacts) if facts else None
        records = msgspec.convert(steps["steps"], list[StepRecord]) if steps else []
        books = live_books(told, [account_from_json(entry) for entry in listed["accounts"]], records, base)
        if asked is None:
            found = _slowest(books.accounts, question, base)
        else:
            found = [account_from_json(entry) for entry in asked.get("choices", [asked])]
        return FoundAccounts(found, books, _hops_from_server(base, found, get))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise EngineError(f"what {base} answered is no account: {error}", hint="Is it a splittime server?") from None


def _hops_from_server(base: str, accounts: list[ClosedAccount], get: Callable[[str], Any]) -> list[Hop]:
    """Returns the hops of the accounts' traces; none were posted of most."""
    hops: list[Hop] = []
    for trace_id in _traces(accounts):
        with contextlib.suppress(NotFound):
            hops += msgspec.convert(get(f"{base}/ledger/hops/{trace_id}")["hops"], list[Hop])
    return hops


def _traces(accounts: Iterable[ClosedAccount]) -> list[str]:
    return list(dict.fromkeys(account.trace_id for account in accounts if account.trace_id))


def _read(file: LedgerFile, path: Path, question: AccountQuestion) -> FoundAccounts:
    books = books_from_ledger(file, f"ledger file {path.name}", MAX_OTHERS)
    request_id = question.request_id
    accounts = file.account(request_id) if request_id is not None else _slowest(books.accounts, question, str(path))
    if not accounts:
        raise NotFound(f"no request {request_id!r} in {path}", param="request_id", value=request_id)
    begin_ns = min(account.start_ns for account in accounts)
    end_ns = max(account.end_ns for account in accounts)
    hops = [hop for trace_id in _traces(accounts) for hop in file.hops(trace_id)]
    return FoundAccounts(accounts, with_steps(books, file.steps_between(begin_ns, end_ns)), hops)


def _slowest(others: Sequence[ClosedAccount], question: AccountQuestion, where: str) -> list[ClosedAccount]:
    """Returns those that were served, the slowest first."""
    served = [account for account in others if account.finish_reason != "refused"]
    if not served:
        raise NotFound(f"no request in {where} yet", param="slowest")
    return sorted(served, key=lambda account: account.start_ns - account.end_ns)[: question.slowest or 1]
