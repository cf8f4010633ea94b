"""The laws that hold whatever happens: random arrivals, aborts, deadlines, tiny caches, preemptions, changed knobs.

After every step the scheduler's books are checked against the cache's. At the end: each submitted request has had
exactly one terminal event; its account sums to its wall time; nothing is unattributed; blocks in use are zero; and what
was generated is what an undisturbed request alone would have got (chunked = whole, preempted = undisturbed, prefix hit
= cold, batched = alone).
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.clock import VirtualClock
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.engine.messages import EngineStats, StepOutput
from splittime.ledger.account import Account
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler
from splittime.scheduler.state import RequestState
from splittime.simulate.fake import FakeRunner, expected_tokens

MAX_MODEL_LEN = 40
EOS_EVERY = 23


@dataclass
class World:
    """An engine on a fake runner under a virtual clock, and everything that came out of it."""

    config: SchedulerConfig
    plans_ahead: bool = False
    execution: str = "host"
    clock: VirtualClock = field(default_factory=VirtualClock)
    requests: dict[str, Request] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[FinishReason]] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    told: list[EngineStats] = field(default_factory=list)
    last_news: dict[str, RequestOutput] = field(default_factory=dict)
    began_waiting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        runner = FakeRunner(self.config.block_size, 50, EOS_EVERY, 1000, 10, self.clock, self.execution, move_ns=5)
        self.scheduler = Scheduler(self.config)
        self.engine = Engine(self.scheduler, runner, self.clock, runner if self.plans_ahead else None)

    def submit(self, prompt: list[int], max_tokens: int, deadline_ns: int | None, priority: int) -> None:
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
            eos_token_ids=(0,),
            submitted_ns=self.clock.now_ns(),
            priority=priority,
            deadline_ns=None if deadline_ns is None else self.clock.now_ns() + deadline_ns,
            cache_salt="even" if priority % 2 == 0 else "odd",
        )
        self.requests[request.request_id] = request
        self.accounts[request.request_id] = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
        self.tokens[request.request_id] = []
        self.ends[request.request_id] = []
        self.clock.advance(7)
        self.engine.submit(request, self.clock.now_ns())
        self.told.append(self.engine.stats())
        self.clock.advance(1)

    def step(self) -> None:
        overdue = self.overdue()
        self.began_waiting = {state.request_id for state in self.scheduler.queue}
        output = self.engine.step()
        self.scheduler.check()
        self.verify_nobody_overtook(overdue, output)
        self.told.append(self.engine.stats())
        self.clock.advance(3)
        if output is None:
            return
        if output.record is not None:
            self.records.append(output.record)
        for news in output.outputs:
            self.accounts[news.request_id].extend(news.marks)
            self.tokens[news.request_id] += news.token_ids
            self.last_news[news.request_id] = news
            if news.finish_reason is not None:
                assert news.freed_ns is not None
                self.ends[news.request_id].append(news.finish_reason)
                self.accounts[news.request_id].close(news.freed_ns)

    def overdue(self) -> list[RequestState]:
        """Who has waited longer than the starvation bound, the longest wait first; the expired do not count."""
        now_ns, bound_ns = self.clock.now_ns(), self.scheduler.config.starvation_bound_ms * 1e6
        waiting = sorted(entry for entry in self.scheduler.queue._by_age if entry[2].pushed == entry[1])
        alive = [e for e in waiting if e[2].request.deadline_ns is None or e[2].request.deadline_ns > now_ns]
        return [state for since_ns, _, state in alive if now_ns - since_ns > bound_ns]

    def verify_nobody_overtook(self, overdue: list[RequestState], output: StepOutput | None) -> None:
        """The overdue are admitted in the order of their waiting, and nobody else before all of them."""
        if output is None or output.record is None or self.scheduler.config.batching == "static":
            return
        began = {request_id for request_id, _, _ in output.record.rows if request_id in self.began_waiting}
        was_admitted = [state.request_id in began for state in overdue]
        assert was_admitted == sorted(was_admitted, reverse=True), "an overdue request overtook a longer waiting one"
        if not all(was_admitted):
            assert began <= {state.request_id for state in overdue}, "somebody overtook an overdue request"

    def run_dry(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 5_000, "the engine makes no progress"

    def verify(self) -> None:
        for request_id, request in self.requests.items():
            assert len(self.ends[request_id]) == 1, f"{request_id} ended {self.ends[request_id]}"
            account = self.accounts[request_id]
            account.verify()
            assert all(interval.stage is not Stage.UNATTRIBUTED for interval in account.intervals())
            self.verify_tokens(request, self.ends[request_id][0], self.tokens[request_id])
        assert self.scheduler.cache.num_used == 0
        assert not self.scheduler.has_requests
        verify_steps(self.records)
        self.verify_counters()
        if not self.plans_ahead:
            self.verify_recomputation()
        if not self.plans_ahead and self.execution != "host":
            self.verify_device_time()
        assert sum(len(record.victims) for record in self.records) == self.scheduler.num_preemptions
        for stats in self.told:
            self.verify_waiting(stats)

    def verify_counters(self) -> None:
        """What the engine counted is what its requests were told."""
        told, admitted = self.engine.stats(), [n for n in self.last_news.values() if n.num_cached_tokens is not None]
        assert told.output_tokens == sum(len(tokens) for tokens in self.tokens.values())
        assert told.num_preemptions == sum(news.num_preemptions for news in self.last_news.values())
        prompt_tokens = sum(len(self.requests[news.request_id].prompt_token_ids) for news in admitted)
        assert told.prompt_tokens == told.prefix_query_tokens == prompt_tokens
        assert told.prefix_hit_tokens == sum(news.num_cached_tokens or 0 for news in admitted)
        assert told.prefix_host_hit_tokens == sum(news.num_host_tokens for news in admitted)

    def verify_recomputation(self) -> None:
        """What was computed before is computed again in `recompute`, however often it was preempted meanwhile, and
        nothing else is."""
        computed: dict[str, int] = {}
        for record in self.records:
            for request_id, start, count in record.rows:
                account = self.accounts[request_id]
                (stage,) = [i.stage for i in account.intervals() if i.begin_ns <= record.begin_ns < i.end_ns]
                before = computed.get(request_id, 0)
                assert (stage is Stage.RECOMPUTE) == (start < before), f"{request_id} is in {stage}"
                assert stage in (Stage.RECOMPUTE, Stage.PREFILL, Stage.DECODE)
                computed[request_id] = max(before, start + count)

    def verify_device_time(self) -> None:
        """On this clock the host hears of a step's end at once: the device worked, waited, or there was no work."""
        for before, after in pairwise(self.records):
            passed_ns = (after.end_ns - after.commit_ns) - (before.end_ns - before.commit_ns)
            assert after.gap_ns + after.idle_ns + after.busy_ns == passed_ns

    def verify_waiting(self, stats: EngineStats) -> None:
        """Who was said to wait, and for what, is what the books say once they are closed."""
        waits = [
            interval.cause or "not_told"
            for account in self.accounts.values()
            for interval in account.intervals()
            if interval.stage in (Stage.QUEUE, Stage.PREEMPTED) and interval.begin_ns <= stats.now_ns < interval.end_ns
        ]
        assert Counter(waits) == stats.waiting_for
        assert len(waits) == stats.num_waiting

    def verify_tokens(self, request: Request, end: FinishReason, tokens: list[int]) -> None:
        limit = min(request.sampling.max_tokens or 0, MAX_MODEL_LEN - len(request.prompt_token_ids))
        alone = expected_tokens(request.prompt_token_ids, limit, 50, EOS_EVERY)
        assert tokens == alone[: len(tokens)]
        if end in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == alone


configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 50),
    max_prefill_tokens=st.sampled_from([None, 1, 3, 20, 100]),
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_blocks=st.integers(40, 60),
    num_host_slots=st.sampled_from([0, 1, 7, 60]),
    policy=st.sampled_from(["fcfs", "priority", "shortest_prefill", "deadline"]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    starvation_bound_ms=st.sampled_from([0.0, 0.005, 10_000.0]),
    enable_prefix_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
)


def shrink_cache(config: SchedulerConfig) -> SchedulerConfig:
    """A cache that holds just one to one and a half of the longest requests, whatever the block size."""
    num_blocks = -(-MAX_MODEL_LEN // config.block_size) * config.num_blocks // 40
    return msgspec.structs.replace(config, num_blocks=num_blocks)


asks = st.tuples(
    st.integers(0, 2),  # prompts of one group begin alike
    st.integers(1, 38),
    st.integers(1, 40),
    st.sampled_from([None, None, 0, 5_000, 60_000]),
    st.integers(-2, 2),
)
bursts = st.tuples(st.just("burst"), st.lists(asks, min_size=1, max_size=8))
events = st.one_of(
    bursts,
    bursts,
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(0, 50_000)),
    st.tuples(
        st.just("knobs"),
        st.sampled_from(
            [
                {"paused": True},
                {"paused": False},
                {"policy": "priority"},
                {"policy": "fcfs"},
                {"max_num_seqs": 1},
                {"max_num_seqs": 6},
                {"max_prefill_tokens": 1},
                {"max_prefill_tokens": None},
                {"enable_prefix_caching": False},
                {"enable_prefix_caching": True},
                {"enable_chunked_prefill": False},
                {"batching": "static"},
                {"batching": "continuous"},
            ]
        ),
    ),
)


def play(world: World, event: tuple) -> None:
    match event:
        case ("burst", asked):
            for group, length, max_tokens, deadline_ns, priority in asked:
                world.submit([1 + (i // (group + 1)) % 3 for i in range(length)], max_tokens, deadline_ns, priority)
        case ("steps", count):
            for _ in range(count):
                world.step()
        case ("abort", number):
            world.engine.abort(f"r{number}")
        case ("wait", delay_ns):
            world.clock.advance(delay_ns)
        case ("knobs", knobs):
            world.engine.configure(knobs)


@settings(max_examples=300, deadline=None)
@given(configs.map(shrink_cache), st.booleans(), st.booleans(), st.lists(events, min_size=3, max_size=30))
def test_laws_hold_under_anything(
    config: SchedulerConfig, plans_ahead: bool, is_apart: bool, script: list[tuple]
) -> None:
    world = World(config, plans_ahead, "eager" if is_apart else "host")
    for event in script:
        play(world, event)
    world.engine.configure({"paused": False})
    world.run_dry()
    world.verify()
