"""A recorded run, replayed with the step times of its ledger, decides the same in every step."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import Abort
from splittime.engine.engine import Engine
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import prompt_hashes
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.fake import FakeRunner
from splittime.simulate.replay import Divergence, replay
from splittime.simulate.trace import Recorded
from splittime.simulate.virtual import HostCosts, RequestOutcome, TimedRun

COSTS = HostCosts(after_output_ns=37, to_wake_ns=11, per_message_ns=3)


def closed(outcome: RequestOutcome) -> ClosedAccount:
    request, account = outcome.request, outcome.account
    return ClosedAccount(
        request_id=request.request_id,
        group_id=request.request_id,
        model="fake",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=account.start_ns,
        end_ns=account.end_ns,
        intervals=tuple(account.intervals()),
        finish_reason=str(outcome.finish_reasons[0]),
        error=outcome.error,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=outcome.num_cached_tokens or 0,
        output_tokens=len(outcome.token_ids),
        num_preemptions=outcome.num_preemptions,
        token_steps=tuple(outcome.token_steps),
        token_ready_ns=tuple(outcome.token_ready_ns),
        freed_ns=account.end_ns,
        prefixes=prompt_hashes(request.prompt_token_ids).prefixes,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        deadline_ns=request.deadline_ns,
    )


def record_run(config: SchedulerConfig, seed: int, count: int = 25, eos_every: int = 40) -> Recorded:
    """A run of `count` requests in bursts, some with common beginnings, some that end early by every way there is."""
    rng, clock = random.Random(seed), VirtualClock()
    runner = FakeRunner(step_ns=900, token_ns=31, clock=clock, eos_every=eos_every)
    run = TimedRun(Crank(EngineParts(Engine(Scheduler(config)), runner), clock), clock, COSTS)
    common = [tuple(rng.randrange(1, 900) for _ in range(rng.choice((20, 90, 150)))) for _ in range(3)]
    at_ns = 0
    for number in range(count):
        at_ns += rng.choice((1, 3, 400, 3_000, 60_000))
        prompt = (*rng.choice((*common, ())), *(rng.randrange(1, 900) for _ in range(rng.choice((1, 7, 40, 80)))))
        sampling = SamplingParams(max_tokens=rng.choice((1, 2, 9, 60)), seed=number)
        deadline_ns = at_ns + rng.choice((700, 9_000, 90_000)) if rng.random() < 0.15 else None
        name = f"r{number}"
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            eos_token_ids=(0,),
            submitted_ns=at_ns,
            priority=rng.randrange(3),
            deadline_ns=deadline_ns,
        )
        run.submit(request)
        if rng.random() < 0.15:
            run.at(at_ns + rng.choice((1, 2_000, 30_000)), Abort(name))
    run.run()
    facts = ServerFacts(version="test", model="fake", max_model_len=256, settings=msgspec.to_builtins(config))
    return Recorded([closed(outcome) for outcome in run.outcomes.values()], run.steps, facts)


CONFIGS = st.builds(
    lambda blocks, **more: SchedulerConfig(
        max_model_len=256, num_blocks=blocks, block_size=16, max_num_batched_tokens=more.pop("budget"), **more
    ),
    blocks=st.sampled_from((16, 20, 60)),
    max_num_seqs=st.sampled_from((1, 3, 12)),
    budget=st.sampled_from((16, 64, 300)),
    max_prefill_tokens=st.sampled_from((None, 16)),
    policy=st.sampled_from(("fcfs", "priority", "shortest_prefill", "deadline")),
    batching=st.sampled_from(("continuous", "static")),
    starvation_bound_ms=st.sampled_from((0.01, 10.0)),
    enable_chunked_prefill=st.booleans(),
    num_host_slots=st.sampled_from((0, 8)),
)


@given(CONFIGS, st.integers(0, 10_000))
def test_a_replay_decides_as_the_recorded_run_did(config: SchedulerConfig, seed: int) -> None:
    recorded = record_run(config, seed)
    assert replay(recorded) is None


TIGHT = SchedulerConfig(max_model_len=256, num_blocks=16, block_size=16, max_num_batched_tokens=64, max_num_seqs=8)


def test_what_happened_is_in_these_runs() -> None:
    """Preemptions, deadlines, aborts, ends by a stop token, hits in the prefix cache."""
    recorded = record_run(TIGHT, seed=4, count=60)
    assert any(step.victims for step in recorded.steps)
    assert {account.finish_reason for account in recorded.accounts} == {"abort", "deadline", "length", "stop"}
    assert any(account.cached_tokens for account in recorded.accounts)
    assert replay(recorded) is None


@pytest.mark.parametrize(
    ("knob", "value"),
    [("max_num_seqs", 2), ("num_blocks", 24), ("policy", "shortest_prefill"), ("max_num_batched_tokens", 32)],
)
def test_another_scheduler_is_found_out(knob: str, value: object) -> None:
    recorded = record_run(TIGHT, seed=4, count=60)
    facts = msgspec.structs.replace(recorded.facts, settings=recorded.facts.settings | {knob: value})
    divergence = replay(msgspec.structs.replace(recorded, facts=facts))
    assert isinstance(divergence, Divergence)
    assert divergence.recorded != divergence.replayed


def test_a_step_that_took_longer_is_found_out() -> None:
    recorded = record_run(TIGHT, seed=3)
    second = recorded.steps[1]
    steps = [recorded.steps[0], msgspec.structs.replace(second, end_ns=second.end_ns + 1), *recorded.steps[2:]]
    assert replay(msgspec.structs.replace(recorded, steps=steps)) == (2, "end_ns", second.end_ns + 1, second.end_ns)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: run.steps.clear(), "no steps"),
        (lambda run: run.steps.pop(0), "not all of one engine"),
        (lambda run: run.accounts.pop(0), "'r0' among them"),
        (lambda run: run.facts.settings.update(async_scheduling=True), "plans ahead"),
        (lambda run: run.facts.settings.pop("num_blocks"), "do not say num_blocks"),
    ],
)
def test_what_cannot_be_replayed_is_refused(spoil, words: str) -> None:
    recorded = record_run(TIGHT, seed=0)
    spoil(recorded)
    with pytest.raises(ConfigError, match=words):
        replay(recorded)
