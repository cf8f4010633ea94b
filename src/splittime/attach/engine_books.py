"""The accounts and step records of an engine that is not ours, from what its scheduler decided. Pure: time is told.

    receive -> begin (a step was planned) -> commit (its result is there) -> end_step ... -> end (the request has ended)

A request waits (`queue`, `preempted`), is computed (`prefill`, `recompute`, `decode`) or stalls; the adapter of the
scheduler says which at each plan, with the cause. What the engine's process cannot see (launching, sampling, the
device's own clock) is 0 in a step's record and named in `UNKNOWN`: `device_ns` is all from the plan to the result, or,
of a step that was planned while another ran, from that one's end to its own result.

The requests of an engine that wait, and why, without touching each of 10,000 at each plan.

All that stand behind the point where the scheduler's loop stopped wait for the same: they share one history
(`scheduler.queue`), and each copies its stretch of it into its account when it leaves. Beside it stands alone who
has a cause of its own: the first, whoever waits for something of its own, and who has come since the last plan.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from splittime.attach.request_book import WAITING, AskedRequest, EndedBook, EngineBook, FirstTokenBook, name_of
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.state import CauseLog, leave_log

UNKNOWN = ("launch_ns", "sample_ns", "cpu_wait_ns", "off_cpu_ns", "unseen_ns")
UNKNOWN_AHEAD = ("plan_ns", "commit_ns")  # of an engine that plans ahead: they lie beside the step, in `device_ns`
ENGINE_DECODES = Stage.DECODE  # looked up once: Python 3.11 calls a function for each look at an enumeration's member

RowOf = tuple[str, int, int]  # request id, start, number of tokens
PauseOf = Literal["all", "new"]  # of everybody, or of those who wait


class DecidedPlan(NamedTuple):
    """A plan, as the scheduler made it. rows: in its order. decode_tokens, kv_tokens_read: as in `StepRecord`.
    stalled, waiting: who runs without a row and who waits, with causes of their own (None where nobody knows one).
    rest: what all others wait for. hits: tokens found in the prefix cache, of those who were admitted. drafts: of each
    row that verifies some. num_*: behind the plan."""

    rows: tuple[RowOf, ...]
    decode_tokens: int
    kv_tokens_read: int
    stalled: Sequence[tuple[str, Cause | None]]
    waiting: Sequence[tuple[str, Cause | None]]
    hits: Sequence[tuple[str, int]]
    victims: tuple[str, ...]
    blocks_used: int
    num_running: int
    num_waiting: int
    drafts: tuple[tuple[str, int], ...] = ()
    rest: Cause | None = None


class BegunStep(msgspec.Struct):
    """A step that has begun. is_queued: while another ran. looked_ns: when the engine began its first plan while this
    step ran; busy_until_ns: when that plan was finished."""

    step_id: int
    plan: DecidedPlan
    begin_ns: int
    planned_ns: int
    is_queued: bool
    looked_ns: int | None = None
    busy_until_ns: int = 0


class EngineBooks:
    """All requests that an engine has, and its steps. Not thread-safe: the engine's loop is the only caller.
    plans_ahead: it plans a step while another runs, whenever it can. name: of a request's id, for what is told."""

    def __init__(self, plans_ahead: bool = False, name: Callable[[str], str] = name_of) -> None:
        self._plans_ahead, self._name_of = plans_ahead, name
        self.books: dict[str, EngineBook] = {}  # by the engine's own ids, as all that comes in here names them
        self._renames = False  # there was an id that is not its name
        self._queue = EngineQueue()
        self.num_steps = 0
        self._flights: list[BegunStep] = []
        self._last_end_ns: int | None = None  # of the last step that was committed
        self._idle_since_ns: int | None = None
        self._idle_ns = 0
        self._pause: PauseOf | None = None
        self._victims: tuple[str, ...] = ()  # preempted by plans of which no step came

    def waiting_for(self) -> dict[str, int]:
        """Returns how many requests wait, by cause. May be called from another thread."""
        found = self._queue.waiting_for()
        return {"unknown" if cause is None else cause.value: count for cause, count in found.items()}

    # ---- requests come and go

    def receive(self, asked: AskedRequest, received_ns: int, now_ns: int, *, is_paused: bool = False) -> None:
        """received_ns: when the engine's process had it; it joins the scheduler's queue at `now_ns`."""
        if not is_paused:
            self._stop_idling(now_ns)
        is_busy = bool(self._flights) or received_ns < (self._last_end_ns or 0)
        cause = Cause.PAUSED if is_paused else Cause.STEP_IN_FLIGHT if is_busy else Cause.ENGINE_LOOP
        name = self._name_of(asked.request_id)
        self._renames = self._renames or name != asked.request_id
        self.books[asked.request_id] = book = EngineBook(asked, name, received_ns, cause)
        self._queue.join(book)

    def preempt(self, request_id: str, num_computed: int) -> None:
        """Its blocks were taken back; what was computed is lost. The next plan says why it waits."""
        book = self.books.get(request_id)
        if book is not None:
            book.num_preemptions += 1
            book.recompute_until = max(book.recompute_until, num_computed)
            self._queue.join(book)

    def set_back(self, request_id: str, cause: Cause | None, now_ns: int) -> None:
        """One that was preempted by no plan waits from now on, for this."""
        if request_id in self.books:
            self.books[request_id].wait(cause, now_ns)

    def pause(self, pause: PauseOf, running: Iterable[str], now_ns: int) -> None:
        """No plan is made from now on for these and for those who wait; time without a step is idle, though there is
        work. Who is in a step that runs stalls once no step runs."""
        self._pause = pause
        for request_id in running:
            if request_id in self.books:
                self.books[request_id].stall(Cause.PAUSED, now_ns)
        self._queue.pause(now_ns)
        if not self._flights and self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def resume(self) -> None:
        self._pause = None

    def _has_work(self) -> bool:
        """Returns whether anybody may be in the next plan."""
        if self._pause is None:
            return bool(self.books)
        return self._pause == "new" and len(self.books) > len(self._queue)

    def _stall_all(self, now_ns: int) -> None:
        for book in self.books.values():
            if not book.waits:
                book.stall(Cause.PAUSED, now_ns)

    def _stop_idling(self, now_ns: int) -> None:
        if self._idle_since_ns is not None:
            self._idle_ns += max(0, now_ns - self._idle_since_ns)
            self._idle_since_ns = None

    def end(self, request_id: str, reason: str, now_ns: int) -> EndedBook | None:
        """Returns the closed book; None for a request that is not known, or has ended."""
        book = self.books.pop(request_id, None)
        if book is None:
            return None
        self._queue.leave(book)
        if not self.books and not self._flights:
            self._renames = False
            self._idle_since_ns = now_ns if self._idle_since_ns is None else self._idle_since_ns
        return book.ended(reason, now_ns)

    # ---- a step

    def begin(self, plan: DecidedPlan, begin_ns: int, planned_ns: int) -> BegunStep | None:
        """A plan was made between these instants. Returns None where it has no row: no step comes of it, and an engine
        that was idle still is (vLLM makes such a plan to tell its workers who has ended)."""
        self._mark(plan, begin_ns)
        if self._flights and self._flights[0].looked_ns is None:
            self._flights[0].looked_ns, self._flights[0].busy_until_ns = begin_ns, planned_ns
        if not plan.rows:
            self._victims += plan.victims
            return None
        self._stop_idling(begin_ns)
        self.num_steps += 1
        flight = BegunStep(self.num_steps, plan, begin_ns, planned_ns, is_queued=bool(self._flights))
        self._flights.append(flight)
        return flight

    def _mark(self, plan: DecidedPlan, now_ns: int) -> None:
        books = self.books
        for request_id, start, _ in plan.rows:
            book = books.get(request_id)
            if book is not None and (book.account.stage is not ENGINE_DECODES or book.waits):
                self._queue.leave(book)
                book.compute(start, now_ns)
        for request_id, num_tokens in plan.hits:
            book = books.get(request_id)
            if book is not None and book.cached_tokens is None:
                book.cached_tokens = num_tokens
        for request_id, cause in plan.stalled:
            if request_id in books:
                self._queue.leave(books[request_id])
                books[request_id].stall(cause, now_ns)
        if self._queue or plan.waiting:
            told = [(books[name], cause) for name, cause in plan.waiting if name in books]
            self._queue.wait(told, plan.rest, now_ns)

    def commit(
        self, flight: BegunStep, sampled: Iterable[tuple[str, int]], ready_ns: int
    ) -> list[tuple[int, FirstTokenBook]]:
        """The step's result was there at `ready_ns`: so many new tokens for each request that has some. Returns the
        books of those that have their first, with whose API process each is."""
        first_tokens = []
        step_id, books = flight.step_id, self.books
        for request_id, count in sampled:
            book = books.get(request_id)
            if book is None or not count:
                continue
            if book.account.stage is not ENGINE_DECODES and book.account.stage not in WAITING:
                book.account.enter(Stage.DECODE, ready_ns)  # else it was preempted while its token was computed
            if not book.token_steps:
                first_tokens.append((book.asked.client, FirstTokenBook(book.name, list(book.account.marks))))
            book.token_steps += [step_id] * count
            book.token_ready_ns += [ready_ns] * count
        for request_id, start, count in flight.plan.rows:
            book = books.get(request_id)
            if book is not None and book.account.stage is Stage.RECOMPUTE and start + count >= book.recompute_until:
                book.account.enter(Stage.PREFILL, ready_ns)
        return first_tokens

    def end_step(self, flight: BegunStep, accepted: dict[str, int], ready_ns: int, end_ns: int) -> StepRecord:
        """Returns the record of a step whose result was taken in between these instants. accepted: of its drafts."""
        done = self._flights.index(flight) + 1
        del self._flights[:done]  # whatever vLLM dropped, recovering from a fault, was before it
        record = self._record(flight, accepted, ready_ns, end_ns)
        record = self._named(record) if self._renames else record
        self._last_end_ns, self._idle_ns, self._victims = record.end_ns, 0, ()
        if self._pause == "all" and not self._flights:
            self._stall_all(end_ns)
        if not self._flights and not self._has_work():
            self._idle_since_ns = end_ns
        return record

    def _record(self, flight: BegunStep, accepted: dict[str, int], ready_ns: int, end_ns: int) -> StepRecord:
        """A step that was planned while another ran begins where that one ended. Where steps are planned ahead, each
        ends with its result: what the engine does then lies beside the next, as in `engine.recorder`."""
        plan, last_ns = flight.plan, self._last_end_ns
        begin_ns = max(last_ns or 0, flight.begin_ns) if flight.is_queued else flight.begin_ns
        planned_ns = max(begin_ns, flight.planned_ns)
        ready_ns = max(ready_ns, planned_ns)
        end_ns = ready_ns if self._plans_ahead else end_ns
        looked_ns = begin_ns if flight.looked_ns is None else flight.looked_ns
        gap_ns = 0 if last_ns is None else max(0, begin_ns - last_ns)
        idle_ns = min(self._idle_ns, gap_ns)
        num_tokens = sum(count for _, _, count in plan.rows)
        return StepRecord(
            step_id=flight.step_id,
            begin_ns=begin_ns,
            end_ns=end_ns,
            plan_ns=planned_ns - begin_ns,
            launch_ns=0,
            device_ns=ready_ns - planned_ns,
            sample_ns=0,
            commit_ns=end_ns - ready_ns,
            host_gap_ns=gap_ns - idle_ns,
            idle_ns=idle_ns,
            rows=plan.rows,
            prefill_tokens=num_tokens - plan.decode_tokens,
            decode_tokens=plan.decode_tokens,
            kv_tokens_read=plan.kv_tokens_read,
            blocks_used=plan.blocks_used,
            num_running=plan.num_running,
            num_waiting=plan.num_waiting,
            victims=self._victims + plan.victims,
            hidden_ns=max(0, flight.busy_until_ns - planned_ns),
            ahead_ns=max(0, looked_ns - begin_ns) if self._plans_ahead else None,
            verified=tuple((name, count, min(count, accepted.get(name, 0))) for name, count in plan.drafts),
        )

    def _named(self, record: StepRecord) -> StepRecord:
        """Returns the record with names for ids."""
        name = self._name
        return msgspec.structs.replace(
            record,
            rows=tuple((name(request_id), start, count) for request_id, start, count in record.rows),
            victims=tuple(map(name, record.victims)),
            verified=tuple((name(request_id), *counts) for request_id, *counts in record.verified),
        )

    def _name(self, request_id: str) -> str:
        book = self.books.get(request_id)
        return self._name_of(request_id) if book is None else book.name


