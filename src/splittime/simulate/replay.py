"""A recorded run again, with the step times that its ledger has: does this scheduler decide what that one did?

    divergence = replay(recorded)        None: the same decisions in every step

The same scheduler, cache, engine, crank and loop run under a virtual clock. Requests reach the engine when they did,
aborts too, and each step takes what its record says. What comes out is compared with the record: who was in the step
with which tokens, who was preempted, how many ran and waited, how many blocks were in use, when it began and ended.

Who can be replayed: an engine, whether it plans ahead or not, from its first step on, with its knobs unchanged and its
prefix cache not reset since. What a ledger does not say is not guessed: a request whose account is missing while steps
name it is a `ConfigError`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.drive.crank import Crank
from splittime.drive.loop import run_loop
from splittime.drive.messages import FromEngine, StepOutput
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import PREFIX_TOKENS
from splittime.ledger.steps import StepRecord
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.course import Course, num_came
from splittime.simulate.drafts import require_known_drafts
from splittime.simulate.recorded import Recorded, plans_ahead
from splittime.simulate.retaken import (
    RecordedAnswers,
    RecordedArrivals,
    RecordedSteps,
    Rows,
    UnknownStep,
    engine_again,
)
from splittime.simulate.trace import traced_requests, was_taken_in

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
