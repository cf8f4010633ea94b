"""What an account says in figures: TTFT, TPOT, ITL, stalls, stage totals. This file is their only definition.

Pure functions of closed books; nothing here reads a clock. With n output tokens, arrival `start_ns` and end `end_ns`:

    E2E        = end - start
    TTFT       = instant the first token was written - start         includes the queue; None if none was written
    TPOT       = (E2E - TTFT) / (n - tokens in the first chunk)      None if the first chunk held them all
    first ready, per token: the same by when tokens were ready, so that whole answers and streams are compared
    ITL        = gaps between tokens by the server's clock           ready to ready; 0 within one step
    max stall  = the longest ITL
    send lag   = instant a token was written - instant it was ready  its own distribution, part of no sum

What is missing is None, never 0. Percentiles are nearest rank: a value that did occur, never one in between.

The device book is the machine's view of the same time. What it promises, in integers, and `verify_device_book` checks:

    sum(shares) + host_gap_ns + idle_ns == wall_ns
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from statistics import median_low
from typing import TypeVar

import msgspec

from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord, verify_steps

PROMPT_BUCKET_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PERCENTILES = (50, 90, 95, 99)

KeyT = TypeVar("KeyT")


def e2e_ns(account: ClosedAccount) -> int:
    return account.end_ns - account.start_ns


def ttft_ns(account: ClosedAccount) -> int | None:
    return account.token_written_ns[0] - account.start_ns if account.token_written_ns else None


def tpot_ns(account: ClosedAccount) -> float | None:
    first_ns = ttft_ns(account)
    later_tokens = account.output_tokens - account.first_chunk_tokens
    if first_ns is None or later_tokens <= 0:
        return None
    return (e2e_ns(account) - first_ns) / later_tokens


def first_ready_ns(account: ClosedAccount) -> int | None:
    return account.token_ready_ns[0] - account.start_ns if account.token_ready_ns else None


def per_token_ns(account: ClosedAccount) -> float | None:
    ready_ns = account.token_ready_ns
    return (ready_ns[-1] - ready_ns[0]) / (len(ready_ns) - 1) if len(ready_ns) > 1 else None


def itl_ns(account: ClosedAccount) -> list[int]:
    return [after - before for before, after in pairwise(account.token_ready_ns)]


def send_lag_ns(account: ClosedAccount) -> list[int]:
    """For each token that was written: how long after it was ready."""
    return [w - r for r, w in zip(account.token_ready_ns, account.token_written_ns, strict=False)]


def usual_off_share(steps: Iterable[StepRecord]) -> float:
    """Returns the share of a step's remaining time that its thread is usually off the processor: the steps' median. One
    that waits for other threads' part of a product is off as well, in each step alike."""
    known = [(step.off_cpu_ns, step.length_ns) for step in steps if step.off_cpu_ns is not None]
    return median_low([off / max(1, length - off) for off, length in known]) if known else 0.0


def stopped_ns(step: StepRecord, usual: float) -> float:
    """Returns how long a step's thread was stopped: off the processor, and ready for none, beyond what is usual."""
    off_ns = step.off_cpu_ns or 0
    return max(0.0, off_ns - usual * (step.length_ns - off_ns))


class Stall(msgspec.Struct, frozen=True):
    """The longest gap of a request: before which token, made by which step."""

    duration_ns: int
    token_index: int
    step_id: int


def max_stall(account: ClosedAccount) -> Stall | None:
    gaps_ns = itl_ns(account)
    if not gaps_ns:
        return None
    duration_ns = max(gaps_ns)
    token_index = gaps_ns.index(duration_ns) + 1
    return Stall(duration_ns, token_index, account.token_steps[token_index])


def cancel_to_freed_ns(account: ClosedAccount) -> int | None:
    """From noticing that the client went away until its blocks were free. The engine may have freed them first: 0."""
    if account.cancelled_ns is None or account.freed_ns is None:
        return None
    return max(0, account.freed_ns - account.cancelled_ns)


def request_of(account: ClosedAccount) -> tuple[str, int]:
    """Returns what tells an HTTP request from others: its choices have an account each, and an id may come again."""
    return account.group_id, account.start_ns


def stage_totals_ns(account: ClosedAccount) -> dict[tuple[Stage, Cause | None], int]:
    """Time by stage and cause, in the order in which they first occur. The values sum to E2E."""
    return _totals_ns(account.intervals)


def _totals_ns(intervals: Iterable[StageInterval]) -> dict[tuple[Stage, Cause | None], int]:
    totals_ns: dict[tuple[Stage, Cause | None], int] = {}
    for interval in intervals:
        key = (interval.stage, interval.cause)
        totals_ns[key] = totals_ns.get(key, 0) + interval.end_ns - interval.begin_ns
    return totals_ns


