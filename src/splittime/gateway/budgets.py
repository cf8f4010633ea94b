"""Tokens of a tenant by day and by month, in UTC, kept over restarts: `tokens_per_day`, `tokens_per_month`.

A limit by the minute fills up again; a budget is used up, and its tenant is refused (429) until the day or the month is
over. What a request used is known at its end, so what it may use is reserved until then: a budget may be overdrawn by
one request. A request that was cancelled counts by what its upstream told until then, or by an estimate.

The counts are in a SQLite file, written once a second off the path: what a killed gateway had not written, a second's
worth, is not charged. Only differences are added there, so gateways that share a file share the budgets, a second late.
A day or month that has begun is never gone back from, whatever the clock is set to. A file that cannot be written is
logged, and the counts go on in memory.

`max_tokens` is a bound and no forecast: who writes 500,000 there uses 200. So the order of the queue and the choice of
an upstream go by what such requests used (`expected_tokens`), never more than the bound. Limits are safe the other way
round: all that a request may use is reserved (`reserved_tokens`), and what upstreams wrote beyond that of late. Until
a tenant has one answer of a model its bound is not believed below what an answer is assumed to have.

An answer whose client left told no usage. Its tokens are those of its events, by how many one had of late
(speculation and `stream_interval` have several in one), or by its text; of an answer that is no stream, by the time
that it ran, at the best pace at which one of its tenant's was written of late. It is charged no more than it may use,
as far as that is known. What one tenant's requests used says nothing of another's.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from splittime.core.errors import ConfigError, Refused
from splittime.gateway.config import GatewayConfig, TenantConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, MOST_TOKENS, ForwardedRequest

MAX_KEPT = 4096  # pairs of a tenant and a model; who was seen longest ago goes
WEIGHT = 1 / 8  # of the latest answer in a mean; the first ones count alike
SLOWER = 1.1  # a best pace is forgotten by so much with each answer
KEPT_BEYOND = 0.75  # of what was written beyond a bound, with each answer that keeps to its own
log = logging.getLogger("splittime.gateway")

WRITE_S = 1.0
BUSY_S = 5.0  # for another gateway that writes
END_S = 3.0  # for the last write
RESERVED_S = 1.0  # when to come back where open requests have reserved the rest
DAY, MONTH = "tokens_per_day", "tokens_per_month"
SCHEMA = "CREATE TABLE IF NOT EXISTS budget (tenant TEXT, period TEXT, tokens INTEGER, PRIMARY KEY (tenant, period))"
ADD = "INSERT INTO budget VALUES (?, ?, ?) ON CONFLICT (tenant, period) DO UPDATE SET tokens = tokens + excluded.tokens"

Account = tuple[str, str]  # a tenant and a period: 2026-11-27 or 2026-11


class UsedOfLate:
    """The use of a tenant and model. answer_tokens: of one answer. beyond_tokens: by whether a bound was said.
    s_per_token: at the best pace of one answer."""

    __slots__ = ("answer_tokens", "beyond_tokens", "num_seen", "s_per_token", "tokens_per_piece")

    def __init__(self) -> None:
        self.num_seen = 0
        self.answer_tokens = 0.0
        self.beyond_tokens = {True: 0.0, False: 0.0}
        self.tokens_per_piece, self.s_per_token = 1.0, inf

    def note(self, request: ForwardedRequest, output_tokens: int, num_pieces: int, lasted_s: float) -> None:
        self.num_seen += 1
        weight = max(WEIGHT, 1 / self.num_seen)
        self.answer_tokens += weight * (output_tokens / request.answers - self.answer_tokens)
        kept = KEPT_BEYOND * self.beyond_tokens[request.is_bounded]
        self.beyond_tokens[request.is_bounded] = max(kept, output_tokens - request.output_tokens)
        if output_tokens and num_pieces:
            self.tokens_per_piece += weight * (max(1.0, output_tokens / num_pieces) - self.tokens_per_piece)
        if output_tokens and not request.is_stream:  # several answers are written at once
            now_s = max(lasted_s, 1e-6) * request.answers / output_tokens
            self.s_per_token = min(now_s, self.s_per_token * SLOWER)


NOTHING = UsedOfLate()


class LearntUse:
    """assumed_tokens: of an answer of which nothing is known, as the config says now."""

    def __init__(self) -> None:
        self._used: OrderedDict[tuple[str, str], UsedOfLate] = OrderedDict()

    def note(
        self, tenant: str, request: ForwardedRequest, output_tokens: int, num_pieces: int, lasted_s: float
    ) -> None:
        """An answer told its tokens. num_pieces: events that had some, 0 for no stream. lasted_s: until its first byte,
        since its request was sent."""
        used = self._used.setdefault((tenant, request.model), UsedOfLate())
        self._used.move_to_end((tenant, request.model))
        used.note(request, output_tokens, num_pieces, lasted_s)
        if len(self._used) > MAX_KEPT:
            self._used.popitem(last=False)

    def expected_tokens(self, tenant: str, request: ForwardedRequest, assumed_tokens: int) -> int:
        """Returns the tokens that its answers are expected to have."""
        used = self._of(tenant, request)
        one = used.answer_tokens if used.num_seen else assumed_tokens
        return min(request.output_tokens, ceil(one * request.answers))

    def reserved_tokens(self, tenant: str, request: ForwardedRequest, assumed_tokens: int) -> int:
        """Returns the tokens that its prompt and its answers may come to."""
        if not request.is_written:
            return request.prompt_tokens
        used = self._of(tenant, request)
        most = request.output_tokens + ceil(used.beyond_tokens[request.is_bounded])
        if not used.num_seen:
            most = max(most, assumed_tokens * request.answers)
        return request.prompt_tokens + min(MOST_TOKENS, most)

    def written_tokens(self, tenant: str, request: ForwardedRequest, num_pieces: int, text_bytes: int) -> int:
        """Returns the tokens of a stream that told so many events with so much text."""
        used = self._of(tenant, request)
        tokens = max(ceil(num_pieces * used.tokens_per_piece), text_bytes // BYTES_PER_TOKEN)
        return min(tokens, request.output_tokens) if request.is_bounded else tokens

    def unseen_tokens(self, tenant: str, request: ForwardedRequest, lasted_s: float) -> int:
        """Returns the tokens that were written for so long of an answer that comes as a whole."""
        if not request.is_written:
            return 0
        used = self._of(tenant, request)
        if used.s_per_token == inf:
            return request.expected_tokens
        most = request.output_tokens + (0 if request.is_bounded else ceil(used.beyond_tokens[False]))
        return min(most, ceil(min(MOST_TOKENS, lasted_s / used.s_per_token * request.answers)))

    def _of(self, tenant: str, request: ForwardedRequest) -> UsedOfLate:
        return self._used.get((tenant, request.model), NOTHING)


class TokenBudget(NamedTuple):
    """One limit of one tenant. kind: DAY or MONTH."""

    tenant: str
    kind: str
    limit: int


def budgets_of(tenants: Iterable[TenantConfig]) -> list[TokenBudget]:
    found = [(tenant.name, kind, getattr(tenant, kind)) for tenant in tenants for kind in (DAY, MONTH)]
    return [TokenBudget(*one) for one in found if one[2] is not None]


def check_budgets(config: GatewayConfig) -> None:
    """Raises `ConfigError` for a budget that a restart would forget."""
    for number, tenant in enumerate(config.tenant):
        for budget in budgets_of([tenant]) if config.budget_file is None else ():
            param = f"tenant[{number}].{budget.kind}"
            hint = 'budget_file = "budgets.sqlite" keeps what was used'
            message = f"{param} needs a budget_file: a restart would give it all again"
            raise ConfigError(message, param=param, value=budget.limit, hint=hint)


class Calendar:
    """Which day and month it is, never an earlier one than before. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._latest = clock, 0.0

    def now(self) -> datetime:
        self._latest = max(self._latest, self._clock())
        return datetime.fromtimestamp(self._latest, UTC)

    def period(self, kind: str) -> str:
        return self.now().strftime("%Y-%m-%d" if kind == DAY else "%Y-%m")

    def left_s(self, kind: str) -> float:
        """Returns the seconds until this day or month is over."""
        now = self.now()
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        ends = day + timedelta(days=1) if kind == DAY else (day.replace(day=1) + timedelta(days=32)).replace(day=1)
        return (ends - now).total_seconds()


