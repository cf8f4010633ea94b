"""Steps that are skipped leave the books that they would have made one by one, entry for entry."""

import random
from itertools import groupby

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.run import Delivery, simulate
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest

CONFIGS = st.builds(
    SchedulerConfig,
    max_model_len=st.just(192),
    block_size=st.sampled_from((4, 16)),
    num_blocks=st.sampled_from((48, 60, 400)),
    max_num_seqs=st.sampled_from((1, 3, 12)),
    max_num_batched_tokens=st.sampled_from((16, 64, 300)),
    max_prefill_tokens=st.sampled_from((None, 16)),
    policy=st.sampled_from(("fcfs", "priority", "shortest_prefill", "deadline")),
    batching=st.sampled_from(("continuous", "static")),
    starvation_bound_ms=st.sampled_from((0.0, 0.0123, 10.0)),
    enable_prefix_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    num_host_slots=st.sampled_from((0, 8)),
    num_state_slots=st.sampled_from((0, 3, 40)),
)
LIMITS = st.sampled_from((QueueLimits(10**9, 10**9), QueueLimits(4, 10**9)))
DELIVERIES = st.builds(
    Delivery, send_lag_ns=st.sampled_from((0, 70, 5_000)), end_ns=st.just(9), to_wake_ns=st.sampled_from((0, 11))
)


class NoisyCosts:
    """Times that hang on the shape, on the instant, and on what a generator says, once for each step."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_asked = 0

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        self.num_asked += 1
        rows, tokens, decodes, kv_tokens, pairs, moved, _ = shape
        device_ns = 700 + 13 * tokens + 7 * decodes + kv_tokens // 8 + pairs // 64 + now_ns % 101
        host_ns = [self._rng.randrange(1 + 3 * rows) for _ in range(5)]
        plan_ns, launch_ns, sample_ns, commit_ns, gap_ns = host_ns
        return StepTime(plan_ns, launch_ns, 40 * moved, device_ns, sample_ns, commit_ns, gap_ns)


def some_requests(seed: int, count: int = 30) -> list[TracedRequest]:
    """Requests that share beginnings and come in bursts; some are stopped, leave, have a deadline, ask what was asked
    before, go on with an answer, or look nothing up in the cache."""
    rng, more_rng, at_ns = random.Random(seed), random.Random(seed + 1), 0
    said: list[tuple[int, ...]] = [()]
    common = [tuple(rng.randrange(1, 900) for _ in range(rng.choice((20, 40, 90)))) for _ in range(3)]
    made = []
    for number in range(count):
        at_ns += rng.choice((0, 1, 400, 3_000, 60_000))
        prompt = (*rng.choice((*common, ())), *(rng.randrange(1, 900) for _ in range(rng.choice((1, 7, 40, 80)))))
        length = rng.choice((1, 2, 9, 60, 100))
        if more_rng.random() < 0.3:
            prompt = (*more_rng.choice(said), *prompt[:5])[:190]
        answer = tuple(more_rng.randrange(1, 900) for _ in range(more_rng.choice((0, length // 2, length))))
        said += [prompt, (*prompt, *answer)]
        deadline_ns = at_ns + rng.choice((700, 9_000, 90_000)) if rng.random() < 0.15 else None
        name = f"r{number}"
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=length, seed=0, ignore_eos=True, prompt_logprobs=more_rng.choice((None, None, 0))
            ),
            submitted_ns=at_ns + 5,
            priority=rng.randrange(3),
            deadline_ns=deadline_ns,
        )
        account = ClosedAccount(
            request_id=name,
            group_id=name,
            model="",
            endpoint="",
            started_at_unix_ns=0,
            start_ns=at_ns,
            end_ns=at_ns,
            intervals=(),
            finish_reason="length",
            prompt_tokens=len(prompt),
        )
        marks = (Mark(Stage.RECEIVE, None, at_ns), Mark(Stage.HANDOFF, None, at_ns + 5))
        stops_after = rng.randrange(1, length + 1) if rng.random() < 0.2 else None
        leaves_ns = at_ns + rng.choice((10, 2_000, 30_000)) if rng.random() < 0.15 else None
        made.append(TracedRequest(request, account, marks, at_ns + 9, stops_after, leaves_ns, answer))
    return made


@settings(max_examples=150, deadline=None)
@given(CONFIGS, LIMITS, DELIVERIES, st.integers(0, 10_000))
def test_the_ledger_is_the_one_without_skipping(config, limits: QueueLimits, delivery: Delivery, seed: int) -> None:
    costs, plain_costs = NoisyCosts(seed), NoisyCosts(seed)
    books = simulate(some_requests(seed), config, costs, limits, delivery)
    plain = simulate(some_requests(seed), config, plain_costs, limits, delivery, skips_ahead=False)
    for skipped, one_by_one in zip(books.steps, plain.steps, strict=True):
        assert skipped == one_by_one
    assert books == plain
    assert costs.num_asked == plain_costs.num_asked == len(plain.steps)
    verify_steps(books.steps)


TIGHT = SchedulerConfig(
    max_model_len=192, block_size=4, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=64, num_host_slots=8
)


def test_what_there_is_to_decide_happens_in_these_runs() -> None:
    unbounded = QueueLimits(10**9, 10**9)
    runs = [simulate(some_requests(seed), TIGHT, NoisyCosts(seed), unbounded, Delivery(70)) for seed in range(8)]
    accounts = [account for run in runs for account in run.accounts]
    steps = [step for run in runs for step in run.steps]
    assert {"stop", "length", "abort", "deadline", "refused"} <= {account.finish_reason for account in accounts}
    assert any(step.victims for step in steps)
    assert any(step.offloaded_blocks and not step.prefill_tokens for step in steps)
    assert any(step.restored_blocks for step in steps)
    assert any(account.cached_tokens for account in accounts)


def test_most_steps_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from splittime.scheduler.planner import Planner

    planned = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, now_ns: planned.append(now_ns) or plan(self, now_ns))
    config = msgspec.structs.replace(TIGHT, num_blocks=400, num_host_slots=0)
    books = simulate(some_requests(1, 60), config, NoisyCosts(1), QueueLimits(10**9, 10**9), Delivery(70))
    decodes = [step for step in books.steps if not step.prefill_tokens]
    runs = [len(list(run)) for _, run in groupby(decodes, key=lambda step: tuple(row[0] for row in step.rows))]
    assert sum(length for length in runs if length > 3) > len(decodes) // 2, "the run has long stretches"
    assert len(planned) < len(books.steps) // 2
