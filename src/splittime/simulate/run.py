"""A server under a virtual clock: arrivals, admission, the engine, delivery. What it makes is a ledger.

    books = simulate(requests, config, costs, limits, delivery)
    simulate_each(requests, config, costs, limits, on_account, on_step)        keeps nothing that is closed

A request arrives, is admitted or refused by the server's own admission (`simulate.door`), reaches the engine after as
long as it took in the recorded run, and is computed by the same scheduler, engine, crank and loop as a real one, in the
time that `costs` says. Its account is closed as the server would close it.

Skips ahead: many steps in which nothing is decided, without a plan, a row and an output for each request of each.

The scheduler says where nothing is decided (`scheduler.scheduler`). The books are those that the steps would have made
one by one: a record each, and for each request the instants of its tokens. What a step takes is asked for each of
them, in order, at the instant at which it begins.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from operator import add
from typing import Any, NamedTuple

from msgspec import UNSET

from splittime.core.clock import VirtualClock
from splittime.core.errors import Refused
from splittime.core.request import FinishReason
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.loop import run_loop
from splittime.drive.messages import FromEngine, StepOutput
from splittime.engine.engine import Engine
from splittime.ledger import derive
from splittime.ledger.account import REFUSED, Account, ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import Coming, StepRecord
from splittime.scheduler.admission import Admission, QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import QuietStretch, Scheduler
from splittime.simulate.costed import Answers, StepCosts, by_shape, costed_engine, costed_engine_ahead
from splittime.simulate.door import Door
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest, unforeseen


class Skipped(NamedTuple):
    """Steps that follow each other: the first one's number, when the tokens of each were ready, the last one's record,
    and the ends of requests that were done with it."""

    first_step: int
    ready_ns: list[int]
    last: StepRecord
    ends: list[RequestOutput]


class SkipAhead:
    """For an engine of `costed_engine`. on_step: called with each record."""

    def __init__(
        self,
        engine: Engine,
        costs: StepCosts,
        clock: VirtualClock,
        execution: str,
        answers: Answers,
        on_step: Callable[[StepRecord], None],
    ) -> None:
        self._answers = answers
        self._engine, self._scheduler = engine, engine.scheduler
        self._costs, self._clock, self._execution, self._on_step = costs, clock, execution, on_step

    def stretch(self) -> QuietStretch | None:
        """Returns the steps that may be skipped now, right behind another step; None if there are none."""
        return self._scheduler.stretch(self._clock.now_ns(), self._answers.tokens)

    def run(self, stretch: QuietStretch, last: StepRecord, next_ns: float) -> Skipped:
        """Takes steps of a stretch that follows this step, as long as they begin before something comes at `next_ns`.
        Returns which."""
        first_step, clock = last.step_id + 1, self._clock
        ready_ns: list[int] = []
        ends: list[RequestOutput] = []
        ids, positions = stretch.request_ids, stretch.starts
        num_rows, kv_tokens = len(ids), sum(positions)
        while stretch.num_steps < stretch.max_steps and self._may_begin(stretch, next_ns) and stretch.begin_step():
            kv_tokens += num_rows
            offloads, restores = self._scheduler.cache.take_moves()
            moved = len(offloads) + len(restores)
            shape = StepShape(num_rows, num_rows, num_rows, kv_tokens, 0, moved, self._execution)
            begin_ns = clock.now_ns()
            time = self._costs.of(shape, begin_ns)
            ready_ns.append(begin_ns + time.step_ns - time.commit_ns)
            stretch.end_step()
            if stretch.has_ends:
                ends = self._scheduler.take_over(stretch, ready_ns[-1])
            rows = tuple(zip(ids, positions, repeat(1)))
            ended = {end.request_id for end in ends}
            comings = tuple((name, start + 2) for name, start, _ in rows if name in ended)
            last = self._record(last, begin_ns, rows, kv_tokens, time, len(offloads), len(restores), comings)
            positions = [position + 1 for position in positions]
            self._on_step(last)
            clock.advance_to(last.end_ns + time.host_gap_ns)
        if ready_ns and not ends:
            self._scheduler.take_over(stretch, ready_ns[-1])
        self._engine.take_over(last, len(ready_ns))
        return Skipped(first_step, ready_ns, last, ends)

    def _may_begin(self, stretch: QuietStretch, next_ns: float) -> bool:
        now_ns = self._clock.now_ns()
        return now_ns < next_ns and now_ns <= stretch.until_ns

    def _record(
        self,
        last: StepRecord,
        begin_ns: int,
        rows: tuple[tuple[str, int, int], ...],
        kv_tokens: int,
        time: StepTime,
        num_offloaded: int,
        num_restored: int,
        comings: tuple[Coming, ...],
    ) -> StepRecord:
        scheduler = self._scheduler
        offload_ns = time.offload_ns(num_offloaded, num_restored)
        return StepRecord(
            step_id=last.step_id + 1,
            begin_ns=begin_ns,
            end_ns=begin_ns + time.step_ns,
            plan_ns=time.plan_ns,
            launch_ns=time.launch_ns,
            device_ns=time.device_ns,
            sample_ns=time.sample_ns,
            commit_ns=time.commit_ns,
            host_gap_ns=begin_ns - last.end_ns,
            idle_ns=0,
            rows=rows,
            prefill_tokens=0,
            decode_tokens=len(rows),
            kv_tokens_read=kv_tokens,
            blocks_used=scheduler.cache.num_used,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            execution=self._execution,
            offload_ns=offload_ns,
            restore_ns=time.moves_ns - offload_ns,
            offloaded_blocks=num_offloaded,
            restored_blocks=num_restored,
            comings=comings or UNSET,
        )


class Followers:
    """Requests that come when an answer has ended: a session's next turn, `think_ns` after the turn before or at its
    own time, if that is later; in a closed loop, as soon as a worker is free, a turn that is due or else the next in
    order. requests: those with `follows`, in the order in which workers take them."""

    def __init__(self, requests: Iterable[TracedRequest]) -> None:
        self._next_turns: dict[str, TracedRequest] = {}
        self._in_order: deque[TracedRequest] = deque()
        self._due: list[tuple[int, int, TracedRequest]] = []  # turns of a closed loop, by when they may be taken
        self._free_workers = self._count = 0
        for traced in requests:
            assert traced.follows is not None
            if traced.follows.request_id is None:
                self._in_order.append(traced)
            else:
                self._next_turns[traced.follows.request_id] = traced
        self._is_closed = bool(self._in_order)

    def __bool__(self) -> bool:
        return bool(self._next_turns or self._in_order or self._due)

    def ended(self, request_id: str, at_ns: int) -> Iterator[TracedRequest]:
        """Returns who comes because of that, at their times."""
        turn = self._next_turns.pop(request_id, None)
        if self._is_closed:
            self._free_workers += 1
            if turn is not None and turn.follows is not None:
                self._count += 1
                heapq.heappush(self._due, (at_ns + turn.follows.think_ns, self._count, turn))
            yield from self._taken(at_ns)
        elif turn is not None and turn.follows is not None:
            yield from _coming(turn, max(turn.arrived_ns, at_ns + turn.follows.think_ns))

    def _taken(self, now_ns: int) -> Iterator[TracedRequest]:
        """Returns what the free workers take."""
        while self._free_workers and (self._due or self._in_order):
            self._free_workers -= 1
            if self._due and (self._due[0][0] <= now_ns or not self._in_order):
                due_ns, _, traced = heapq.heappop(self._due)
                yield from _coming(traced, max(now_ns, due_ns))
            else:
                yield from _coming(self._in_order.popleft(), now_ns)


def _coming(traced: TracedRequest, at_ns: int) -> Iterator[TracedRequest]:
    """Returns the request at this time; nothing if that is too late for it."""
    assert traced.follows is not None
    if traced.follows.until_ns is None or at_ns < traced.follows.until_ns:
        yield traced.moved(at_ns - traced.arrived_ns)


class OpenRequest:
    """What has become of a request so far. ready_ns, steps: of each of its tokens. stops_after: as `TracedRequest` has
    it, until it has so many."""

    __slots__ = (
        *(
            "account",
            "cached_tokens",
            "has_begun",
            "host_tokens",
            "num_preemptions",
            "ready_ns",
            "steps",
            "stops_after",
            "traced",
        ),
    )

    def __init__(self, traced: TracedRequest) -> None:
        self.traced, self.account = traced, _begun(traced)
        self.ready_ns: list[int] = []
        self.steps: list[int] = []
        self.cached_tokens = self.host_tokens = self.num_preemptions = 0
        self.has_begun, self.stops_after = False, traced.stops_after

    @property
    def steps_before_stop(self) -> int:
        """How many steps will not end it by its stop string."""
        assert self.stops_after is not None
        return self.stops_after - len(self.steps) - 1


def _begun(traced: TracedRequest) -> Account:
    """Returns the account that the server hands over with the request."""
    first = traced.marks[0]
    account = Account(traced.request.request_id, first.begin_ns, first.stage)
    account.extend(traced.marks[1:])
    return account


OnAccount = Callable[[ClosedAccount], None]
OnStep = Callable[[StepRecord], None]
EngineLoop = Callable[[Door, Callable[[FromEngine], None]], None]  # an engine's: who comes, and who takes what it says
OF_THE_REQUEST = (
    *("group_id", "model", "endpoint", "tenant", "started_at_unix_ns"),
    *("prompt_tokens", "prompt_parts", "prefixes", "answer_prefixes"),
    *("cache_salt", "computes_prompt", "max_tokens", "priority", "weight"),
)


class Delivery(NamedTuple):
    """What lies behind the engine, where a request has no record of its own. send_lag_ns: from a token's being ready to
    its bytes' being with the socket. end_ns: from the last token to the end of the answer. to_wake_ns: what an engine
    without work takes to wake up."""

    send_lag_ns: int = 0
    end_ns: int = 0
    to_wake_ns: int = 0


AT_ONCE = Delivery()


class SimulatedBooks(NamedTuple):
    """What a run has made: the accounts in the order in which they ended, and the steps."""

    accounts: list[ClosedAccount]
    steps: list[StepRecord]


def simulate(
    requests: Iterable[TracedRequest],
    config: SchedulerConfig,
    costs: StepCosts,
    limits: QueueLimits,
    delivery: Delivery = AT_ONCE,
    execution: str = "host",
    skips_ahead: bool = True,
    plans_ahead: bool = False,
    drafts_seed: int | None = None,
) -> SimulatedBooks:
    """Returns the ledger of a server with these settings that is asked these requests. Raises what `costs` raises.

    skips_ahead: takes the steps in which nothing is decided without a plan for each; the ledger is the same.
    plans_ahead: it plans the next step while one runs (and skips none).
    drafts_seed: it is told the requests' drafts (and skips no step); of how many are right, where nobody knows. None:
        it is told none.
    """
    books = SimulatedBooks([], [])
    how = delivery, execution, skips_ahead, plans_ahead, drafts_seed
    simulate_each(requests, config, costs, limits, books.accounts.append, books.steps.append, *how)
    return books


def simulate_each(
    requests: Iterable[TracedRequest],
    config: SchedulerConfig,
    costs: StepCosts,
    limits: QueueLimits,
    on_account: OnAccount,
    on_step: OnStep,
    delivery: Delivery = AT_ONCE,
    execution: str = "host",
    skips_ahead: bool = True,
    plans_ahead: bool = False,
    drafts_seed: int | None = None,
) -> None:
    """Hands over each account and each step as it is closed, and keeps none: memory is that of the open requests.
    requests: asked for when it is time for each of them, unless they are a list, in which some may wait for answers.
    The rest is as of `simulate`. Raises ValueError if they do not come in the order of their arrivals, and what `costs`
    raises."""
    clock = VirtualClock()
    make = costed_engine_ahead if plans_ahead else costed_engine
    engine, runner, after_step_ns = make(Scheduler(config), by_shape(costs, execution), clock, execution)
    skip, is_drafted = None, drafts_seed is not None
    runner.answers = Answers(drafts_seed or 0)
    if plans_ahead or is_drafted:
        requests = list(map(unforeseen, requests)) if isinstance(requests, list) else map(unforeseen, requests)
    elif skips_ahead:
        skip = SkipAhead(engine, costs, clock, execution, runner.answers, on_step)
    crank = Crank(EngineParts(engine, runner), clock)
    around = limits, delivery, after_step_ns, runner.answers, on_account, on_step
    SimulatedServer(clock, *around, skip, is_drafted).run(partial(run_loop, crank), requests)


class SimulatedServer:
    """A server around the loop of any engine. after_step_ns: how long after a step the next may begin. answers: learn
    what each request samples. on_account, on_step: called with each as it is closed; nothing closed is kept.
    is_drafted: the answers learn the requests' drafts too."""

    def __init__(
        self,
        clock: VirtualClock,
        limits: QueueLimits,
        delivery: Delivery,
        after_step_ns: Callable[[], int],
        answers: Answers,
        on_account: OnAccount,
        on_step: OnStep,
        skip: SkipAhead | None = None,
        is_drafted: bool = False,
    ) -> None:
        self._clock, self._delivery, self._after_step_ns = clock, delivery, after_step_ns
        self._on_account, self._on_step, self._skip = on_account, on_step, skip
        self._door = Door(clock, Admission(limits), delivery.to_wake_ns, self._refuse)
        self._open: dict[str, OpenRequest] = {}
        self._followers, self._answers, self._is_drafted = Followers(()), answers, is_drafted

    def run(self, loop: EngineLoop, requests: Iterable[TracedRequest]) -> None:
        """Until the last request has ended. Of a list some requests may wait for answers."""
        if isinstance(requests, list):
            self._followers = Followers(traced for traced in requests if traced.follows is not None)
            requests = sorted((each for each in requests if each.follows is None), key=lambda each: each.arrived_ns)
        self._door.expect(self._opened(requests))
        loop(self._door, self._take)

    def _opened(self, requests: Iterable[TracedRequest]) -> Iterator[TracedRequest]:
        for traced in requests:
            request = traced.request
            self._open[request.request_id] = OpenRequest(traced)
            drafts = traced.drafts if self._is_drafted else None
            self._answers.learn(request.request_id, len(request.prompt_token_ids), traced.answer, drafts)
            yield traced

    def _take(self, message: FromEngine) -> None:
        assert isinstance(message, StepOutput)
        open_requests, step_id, ready_ns = self._open, message.step_id, message.ready_ns
        for output in message.outputs:
            request = open_requests[output.request_id]
            for _ in output.token_ids:
                request.ready_ns.append(ready_ns)
                request.steps.append(step_id)
            if output.marks:  # a request that goes on decoding has nothing but its token to tell
                self._take_marks(request, output, ready_ns)
            elif request.stops_after is not None:
                self._stop(request, ready_ns)
        if message.record is not None:
            self._on_step(message.record)
            self._clock.advance(self._after_step_ns())
            if self._skip is not None:
                self._skip_behind(message.record, self._skip)

    def _skip_behind(self, last: StepRecord, skip: SkipAhead) -> None:
        """Takes the steps in which there is nothing to tell but tokens, and at the last of them ends."""
        while self._clock.now_ns() < self._door.next_ns and (stretch := skip.stretch()) is not None:
            requests = [self._open[request_id] for request_id in stretch.request_ids]
            for request in requests:
                if request.stops_after is not None:
                    stretch.max_steps = min(stretch.max_steps, request.steps_before_stop)
            skipped = skip.run(stretch, last, self._door.next_ns)
            steps = list(range(skipped.first_step, skipped.last.step_id + 1))
            for request in requests:
                request.ready_ns += skipped.ready_ns
                request.steps += steps
            for output in skipped.ends:
                self._take_marks(self._open[output.request_id], output, skipped.ready_ns[-1])
            if not skipped.ends:
                break
            last = skipped.last

    def _take_marks(self, request: OpenRequest, output: RequestOutput, ready_ns: int) -> None:
        request.account.extend(output.marks)
        request.num_preemptions = max(request.num_preemptions, output.num_preemptions)
        if output.num_cached_tokens is not None:
            request.cached_tokens, request.host_tokens = output.num_cached_tokens, output.num_host_tokens
        if not request.has_begun and any(mark.stage is Stage.PREFILL for mark in output.marks):
            request.has_begun = True
            self._door.note_begun(output.request_id, ready_ns)
        if output.freed_ns is not None:
            del self._open[output.request_id]
            self._door.note_ended(output.request_id, ready_ns)
            self._close(_closed(request, output, output.freed_ns, self._delivery))
        else:
            self._stop(request, ready_ns)

    def _stop(self, request: OpenRequest, ready_ns: int) -> None:
        """End it if the server has found its stop string."""
        if request.stops_after is not None and len(request.steps) >= request.stops_after:
            request.stops_after = None
            self._door.abort(request.traced.request.request_id, ready_ns + self._delivery.send_lag_ns)

    def _refuse(self, traced: TracedRequest, refused: Refused, at_ns: int) -> None:
        del self._open[traced.request.request_id]
        account = Account(traced.request.request_id, traced.marks[0].begin_ns, traced.marks[0].stage)
        account.extend(mark for mark in traced.marks if mark.begin_ns <= at_ns)
        account.enter(Stage.DELIVER, at_ns)
        account.close(at_ns)
        self._close(_account(traced, account, REFUSED, error=refused.info))

    def _close(self, account: ClosedAccount) -> None:
        self._on_account(account)
        self._answers.forget(account.request_id)
        if self._followers:
            for traced in self._opened(self._followers.ended(account.request_id, account.end_ns)):
                self._door.expect_one(traced)


