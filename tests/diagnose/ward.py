"""Books of a made illness: the real engine on a fake runner under a virtual clock, so that every cause in them was
stated by the scheduler itself.

    ward = Ward(max_num_seqs=2)
    ward.admit(Case(at_ms=0, prompt=ids(40), output=30), ...)
    books = ward.books()

Beside the scheduler's own causes it makes what the kernel would state: steps in which the engine's thread is stopped,
or waits for a processor (`Hindered`); and guesses of what follows (`Guessing`), which the scheduler has verified.
"""

import pickle
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from benchmarks.fake_runner import FakeRunner
from benchmarks.timed_run import HostCosts, RequestOutcome, TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.facts import Machine, TokenCost
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, StepPlan, StepResult
from splittime.diagnose.books import Books, make_books
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import Configure
from splittime.engine.engine import Engine
from splittime.engine.recorder import ThreadTime
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.facts import Process, ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.runner.drafting import Draft, DraftingRunner, Look
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

MS = 1_000_000
MOST_KEPT = 64
RAN: dict[bytes, tuple[Books, list[ClosedAccount], list[StepRecord], int]] = {}
WRITE_NS = 50_000


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 4000) for _ in range(length)]


@dataclass(frozen=True)
class Case:
    at_ms: float
    prompt: list[int]
    output: int
    tokenize_ms: float = 0.1
    client_wait_ms: float = 0.0
    deadline_ms: float | None = None
    n: int = 1


def _engine_ns(at_ns: int, case: Case) -> int:
    """When it reaches the engine."""
    return at_ns + int(case.tokenize_ms * MS) + WRITE_NS


class Hindered(FakeRunner):
    """sample_share: of a step, on top of it. stops: (at, for so long) in ns, each in the step that is then running or
    comes next. wait_share: of each step, without a processor. `now` says what the kernel would."""

    sample_share = wait_share = 0.0
    stops: tuple[tuple[int, int], ...] = ()
    waited_ns = stopped_ns = 0

    def run(self, plan: StepPlan) -> StepResult:
        assert isinstance(self._clock, VirtualClock)
        begin_ns = self._clock.now_ns()
        result = super().run(plan)
        taken_ns = self._clock.now_ns() - begin_ns
        sample_ns, wait_ns = int(self.sample_share * taken_ns), int(self.wait_share * taken_ns)
        due = [stop for stop in self.stops if stop[0] <= self._clock.now_ns()]
        self.stops = self.stops[len(due) :]
        stop_ns = sum(ns for _, ns in due)
        self.waited_ns, self.stopped_ns = self.waited_ns + wait_ns, self.stopped_ns + stop_ns
        self._clock.advance(sample_ns + wait_ns + stop_ns)
        device_ns = result.device_ns + wait_ns + stop_ns
        return msgspec.structs.replace(result, device_ns=device_ns, sample_ns=result.sample_ns + sample_ns)

    def now(self) -> ThreadTime:
        return ThreadTime(self._clock.now_ns() - self.waited_ns - self.stopped_ns, self.waited_ns)


@dataclass
class Guessing:
    """How a server guesses what follows, whatever that costs. most: drafts of a row. share: of the tokens that are
    guessed right; it looks only at so many of the rows (`asked`). take_ms: what looking takes a step."""

    most: int = 4
    share: float = 0.0
    asked: float = 0.7
    take_ms: float = 0.0


