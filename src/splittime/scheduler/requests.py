"""Every request in the engine, and what it means for the books when one comes to run, is preempted, or ends.

submit ──▶ queue ──admit──▶ running ──end──▶
  │        ▲   ▲               │
  ▼        │   └───preempt─────┘              a request is in exactly one of these places; `check` verifies it
 held ─────┘                  what is computed ahead waits in a place of its own (`prompts_ahead`)

Of the adapters at most `max_loras` have a place, and the requests of the others are held (`lora_slots`). An adapter has
its place while a request of it is queued or runs. When the last of them has ended, the adapter that has waited longest
gets the place, with all its requests. While adapters wait, as many are closing as wait, those first that got their
place first: who comes for one of these waits too, until it is none of them any more or has a place anew. So each
adapter's turn comes after the requests that were there before it, however many newcomers the others have.

Prompts that are computed ahead (`sampling.AHEAD`): of such a request nothing is wanted but what it leaves in the
prefix cache, for another that will come. Three rules keep it from being felt:

* It stands in no queue, and nobody waits behind it. It is computed when nobody waits, one at a time, ranked behind all
  others. Of several tenants the one goes next whose turn was longest ago.
* A step computes `AHEAD_TOKENS` of it at most, of what the others leave of the step's budget. So a step is longer by no
  more than these, and who comes waits for no more than these.
* As soon as anybody lacks a slot or a block, it gives its own back, which is no preemption. What it has computed stays
  in the prefix cache while there is room, and it goes on from there.
"""

import bisect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from splittime.core.errors import ErrorInfo, RequestError
from splittime.core.request import FinishReason, Request, adapter_name
from splittime.core.step import Admitted, Row, RowResult, TokenLogprob
from splittime.kv.cache import KVCache
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.queue import WaitingQueue
from splittime.scheduler.speculation import Counts, Speculation
from splittime.scheduler.state import RequestState, end_output

AHEAD_TOKENS = 64
MOST_TENANTS = 1024  # whose last turns are remembered
NEEDED = ("enable_prefix_caching", "enable_chunked_prefill")


class AheadSet:
    """Who does not run now. Tenants are told apart by their key."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._turns: dict[str, int] = {}  # of tenants, the latest last
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._states

    def add(self, state: RequestState, now_ns: int) -> None:
        """From `now_ns` on it waits until nobody else does."""
        self._states[state.request_id] = state
        state.account.enter(state.waiting_stage, now_ns, Cause.POLICY)

    def remove(self, state: RequestState) -> None:
        del self._states[state.request_id]

    def first(self) -> RequestState | None:
        """Returns who goes next: who was put aside, or else of the tenant whose turn was longest ago."""
        return min(self, key=self._place, default=None)

    def begin(self, state: RequestState) -> None:
        """Take it out: it runs now, which is its tenant's turn."""
        self.remove(state)
        self._num_turns += 1
        self._turns.pop(state.request.tenant, None)
        self._turns[state.request.tenant] = self._num_turns
        if len(self._turns) > MOST_TENANTS:
            del self._turns[next(iter(self._turns))]

    def _place(self, state: RequestState) -> tuple[bool, int, int]:
        is_new = state.num_cached_tokens is None
        return is_new, self._turns.get(state.request.tenant, 0), state.arrival


def check_ahead(request: Request, config: SchedulerConfig) -> None:
    """Raises RequestError where nothing would be left of a prompt that is computed ahead, where it would not be cut,
    and for one with an adapter, for whose place others may wait."""
    if request.adapter:
        words = "a prompt is computed ahead for the model itself, not with an adapter"
        raise RequestError(words, param="model", value=adapter_name(request.adapter), hint="name the model")
    for name in NEEDED:
        if not getattr(config, name):
            hint = f"serve with --{name.replace('_', '-')}, or send the request itself"
            raise RequestError(
                f"a prompt is computed ahead only with {name}", code=f"no_{name}", value=False, hint=hint
            )


CAUSES = frozenset({Cause.GRAMMAR, Cause.LORA_SLOTS, Cause.KV_EXPORT, Cause.KV_TRANSFER, Cause.KV_IMPORT})


