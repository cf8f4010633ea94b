"""The ledger as a Chrome trace (JSON): drop it on https://ui.perfetto.dev. Two processes:

    engine      one track; each step a slice, and inside it plan, launch, offload and restore (where there are any),
                device, sample, commit, end to end
    requests    one track for each request; the request a slice, and inside it its stages, end to end;
                each token an instant with its step's id

Timestamps are microseconds (with decimals, as the format has it) from the earliest instant shown.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING
from splittime.ledger.steps import StepRecord

ENGINE_PID, REQUESTS_PID = 1, 2
STEP_PARTS = ("plan", "launch", "offload", "restore", "device", "sample", "commit")
_RARE_PARTS = ("offload", "restore")

Event = dict[str, Any]


def trace(accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> bytes:
    """The whole trace file."""
    origin_ns = min([a.start_ns for a in accounts] + [s.begin_ns for s in steps], default=0)
    events: list[Event] = [*_names(accounts), *(e for step in steps for e in _step_events(step, origin_ns))]
    for tid, account in enumerate(accounts, start=1):
        events += _request_events(account, tid, origin_ns)
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(accounts: Sequence[ClosedAccount]) -> Iterator[Event]:
    yield _name("process_name", ENGINE_PID, 0, "engine")
    yield _name("thread_name", ENGINE_PID, 1, "steps")
    yield _name("process_name", REQUESTS_PID, 0, "requests")
    for tid, account in enumerate(accounts, start=1):
        yield _name("thread_name", REQUESTS_PID, tid, account.request_id)


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _step_events(step: StepRecord, origin_ns: int) -> Iterator[Event]:
    args = {
        "step_id": step.step_id,
        "rows": len(step.rows),
        "requests": [request_id for request_id, _, _ in step.rows],
        "prefill_tokens": step.prefill_tokens,
        "decode_tokens": step.decode_tokens,
        "kv_tokens_read": step.kv_tokens_read,
        "blocks_used": step.blocks_used,
        "num_waiting": step.num_waiting,
        "host_gap_ns": step.host_gap_ns,
        "offloaded_blocks": step.offloaded_blocks,
        "restored_blocks": step.restored_blocks,
        "victims": list(step.victims),
        "execution": step.execution,
        "padded_rows": step.padded_rows,
        "gap_ns": step.gap_ns,
        "enqueue_ns": step.enqueue_ns,
        "collective_ns": step.collective_ns,
        "cpu_wait_ns": step.cpu_wait_ns,
        "off_cpu_ns": step.off_cpu_ns,
    }
    yield _slice(f"step {step.step_id}", ENGINE_PID, 1, step.begin_ns, step.end_ns, origin_ns, args)
    begin_ns = step.begin_ns
    for part in STEP_PARTS:
        end_ns = begin_ns + getattr(step, f"{part}_ns")
        if end_ns == begin_ns and part in _RARE_PARTS:
            continue
        yield _slice(part, ENGINE_PID, 1, begin_ns, end_ns, origin_ns, {})
        begin_ns = end_ns


def _request_events(account: ClosedAccount, tid: int, origin_ns: int) -> Iterator[Event]:
    args = {
        "finish_reason": account.finish_reason,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "host_tokens": account.host_tokens,
        "output_tokens": account.output_tokens,
        "ttft_ns": derive.ttft_ns(account),
        "tpot_ns": derive.tpot_ns(account),
    }
    yield _slice("request", REQUESTS_PID, tid, account.start_ns, account.end_ns, origin_ns, args)
    for interval in account.intervals:
        yield _stage_event(interval, tid, origin_ns)
    for index, (step_id, ready_ns) in enumerate(zip(account.token_steps, account.token_ready_ns, strict=False)):
        yield {
            "ph": "i",
            "s": "t",
            "name": "token",
            "pid": REQUESTS_PID,
            "tid": tid,
            "ts": _us(ready_ns - origin_ns),
            "args": {"index": index, "step_id": step_id},
        }


def _stage_event(interval: StageInterval, tid: int, origin_ns: int) -> Event:
    stage, cause = interval.stage, interval.cause
    name = f"{stage.value} ({cause.value})" if cause is not None else stage.value
    args = {"meaning": STAGE_MEANING[stage], "why": CAUSE_MEANING[cause] if cause is not None else None}
    return _slice(name, REQUESTS_PID, tid, interval.begin_ns, interval.end_ns, origin_ns, args)


def _slice(name: str, pid: int, tid: int, begin_ns: int, end_ns: int, origin_ns: int, args: dict[str, Any]) -> Event:
    ts_us, duration_us = _us(begin_ns - origin_ns), _us(end_ns - begin_ns)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts_us, "dur": duration_us, "args": args}


def _us(duration_ns: int) -> float:
    return duration_ns / 1000
