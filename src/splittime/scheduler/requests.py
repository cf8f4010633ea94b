"""Every request in the engine, and what it means for the books when one comes to run, is preempted, or ends.

submit ──▶ queue ──admit──▶ running ──end──▶
  │        ▲   ▲               │
  ▼        │   └───preempt─────┘              a request is in exactly one of these places; `check` verifies it
 held ─────┘
"""

import bisect
from typing import Any

from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason
from splittime.core.step import Admitted, Row, TokenLogprob
from splittime.kv.cache import KVCache
from splittime.ledger.stages import Stage
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.counts import Counts
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.held import HeldSet
from splittime.scheduler.outputs import end_output
from splittime.scheduler.queue import WaitingQueue
from splittime.scheduler.speculation import Speculation
from splittime.scheduler.state import RequestState


class Requests:
    """See the module's docstring.

    running: best rank first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = KVCache(config.num_blocks, config.block_size, config.enable_prefix_caching, config.num_host_slots)
        self.queue = WaitingQueue()
        self.held = HeldSet()
        self.running: list[RequestState] = []
        self.by_id: dict[str, RequestState] = {}
        self.counts = Counts()
        self.speculation = Speculation(self.cache, self.counts)
        self._released: list[str] = []
        self._in_flight: dict[int, list[RequestState | None]] = {}  # by step, whose rows it has; None: of no interest

    def admit(self, state: RequestState) -> Admitted:
        """From the queue to the running, with blocks for all its known tokens."""
        self.cache.reserve(state.lease, len(state.token_ids))
        num_cached_tokens, state.num_computed = state.num_computed, 0  # the queue counts pending tokens from scratch
        self.queue.admit(state)
        state.num_computed = num_cached_tokens
        bisect.insort(self.running, state, key=rank_of)
        if state.num_cached_tokens is None:
            state.num_cached_tokens = num_cached_tokens
            self.counts.prefix_query_tokens += state.num_prompt
            self.counts.prefix_hit_tokens += num_cached_tokens
            self.counts.prefix_host_hit_tokens += state.num_host_tokens
            self.counts.prompt_tokens += state.num_prompt
        state.is_known_to_runner = True
        sampling = state.request.sampling
        return Admitted(state.request_id, tuple(state.token_ids), state.num_output, sampling, tuple(state.stop_ids))

    def preempt(self, victim: RequestState, now_ns: int) -> None:
        """Take its blocks back; what it had computed is computed again, but for what the prefix cache still has. Why
        it waits from now on is said where this plan admits."""
        self.running.remove(victim)
        self._take_back(victim)
        victim.recompute_until = max(victim.recompute_until, victim.num_computed)
        victim.num_computed = victim.num_promised = 0
        victim.num_preemptions += 1
        self.queue.push(victim, now_ns)
        self.counts.num_preemptions += 1

    def end(
        self,
        state: RequestState,
        reason: FinishReason,
        now_ns: int,
        error: ErrorInfo | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        """The one way out: blocks freed, account closed, runner told, terminal event made."""
        if state.pushed:
            self.queue.remove(state)
        elif state in self.held:
            self.held.remove(state)
        else:
            self.running.remove(state)
        self._take_back(state)
        del self.by_id[state.request_id]
        state.account.enter(Stage.DELIVER, now_ns)
        state.account.close(now_ns)
        return end_output(state, reason, now_ns, error, token_ids, logprobs, prompt_logprobs)

    def _take_back(self, state: RequestState) -> None:
        """Its blocks return to the pool, the runner is told to forget it with the next plan, and what comes of its rows
        in steps that were not committed yet is of no interest any more."""
        self.cache.free(state.lease)
        if state.is_known_to_runner:
            self._released.append(state.request_id)
            state.is_known_to_runner = False
        self.speculation.forget(state)
        for flight in self._in_flight.values():
            if state in flight:
                flight[flight.index(state)] = None

    def take_released(self) -> tuple[str, ...]:
        """Whom the runner is to forget, once each."""
        released, self._released = tuple(self._released), []
        return released

    def begin_step(self, step_id: int, rows: list[Row]) -> None:
        """These rows run from now on, until `end_step`."""
        self._in_flight[step_id] = [self.by_id[row.request_id] for row in rows]

    def end_step(self, step_id: int) -> list[RequestState | None]:
        """Returns whose the step's rows are; None for rows of no interest."""
        return self._in_flight.pop(step_id)

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    def is_in_flight(self, state: RequestState) -> bool:
        """Whether a step runs that has a row of it."""
        return any(state in flight for flight in self._in_flight.values())

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        everybody = [*self.queue, *self.held, *self.running]
        assert {state.request_id for state in everybody} == set(self.by_id)
        assert len(everybody) == len(self.by_id)
        assert self.running == sorted(self.running, key=rank_of)
        assert self.speculation.active <= set(self.running)
        self.queue.check()
        self.held.check()
        self.cache.check(state.lease for state in self.by_id.values())


def rank_of(state: RequestState) -> Any:
    return state.rank