class AdapterSlots:
    """Requests without an adapter need no place and are not known here."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._users: dict[str, set[str]] = {}  # ids of requests, by adapter, in the order in which these got places
        self._waiting: dict[str, dict[str, RequestState]] = {}  # by adapter, the one that has waited longest first

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the adapters that have a place, as clients name them."""
        return tuple(map(adapter_name, self._users))

    @property
    def waiting_names(self) -> tuple[str, ...]:
        """Returns those that have requests waiting for a place."""
        return tuple(map(adapter_name, self._waiting))

    def is_waiting(self, state: RequestState) -> bool:
        return state.request_id in self._waiting.get(state.request.adapter, ())

    def enter(self, state: RequestState) -> bool:
        """Returns whether it may queue. Otherwise it waits here, until `leave` of another lets it in."""
        adapter = state.request.adapter
        if not adapter or state.request_id in self._users.get(adapter, ()):
            return True
        if self._is_open(adapter):
            self._users.setdefault(adapter, set()).add(state.request_id)
            return True
        self._waiting.setdefault(adapter, {})[state.request_id] = state
        return False

    def leave(self, state: RequestState) -> list[RequestState]:
        """Forget a request, which has ended. Returns who may queue now that could not before."""
        adapter = state.request.adapter
        if not adapter:
            return []
        users, waiting = self._users.get(adapter, set()), self._waiting.get(adapter, {})
        users.discard(state.request_id)
        waiting.pop(state.request_id, None)
        if not users:
            self._users.pop(adapter, None)
        if not waiting:
            self._waiting.pop(adapter, None)
        return self._let_in()

    def _let_in(self) -> list[RequestState]:
        """Gives out the places that are free, and opens what need not close any more."""
        freed: list[RequestState] = []
        while (adapter := next(filter(self._is_open, self._waiting), None)) is not None:
            states = self._waiting.pop(adapter)
            self._users.setdefault(adapter, set()).update(states)
            freed += states.values()
        return freed

    def _is_open(self, adapter: str) -> bool:
        """Returns whether requests of it may queue now."""
        if adapter not in self._users:
            return len(self._users) < self._max_loras
        num_without_place = sum(one not in self._users for one in self._waiting)
        return adapter not in list(self._users)[:num_without_place]

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        assert len(self._users) <= self._max_loras
        assert all(self._users.values())
        assert all(self._waiting.values())
        assert not any(map(self._is_open, self._waiting)), "somebody waits for what is free"


class HeldSet:
    """The held: requests that wait for something of their own, beside the queue, each with its cause.

    A grammar that is compiled, an adapter that has no place yet, keys and values that are on their way: whoever waits
    for one of these cannot be admitted, however much room there is, and would keep all behind it waiting if it stood in
    the queue. It keeps its rank and its arrival. When it is released it joins the queue, and its wait there, which the
    starvation bound counts, begins then. num_tokens: that the held still have to be computed.
    """

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._states

    def add(self, state: RequestState, cause: Cause, now_ns: int) -> None:
        """From `now_ns` on it waits for this; it stands in no queue."""
        assert cause in CAUSES, f"{cause} is not a cause to be held for"
        if state not in self:
            self._states[state.request_id] = state
            self.num_tokens += state.num_pending
        state.account.enter(state.waiting_stage, now_ns, cause)

    def remove(self, state: RequestState) -> None:
        del self._states[state.request_id]
        self.num_tokens -= state.num_pending

    def waiting_for(self) -> Counter[Cause | None]:
        """How many are held for what."""
        return Counter(state.account.cause for state in self)

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        assert self.num_tokens == sum(state.num_pending for state in self)
        assert all(not state.pushed and not state.lease.block_ids for state in self), (
            "one that is held is elsewhere too"
        )
        assert set(self.waiting_for()) <= CAUSES


