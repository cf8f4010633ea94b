"""A recorded run again, with the step times that its ledger has: does this scheduler decide what that one did?

    divergence = replay(recorded)        None: the same decisions in every step

The same scheduler, cache, engine, crank and loop run under a virtual clock. Requests reach the engine when they did,
aborts too, and each step takes what its record says. What comes out is compared with the record: who was in the step
with which tokens, who was preempted, how many ran and waited, how many blocks were in use, when it began and ended.

Who can be replayed: an engine, whether it plans ahead or not, from its first step on, with its knobs unchanged and its
prefix cache not reset since. What a ledger does not say is not guessed: a request whose account is missing while steps
name it is a `ConfigError`.

The steps of a ledger, taken again: an engine whose steps take what they took, and its messages, when they came.

An engine in turn plans a step, runs it, and takes messages in before the next. One that plans ahead takes messages in,
plans step k + 1 at the instant that the record of step k tells (`ahead_ns`), and then waits for step k.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.loop import run_loop
from splittime.drive.messages import Abort, FromEngine, Hold, MaskFound, Release, StepOutput, Submit, ToEngine
from splittime.engine.engine import Engine
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import PREFIX_TOKENS
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import CAME, FAILED, HELD, LEFT, RELEASED, UNTOLD, WENT_ON, StepRecord, Told
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.requests import CAUSES
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.costed import Answers, costed_engine
from splittime.simulate.drafts import require_known_drafts
from splittime.simulate.recorded import Recorded, plans_ahead
from splittime.simulate.shape import StepTime
from splittime.simulate.trace import TracedRequest, ended_by_token, traced_requests, unforeseen, was_taken_in

Rows = tuple[tuple[str, int, int], ...]


class UnknownStep(Exception):
    """The replay has come to a step that the records do not have: nobody knows how long it takes."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows


class RecordedSteps:
    """The records, one after the other: the costs of the replay's steps and the instants at which they begin."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self.records = records
        self.num_ended = 0

    @property
    def next(self) -> StepRecord | None:
        """The record of the next step to end."""
        return self.records[self.num_ended] if self.num_ended < len(self.records) else None

    @property
    def latest(self) -> StepRecord:
        """The record of the step that was taken last."""
        return self.records[self.num_ended - 1]

    @property
    def looked_ns(self) -> int:
        """When the engine planned what comes behind the next step to end."""
        return 0 if self.next is None else self.next.begin_ns + (self.next.ahead_ns or 0)

    def take(self, plan: StepPlan) -> StepRecord:
        """Returns the record of the next step to end. Raises UnknownStep if it is not this one's."""
        record, rows = self.next, tuple((row.request_id, row.start, row.num_tokens) for row in plan.rows)
        if record is None or record.rows != rows:
            raise UnknownStep(rows)
        self.num_ended += 1
        return record

    def time_of(self, plan: StepPlan, now_ns: int) -> StepTime:
        """Returns what a step takes beside which nothing is planned."""
        return time_of(self.take(plan))


def time_of(record: StepRecord) -> StepTime:
    """Returns the parts of a recorded step; how long after it the next began, its own record does not say."""
    return StepTime(
        record.plan_ns, record.launch_ns, record.moves_ns, record.device_ns, record.sample_ns, record.commit_ns
    )


