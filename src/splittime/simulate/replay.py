"""A recorded run again, with the step times that its ledger has: does this scheduler decide what that one did?

    divergence = replay(recorded)        None: the same decisions in every step

The same scheduler, cache, engine, crank and loop run under a virtual clock. Requests reach the engine when they did,
aborts too, and each step takes what its record says. What comes out is compared with the record: who was in the step
with which tokens, who was preempted, how many ran and waited, how many blocks were in use, when it began and ended.

Who can be replayed: an engine that does not plan ahead, from its first step on, with its knobs unchanged and its prefix
cache not reset since. What a ledger does not say is not guessed: a request whose account is missing while steps name it
is a `ConfigError`.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason
from splittime.core.step import StepPlan
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.loop import run_loop
from splittime.drive.messages import Abort, FromEngine, StepOutput, Submit, ToEngine
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import PREFIX_TOKENS
from splittime.ledger.steps import StepRecord
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.costed import costed_engine
from splittime.simulate.recorded import Recorded
from splittime.simulate.shape import StepTime
from splittime.simulate.trace import TracedRequest, traced_requests

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
        self.num_begun = 0

    @property
    def next(self) -> StepRecord | None:
        """The record of the next step to begin."""
        return self.records[self.num_begun] if self.num_begun < len(self.records) else None

    def time_of(self, plan: StepPlan, now_ns: int) -> StepTime:
        record, rows = self.next, tuple((row.request_id, row.start, row.num_tokens) for row in plan.rows)
        if record is None or record.rows != rows:
            raise UnknownStep(rows)
        self.num_begun += 1
        return time_of(record)


def time_of(record: StepRecord) -> StepTime:
    """Returns the parts of a recorded step; how long after it the next began, its own record does not say."""
    return StepTime(
        record.plan_ns, record.launch_ns, record.moves_ns, record.device_ns, record.sample_ns, record.commit_ns
    )


class RecordedArrivals:
    """The messages of a recorded run, handed over before the step that the engine was at, and not a step earlier.

    `Arrivals` of a loop. Each turn of the loop begins when a recorded step did, or when a request ended without one
    (its deadline). num_taken: requests that the engine had taken in before each step: one that came just before a step
    may have been a moment too late for it. forget: drops what is cached; an engine that has slept has lost it.
    """

    def __init__(
        self,
        clock: VirtualClock,
        steps: RecordedSteps,
        messages: list[tuple[int, ToEngine | None]],
        num_taken: Sequence[int],
        forget: Callable[[], object],
    ) -> None:
        self.is_closed, self._forget = False, forget
        self._clock, self._steps, self._messages, self._num_taken = clock, steps, deque(messages), num_taken
        self._num_submitted = 0

    def wait(self, timeout_s: float | None) -> bool:
        return True  # time goes on in `take_all`

    def take_all(self) -> Iterator[tuple[ToEngine, int]]:
        record = self._steps.next
        if record is None:
            self.is_closed = True
            return
        if record.idle_ns:
            self._clock.advance_to(record.begin_ns - record.host_gap_ns)  # it woke up then
        while self._messages and self._messages[0][0] <= record.begin_ns:
            at_ns, message = self._messages[0]
            if isinstance(message, Submit):
                if self._num_submitted == self._num_taken[self._steps.num_begun]:
                    break
                self._num_submitted += 1
            else:
                self._clock.advance_to(at_ns)
            self._messages.popleft()
            if message is None:
                return
            yield message, at_ns
        if record.asleep_ns:
            self._forget()
        self._clock.advance_to(record.begin_ns)


def replay(recorded: Recorded) -> Divergence | None:
    """Returns the first divergence, None if there is none. Raises ConfigError for what cannot be replayed."""
    _require_whole(recorded)
    config, records = scheduler_config(recorded.facts), recorded.steps
    requests = _as_the_engine_ended_them(traced_requests(recorded.accounts, config.max_model_len), records)
    clock = VirtualClock(min(records[0].begin_ns, *(traced.received_ns for traced in requests)))
    steps = RecordedSteps(records)
    engine, runner, _ = costed_engine(Scheduler(config), steps.time_of, clock, records[0].execution)
    for traced in requests:
        runner.answers.learn(traced.request.request_id, len(traced.request.prompt_token_ids), traced.answer)
    messages = _messages(requests, records)
    replayed: list[StepRecord] = []
    try:
        run_loop(
            Crank(EngineParts(engine, runner), clock),
            RecordedArrivals(clock, steps, messages, _num_taken(requests, records), engine.forget_cache),
            lambda message: _keep(message, replayed),
        )
    except UnknownStep as unknown:
        return _first_divergence(records, replayed, unknown.rows)
    return _first_divergence(records, replayed, None)


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


def _require_whole(recorded: Recorded) -> None:
    accounts, records, facts = recorded.accounts, recorded.steps, recorded.facts
    if not records:
        raise ConfigError("the ledger has no steps to replay", param="ledger")
    if facts.settings.get("async_scheduling"):
        raise ConfigError("a ledger of an engine that plans ahead cannot be replayed step by step", param="ledger")
    block_size = facts.settings.get("block_size", PREFIX_TOKENS)
    if block_size % PREFIX_TOKENS and facts.settings.get("enable_prefix_caching", True):
        words = f"the engine shares blocks of {block_size} tokens; a ledger tells prompts apart by {PREFIX_TOKENS}"
        hint = f"Replay one of --block-size {PREFIX_TOKENS} or a multiple of it, or of --no-enable-prefix-caching."
        raise ConfigError(words, param="block_size", value=block_size, limit=PREFIX_TOKENS, hint=hint)
    ids = [record.step_id for record in records]
    if ids != list(range(1, len(ids) + 1)):
        hint = "Keep more of it: --max-file-steps, --max-file-accounts; or write to a new file."
        raise ConfigError("the ledger's steps are not all of one engine, from its first on", param="ledger", hint=hint)
    reached = Counter(account.request_id for account in accounts if account.token_steps)
    name, count = max(reached.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"{count} requests have the id {name!r}; the steps do not tell them apart", param="ledger")
    unknown = {row[0] for record in records for row in record.rows} - {account.request_id for account in accounts}
    if unknown:
        hint = "Replay a ledger whose server has ended its requests, and which kept all accounts (--max-file-accounts)."
        words = f"{len(unknown)} requests have steps but no account, {min(unknown)!r} among them"
        raise ConfigError(words, param="ledger", hint=hint)


def _as_the_engine_ended_them(requests: Sequence[TracedRequest], records: Sequence[StepRecord]) -> list[TracedRequest]:
    """Returns the requests; one that the engine ended, while the server was telling it of the stop string that it had
    found, has as many tokens as the engine gave it. An account that closed before does not say so: after its last step
    one is missing."""
    last_step = {row[0]: record for record in records for row in record.rows}
    received_ns = sorted(traced.received_ns for traced in requests)
    ended_ns = sorted(_ended_ns(traced, last_step.get(traced.request.request_id)) for traced in requests)
    num_missing: dict[int, int] = {}
    same = []
    for traced in requests:
        last = last_step.get(traced.request.request_id)
        freed_ns = traced.account.freed_ns
        if traced.stops_after is None or last is None:
            pass
        elif freed_ns is not None:
            traced = _ended_in(traced, last) if freed_ns <= last.end_ns else traced
        else:
            present = last.num_running + last.num_waiting + bisect_right(ended_ns, last.end_ns)
            missing = num_missing.setdefault(last.step_id, bisect_right(received_ns, last.begin_ns) - present)
            if missing > 0:
                num_missing[last.step_id] -= 1
                traced = _ended_in(traced, last)
        same.append(traced)
    return same


def _ended_in(traced: TracedRequest, last: StepRecord) -> TracedRequest:
    """Returns the request as one whose last token is of this step."""
    request = traced.request
    end = next(start + count for request_id, start, count in last.rows if request_id == request.request_id)
    max_tokens = max(1, end + 1 - len(request.prompt_token_ids))
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
    return traced._replace(request=msgspec.structs.replace(request, sampling=sampling), stops_after=None)


def _messages(requests: Sequence[TracedRequest], records: Sequence[StepRecord]) -> list[tuple[int, ToEngine | None]]:
    """Returns what reached the engine, in order. None: a deadline, at which the engine had to look."""
    last_step = {row[0]: record for record in records for row in record.rows}
    begins = {record.begin_ns for record in records}
    messages: list[tuple[int, int, ToEngine | None]] = []
    for traced in requests:
        account = traced.account
        messages.append((traced.received_ns, len(messages), Submit(traced.request)))
        gone_ns = _abort_ns(traced, last_step.get(account.request_id))
        if gone_ns is not None:
            messages.append((gone_ns, len(messages), Abort(account.request_id)))
        elif account.finish_reason == FinishReason.DEADLINE and account.freed_ns not in (None, *begins):
            messages.append((account.freed_ns or 0, len(messages), None))
    messages.sort(key=lambda message: message[:2])
    return [(at_ns, message) for at_ns, _, message in messages]


def _num_taken(requests: Sequence[TracedRequest], records: Sequence[StepRecord]) -> list[int]:
    """Returns how many requests had been taken in before each step: who is there after it, and who has ended."""
    last_step = {row[0]: record for record in records for row in record.rows}
    ended_ns = sorted(_ended_ns(traced, last_step.get(traced.request.request_id)) for traced in requests)
    return [record.num_running + record.num_waiting + bisect_right(ended_ns, record.end_ns) for record in records]


def _ended_ns(traced: TracedRequest, last: StepRecord | None) -> int:
    """When the engine was done with it. One that was aborted for a stop string was there until its last step's end."""
    aborted_ns = _abort_ns(traced, last)
    if aborted_ns is not None:
        return aborted_ns + (traced.stops_after is not None and traced.account.freed_ns is None)
    freed_ns = traced.account.freed_ns
    if freed_ns is None:
        return traced.account.end_ns if last is None else last.end_ns
    return freed_ns


def _abort_ns(traced: TracedRequest, last: StepRecord | None) -> int | None:
    """When the engine was told to end it; None if it ended by itself. last: the last step that it was in."""
    account = traced.account
    if traced.stops_after is not None and account.freed_ns is None:
        return last.end_ns if last is not None else account.end_ns
    if traced.stops_after is not None or account.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return account.end_ns if account.freed_ns is None else account.freed_ns
    return None


def _keep(message: FromEngine, replayed: list[StepRecord]) -> None:
    if isinstance(message, StepOutput) and message.record is not None:
        replayed.append(message.record)


def _first_divergence(
    records: Sequence[StepRecord], replayed: Sequence[StepRecord], last_rows: Rows | None
) -> Divergence | None:
    """last_rows: of the step at which the replay stopped."""
    for recorded, again in zip(records, replayed, strict=False):
        for name in DECISIONS:
            if getattr(recorded, name) != getattr(again, name):
                return Divergence(recorded.step_id, name, getattr(recorded, name), getattr(again, name))
    if len(replayed) < len(records):
        missing = records[len(replayed)]
        return Divergence(missing.step_id, "rows", missing.rows, last_rows)
    return None
