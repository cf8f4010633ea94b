"""An engine in its loop under a virtual clock: the same crank, the same loop, time that passes only while it waits or
computes.

    clock = VirtualClock()
    parts = EngineParts(Engine(Scheduler(config)), FakeRunner(step_ns=..., clock=clock))
    run = TimedRun(Crank(parts, clock), clock)
    run.submit(request, at_ns)             any number, also from `on_end` while it runs: a closed loop
    run.at(at_ns, Configure(1, {"paused": True}))
    run.run()                              until nothing is left to come or to do
    run.outcomes, run.steps, run.answers

What the host does beside the runner takes no virtual time of its own: `HostCosts` says what it takes. With a clock that
passes by itself and a `wait_until` that waits for it, the same requests are sent in real time.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from splittime.core.clock import Clock, VirtualClock
from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason, Request
from splittime.core.step import TokenLogprob
from splittime.drive.crank import Crank
from splittime.drive.loop import run_loop
from splittime.drive.messages import FromEngine, StepOutput, Submit, ToEngine
from splittime.ledger.account import Account
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.events import RequestOutput


@dataclass(frozen=True)
class HostCosts:
    """In ns of virtual time: what the host does after each output, what an engine without work takes to wake up for a
    message, and what it takes to take one in."""

    after_output_ns: int = 0
    to_wake_ns: int = 0
    per_message_ns: int = 0


@dataclass
class RequestOutcome:
    """What has become of one request. The lists have one entry for each token. num_cached_tokens: None until it was
    admitted."""

    request: Request
    account: Account
    token_ids: list[int] = field(default_factory=list)
    token_ready_ns: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_host_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: list[FinishReason] = field(default_factory=list)  # one, once it has ended
    error: ErrorInfo | None = None
    stop_token_id: int | None = None

    @property
    def e2e_ns(self) -> int:
        return sum(interval.duration_ns for interval in self.account.intervals())

    @property
    def ttft_ns(self) -> int:
        return self.token_ready_ns[0] - self.account.start_ns

    def take(self, output: RequestOutput, step_id: int, ready_ns: int) -> None:
        self.account.extend(output.marks)
        self.token_ids += output.token_ids
        self.token_ready_ns += [ready_ns] * len(output.token_ids)
        self.token_steps += [step_id] * len(output.token_ids)
        self.logprobs += output.logprobs
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if output.num_cached_tokens is not None:
            self.num_cached_tokens, self.num_host_tokens = output.num_cached_tokens, output.num_host_tokens
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason)
            self.error, self.stop_token_id = output.error, output.stop_token_id


class Timetable:
    """Messages that come at their instants: the `Arrivals` of a loop. It is closed once nothing is left to come."""

    def __init__(self, now_ns: Callable[[], int], wait_until: Callable[[int], None], costs: HostCosts) -> None:
        self.is_closed = False
        self._now_ns, self._wait_until, self._costs = now_ns, wait_until, costs
        self._coming: list[tuple[int, int, ToEngine]] = []
        self._count = 0

    def add(self, at_ns: int, message: ToEngine) -> None:
        """Have the message arrive at `at_ns`; those of one instant come in the order in which they were added."""
        self._count += 1
        heapq.heappush(self._coming, (at_ns, self._count, message))

    def wait(self, timeout_s: float | None) -> bool:
        now_ns = self._now_ns()
        until_ns = None if timeout_s is None else now_ns + round(timeout_s * 1e9)
        if self._coming and (until_ns is None or self._coming[0][0] <= until_ns):
            self._wait_until(max(self._coming[0][0], now_ns) + self._costs.to_wake_ns)
            return True
        if until_ns is None:
            self.is_closed = True
        else:
            self._wait_until(until_ns)
        return False

    def take_all(self) -> Iterator[tuple[ToEngine, int]]:
        while self._coming and self._coming[0][0] <= self._now_ns():
            at_ns, _, message = heapq.heappop(self._coming)
            yield message, at_ns
            if self._costs.per_message_ns:
                self._wait_until(self._now_ns() + self._costs.per_message_ns)


class TimedRun:
    """on_end: called with the outcome of each request that has ended and the instant of its last output; without it
    the account closes when the engine is done with the request."""

    def __init__(
        self,
        crank: Crank,
        clock: Clock,
        costs: HostCosts = HostCosts(),
        wait_until: Callable[[int], None] | None = None,
        on_end: Callable[[RequestOutcome, int], None] | None = None,
    ) -> None:
        if wait_until is None:
            assert isinstance(clock, VirtualClock), "only a virtual clock can be moved"
            wait_until = clock.advance_to
        self.crank = crank
        self.outcomes: dict[str, RequestOutcome] = {}
        self.steps: list[StepRecord] = []
        self.answers: list[FromEngine] = []  # to what was no request
        self._clock, self._costs, self._wait_until, self._on_end = clock, costs, wait_until, on_end
        self._timetable = Timetable(clock.now_ns, wait_until, costs)

    def submit(self, request: Request, at_ns: int | None = None, account: Account | None = None) -> None:
        """The request reaches the engine at `at_ns`, or when it was submitted. account: begun by whoever made the
        request; without one it begins when that was submitted."""
        account = account or Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        self.outcomes[request.request_id] = RequestOutcome(request, account)
        self.at(request.submitted_ns if at_ns is None else at_ns, Submit(request))

    def at(self, at_ns: int, message: ToEngine) -> None:
        self._timetable.add(at_ns, message)

    def run(self) -> None:
        """Until nothing is left to come, and what has come is done (or stands still: paused, asleep)."""
        self._timetable.is_closed = False
        run_loop(self.crank, self._timetable, self._take)

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, StepOutput):
            self.answers.append(message)
            return
        if message.record is not None:
            self.steps.append(message.record)
        for output in message.outputs:
            outcome = self.outcomes[output.request_id]
            outcome.take(output, message.step_id, message.ready_ns)
            if output.freed_ns is not None:
                self._end(outcome, output.freed_ns, message.ready_ns)
        if self._costs.after_output_ns:
            self._wait_until(self._clock.now_ns() + self._costs.after_output_ns)

    def _end(self, outcome: RequestOutcome, freed_ns: int, ready_ns: int) -> None:
        if self._on_end is None:
            outcome.account.close(freed_ns)
        else:
            self._on_end(outcome, ready_ns)