class RecordedArrivals:
    """The messages of a recorded run, handed over before the step that the engine was at, in the order in which it took
    them in.

    `Arrivals` of a loop. Each turn of the loop begins when a recorded step did, or when the engine looked and could
    plan nothing. asked: says what the engine was asked before a step. forget: drops what is cached; an engine that has
    slept has lost it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        steps: RecordedSteps,
        asked: Callable[[StepRecord], Iterable[tuple[int, ToEngine | None]]],
        forget: Callable[[], object],
    ) -> None:
        self.is_closed, self._forget = False, forget
        self._clock, self._steps, self._asked = clock, steps, asked
        self._messages: deque[tuple[int, ToEngine | None]] = deque()
        self._record: StepRecord | None = None
        self._came_to: tuple[int, int] | None = None  # when it was last asked for messages

    def wait(self, timeout_s: float | None) -> bool:
        return True  # time goes on in `take_all`

    def take_all(self) -> Iterator[tuple[ToEngine, int]]:
        record = self._steps.next
        if record is None:
            self.is_closed = True
            return
        if record is not self._record:
            self._record = record
            self._messages.extend(self._asked(record))
        now_at = self._steps.num_ended, len(self._messages)
        if now_at == self._came_to:  # nothing ever comes: nobody computes where the recorded run had a step
            raise UnknownStep(())
        self._came_to = now_at
        while self._messages:
            at_ns, message = self._messages.popleft()
            self._clock.advance_to(at_ns)
            if message is None:
                return
            yield message, at_ns
        if record.asleep_ns:
            self._forget()
        self._clock.advance_to(record.begin_ns)


class RecordedAnswers(Answers):
    """The answers of a replay: as many drafts are right as the step's record says, and it tells the next ones.
    Rows that were late give nothing, nor do those that failed."""

    def __init__(self, steps: RecordedSteps) -> None:
        super().__init__()
        self._steps = steps
        self._record: StepRecord | None = None
        self._num_right: dict[str, int] = {}
        self._told: dict[str, Told] = {}
        self._without: dict[str, RowResult] = {}

    def result(self, row: Row) -> RowResult:
        record = self._steps.latest
        if record is not self._record:
            self._look_at(record)
        if (without := self._without.get(row.request_id)) is not None:
            return without
        if not row.num_samples or not (record.verified or record.drafts):
            return super().result(row)
        return self.accepted(row, self._num_right.get(row.request_id, 0), self._told.get(row.request_id, 0))

    def _look_at(self, record: StepRecord) -> None:
        self._record, self._told = record, dict(record.told_drafts)
        self._num_right = {request_id: num_right for request_id, _, num_right in record.verified}
        self._without = {name: RowResult(name, is_late=True) for name, _ in record.late_rows}
        failed = [one[0] for one in record.told_comings if not isinstance(one, int) and one[1] == FAILED]
        self._without |= {name: RowResult(name, error=FAILED) for name in failed}


class EngineAhead(Engine):
    """Plans the next step when the recorded engine did."""

    def __init__(self, scheduler: Scheduler, steps: RecordedSteps, clock: VirtualClock) -> None:
        super().__init__(scheduler, plans_ahead=True)
        self._steps, self._clock = steps, clock

    def begin(self, now_ns: int) -> StepPlan | None:
        if self.num_in_flight:
            self._clock.advance_to(self._steps.looked_ns)
        return super().begin(self._clock.now_ns())


class RunnerAhead:
    """An `AsyncRunner` whose steps end when they did. A step that is not the recorded one is noticed when it is to end,
    behind all before it."""

    def __init__(self, steps: RecordedSteps, clock: VirtualClock, answers: Answers) -> None:
        self._steps, self._clock, self._answers = steps, clock, answers
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        record = self._steps.take(plan)
        self._clock.advance_to(record.end_ns)
        rows = tuple([self._answers.result(row) for row in plan.rows])
        return StepResult(plan.step_id, rows, record.device_ns, record.sample_ns, record.execution)


def engine_again(
    scheduler: Scheduler, steps: RecordedSteps, clock: VirtualClock, answers: Answers, is_ahead: bool
) -> EngineParts:
    """Returns an engine whose steps take what they took. is_ahead: it plans ahead, as the recorded one did."""
    if is_ahead:
        return EngineParts(EngineAhead(scheduler, steps, clock), RunnerAhead(steps, clock, answers))
    engine, runner, _ = costed_engine(scheduler, steps.time_of, clock, steps.records[0].execution)
    runner.answers = answers
    return EngineParts(engine, runner)


class Course:
    """What the engine was asked before each step, as the records say (`StepRecord.comings`). Where the server found a
    request's stop string, the engine may have ended it some tokens later: its record says of how many.
    requests: as the engine ended them. Raises ConfigError where the records do not tell who came when."""

    def __init__(self, requests: Sequence[TracedRequest], records: Sequence[StepRecord]) -> None:
        _require_told(records)
        num_tokens = {name: what for name, what in _words(records) if isinstance(what, int)}
        taken_in = [traced for traced in requests if was_taken_in(traced.account)]
        self.requests = [_as_ended(traced, num_tokens.get(traced.request.request_id)) for traced in taken_in]
        self._by_id = {traced.request.request_id: traced for traced in self.requests}
        self._seen: set[str] = set()

    def before(self, record: StepRecord) -> Iterator[tuple[int, ToEngine | None]]:
        """Yields what the engine was asked before this step, in order. None: at this instant it had nothing that it
        could plan. Ask for one step after the other."""
        for coming in record.told_comings:
            if isinstance(coming, int):
                yield coming, None
            elif coming[1] in (CAME, HELD, RELEASED, WENT_ON, LEFT):
                yield self._message(self._by_id[coming[0]], str(coming[1]))

    def _message(self, traced: TracedRequest, what: str) -> tuple[int, ToEngine]:
        request, received_ns = traced.request, traced.received_ns
        name = request.request_id
        is_new = name not in self._seen
        self._seen.add(name)
        if what == CAME:
            return received_ns, Submit(request)
        if what == HELD:
            return received_ns, Submit(request, Cause.GRAMMAR) if is_new else Hold(name, Cause.GRAMMAR)
        if what == RELEASED:
            return _held_until_ns(traced), Release(name)
        return received_ns, MaskFound(name) if what == WENT_ON else Abort(name)


def num_came(records: Sequence[StepRecord]) -> Counter[str]:
    """Returns how many requests came under each name that is told of. Who is held and is not here comes held."""
    came, here = Counter[str](), set[str]()
    for name, what in _words(records):
        came[name] += what == CAME or (what == HELD and name not in here)
        (here.discard if isinstance(what, int) or what in (LEFT, FAILED) else here.add)(name)
    return came


def _words(records: Sequence[StepRecord]) -> list[tuple[str, str | int]]:
    return [one for record in records for one in record.told_comings if not isinstance(one, int)]


def _require_told(records: Sequence[StepRecord]) -> None:
    if not any(record.comings for record in records):
        words = "the ledger does not say in which order requests came and went"
        raise ConfigError(words, param="ledger", hint="Record another: an early version wrote it.")
    for record in records:
        if ("", UNTOLD) in record.told_comings:
            words = f"more came and went before step {record.step_id} than a record keeps"
            raise ConfigError(words, param="ledger", hint="Replay another: one whose engine was not paused for long.")


def _as_ended(traced: TracedRequest, num_tokens: int | None) -> TracedRequest:
    """Returns the request as the engine ended it by itself, with so many tokens, its prompt's among them."""
    if num_tokens is None:
        return unforeseen(traced)
    return ended_by_token(traced, num_tokens - len(traced.request.prompt_token_ids))


