"""The page at `/` and what it asks for: `GET /dashboard/data?after=CURSOR` answers what is new since the last answer.

What is read of the ledger and of the requests in flight is taken in the event loop, in one turn, so that a record is in
exactly one answer and a request is either open or closed; what is made of it, in a thread beside. That thread is one,
whoever looks, and is started by the first look: a server that nobody looks at does nothing. It works in short turns
(`web.reading`).
An answer is bounded (`MAX_ROWS`, `MAX_STEPS`, `MAX_OPEN`) and says what it left out. The cursor is of this process: one
from before a restart gets everything anew, with `reset`.

Time by the second, for the page's charts: how many requests were in which stage, and what the steps did. A bin is one
second of the host's monotonic clock, named by its number. An interval is shared out among the bins it lies in, in
integers, so the bins of an interval that lies within the horizon sum to it; so are a step's tokens. Bins are additive:
what later books say of the same second is added by the page. Presence is time-averaged: 3e9 ns of one are 3 requests.

A request in a line, for the page's table; and one request with the steps it was in, for its waterfall. Durations in ns;
instants as they are kept, of the host's monotonic clock, with the wall clock beside them for display. Texts that came
from outside are shortened here and shown as text there.
"""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import orjson

from splittime.core.errors import NotFound, RequestError
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.account_json import account_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import ID_PREFIXES, Ledger
from splittime.server import dashboard, routes_info
from splittime.server.books import KeepsBooks, OpenBook
from splittime.server.service import Service
from splittime.web import http
from splittime.web.page_files import NO_STORE
from splittime.web.reading import in_short_turns

BIN_NS = 1_000_000_000
HORIZON_S = 300

# what is known of the steps in a bin, by column: how many ended in it, tokens and time in it, the most in any step
SUMS = (
    *("steps", "prefill_tokens", "decode_tokens", "device_ns", "sample_ns", "host_ns", "host_gap_ns", "idle_ns"),
    *("moves_ns", "kept_ns"),
)
PEAKS = ("running", "waiting", "blocks_used")

Presence = dict[str, dict[int, int]]  # stage key -> bin -> ns
Span = tuple[str, int, int]  # stage key, begin_ns, end_ns
MAX_WATERFALL_STEPS = 2_000  # of one waterfall
MAX_NEIGHBOURS = 50
MAX_TEXT_CHARS = 300
NOT_TOLD = "queue:not_told"  # why a request waits comes with its first output, or when it leaves

Row = dict[str, Any]
MAX_ROWS, MAX_STEPS, MAX_OPEN, MAX_STEPS_SEARCHED = 1_000, 8_000, 256, 16_384
USUAL_STEPS = 200  # the latest, that say how much a thread is usually off the processor
DIAGNOSED_FOR_S = 5.0  # a diagnosis is kept so long, whoever asks
PROCESS = secrets.token_hex(6)
WORDS = {
    "stages": {stage.value: meaning for stage, meaning in STAGE_MEANING.items()},
    "causes": {cause.value: meaning for cause, meaning in CAUSE_MEANING.items()},
}

_diagnoses: WeakKeyDictionary[Ledger, tuple[float, bytes]] = WeakKeyDictionary()  # when it was made, and its answer


def stage_key(stage: str, cause: Cause | None) -> str:
    """`queue:batch_slots`, or `prefill` where there is no cause."""
    return str(stage) if cause is None else f"{stage}:{cause}"


def spans(intervals: Iterable[StageInterval]) -> list[Span]:
    return [(stage_key(i.stage, i.cause), i.begin_ns, i.end_ns) for i in intervals]


