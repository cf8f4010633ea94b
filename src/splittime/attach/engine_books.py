"""The accounts and step records of an engine that is not ours, from what its scheduler decided. Pure: time is told.

    receive -> begin (a step was planned) -> commit (its result is there) -> end_step ... -> end (the request has ended)

A request waits (`queue`, `preempted`), is computed (`prefill`, `recompute`, `decode`) or stalls; the adapter of the
scheduler says which at each plan, with the cause. What the engine's process cannot see (launching, sampling, the
device's own clock) is 0 in a step's record and named in `UNKNOWN`: `device_ns` is all from the plan to the result, or,
of a step that was planned while another ran, from that one's end to its own result.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

UNKNOWN = ("launch_ns", "sample_ns", "cpu_wait_ns", "off_cpu_ns", "unseen_ns")
UNKNOWN_AHEAD = ("plan_ns", "commit_ns")  # of an engine that plans ahead: they lie beside the step, in `device_ns`
ENGINE_DECODES = Stage.DECODE  # looked up once: Python 3.11 calls a function for each look at an enumeration's member

RowOf = tuple[str, int, int]  # request id, start, number of tokens
PauseOf = Literal["all", "new"]  # of everybody, or of those who wait
WAITING = (Stage.QUEUE, Stage.PREEMPTED)


class AskedRequest(NamedTuple):
    """A request as the engine took it in. client: whose API process. answer_ids: they grow."""

    request_id: str
    client: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    computes_prompt: bool = False
    answer_ids: Iterable[int] = ()


class DecidedPlan(NamedTuple):
    """A plan, as the scheduler made it. rows: in its order. decode_tokens, kv_tokens_read: as in `StepRecord`.
    stalled, waiting: who runs without a row and who waits, with causes (None where nobody knows one); those of whom
    nothing new is to be said may be left out. hits: tokens found
    in the prefix cache, of those who were admitted. drafts: of each row that verifies some. num_*: behind the plan."""

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


class EndedBook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's part of a request's account, which has ended there at `ended_ns`."""

    request_id: str
    marks: list[Mark]
    ended_ns: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    token_steps: list[int]
    token_ready_ns: list[int]
    num_preemptions: int
    max_tokens: int
    priority: int
    computes_prompt: bool
    answer_ids: list[int]


class FirstTokenBook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine's part says when the first token is there."""

    request_id: str
    marks: list[Mark]