def _held_until_ns(traced: TracedRequest) -> int:
    queued = [each for each in traced.account.intervals if each.stage is Stage.QUEUE and each.cause in CAUSES]
    return max((each.end_ns for each in queued), default=traced.received_ns)


DECISIONS = (
    *("step_id", "rows", "victims", "prefill_tokens", "decode_tokens", "kv_tokens_read", "blocks_used"),
    *("num_running", "num_waiting", "offloaded_blocks", "restored_blocks", "begin_ns", "end_ns"),
)


class Divergence(NamedTuple):
    """The first step that was decided otherwise: what of it, as recorded and as replayed (None: no such step)."""

    step_id: int
    what: str
    recorded: object
    replayed: object


def replay(recorded: Recorded) -> Divergence | None:
    """Returns the first divergence, None if there is none. Raises ConfigError for what cannot be replayed."""
    require_whole(recorded)
    config, records = scheduler_config(recorded.facts), recorded.steps
    course = Course(traced_requests(recorded.accounts, config.max_model_len), records)
    clock, steps = VirtualClock(), RecordedSteps(records)
    answers = RecordedAnswers(steps)
    for traced in course.requests:
        answers.learn(traced.request.request_id, len(traced.request.prompt_token_ids), traced.answer)
    parts = engine_again(Scheduler(config), steps, clock, answers, is_ahead=records[0].ahead_ns is not None)
    arrivals = RecordedArrivals(clock, steps, course.before, parts.engine.forget_cache)
    replayed: list[StepRecord] = []
    try:
        run_loop(Crank(parts, clock), arrivals, lambda message: _keep(message, replayed))
    except UnknownStep as unknown:
        return first_divergence(records, replayed, unknown.rows)
    return first_divergence(records, replayed, None)