class GuessingDrafter:
    """Implements `runner.drafting.Drafter`: it asks the fake model itself, and tells some of it wrong."""

    def __init__(self, how: Guessing, runner: FakeRunner, clock: VirtualClock) -> None:
        self._how, self._runner, self._clock, self._rng = how, runner, clock, random.Random(7)
        self._known: dict[str, array] = {}

    def admit(self, admitted: Admitted) -> None:
        self._known[admitted.request_id] = array("I", admitted.token_ids)

    def release(self, request_id: str, is_preempted: bool = False) -> None:
        self._known.pop(request_id, None)

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        pass  # it stays as it is

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft]:
        self._clock.advance(int(self._how.take_ms * MS))
        for row in result.rows:
            self._known[row.request_id].extend(row.token_ids)
        asked = [row.request_id for row in result.rows if row.token_ids and self._rng.random() < self._how.asked]
        return {name: Draft(self._guesses(name), ()) for name in asked}

    def _guesses(self, request_id: str) -> tuple[int, ...]:
        known, found = self._known[request_id][:], []
        for _ in range(self._how.most):
            known.append(self._runner._next_token(known.tobytes()))
            found.append(known[-1] if self._rng.random() < self._how.share else 4000)
        return tuple(found)

    def forget(self) -> None:
        pass


