"""Skips ahead: many steps in which nothing is decided, without a plan, a row and an output for each request of each.

The scheduler says where nothing is decided (`scheduler.stretch`). The books are those that the steps would have made
one by one: a record each, and for each request the instants of its tokens. What a step takes is asked for each of
them, in order, at the instant at which it begins.
"""

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

from msgspec import UNSET

from splittime.core.clock import VirtualClock
from splittime.engine.engine import Engine
from splittime.ledger.steps import Coming, StepRecord
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.stretch import QuietStretch
from splittime.simulate.costed import Answers, StepCosts
from splittime.simulate.shape import StepShape, StepTime


class Skipped(NamedTuple):
    """Steps that follow each other: the first one's number, when the tokens of each were ready, the last one's record,
    and the ends of requests that were done with it."""

    first_step: int
    ready_ns: list[int]
    last: StepRecord
    ends: list[RequestOutput]


class SkipAhead:
    """For an engine of `costed_engine`. on_step: called with each record."""

    def __init__(
        self,
        engine: Engine,
        costs: StepCosts,
        clock: VirtualClock,
        execution: str,
        answers: Answers,
        on_step: Callable[[StepRecord], None],
    ) -> None:
        self._answers = answers
        self._engine, self._scheduler = engine, engine.scheduler
        self._costs, self._clock, self._execution, self._on_step = costs, clock, execution, on_step

    def stretch(self) -> QuietStretch | None:
        """Returns the steps that may be skipped now, right behind another step; None if there are none."""
        return self._scheduler.stretch(self._clock.now_ns(), self._answers.tokens)

    def run(self, stretch: QuietStretch, last: StepRecord, next_ns: float) -> Skipped:
        """Takes steps of a stretch that follows this step, as long as they begin before something comes at `next_ns`.
        Returns which."""
        first_step, clock = last.step_id + 1, self._clock
        ready_ns: list[int] = []
        ends: list[RequestOutput] = []
        ids, positions = stretch.request_ids, stretch.starts
        num_rows, kv_tokens = len(ids), sum(positions)
        while stretch.num_steps < stretch.max_steps and self._may_begin(stretch, next_ns) and stretch.begin_step():
            kv_tokens += num_rows
            offloads, restores = self._scheduler.cache.take_moves()
            moved = len(offloads) + len(restores)
            shape = StepShape(num_rows, num_rows, num_rows, kv_tokens, 0, moved, self._execution)
            begin_ns = clock.now_ns()
            time = self._costs.of(shape, begin_ns)
            ready_ns.append(begin_ns + time.step_ns - time.commit_ns)
            stretch.end_step()
            if stretch.has_ends:
                ends = self._scheduler.take_over(stretch, ready_ns[-1])
            rows = tuple(zip(ids, positions, repeat(1)))
            ended = {end.request_id for end in ends}
            comings = tuple((name, start + 2) for name, start, _ in rows if name in ended)
            last = self._record(last, begin_ns, rows, kv_tokens, time, len(offloads), len(restores), comings)
            positions = [position + 1 for position in positions]
            self._on_step(last)
            clock.advance_to(last.end_ns + time.host_gap_ns)
        if ready_ns and not ends:
            self._scheduler.take_over(stretch, ready_ns[-1])
        self._engine.take_over(last, len(ready_ns))
        return Skipped(first_step, ready_ns, last, ends)

    def _may_begin(self, stretch: QuietStretch, next_ns: float) -> bool:
        now_ns = self._clock.now_ns()
        return now_ns < next_ns and now_ns <= stretch.until_ns

    def _record(
        self,
        last: StepRecord,
        begin_ns: int,
        rows: tuple[tuple[str, int, int], ...],
        kv_tokens: int,
        time: StepTime,
        num_offloaded: int,
        num_restored: int,
        comings: tuple[Coming, ...],
    ) -> StepRecord:
        scheduler = self._scheduler
        offload_ns = time.offload_ns(num_offloaded, num_restored)
        return StepRecord(
            step_id=last.step_id + 1,
            begin_ns=begin_ns,
            end_ns=begin_ns + time.step_ns,
            plan_ns=time.plan_ns,
            launch_ns=time.launch_ns,
            device_ns=time.device_ns,
            sample_ns=time.sample_ns,
            commit_ns=time.commit_ns,
            host_gap_ns=begin_ns - last.end_ns,
            idle_ns=0,
            rows=rows,
            prefill_tokens=0,
            decode_tokens=len(rows),
            kv_tokens_read=kv_tokens,
            blocks_used=scheduler.cache.num_used,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            execution=self._execution,
            offload_ns=offload_ns,
            restore_ns=time.moves_ns - offload_ns,
            offloaded_blocks=num_offloaded,
            restored_blocks=num_restored,
            comings=comings or UNSET,
        )
