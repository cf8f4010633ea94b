"""Closed books to look at: accounts and steps of the last minutes, as a busy server would have written them."""

import random
import time

from splittime.core.errors import ErrorInfo
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

MS = 1_000_000
PLAN = (
    (Stage.RECEIVE, None, 0.4),
    (Stage.TOKENIZE, None, 1.5),
    (Stage.HANDOFF, None, 0.3),
    (Stage.QUEUE, Cause.BATCH_SLOTS, 120),
    (Stage.QUEUE, Cause.KV_BLOCKS, 30),
    (Stage.PREFILL, None, 60),
    (Stage.DECODE, None, 90),
    (Stage.DECODE_STALL, Cause.TOKEN_BUDGET, 20),
    (Stage.DECODE, None, 70),
    (Stage.DELIVER, None, 0.5),
)


def account(
    request_id: str, end_ns: int, *, scale: float = 1.0, error: str | None = None, output_tokens: int = 8
) -> ClosedAccount:
    """One that went through `PLAN`, its times scaled, and ended at `end_ns`; or one refused with an error."""
    plan = PLAN if error is None else PLAN[:2]
    durations_ns = [int(ms * scale * MS) for _, _, ms in plan]
    start_ns = at_ns = end_ns - sum(durations_ns)
    intervals = []
    for (stage, cause, _), duration_ns in zip(plan, durations_ns, strict=True):
        intervals.append(StageInterval(stage, cause, at_ns, at_ns + duration_ns))
        at_ns += duration_ns
    first_ns = intervals[-4].begin_ns if error is None else end_ns
    ready_ns = tuple(first_ns + k * (end_ns - first_ns) // output_tokens for k in range(output_tokens))
    tokens = ready_ns if error is None else ()
    return ClosedAccount(
        request_id=request_id,
        group_id=f"cmpl-{request_id}",
        model="fake",
        endpoint="completions",
        started_at_unix_ns=time.time_ns() - (time.monotonic_ns() - start_ns),
        start_ns=start_ns,
        end_ns=end_ns,
        intervals=tuple(intervals),
        finish_reason="length" if error is None else "refused",
        error=ErrorInfo("invalid_request_error", error, "bad", 400) if error is not None else None,
        prompt_tokens=256,
        cached_tokens=64,
        output_tokens=len(tokens),
        first_chunk_tokens=min(1, len(tokens)),
        token_steps=tuple(range(len(tokens))),
        token_ready_ns=tokens,
        token_written_ns=tokens,
    )


def accounts(count: int, seconds: float = 240, seed: int = 1) -> list[ClosedAccount]:
    """So many, ended at random instants of the last seconds, oldest first; ids r0, r1, ..."""
    rng, now_ns = random.Random(seed), time.monotonic_ns()
    ends = sorted(now_ns - int(rng.random() * seconds * 1e9) for _ in range(count))
    return [account(f"r{i}", end_ns, scale=rng.lognormvariate(0, 0.5)) for i, end_ns in enumerate(ends)]


def steps(count: int, request_ids: tuple[str, ...], length_ns: int = 20 * MS) -> list[StepRecord]:
    """Consecutive steps up to now, every request in each, with a host gap before each."""
    gap_ns = length_ns // 10
    begin_ns = time.monotonic_ns() - count * (length_ns + gap_ns)
    return [_step(i, begin_ns + i * (length_ns + gap_ns), length_ns, gap_ns, request_ids) for i in range(count)]


def _step(step_id: int, begin_ns: int, length_ns: int, gap_ns: int, request_ids: tuple[str, ...]) -> StepRecord:
    part_ns = length_ns // 20
    has_prompt = step_id % 4 == 0
    rows = tuple((name, 16 * step_id, 256 if has_prompt and i == 0 else 1) for i, name in enumerate(request_ids))
    return StepRecord(
        step_id=step_id,
        begin_ns=begin_ns,
        end_ns=begin_ns + length_ns,
        plan_ns=part_ns,
        launch_ns=part_ns,
        device_ns=length_ns - 4 * part_ns,
        sample_ns=part_ns,
        commit_ns=part_ns,
        host_gap_ns=gap_ns,
        idle_ns=0,
        rows=rows,
        prefill_tokens=256 if has_prompt else 0,
        decode_tokens=len(rows) - has_prompt,
        kv_tokens_read=1000,
        blocks_used=20 + step_id % 40,
        num_running=len(rows),
        num_waiting=step_id % 7,
    )