class EngineBook:
    """The engine's part of one request's account, while it is open there. recompute_until: as in
    `scheduler.state.RequestState`."""

    __slots__ = (
        "account",
        "asked",
        "cached_tokens",
        "num_preemptions",
        "recompute_until",
        "token_ready_ns",
        "token_steps",
    )

    def __init__(self, asked: AskedRequest, received_ns: int, cause: Cause) -> None:
        self.asked = asked
        self.account = Account(asked.request_id, received_ns, Stage.QUEUE)
        self.account.marks[0] = Mark(Stage.QUEUE, cause, received_ns)
        self.account.cause = cause
        self.cached_tokens: int | None = None
        self.num_preemptions = self.recompute_until = 0
        self.token_steps: list[int] = []
        self.token_ready_ns: list[int] = []

    def wait(self, cause: Cause | None, now_ns: int) -> None:
        self.account.enter(Stage.PREEMPTED if self.num_preemptions else Stage.QUEUE, now_ns, cause)

    def stall(self, cause: Cause | None, now_ns: int) -> None:
        self.account.enter(Stage.DECODE_STALL if self.token_steps else Stage.PREFILL_STALL, now_ns, cause)

    def compute(self, start: int, now_ns: int) -> None:
        """Notes that it has a row which begins at this position."""
        if start < self.recompute_until:
            self.account.enter(Stage.RECOMPUTE, now_ns)
        elif self.account.stage is Stage.DECODE_STALL:
            self.account.enter(Stage.DECODE, now_ns)
        else:
            self.account.enter(Stage.PREFILL, now_ns)


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
    plans_ahead: it plans a step while another runs, whenever it can."""

    def __init__(self, plans_ahead: bool = False) -> None:
        self._plans_ahead = plans_ahead
        self.books: dict[str, EngineBook] = {}
        self.num_steps = 0
        self._flights: list[BegunStep] = []
        self._last_end_ns: int | None = None  # of the last step that was committed
        self._idle_since_ns: int | None = None
        self._idle_ns = 0
        self.num_changes = 0  # of who waits for what, but for plans
        self._pause: PauseOf | None = None
        self._victims: tuple[str, ...] = ()  # preempted by plans of which no step came

    def waiting_for(self) -> dict[str, int]:
        """Returns how many requests wait, by cause. May be called from another thread."""
        waiting = [book.account.cause for book in list(self.books.values()) if book.account.stage in WAITING]
        return dict(Counter("unknown" if cause is None else cause.value for cause in waiting))

    # ---- requests come and go

    def receive(self, asked: AskedRequest, received_ns: int, now_ns: int, *, is_paused: bool = False) -> None:
        """received_ns: when the engine's process had it; it joins the scheduler's queue at `now_ns`."""
        if not is_paused:
            self._stop_idling(now_ns)
        is_busy = bool(self._flights) or received_ns < (self._last_end_ns or 0)
        cause = Cause.PAUSED if is_paused else Cause.STEP_IN_FLIGHT if is_busy else Cause.ENGINE_LOOP
        self.books[asked.request_id] = EngineBook(asked, received_ns, cause)
        self.num_changes += 1

    def preempt(self, request_id: str, num_computed: int) -> None:
        """Its blocks were taken back; what was computed is lost. The next plan says why it waits."""
        book = self.books.get(request_id)
        if book is not None:
            book.num_preemptions += 1
            book.recompute_until = max(book.recompute_until, num_computed)
        self.num_changes += 1

    def set_back(self, request_id: str, cause: Cause | None, now_ns: int) -> None:
        """One that was preempted by no plan waits from now on, for this."""
        if request_id in self.books:
            self.books[request_id].wait(cause, now_ns)

    def pause(self, pause: PauseOf, running: Iterable[str], waiting: Iterable[str], now_ns: int) -> None:
        """No plan is made from now on for these; time without a step is idle, though there is work. Who is in a step
        that runs stalls once no step runs."""
        self._pause = pause
        for request_id in running:
            if request_id in self.books:
                self.books[request_id].stall(Cause.PAUSED, now_ns)
        for request_id in waiting:
            if request_id in self.books:
                self.books[request_id].wait(Cause.PAUSED, now_ns)
        self.num_changes += 1
        if not self._flights and self._idle_since_ns is None:
            self._idle_since_ns = now_ns

    def resume(self) -> None:
        self._pause = None

    def _has_work(self) -> bool:
        """Returns whether anybody may be in the next plan."""
        if self._pause is None:
            return bool(self.books)
        return self._pause == "new" and any(book.account.stage not in WAITING for book in self.books.values())

    def _stall_all(self, now_ns: int) -> None:
        for book in self.books.values():
            if book.account.stage not in WAITING:
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
        book.account.enter(Stage.DELIVER, now_ns)
        self.num_changes += 1
        if not self.books and not self._flights and self._idle_since_ns is None:
            self._idle_since_ns = now_ns
        return EndedBook(
            request_id,
            book.account.marks[:-1],
            now_ns,
            reason,
            book.asked.prompt_tokens,
            book.cached_tokens or 0,
            book.token_steps,
            book.token_ready_ns,
            book.num_preemptions,
            book.asked.max_tokens,
            book.asked.priority,
            book.asked.computes_prompt,
            list(book.asked.answer_ids),
        )

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
            if book is not None and book.account.stage is not ENGINE_DECODES:
                book.compute(start, now_ns)
        for request_id, num_tokens in plan.hits:
            book = books.get(request_id)
            if book is not None and book.cached_tokens is None:
                book.cached_tokens = num_tokens
        for request_id, cause in plan.stalled:
            if request_id in books:
                books[request_id].stall(cause, now_ns)
        for request_id, cause in plan.waiting:
            if request_id in books:
                books[request_id].wait(cause, now_ns)

    def commit(self, flight: BegunStep, sampled: Iterable[tuple[str, int]], ready_ns: int) -> list[FirstTokenBook]:
        """The step's result was there at `ready_ns`: so many new tokens for each request that has some. Returns the
        books of those that have their first."""
        first_tokens = []
        step_id, books = flight.step_id, self.books
        for request_id, count in sampled:
            book = books.get(request_id)
            if book is None or not count:
                continue
            if book.account.stage is not ENGINE_DECODES and book.account.stage not in WAITING:
                book.account.enter(Stage.DECODE, ready_ns)  # else it was preempted while its token was computed
            if not book.token_steps:
                first_tokens.append(FirstTokenBook(request_id, list(book.account.marks)))
            book.token_steps += [step_id] * count
            book.token_ready_ns += [ready_ns] * count
        for request_id, start, count in flight.plan.rows:
            book = books.get(request_id)
            if book is not None and book.account.stage is Stage.RECOMPUTE and start + count >= book.recompute_until:
                book.account.enter(Stage.PREFILL, ready_ns)
        return first_tokens

    def end_step(self, flight: BegunStep, accepted: dict[str, int], ready_ns: int, end_ns: int) -> StepRecord:
        """Returns the record of a step whose result was taken in between these instants. accepted: of its drafts."""
        self._flights.remove(flight)
        record = self._record(flight, accepted, ready_ns, end_ns)
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