def _shares(begin_ns: int, end_ns: int, since_ns: int) -> dict[int, int]:
    """Returns how much of the part of [begin, end) that lies after `since_ns` is in each bin."""
    begin_ns = max(begin_ns, since_ns)
    bins = range(begin_ns // BIN_NS, -(-end_ns // BIN_NS)) if begin_ns < end_ns else ()
    return {at: min(end_ns, (at + 1) * BIN_NS) - max(begin_ns, at * BIN_NS) for at in bins}


def presence(books: Iterable[Iterable[Span]], since_ns: int) -> Presence:
    """Time in each stage by bin, over all books."""
    found: Presence = defaultdict(lambda: defaultdict(int))
    for book in books:
        for key, begin_ns, end_ns in book:
            at = begin_ns // BIN_NS
            if since_ns <= begin_ns < end_ns <= (at + 1) * BIN_NS:  # most stages lie in one bin
                found[key][at] += end_ns - begin_ns
            elif end_ns > since_ns:
                for at, ns in _shares(begin_ns, end_ns, since_ns).items():
                    found[key][at] += ns
    return found


def presence_json(found: Presence) -> dict[str, list[tuple[int, int]]]:
    return {key: sorted(bins.items()) for key, bins in found.items()}


def step_bins(records: Iterable[StepRecord], since_ns: int, usual: float = 0.0) -> list[list[int]]:
    """`[bin, *SUMS, *PEAKS]` for each bin that a step touched. usual: `derive.usual_off_share` of the latest steps."""
    found: dict[int, list[int]] = defaultdict(lambda: [0] * (len(SUMS) + len(PEAKS)))
    for record in records:
        if record.end_ns > since_ns:
            row, peaks = found[record.end_ns // BIN_NS], (record.num_running, record.num_waiting, record.blocks_used)
            row[0] += 1
            row[len(SUMS) :] = map(max, row[len(SUMS) :], peaks)
            _book(found, record, since_ns, usual)
    return [[at, *row] for at, row in sorted(found.items())]


def _book(found: dict[int, list[int]], record: StepRecord, since_ns: int, usual: float) -> None:
    at_ns = record.begin_ns - record.host_gap_ns - record.idle_ns
    times = (7, record.idle_ns), *_parts(record, usual)
    tokens = (1, record.prefill_tokens), (2, record.decode_tokens)
    if at_ns >= since_ns and at_ns // BIN_NS == record.end_ns // BIN_NS:  # most steps lie in one bin
        for column, amount in (*tokens, *times):
            found[record.end_ns // BIN_NS][column] += amount
        return
    for column, duration_ns in times:
        for at, ns in _shares(at_ns, at_ns + duration_ns, since_ns).items():
            found[at][column] += ns
        at_ns += duration_ns
    during = _shares(record.begin_ns, record.end_ns, record.begin_ns)
    for column, count in tokens:
        for at, part in derive.apportion(count, during).items():
            if (at + 1) * BIN_NS > since_ns:
                found[at][column] += part


def _parts(record: StepRecord, usual: float) -> list[tuple[int, int]]:
    """Returns gap, plan and launch, copies of blocks, device, sample, commit: end to end, up to where the step ends.
    While the thread had no processor or was stopped it did nothing of these, nobody knows of which: as the doctor
    divides a step (`diagnose.timeline`), that comes first, and each has its share of the rest."""
    launch_ns = record.plan_ns + record.launch_ns
    times = (record.host_gap_ns, launch_ns, record.moves_ns, record.device_ns, record.sample_ns, record.commit_ns)
    parts, length_ns = list(zip((6, 5, 8, 3, 4, 5), times, strict=True)), sum(times)
    kept_ns = min(length_ns, (record.cpu_wait_ns or 0) + round(derive.stopped_ns(record, usual)))
    if not kept_ns:
        return parts
    left = [(column, ns * (length_ns - kept_ns) // length_ns) for column, ns in parts]
    return [(9, length_ns - sum(ns for _, ns in left)), *left]


def open_spans(book: OpenBook, now_ns: int) -> list[Span]:
    """Returns its stages up to now. The engine has said nothing of a request whose last mark is the hand-off: it waits
    there."""
    keys = [stage_key(mark.stage, mark.cause) for mark in book.marks]
    if book.marks[-1].stage is Stage.HANDOFF:
        keys[-1] = NOT_TOLD
    begins = [mark.begin_ns for mark in book.marks]
    return list(zip(keys, begins, [*begins[1:], max(now_ns, begins[-1])], strict=True))


def open_row(book: OpenBook, now_ns: int) -> Row:
    return {
        "id": book.request_id,
        "sent_as": sent_as(book.group_id),
        "endpoint": book.endpoint,
        "start_ns": book.start_ns,
        "e2e_ns": max(0, now_ns - book.start_ns),
        "prompt_tokens": book.prompt_tokens,
        "cached_tokens": book.cached_tokens,
        "output_tokens": book.output_tokens,
        "stages": _totals(open_spans(book, now_ns)),
    }


def sent_as(group_id: str) -> str:
    """Returns the X-Request-Id of a request: the response's id without its prefix."""
    prefix = next((each for each in ID_PREFIXES if group_id.startswith(each)), "")
    return group_id.removeprefix(prefix)


def _rows(accounts: Sequence[ClosedAccount], steps: Iterable[StepRecord], facts: ServerFacts | None) -> list[Row]:
    """Returns their lines. Of their times by stage and cause, what kept the engine's thread from running in these steps
    is told by itself, as `splittime explain` tells it."""
    if not accounts:
        return []
    from splittime.diagnose.attribution import stages_and_stops
    from splittime.diagnose.books import make_books

    begin_ns = min(account.start_ns for account in accounts)
    books = make_books(facts, (), [step for step in steps if step.end_ns > begin_ns], "the live ledger")
    told = zip(accounts, stages_and_stops(books, accounts), strict=True)
    return [_account_row(account, [(stage_key(*key), ns) for key, ns in totals.items()]) for account, totals in told]


def _account_row(account: ClosedAccount, stages: list[tuple[str, int]]) -> Row:
    return {
        "id": account.request_id,
        "sent_as": sent_as(account.group_id),
        "endpoint": account.endpoint,
        "started_unix_ms": account.started_at_unix_ns // 1_000_000,
        "start_ns": account.start_ns,
        "end_ns": account.end_ns,
        "e2e_ns": derive.e2e_ns(account),
        "ttft_ns": derive.ttft_ns(account),
        "tpot_ns": derive.tpot_ns(account),
        "first_ready_ns": derive.first_ready_ns(account),
        "per_token_ns": derive.per_token_ns(account),
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "preemptions": account.num_preemptions,
        "finish_reason": account.finish_reason,
        "error": account.error.message[:MAX_TEXT_CHARS] if account.error is not None else None,
        "stages": stages,
    }


def _totals(book: Sequence[Span]) -> list[tuple[str, int]]:
    """Time by stage and cause, in the order in which they first occur."""
    totals_ns: dict[str, int] = {}
    for key, begin_ns, end_ns in book:
        totals_ns[key] = totals_ns.get(key, 0) + end_ns - begin_ns
    return [(key, ns) for key, ns in totals_ns.items() if ns]


def waterfall(account: ClosedAccount, records: Sequence[StepRecord]) -> Row:
    """The account, the steps that ran while the engine had it, and with whom it shared those it was in."""
    shown = account_json(account)
    within = [r for r in records if r.end_ns > account.start_ns and r.begin_ns < account.end_ns]
    shown["num_steps"] = len(within)
    shown["steps"] = [_step(account, record) for record in within[:MAX_WATERFALL_STEPS]]
    shown["neighbours"] = _neighbours(account.request_id, within)
    return shown


def _step(account: ClosedAccount, record: StepRecord) -> Row:
    own = sum(tokens for request_id, _, tokens in record.rows if request_id == account.request_id)
    one_token_rows = sum(1 for request_id, _, tokens in record.rows if request_id != account.request_id and tokens == 1)
    others = sum(tokens for request_id, _, tokens in record.rows if request_id != account.request_id)
    return {
        "step_id": record.step_id,
        "begin_ns": record.begin_ns - account.start_ns,
        "end_ns": record.end_ns - account.start_ns,
        "device_ns": record.device_ns,
        "own_tokens": own,
        "other_decode_tokens": min(one_token_rows, record.decode_tokens),
        "other_prefill_tokens": others - min(one_token_rows, record.decode_tokens),
        "rows": len(record.rows),
        "waiting": record.num_waiting,
        "victims": list(record.victims),
    }


def _neighbours(request_id: str, records: Sequence[StepRecord]) -> list[Row]:
    """Returns who was in the same steps: those that brought most tokens first."""
    steps: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for record in records:
        names = [name for name, _, _ in record.rows]
        if request_id in names:
            steps.update(name for name in names if name != request_id)
            tokens.update({name: count for name, _, count in record.rows if name != request_id})
    most = tokens.most_common(MAX_NEIGHBOURS)
    return [{"id": name, "steps": steps[name], "tokens": count} for name, count in most]


class PageCursor(NamedTuple):
    """How many records, since the start, the page has."""

    accounts: int = 0
    steps: int = 0


class View(NamedTuple):
    """All that an answer is made from, as it was in one turn of the event loop."""

    head: dict[str, Any]
    now_ns: int
    accounts: list[ClosedAccount]
    steps: list[StepRecord]
    recent_steps: list[StepRecord]
    facts: ServerFacts | None
    open_books: list[OpenBook]


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="dashboard")


async def _respond(send: http.Send, work: Callable[..., bytes], *args: Any) -> None:
    body = await asyncio.get_running_loop().run_in_executor(_beside(), in_short_turns, work, *args)
    await http.respond(send, body, headers=NO_STORE)


async def index(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The page for a browser, a few words in JSON for everybody else."""
    if http.wants_html(scope):
        await dashboard.send_file(scope, send, "index.html")
    else:
        await routes_info.index(service, scope, receive, send)


async def static(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await dashboard.send_file(scope, send, scope[http.PATH_REST])


async def data(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What is new since the cursor, and how things are now."""
    view = _look(books, _read_cursor(http.query_of(scope, "after").get("after"), books))
    await _respond(send, _data, view)


async def one_request(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """A closed account with the steps of its time, and whose that time was."""
    await _respond(send, _waterfall, books.ledger, books.facts(), scope[http.PATH_REST])


async def findings(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the doctor says of the latest books."""
    await _respond(send, _findings, books.ledger, books.facts())


def _read_cursor(text: str | None, books: KeepsBooks) -> PageCursor | None:
    """None for a first look, and for a cursor of another process."""
    process, _, rest = (text or "").partition(".")
    if process != PROCESS:
        return None
    numbers = rest.split(".")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise RequestError("not a cursor of this page", param="after", value=(text or "")[:64])
    cursor, counts = PageCursor(*map(int, numbers)), books.ledger.counts()
    return cursor if cursor.accounts <= counts.accounts and cursor.steps <= counts.steps else None


def _look(books: KeepsBooks, after: PageCursor | None) -> View:
    ledger, counts = books.ledger, books.ledger.counts()
    since = after or PageCursor()
    num_accounts, num_steps = counts.accounts - since.accounts, counts.steps - since.steps
    accounts = ledger.accounts(None, min(num_accounts, MAX_ROWS))
    steps = ledger.steps(min(num_steps, MAX_STEPS))
    head = {
        "cursor": f"{PROCESS}.{counts.accounts}.{counts.steps}",
        "reset": after is None,
        "left_out": {"accounts": num_accounts - len(accounts), "steps": num_steps - len(steps)},
        "server": books.about(),
        "engine": msgspec.to_builtins(books.stats()),
        **({"words": WORDS} if after is None else {}),
    }
    recent, open_books = ledger.steps(MAX_STEPS), list(islice(books.open_books(), MAX_OPEN))
    return View(head, time.monotonic_ns(), accounts, steps, recent, books.facts(), open_books)


def _data(view: View) -> bytes:
    now_ns, since_ns = view.now_ns, view.now_ns - HORIZON_S * BIN_NS
    closed = presence((spans(account.intervals) for account in view.accounts), since_ns)
    still_open = presence((open_spans(book, now_ns) for book in view.open_books), since_ns)
    answer = {
        **view.head,
        "now_ns": now_ns,
        "now_unix_ms": time.time_ns() // 1_000_000,
        "horizon_s": HORIZON_S,
        "rows": _rows(view.accounts, view.recent_steps, view.facts),
        "open": [open_row(book, now_ns) for book in view.open_books],
        "presence": presence_json(closed),
        "presence_open": presence_json(still_open),
        "step_fields": ("at_s", *SUMS, *PEAKS),
        "step_bins": step_bins(view.steps, since_ns, derive.usual_off_share(view.recent_steps[-USUAL_STEPS:])),
    }
    return orjson.dumps(answer, default=str)


def _waterfall(ledger: Ledger, facts: ServerFacts | None, request_id: str) -> bytes:
    from splittime.diagnose.attribution import meaning, owners_between
    from splittime.diagnose.bill import bill
    from splittime.diagnose.books import make_books

    found = ledger.account(request_id)
    if not found:
        raise NotFound(f"no ended request {request_id!r}", code="request_not_found", value=request_id)
    account = max(found, key=lambda account: account.end_ns)
    steps = ledger.steps(MAX_STEPS_SEARCHED)
    books = make_books(facts, (), steps, "the live ledger")
    owners = owners_between(books, account, account.start_ns, account.end_ns)
    told = [(name, round(ns), meaning(name)) for name, ns in owners.items()]
    waited = [(charge.request_id, charge.why, charge.ns) for charge in bill(account, books) if charge.request_id]
    return orjson.dumps(waterfall(account, steps) | {"owners": told, "waited_for": waited[:MAX_NEIGHBOURS]})


def _findings(ledger: Ledger, facts: ServerFacts | None) -> bytes:
    made_at_s, answer = _diagnoses.get(ledger, (float("-inf"), b""))
    if time.monotonic() - made_at_s >= DIAGNOSED_FOR_S:
        answer = _diagnose(ledger, facts)
        _diagnoses[ledger] = (time.monotonic(), answer)
    return answer


def _diagnose(ledger: Ledger, facts: ServerFacts | None) -> bytes:
    from splittime.diagnose.books import LIVE_ACCOUNTS, LIVE_STEPS, live_books  # here: a start does not wait for it
    from splittime.diagnose.doctor import diagnose

    accounts, steps = ledger.accounts(None, LIVE_ACCOUNTS), ledger.steps(LIVE_STEPS)
    return msgspec.json.encode(diagnose(live_books(facts, accounts, steps, "the live ledger")))
