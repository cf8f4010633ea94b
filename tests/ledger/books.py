"""Accounts and steps for the ledger's tests: hand-made ones, and Hypothesis strategies for any."""

from hypothesis import strategies as st

from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.attempts import AffinityDecision, Attempt, Considered, NestedStage
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

CAUSED = {Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED}
marks = st.tuples(st.sampled_from(Stage), st.none() | st.sampled_from(Cause), st.integers(0, 10**9))


def closed(account: Account, **facts) -> ClosedAccount:
    defaults = {
        "group_id": account.request_id.rpartition("-")[0] or account.request_id,
        "model": "code",
        "endpoint": "completions",
        "started_at_unix_ns": 1_700_000_000 * 10**9,
        "finish_reason": "stop",
    }
    return ClosedAccount(
        request_id=account.request_id,
        start_ns=account.start_ns,
        end_ns=account.end_ns,
        intervals=tuple(account.intervals()),
        **(defaults | facts),
    )


@st.composite
def attempts(draw, begin_ns: int, end_ns: int) -> Attempt:
    """Any attempt of a gateway's account that lies within these instants."""
    length_ns = draw(st.integers(0, 10**9))
    cost_ns = draw(st.none() | st.integers(0, 9))
    considered = Considered("a", draw(st.integers(0, 9)), draw(st.integers(0, 9)), cost_ns, cost_ns)
    decision = AffinityDecision(result="hit", upstream="a", matched_bytes=draw(st.integers(0, 9)))
    nested = (NestedStage(Stage.DECODE, draw(st.none() | st.sampled_from(Cause)), 0, length_ns),)
    return Attempt(
        upstream=draw(st.sampled_from("ab")),
        request_id="of the attempt",
        considered=(considered,),
        begin_ns=begin_ns,
        end_ns=end_ns,
        status=draw(st.none() | st.just(200)),
        first_byte_ns=draw(st.none() | st.just(end_ns)),
        error=draw(st.sampled_from(["", "upstream_died"])),
        num_events=draw(st.integers(0, 9)),
        knows_tokens=draw(st.booleans()),
        nested=draw(st.just(()) | st.just(nested)),
        nested_fault=draw(st.sampled_from(["", "a gap"])),
        affinity=draw(st.none() | st.just(decision)),
    )


@st.composite
def accounts(draw) -> ClosedAccount:
    """Any account that the rules allow: stages in any order, some of no length."""
    now_ns = draw(st.integers(0, 2**62))
    account = Account("cmpl-x-0", now_ns, Stage.RECEIVE)
    for stage, cause, delta_ns in draw(st.lists(marks, max_size=30)):
        now_ns += delta_ns
        account.enter(stage, now_ns, cause)
    gaps = draw(st.lists(st.integers(0, 10**8), max_size=20))
    ready_ns = [account.start_ns + sum(gaps[: i + 1]) for i in range(len(gaps))]
    account.close(max([now_ns, *ready_ns]))
    num_written = draw(st.integers(0, len(gaps)))
    return closed(
        account,
        prompt_tokens=draw(st.integers(1, 200_000)),
        output_tokens=len(gaps),
        first_chunk_tokens=min(1, num_written),
        token_steps=tuple(range(1, len(gaps) + 1)),
        token_ready_ns=tuple(ready_ns),
        token_written_ns=tuple(ready_ns[:num_written]),
        cancelled_ns=draw(st.none() | st.just(now_ns)),
        freed_ns=draw(st.none() | st.just(account.end_ns)),
        prompt_parts=tuple(
            draw(st.lists(st.tuples(st.integers(0, 2**52), st.integers(0, 99), st.integers(1, 99)), max_size=3))
        ),
        prefixes=draw(st.binary(max_size=18)),
        attempts=tuple(draw(st.lists(attempts(account.start_ns, account.end_ns), max_size=3))),
        max_tokens=draw(st.integers(0, 99)),
        priority=draw(st.integers(-2, 2)),
        deadline_ns=draw(st.none() | st.just(account.end_ns)),
        trace_id=draw(st.sampled_from(["", "ab" * 16])),
        parent_id=draw(st.sampled_from(["", "cd" * 8])),
    )


def example(request_id: str = "cmpl-a-0", start_ns: int = 1_000, num_tokens: int = 4, gap_ns: int = 5_000_000):
    """A plain life: receive, tokenize, queue, prefill, decode, deliver, a token each `gap_ns`."""
    account = Account(request_id, start_ns, Stage.RECEIVE)
    for stage, cause, at_ns in (
        (Stage.TOKENIZE, None, 200_000),
        (Stage.HANDOFF, None, 300_000),
        (Stage.QUEUE, Cause.KV_BLOCKS, 500_000),
        (Stage.PREFILL, None, 10_000_000),
        (Stage.DECODE, None, 20_000_000),
        (Stage.DELIVER, None, 20_000_000 + (num_tokens - 1) * gap_ns),
    ):
        account.enter(stage, start_ns + at_ns, cause)
    ready_ns = [start_ns + 20_000_000 + i * gap_ns for i in range(num_tokens)]
    account.close(ready_ns[-1] + 100_000)
    return closed(
        account,
        prompt_tokens=40,
        output_tokens=num_tokens,
        first_chunk_tokens=1,
        token_steps=tuple(range(1, num_tokens + 1)),
        token_ready_ns=tuple(ready_ns),
        token_written_ns=tuple(t + 50_000 for t in ready_ns),
    )


@st.composite
def step_runs(draw) -> list[StepRecord]:
    """Consecutive steps with any split, rows and gaps."""
    small = st.integers(0, 10**7)
    rows = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 500), max_size=5)
    now_ns, records = draw(st.integers(10**8, 2**60)), []
    for step_id in range(draw(st.integers(1, 12))):
        gap_ns, idle_ns, *parts = (draw(small) for _ in range(7))
        begin_ns = now_ns + (gap_ns + idle_ns if records else 0)
        now_ns = begin_ns + sum(parts)
        records.append(step(step_id, begin_ns, parts, gap_ns, idle_ns, draw(rows)))
    return records


def step(step_id: int, begin_ns: int, parts=(1, 2, 30, 4, 5), gap_ns: int = 0, idle_ns: int = 0, rows=None):
    plan_ns, launch_ns, device_ns, sample_ns, commit_ns = parts
    rows = {"a": 1} if rows is None else rows
    return StepRecord(
        step_id=step_id,
        begin_ns=begin_ns,
        end_ns=begin_ns + sum(parts),
        plan_ns=plan_ns,
        launch_ns=launch_ns,
        device_ns=device_ns,
        sample_ns=sample_ns,
        commit_ns=commit_ns,
        host_gap_ns=gap_ns,
        idle_ns=idle_ns,
        rows=tuple((request_id, 0, num_tokens) for request_id, num_tokens in rows.items()),
        prefill_tokens=0,
        decode_tokens=len(rows),
        kv_tokens_read=10,
        blocks_used=3,
        num_running=len(rows),
        num_waiting=0,
    )