def scheduler_config(facts: ServerFacts) -> SchedulerConfig:
    """Returns the scheduler's settings as the facts tell them; not paused, as it was not when it computed. Raises
    ConfigError if they are not all there, or cannot be."""
    known = {name: facts.settings[name] for name in SchedulerConfig.__struct_fields__ if name in facts.settings}
    missing = [name for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens") if name not in known]
    if missing:
        raise ConfigError(f"the ledger's facts do not say {', '.join(missing)}", param="ledger")
    known.setdefault("max_model_len", facts.max_model_len)
    try:
        return msgspec.convert(known | {"paused": False}, SchedulerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the ledger's facts cannot be: {error}", param="ledger") from None


def require_whole(recorded: Recorded) -> None:
    """Raises ConfigError for a ledger that lacks steps or accounts, or does not tell what its prompts share."""
    accounts, records, facts = recorded.accounts, recorded.steps, recorded.facts
    if not records:
        raise ConfigError("the ledger has no steps to replay", param="ledger")
    plans_ahead(recorded)
    require_known_drafts(records, facts.max_model_len)
    block_size = facts.settings.get("block_size", PREFIX_TOKENS)
    if block_size % PREFIX_TOKENS and facts.settings.get("enable_prefix_caching", True):
        words = f"the engine shares blocks of {block_size} tokens; a ledger tells prompts apart by {PREFIX_TOKENS}"
        hint = f"Replay one of --block-size {PREFIX_TOKENS} or a multiple of it, or of --no-enable-prefix-caching."
        raise ConfigError(words, param="block_size", value=block_size, limit=PREFIX_TOKENS, hint=hint)
    ids = [record.step_id for record in records]
    if ids != list(range(1, len(ids) + 1)):
        hint = "Keep more of it: --max-file-steps, --max-file-accounts; or write to a new file."
        raise ConfigError("the ledger's steps are not all of one engine, from its first on", param="ledger", hint=hint)
    taken_in = Counter(account.request_id for account in accounts if was_taken_in(account))
    came = num_came(records)  # also those whose account is not there, as it is still open
    name, count = max((taken_in | came).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"{count} requests have the id {name!r}; the steps do not tell them apart", param="ledger")
    here = came.keys() - {""} | {row[0] for record in records for row in record.rows}
    unknown = here - taken_in.keys()
    if unknown:
        hint = "Replay a ledger whose server has ended its requests, and which kept all accounts (--max-file-accounts)."
        words = f"{len(unknown)} requests came to the engine and have no account, {min(unknown)!r} among them"
        raise ConfigError(words, param="ledger", hint=hint)


def _keep(message: FromEngine, replayed: list[StepRecord]) -> None:
    if isinstance(message, StepOutput) and message.record is not None:
        replayed.append(message.record)


def first_divergence(
    records: Sequence[StepRecord], replayed: Sequence[StepRecord], last_rows: Rows | None
) -> Divergence | None:
    """Returns the first; None if there is none. last_rows: of the step at which the replay stopped."""
    for recorded, again in zip(records, replayed, strict=False):
        for name in DECISIONS:
            if getattr(recorded, name) != getattr(again, name):
                return Divergence(recorded.step_id, name, getattr(recorded, name), getattr(again, name))
    if len(replayed) < len(records):
        missing = records[len(replayed)]
        return Divergence(missing.step_id, "rows", missing.rows, last_rows)
    return None