class BudgetFile:
    """path: of the SQLite file, which is made where there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: Counter[Account] = Counter()

    def add(self, added: Mapping[Account, int], periods: tuple[str, str]) -> Counter[Account]:
        """Adds tokens; returns all that was used in these periods, by every gateway of this file. What it could not
        add goes with the next call. Waits for the disk, and raises `sqlite3.Error`."""
        self._waiting.update(added)
        with self._connected() as connection:
            connection.execute(SCHEMA)
            connection.executemany(ADD, [(*account, tokens) for account, tokens in self._waiting.items()])
            if self._waiting:
                connection.execute("DELETE FROM budget WHERE period NOT IN (?, ?)", periods)
            rows = connection.execute("SELECT tenant, period, tokens FROM budget").fetchall()
        self._waiting.clear()
        return Counter({(tenant, period): tokens for tenant, period, tokens in rows})

    def __str__(self) -> str:
        return self._path

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """One transaction; the connection is closed behind it."""
        with contextlib.closing(sqlite3.connect(Path(self._path), timeout=BUSY_S)) as connection, connection:
            yield connection


class TokenBudgets:
    """`open` begins inside the event loop, `close` ends.

    file: read at once; `ConfigError` is raised for one that cannot be used. None for counts in memory alone, as a
    rehearsal keeps them.
    """

    def __init__(
        self, tenants: Sequence[TenantConfig], file: BudgetFile | None, calendar: Calendar | None = None
    ) -> None:
        self._calendar = calendar or Calendar()
        self._by_tenant: dict[str, list[TokenBudget]] = {}
        for budget in budgets_of(tenants):
            self._by_tenant.setdefault(budget.tenant, []).append(budget)
        self._file = file if self._by_tenant else None
        self._used: Counter[Account] = Counter()  # as the file says, with what is not written
        self._unwritten: Counter[Account] = Counter()
        self._reserved: Counter[str] = Counter()  # by tenant, of the requests that are open
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if self._file is not None:
            self._read(self._file)

    def check(self, tenant: str) -> None:
        """Raises `Refused` if a budget of this tenant is used up, or all that is left of it reserved."""
        for _, kind, limit in self._by_tenant.get(tenant, ()):
            left = limit - self._used[tenant, self._calendar.period(kind)]
            if left <= self._reserved[tenant]:
                message = f"the key {tenant!r} has used what its {kind} allows"
                later_s = max(1.0, self._calendar.left_s(kind))
                if left > 0:
                    message, later_s = f"{message}, with what its open requests may use", RESERVED_S
                raise Refused(message, reason=kind, limit=limit, retry_after_s=round(later_s, 3))

    def reserve(self, tenant: str, tokens: int) -> None:
        """Keep so many tokens for a request, until `release`. Raises as `check` does, and keeps none."""
        self.check(tenant)
        if tenant in self._by_tenant:
            self._reserved[tenant] += tokens

    def release(self, tenant: str, tokens: int) -> None:
        """Give back what was reserved; what was used of it is told by `use`."""
        if tenant in self._by_tenant:
            self._reserved[tenant] -= tokens

    def use(self, tenant: str, tokens: int) -> None:
        for _, kind, _ in self._by_tenant.get(tenant, ()):
            account = (tenant, self._calendar.period(kind))
            self._used[account] += tokens
            self._unwritten[account] += tokens

    def used(self) -> dict[tuple[str, ...], float]:
        """Returns the tokens used by (tenant, kind) of the days and months that are now."""
        budgets = [budget for budgets in self._by_tenant.values() for budget in budgets]
        return {(one.tenant, one.kind): self._used[one.tenant, self._calendar.period(one.kind)] for one in budgets}

    # ---- the file

    def open(self) -> None:
        if self._file is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="budgets")  # which may wait for the disk
            self._task = asyncio.create_task(self._write_now_and_then(self._file))

    async def close(self) -> None:
        """Writes what is not written yet, unless that takes too long."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_S)
            self._task.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _write_now_and_then(self, file: BudgetFile) -> None:
        """Logs the first of writes that fail one after the other; the next is tried, whatever it was."""
        is_last = is_failing = False
        while not is_last:
            is_last = self._ending.is_set()
            added, self._unwritten = self._unwritten, Counter()
            try:
                work = partial(file.add, added, self._periods())
                self._used = await asyncio.get_running_loop().run_in_executor(self._thread, work) + self._unwritten
                is_failing = False
            except Exception as error:  # requests are served all the same
                if not is_failing:
                    log.error("budgets are counted and not written to %s: %s", file, error)
                is_failing = True
            if not is_last:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), WRITE_S)

    def _read(self, file: BudgetFile) -> None:
        try:
            self._used = file.add({}, self._periods())
        except (sqlite3.Error, OSError) as error:
            hint = "give a file that this process may write, or take the budgets out"
            message = f"budget_file: cannot use {file}: {error}"
            raise ConfigError(message, param="budget_file", value=str(file), hint=hint) from error

    def _periods(self) -> tuple[str, str]:
        return self._calendar.period(DAY), self._calendar.period(MONTH)