class EngineQueue:
    """The work of a plan goes with who comes, who leaves and who has a cause of its own."""

    def __init__(self) -> None:
        self._log = CauseLog()
        self._alone: dict[EngineBook, None] = {}

    def __len__(self) -> int:
        return len(self._alone) + self._log.num_readers

    def join(self, book: EngineBook) -> None:
        """Takes in one that waits from now on; the next `wait` says why. Nothing happens if it waits already."""
        if not book.waits:
            book.waits = True
            self._alone[book] = None

    def leave(self, book: EngineBook) -> None:
        """Lets one go, whose account learns why it waited. Nothing happens if it does not wait."""
        if book.waits:
            book.waits = False
            leave_log(book)
            self._alone.pop(book, None)

    def wait(self, told: Iterable[tuple[EngineBook, Cause | None]], rest: Cause | None, now_ns: int) -> None:
        """States why all wait from `now_ns` on: these for causes of their own, the rest for theirs."""
        alone: dict[EngineBook, None] = {}
        for book, cause in told:
            leave_log(book)
            book.waits = True
            book.wait(cause, now_ns)
            alone[book] = None
        self._log.state_cause(now_ns, rest)
        for book in self._alone:
            if book not in alone:
                self._log.join(book, now_ns)
        self._alone = alone

    def pause(self, now_ns: int) -> None:
        """All wait for the pause's end, whatever else they wait for."""
        self.wait((), Cause.PAUSED, now_ns)

    def waiting_for(self) -> Counter[Cause | None]:
        """Returns how many wait for what. May be called from another thread."""
        found = Counter(book.account.cause for book in list(self._alone) if book.account.stage in WAITING)
        if self._log.num_readers:
            found[self._log.cause] += self._log.num_readers
        return found