def _closed(request: OpenRequest, last: RequestOutput, freed_ns: int, delivery: Delivery) -> ClosedAccount:
    """Returns the account as the server closes it. A stop string's tokens are those up to it. last: its last output."""
    traced, account = request.traced, request.account
    was_stopped = traced.stops_after is not None and len(request.steps) >= traced.stops_after
    count = traced.stops_after if was_stopped else len(request.steps)
    ready_ns = tuple(request.ready_ns[:count])
    lags_ns = [*derive.send_lag_ns(traced.account), *repeat(delivery.send_lag_ns, len(ready_ns))]  # its own, if told
    written_ns = tuple(map(add, ready_ns, lags_ns))
    done_ns = max(freed_ns, account.marks[-1].begin_ns)
    account.close(max([done_ns + _delivered_ns(traced.account, delivery), *written_ns[-1:]]))
    return _account(
        traced,
        account,
        str(FinishReason.STOP if was_stopped else _reason(traced, last, len(ready_ns))),
        error=None if was_stopped else last.error,
        cached_tokens=request.cached_tokens,
        host_tokens=request.host_tokens,
        output_tokens=len(ready_ns),
        num_preemptions=request.num_preemptions,
        first_chunk_tokens=min(1, len(ready_ns)),
        token_steps=tuple(request.steps[:count]),
        token_ready_ns=ready_ns,
        token_written_ns=written_ns,
        cancelled_ns=traced.leaves_ns if last.finish_reason is FinishReason.ABORT and not was_stopped else None,
        freed_ns=None if was_stopped else freed_ns,
    )