class Requests:
    """See the module's docstring.

    running: best rank first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        sizes = config.num_blocks, config.block_size
        tiers = config.num_host_slots, config.num_state_slots
        self.cache = KVCache(*sizes, config.enable_prefix_caching, *tiers)
        self.queue = WaitingQueue()
        self.held = HeldSet()
        self.adapter_slots = AdapterSlots(config.max_loras)
        self.prompts_ahead = AheadSet()
        self.running: list[RequestState] = []
        self.by_id: dict[str, RequestState] = {}
        self._awaiting: set[RequestState] = set()  # they run, and get no rows until it is known what may come
        self.keys: Counter[str] = Counter()  # of those in `by_id`
        self.counts = Counts()
        self.speculation = Speculation(self.cache, self.counts)
        self._released: dict[str, bool] = {}  # whom the runner is to forget; whether it was preempted
        self._in_flight: dict[int, list[RequestState | None]] = {}  # by step, whose rows it has; None: of no interest

    def enter(self, state: RequestState) -> None:
        """Take it in; where it waits is its caller's to say."""
        self.by_id[state.request_id] = state
        self.keys[state.request.tenant] += 1

    @property
    def is_shared(self) -> bool:
        """Several keys have requests here."""
        return len(self.keys) > 1

    def admit(self, state: RequestState) -> Admitted:
        """From the queue to the running, with blocks for all its known tokens."""
        self.cache.reserve(state.lease, len(state.token_ids))
        num_cached_tokens, state.num_computed = state.num_computed, 0  # the queue counts pending tokens from scratch
        if state.is_ahead:
            self.prompts_ahead.begin(state)
        else:
            self.queue.leave(state, is_admitted=True)
            self.queue.shares.run(state.share)
        state.num_computed = num_cached_tokens
        bisect.insort(self.running, state, key=rank_of)
        if state.num_cached_tokens is None:
            state.num_cached_tokens = num_cached_tokens
            self.counts.prefix_query_tokens += state.num_prompt
            self.counts.prefix_hit_tokens += num_cached_tokens
            self.counts.prefix_host_hit_tokens += state.num_host_tokens
            self.counts.prompt_tokens += state.num_prompt
        state.is_known_to_runner = True
        request, known = state.request, tuple(state.token_ids)
        stop_ids, salt = tuple(state.stop_ids), request.cache_salt
        asked = request.sampling, stop_ids, salt, request.adapter, request.tenant
        return Admitted(state.request_id, known, state.num_output, *asked)

    def preempt(self, victim: RequestState, now_ns: int) -> None:
        """Take its blocks back; what it had computed is computed again, but for what the prefix cache still has. Why
        it waits from now on is said where this plan admits."""
        self._stop(victim)
        self._take_back(victim, is_preempted=True)
        victim.recompute_until = max(victim.recompute_until, victim.num_computed)
        victim.num_computed = victim.num_promised = 0
        victim.spared_until = len(victim.token_ids)
        if victim.is_ahead:  # that is its place, and nothing is lost to anybody: it does not count
            self.prompts_ahead.add(victim, now_ns)
            return
        victim.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.queue.push(victim, now_ns)

    def end(
        self,
        state: RequestState,
        reason: FinishReason,
        now_ns: int,
        error: ErrorInfo | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        pooled: bytes = b"",
    ) -> RequestOutput:
        """The one way out: blocks freed, account closed, runner told, terminal event made."""
        if state.pushed:
            self.queue.leave(state, is_admitted=False)
        elif state in self.held:
            self.held.remove(state)
        elif state in self.prompts_ahead:
            self.prompts_ahead.remove(state)
        else:
            self._stop(state)
        self._take_back(state)
        del self.by_id[state.request_id]
        self._forget_key(state.request.tenant)
        if state.request.adapter:
            self._let_in(self.adapter_slots.leave(state), now_ns)
        state.account.enter(Stage.DELIVER, now_ns)
        state.account.close(now_ns)
        return end_output(state, reason, now_ns, error, token_ids, logprobs, prompt_logprobs, pooled)

    def _stop(self, state: RequestState) -> None:
        self.running.remove(state)
        if not state.is_ahead:
            self.queue.shares.stop(state.share)

    def _forget_key(self, tenant: str) -> None:
        self.keys[tenant] -= 1
        if not self.keys[tenant]:
            del self.keys[tenant]

    def _let_in(self, states: list[RequestState], now_ns: int) -> None:
        """From the held to the queue: their adapters have places."""
        for state in states:
            self.held.remove(state)
            state.account.enter(state.waiting_stage, now_ns, Cause.ENGINE_LOOP)
            self.queue.push(state, now_ns)

    def _take_back(self, state: RequestState, is_preempted: bool = False) -> None:
        """Return its blocks to the pool, have the runner forget it with the next plan, and ignore what comes of its
        rows in steps that are not committed yet."""
        self.cache.free(state.lease)
        if state.is_known_to_runner:
            self._released[state.request_id] = is_preempted
            state.is_known_to_runner = False
        self.speculation.forget(state)
        self._awaiting.discard(state)
        for flight in self._in_flight.values():
            if state in flight:
                flight[flight.index(state)] = None

    def wait_for_form(self, state: RequestState, row: Row, row_result: RowResult) -> None:
        """Give it no row until `go_on`, since this one, which was to sample, gave nothing."""
        state.num_promised -= row.num_samples
        self.speculation.settle(state, row, row_result)
        state.num_computed, state.plan_until = len(state.token_ids) - 1, 0
        state.recompute_until = len(state.token_ids)
        self._awaiting.add(state)

    def go_on(self, state: RequestState) -> bool:
        """Give it rows again; returns whether it had to wait."""
        had_to_wait = state in self._awaiting
        if had_to_wait:
            self._awaiting.remove(state)
            state.plan_until = state.max_num_tokens
        return had_to_wait

    def awaits_form(self, state: RequestState) -> bool:
        """Whether it gets no row until it is known what may come."""
        return state in self._awaiting

    @property
    def may_run(self) -> bool:
        """Whether one of the running may get a row."""
        return len(self.running) > len(self._awaiting)

    @property
    def running_prompt_ahead(self) -> RequestState | None:
        """Who is computed ahead now: nobody ranks behind it."""
        return self.running[-1] if self.running and self.running[-1].is_ahead else None

    @property
    def num_served(self) -> int:
        """How many run of those who are not computed ahead."""
        return len(self.running) - (self.running_prompt_ahead is not None)

    def take_released(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns whom the runner is to forget, once each, and who of them was preempted and comes again."""
        released, self._released = self._released, {}
        return tuple(released), tuple([name for name, is_preempted in released.items() if is_preempted])

    def begin_step(self, step_id: int, rows: list[Row]) -> None:
        """These rows run from now on, until `end_step`."""
        self._in_flight[step_id] = [self.by_id[row.request_id] for row in rows]

    def end_step(self, step_id: int) -> list[RequestState | None]:
        """Returns whose the step's rows are; None for rows of no interest."""
        return self._in_flight.pop(step_id)

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def in_flight(self) -> set[RequestState | None]:
        """Who has rows in steps that run."""
        return {state for flight in self._in_flight.values() for state in flight}

    def is_in_flight(self, state: RequestState) -> bool:
        """Whether a step runs that has a row of it."""
        return any(state in flight for flight in self._in_flight.values())

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        everybody = [*self.queue, *self.held, *self.prompts_ahead, *self.running]
        assert sum(state.is_ahead for state in self.running) <= 1
        assert {state.request_id for state in everybody} == set(self.by_id)
        assert len(everybody) == len(self.by_id)
        assert self.keys == Counter(state.request.tenant for state in everybody)
        assert self.running == sorted(self.running, key=rank_of)
        assert self.speculation.active | self._awaiting <= set(self.running)
        assert all(state.plan_until == 0 and state.num_pending == 1 for state in self._awaiting)
        assert Counter(state.share.name for state in self.running if not state.is_ahead) == {
            name: share.num_running for name, share in self.queue.shares.running.items()
        }
        self.queue.check()
        self.held.check()
        self.adapter_slots.check()
        self.cache.check(state.lease for state in self.by_id.values())


def rank_of(state: RequestState) -> Any:
    return state.rank