@dataclass
class Ward:
    """step_ms and token_ms: what a step and each token in it cost; gap_ms: what the host does after each. wake_ms: what
    an engine without work takes to wake; take_ms: what it takes to take a request in. execution: `FakeRunner`'s. knobs:
    (at ms, settings) changed while it runs. stops_ms: (at, for so long). machine: threads and cores. beside:
    how many cores this server's other processes, and all others, keep busy. throttled: the part of the engine's waits
    in which its group was. quota: of the machine, in cores. guessing: None: nothing is guessed. Other arguments are the
    scheduler's settings, and `Hindered`'s."""

    step_ms: float = 4.0
    token_ms: float = 0.05
    gap_ms: float = 0.05
    wake_ms: float = 0.0
    take_ms: float = 0.0
    execution: str = "host"
    plans_ahead: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    knobs: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    stops_ms: list[tuple[float, float]] = field(default_factory=list)
    wait_share: float = 0.0
    sample_share: float = 0.0
    machine: tuple[int, int] | None = None
    beside: tuple[float, float] | None = None
    throttled: float | None = None
    quota: float | None = None
    guessing: Guessing | None = None
    told: dict[str, Any] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(10**9))

    def run(self, *cases: Case) -> Books:
        """Runs once what several tests of this process ask for: nobody changes books."""
        asked = [getattr(self, one.name) for one in fields(self) if one.name != "clock"]
        key = pickle.dumps((asked, cases, self.clock.now_ns()))
        if key not in RAN:
            RAN[key] = self._run(*cases), self.closed, self.steps, self.clock.now_ns()
            if len(RAN) > MOST_KEPT:
                del RAN[next(iter(RAN))]
        books, self.closed, self.steps, end_ns = RAN[key]
        self.clock = VirtualClock(end_ns)
        return books

    def _run(self, *cases: Case) -> Books:
        config = SchedulerConfig(**({"max_model_len": 4096, "num_blocks": 4096} | self.settings))
        costs = (int(self.step_ms * MS), int(self.token_ms * MS))
        runner = Hindered(config.block_size, 4000, 0, *costs, self.clock, self.execution)
        parts = EngineParts(Engine(Scheduler(config), plans_ahead=self.plans_ahead), self._answering(runner))
        crank = Crank(parts, self.clock, processor=runner)  # type: ignore[arg-type]
        host = HostCosts(int(self.gap_ms * MS), int(self.wake_ms * MS), int(self.take_ms * MS))
        played = TimedRun(crank, self.clock, host, on_end=self._close)
        self.closed: list[ClosedAccount] = []
        self.engine_ran_ns = self.kept_ns = 0
        self._cases: dict[str, Case] = {}
        begin_ns = self.clock.now_ns()
        runner.stops = tuple((begin_ns + int(at * MS), int(ms * MS)) for at, ms in self.stops_ms)
        runner.wait_share, runner.sample_share = self.wait_share, self.sample_share
        for at_ms, knobs in self.knobs:
            played.at(begin_ns + int(at_ms * MS), Configure(0, knobs))
        arriving = [(begin_ns + int(case.at_ms * MS), case) for case in cases for _ in range(case.n)]
        arriving.sort(key=lambda entry: _engine_ns(*entry))
        for number, (at_ns, case) in enumerate(arriving):
            self._submit(played, at_ns, f"r{number}", case)
        played.run()
        self.steps = [self._with_who_ran(step) for step in played.steps]
        facts = ServerFacts(
            version="0",
            model="fake",
            max_model_len=config.max_model_len,
            settings={name: getattr(config, name) for name in config.__struct_fields__} | self.told,
            machine=self._machine(),
            cost=TokenCost(
                weight_bytes=1,
                kv_bytes_per_token=4096,
                operations_per_token=1,
                operations_per_context_token=1,
            ),
            processes=(Process(name="engine", started_ns=begin_ns - 10**10, ready_ns=begin_ns - 10**10),),
        )
        return make_books(facts, self.closed, self.steps, "a ward")

    def _machine(self) -> Machine | None:
        if self.machine is None:
            return None
        return Machine(cpu="made up", threads=self.machine[0], cores=self.machine[1], quota=self.quota)

    def _answering(self, runner: Hindered) -> Any:
        if self.guessing is None:
            return runner
        drafter = GuessingDrafter(self.guessing, runner, self.clock)
        return DraftingRunner(runner, drafter, now_ns=self.clock.now_ns)

    def _submit(self, played: TimedRun, at_ns: int, request_id: str, case: Case) -> None:
        engine_ns = _engine_ns(at_ns, case)
        account = Account(request_id, at_ns, Stage.RECEIVE)
        account.enter(Stage.TOKENIZE, at_ns + 10_000)
        account.enter(Stage.HANDOFF, engine_ns)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(case.prompt),
            sampling=SamplingParams(max_tokens=case.output, seed=0),
            submitted_ns=engine_ns,
            deadline_ns=None if case.deadline_ms is None else at_ns + int(case.deadline_ms * MS),
        )
        self._cases[request_id] = case
        played.submit(request, account=account)

    def _with_who_ran(self, step: StepRecord) -> StepRecord:
        if self.beside is None:
            return step
        own, others = self.beside
        self.engine_ran_ns += step.end_ns - step.begin_ns + step.host_gap_ns - step.cpu_wait_ns - step.off_cpu_ns
        server_ns = self.engine_ran_ns + int(own * step.end_ns)
        self.kept_ns += step.cpu_wait_ns + step.off_cpu_ns
        told_ns = None if self.throttled is None else int(self.throttled * self.kept_ns)
        others_ns = int(others * step.end_ns)
        return msgspec.structs.replace(step, server_ran_ns=server_ns, others_ran_ns=others_ns, throttled_ns=told_ns)

    def _close(self, outcome: RequestOutcome, ready_ns: int) -> None:
        account, request_id = outcome.account, outcome.request.request_id
        case, end_ns = self._cases[request_id], ready_ns + WRITE_NS
        if case.client_wait_ms:
            account.enter(Stage.CLIENT_WAIT, end_ns)
            end_ns += int(case.client_wait_ms * MS)
        account.close(end_ns)
        self.closed.append(
            ClosedAccount(
                request_id=request_id,
                group_id=f"cmpl-{request_id if case.n == 1 else id(case)}",
                error=outcome.error,
                model="fake",
                endpoint="completions",
                started_at_unix_ns=0,
                start_ns=account.start_ns,
                end_ns=end_ns,
                intervals=tuple(account.intervals()),
                finish_reason=str(outcome.finish_reasons[0]),
                prompt_tokens=len(case.prompt),
                cached_tokens=outcome.num_cached_tokens or 0,
                output_tokens=len(outcome.token_ids),
                num_preemptions=outcome.num_preemptions,
                first_chunk_tokens=1,
                token_steps=tuple(outcome.token_steps),
                token_ready_ns=tuple(outcome.token_ready_ns),
                token_written_ns=tuple(at_ns + WRITE_NS for at_ns in outcome.token_ready_ns),
                prompt_parts=prompt_hashes(case.prompt).parts,
                prefixes=prompt_hashes(case.prompt).prefixes,
                answer_prefixes=answer_hashes(case.prompt, outcome.token_ids),
            )
        )