def _delivered_ns(recorded: ClosedAccount, delivery: Delivery) -> int:
    """Returns what an answer takes from its last token to its end: what it took where it was recorded to its end."""
    is_told = recorded.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and recorded.token_written_ns
    return derive.stage_ns(recorded).get(Stage.DELIVER, 0) if is_told else delivery.end_ns


def _reason(traced: TracedRequest, last: RequestOutput, num_tokens: int) -> FinishReason | None:
    """Returns why it ended: one that has as many tokens as it had when a token ended it ends by that token again."""
    recorded = traced.account
    if last.finish_reason is FinishReason.LENGTH and num_tokens == recorded.output_tokens:
        return FinishReason.STOP if recorded.finish_reason == FinishReason.STOP else FinishReason.LENGTH
    return last.finish_reason


def _account(traced: TracedRequest, account: Account, finish_reason: str, **facts: Any) -> ClosedAccount:
    about = {name: getattr(traced.account, name) for name in OF_THE_REQUEST}
    assert account.end_ns is not None
    return ClosedAccount(
        **about,
        request_id=traced.request.request_id,
        start_ns=account.start_ns,
        end_ns=account.end_ns,
        intervals=tuple(account.intervals()),
        finish_reason=finish_reason,
        deadline_ns=traced.request.deadline_ns,
        **facts,
    )