def server_timing(intervals: Sequence[StageInterval], start_ns: int) -> str:
    """Returns the `Server-Timing` header (W3C): where the time up to now went, for browsers' network panels and for
    `curl -i`. Durations are milliseconds; `total` runs from `start_ns` to the end of the last interval.

    tokenize;dur=0.412, queue;dur=12.040;desc="kv_blocks", prefill;dur=31.700, total;dur=44.152
    """
    entries = [_timing(stage.value, ns, cause) for (stage, cause), ns in _totals_ns(intervals).items()]
    end_ns = intervals[-1].end_ns if intervals else start_ns
    return ", ".join([*entries, _timing("total", end_ns - start_ns, None)])


def _timing(name: str, duration_ns: int, cause: Cause | None) -> str:
    entry = f"{name};dur={duration_ns / 1e6:.3f}"
    return f'{entry};desc="{cause.value}"' if cause is not None else entry


def stage_ns(account: ClosedAccount) -> dict[Stage, int]:
    """Time by stage, causes taken together."""
    totals_ns: dict[Stage, int] = {}
    for (stage, _), duration_ns in stage_totals_ns(account).items():
        totals_ns[stage] = totals_ns.get(stage, 0) + duration_ns
    return totals_ns


def queue_ns_by_cause(account: ClosedAccount) -> dict[Cause | None, int]:
    return {cause: ns for (stage, cause), ns in stage_totals_ns(account).items() if stage is Stage.QUEUE}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: the smallest value with at least `percent` % of all at or below it."""
    return _nearest_rank(sorted(values), percent) if values else None


def percentiles(values: Sequence[float], percents: Iterable[float] = PERCENTILES) -> dict[str, float]:
    """`{"p50": ...}` by nearest rank; empty for no values."""
    ordered = sorted(values)
    return {f"p{percent:g}": _nearest_rank(ordered, percent) for percent in percents} if ordered else {}


def _nearest_rank(ordered: Sequence[float], percent: float) -> float:
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} is outside 0 to 100")
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)]


def prompt_bucket(prompt_tokens: int) -> str:
    """The name of the prompt-length bucket: `1-16`, `17-32`, ... `131073+`."""
    low = 1
    for edge in PROMPT_BUCKET_EDGES:
        if prompt_tokens <= edge:
            return f"{low}-{edge}"
        low = edge + 1
    return f"{low}+"


class DeviceBook(msgspec.Struct, frozen=True):
    """The device's time over some consecutive steps.

    share_ns: device time (copies of blocks, forward and sampling) by request, each step's shared among its rows by
        their tokens. That is a convention of book-keeping, not a claim about cost.
    host_gap_ns: there was work, and the device waited for the host: planning, launching, committing, between steps.
    idle_ns: there was no work.
    """

    share_ns: dict[str, int]
    host_gap_ns: int
    idle_ns: int
    wall_ns: int


def device_book(records: Sequence[StepRecord]) -> DeviceBook:
    """The book of consecutive steps; `wall_ns` begins where the step before the first ended."""
    share_ns: dict[str, int] = {}
    host_gap_ns = idle_ns = 0
    for record in records:
        busy_ns = record.busy_ns
        host_gap_ns += record.host_gap_ns + record.plan_ns + record.launch_ns + record.commit_ns
        idle_ns += record.idle_ns
        if not record.rows:
            host_gap_ns += busy_ns
        tokens = {request_id: num_tokens for request_id, _, num_tokens in record.rows}
        for request_id, duration_ns in apportion(busy_ns, tokens).items():
            share_ns[request_id] = share_ns.get(request_id, 0) + duration_ns
    return DeviceBook(share_ns, host_gap_ns, idle_ns, _wall_ns(records))


def apportion(total: int, weights: Mapping[KeyT, int]) -> dict[KeyT, int]:
    """Split an integer by weights with nothing lost: largest remainders get what rounding down leaves over."""
    weight_sum = sum(weights.values())
    if not weights:
        return {}
    if weight_sum == 0:
        weights, weight_sum = dict.fromkeys(weights, 1), len(weights)
    parts = {key: total * weight // weight_sum for key, weight in weights.items()}
    left_over = total - sum(parts.values())
    by_remainder = sorted(weights, key=lambda key: -(total * weights[key] % weight_sum))
    for key in by_remainder[:left_over]:
        parts[key] += 1
    return parts


def verify_device_book(book: DeviceBook, records: Sequence[StepRecord]) -> None:
    """Raise ValueError unless the steps are consecutive and the book accounts for all of their wall time exactly."""
    verify_steps(records)
    for before, after in pairwise(records):
        if after.step_id != before.step_id + 1:
            raise ValueError(f"step {after.step_id} follows {before.step_id}: the device book needs consecutive steps")
    booked_ns = sum(book.share_ns.values()) + book.host_gap_ns + book.idle_ns
    if booked_ns != book.wall_ns or book.wall_ns != _wall_ns(records):
        raise ValueError(f"device book holds {booked_ns} ns of {_wall_ns(records)} ns")


def _wall_ns(records: Sequence[StepRecord]) -> int:
    if not records:
        return 0
    first = records[0]
    return records[-1].end_ns - (first.begin_ns - first.host_gap_ns - first.idle_ns)
