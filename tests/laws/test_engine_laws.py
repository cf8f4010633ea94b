"""The laws that hold whatever happens: random arrivals, aborts, deadlines, tiny caches, preemptions, changed knobs,
requests that are held and released, drafts that are right, wrong, or neither, masks that are late.

Everything comes as a message at an instant of virtual time, to the loop that serves. After every turn the scheduler's
books are checked against the cache's. At the end: each submitted request has had exactly one terminal event; its
account sums to its wall time; nothing is unattributed; blocks in use are zero; and what was generated is what an
undisturbed request alone would have got (chunked = whole, preempted = undisturbed, prefix hit = cold, batched = alone,
drafted = decoded one by one).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from zlib import crc32

import msgspec
from guessing import DraftsAhead, Guesser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.fake_runner import FakeRunner, expected_tokens
from benchmarks.timed_run import HostCosts, RequestOutcome, TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.engine import EngineStats
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.core.step import Row
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import Abort, Configure, MaskFound, StepOutput
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.requests import CAUSES
from splittime.scheduler.scheduler import Scheduler
from splittime.scheduler.state import RequestState

MAX_MODEL_LEN = 40
EOS_EVERY = 23
VOCAB_SIZE = 50
STEP_NS = 1010  # of one token


def following(_: str, token_ids: Sequence[int], count: int) -> list[int]:
    """What a FakeRunner samples after these tokens; an end-of-sequence id does not stop it."""
    found: list[int] = []
    while len(found) < count:
        found += expected_tokens([*token_ids, *found], count - len(found), VOCAB_SIZE, EOS_EVERY)
    return found


def unverified_drafts(record: StepRecord, request_id: str) -> int:
    """Returns how many drafts of this request's row gave no token: wrong ones, and those of a late row."""
    wrong = sum(drafts - right for name, drafts, right in record.verified if name == request_id)
    return wrong + sum(drafts for name, drafts in record.late_rows if name == request_id)


class CheckedCrank(Crank):
    """Lets a world look around before and after each turn."""

    def __init__(self, parts: EngineParts, world: "World") -> None:
        super().__init__(parts, world.clock)
        self._world = world

    def submit(self, request: Request, received_ns: int, held_for: Cause | None = None) -> None:
        self._world.before_submit(request)
        super().submit(request, received_ns, held_for)
        self._world.num_taken_in += 1
        self._world.listen()

    def turn(self) -> StepOutput | None:
        before = self._world.before_turn()
        output = super().turn()
        self._world.after_turn(output, *before)
        return output


class World:
    """An engine on a fake runner in its loop under a virtual clock, and everything that came out of it.

    at_ns: when the next event of the script comes. chance: what is told of each draft. late: masks are, unless
    steps are planned ahead. num_keys: that ask, each of
    another weight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        plans_ahead: bool = False,
        execution: str = "host",
        drafts: bool = False,
        chance: float | None = None,
        late: bool = False,
    ) -> None:
        if drafts or late:  # a state goes back for neither
            config = msgspec.structs.replace(config, num_state_slots=0)
        self.config, self.plans_ahead, self.execution = config, plans_ahead, execution
        self.num_keys = 1
        self.calls: list[tuple[int, Callable[[], object]]] = []  # of the scheduler, and from when on
        self.clock, self.at_ns = VirtualClock(), 0
        self.told: list[tuple[EngineStats, int]] = []  # and how many requests it had taken in
        self.num_turns = self.num_taken_in = 0
        self.scheduler = Scheduler(config)
        self.engine = Engine(self.scheduler, plans_ahead=plans_ahead)
        is_late = self.is_late if late and not plans_ahead else None
        fake = FakeRunner(config.block_size, VOCAB_SIZE, EOS_EVERY, 1000, 10, self.clock, execution, 5, is_late)
        self.guesser = Guesser(following, VOCAB_SIZE, chance)
        self.num_late: Counter[str] = Counter()
        drafting = DraftsAhead(fake, self.guesser, self.clock.now_ns)
        self.crank = CheckedCrank(self.parts(drafting if drafts else fake), self)
        self.played = TimedRun(self.crank, self.clock, HostCosts(after_output_ns=3, per_message_ns=1))

    def parts(self, runner: FakeRunner | DraftsAhead) -> EngineParts:
        return EngineParts(self.engine, runner)

    @property
    def outcomes(self) -> dict[str, RequestOutcome]:
        return self.played.outcomes

    @property
    def records(self) -> list[StepRecord]:
        return self.played.steps

    def submit(
        self, prompt: list[int], max_tokens: int, deadline_ns: int | None, priority: int, pooling: str = ""
    ) -> None:
        request = Request(
            request_id=f"r{len(self.outcomes)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=0, pooling=pooling),
            eos_token_ids=(0,),
            submitted_ns=self.at_ns,
            priority=priority,
            deadline_ns=None if deadline_ns is None else self.at_ns + deadline_ns,
            cache_salt="even" if priority % 2 == 0 else "odd",
            tenant=f"key-{priority % self.num_keys}" if self.num_keys > 1 else "",
            weight=1.0 + priority % self.num_keys,
        )
        self.played.submit(request, self.at_ns + 7)
        self.at_ns += 8

    def is_late(self, row: Row) -> bool:
        """Whether the mask of a row that samples is: of every third, and then of some again. It is there later."""
        mixed = crc32(f"{row.request_id} {row.start} {self.num_late[row.request_id]}".encode())
        if mixed % 3:
            return False
        self.num_late[row.request_id] += 1
        self.played.at(self.clock.now_ns() + 1 + mixed % (4 * STEP_NS), MaskFound(row.request_id))
        return True

    def call(self, of_scheduler: Callable[[], object]) -> None:
        """What a driver does that holds requests; a message to nobody brings about a turn."""
        self.calls.append((self.at_ns, of_scheduler))
        self.played.at(self.at_ns, Abort("nobody"))

    def release_all(self) -> None:
        for state in list(self.scheduler.held):
            assert self.scheduler.release(state.request_id, self.clock.now_ns())

    def before_submit(self, request: Request) -> None:
        pass

    def before_turn(self) -> tuple[list[RequestState], set[str]]:
        self.num_turns += 1
        assert self.num_turns < 20_000, "the engine makes no progress"
        while self.calls and self.calls[0][0] <= self.clock.now_ns():
            self.calls.pop(0)[1]()
        return self.overdue(), {state.request_id for state in self.scheduler.queue}

    def after_turn(self, output: StepOutput | None, overdue: list[RequestState], waiting: set[str]) -> None:
        self.scheduler.check()
        self.verify_nobody_overtook(overdue, waiting, output)
        self.listen()

    def listen(self) -> None:
        self.told.append((self.crank.stats(), self.num_taken_in))

    def run(self) -> None:
        """Until all that was asked is done; what comes next comes after that."""
        self.played.run()
        self.at_ns = max(self.at_ns, self.clock.now_ns())

    def overdue(self) -> list[RequestState]:
        """Who has waited longer than the starvation bound, the longest wait first; the expired do not count."""
        now_ns, bound_ns = self.clock.now_ns(), self.scheduler.config.starvation_bound_ms * 1e6
        waiting = sorted(entry for line in self.scheduler.queue._lines.values() for entry in line.by_age)
        alive = [e for e in waiting if e[2].request.deadline_ns is None or e[2].request.deadline_ns > now_ns]
        return [state for since_ns, _, state in alive if now_ns - since_ns > bound_ns]

    def verify_nobody_overtook(self, overdue: list[RequestState], waiting: set[str], output: StepOutput | None) -> None:
        """The overdue of a key are admitted in the order of their waiting, and nobody else of it before all of them."""
        if output is None or output.record is None or self.scheduler.config.batching == "static":
            return
        began = {request_id for request_id, _, _ in output.record.rows if request_id in waiting}
        for key in {state.share.name for state in overdue}:
            of_key = [state.request_id for state in overdue if state.share.name == key]
            was_admitted = [name in began for name in of_key]
            assert was_admitted == sorted(was_admitted, reverse=True), "an overdue one overtook a longer waiting one"
            others = {name for name in began if self.outcomes[name].request.tenant == key} - set(of_key)
            assert all(was_admitted) or not others, "somebody overtook an overdue request"

    def verify(self) -> None:
        for request_id, outcome in self.outcomes.items():
            assert len(outcome.finish_reasons) == 1, f"{request_id} ended {outcome.finish_reasons}"
            outcome.account.verify()
            assert all(interval.stage is not Stage.UNATTRIBUTED for interval in outcome.account.intervals())
            self.verify_tokens(outcome)
        assert self.scheduler.cache.num_used == 0
        assert not self.scheduler.has_requests
        verify_steps(self.records)
        self.verify_drafts()
        self.verify_counters()
        if not self.plans_ahead:
            self.verify_recomputation()
        if not self.plans_ahead and self.execution != "host":
            self.verify_device_time()
        victims = [name for record in self.records for name in record.victims]
        num_preempted = sum(self.outcomes[name].request.sampling.pooling != AHEAD for name in victims)
        assert num_preempted == self.scheduler.counts.num_preemptions
        for stats, num_taken_in in self.told:
            self.verify_waiting(stats, num_taken_in)

    def verify_counters(self) -> None:
        """What the engine counted is what its requests were told."""
        told, outcomes = self.crank.stats(), list(self.outcomes.values())
        admitted = [one for one in outcomes if one.num_cached_tokens is not None]
        assert told.output_tokens == sum(len(one.token_ids) for one in outcomes)
        assert told.num_preemptions == sum(one.num_preemptions for one in outcomes)
        prompt_tokens = sum(len(one.request.prompt_token_ids) for one in admitted)
        assert told.prompt_tokens == told.prefix_query_tokens == prompt_tokens
        assert told.prefix_hit_tokens == sum(one.num_cached_tokens or 0 for one in admitted)
        assert told.prefix_host_hit_tokens == sum(one.num_host_tokens for one in admitted)

    def verify_drafts(self) -> None:
        """They come of what the budget has left, and what came of them is counted."""
        for record in self.records:
            if record.verified:
                assert sum(num_tokens for _, _, num_tokens in record.rows) <= self.config.max_num_batched_tokens
        verified = [(drafts, accepted) for record in self.records for _, drafts, accepted in record.verified]
        told = self.crank.stats()
        if not self.plans_ahead:  # else a request may end between the two
            assert told.draft_tokens == sum(drafts for drafts, _ in verified)
            assert told.accepted_draft_tokens == sum(accepted for _, accepted in verified)
            learnt = self.guesser.num_learnt, self.guesser.num_learnt_right
            assert learnt == (told.draft_tokens, told.accepted_draft_tokens)

    def verify_recomputation(self) -> None:
        """What was computed before, or cached, is computed again in `recompute`, however often it was preempted
        meanwhile, and nothing else is."""
        computed: dict[str, int] = {}
        for record in self.records:
            for request_id, start, count in record.rows:
                outcome = self.outcomes[request_id]
                account = outcome.account
                (stage,) = [i.stage for i in account.intervals() if i.begin_ns <= record.begin_ns < i.end_ns]
                before = computed.get(request_id, outcome.num_cached_tokens or 0)
                assert (stage is Stage.RECOMPUTE) == (start < before), f"{request_id} is in {stage}"
                assert stage in (Stage.RECOMPUTE, Stage.PREFILL, Stage.DECODE)
                computed[request_id] = max(before, start + count - unverified_drafts(record, request_id))

    def verify_device_time(self) -> None:
        """On this clock the host hears of a step's end at once: the device worked, waited, or there was no work."""
        for before, after in pairwise(self.records):
            passed_ns = (after.end_ns - after.commit_ns) - (before.end_ns - before.commit_ns)
            assert after.gap_ns + after.idle_ns + after.busy_ns == passed_ns

    def verify_waiting(self, stats: EngineStats, num_taken_in: int) -> None:
        """Who was said to wait, and for what, is what the books say once they are closed. What is to be computed ahead
        keeps nobody waiting."""
        waits = [
            interval.cause or "not_told"
            for outcome in itertools.islice(self.outcomes.values(), num_taken_in)
            if outcome.request.sampling.pooling != AHEAD
            for interval in outcome.account.intervals()
            if interval.stage in (Stage.QUEUE, Stage.PREEMPTED) and interval.begin_ns <= stats.now_ns < interval.end_ns
        ]
        assert Counter(waits) == stats.waiting_for
        assert len(waits) == stats.num_waiting

    def verify_embedding(self, outcome: RequestOutcome) -> None:
        """It has no token, and it stops when its prompt has been computed and not before."""
        request, end = outcome.request, outcome.finish_reasons[0]
        assert not outcome.token_ids
        assert end is not FinishReason.LENGTH
        rows = [row for record in self.records for row in record.rows if row[0] == request.request_id]
        if end is FinishReason.STOP:
            assert rows[-1][1] + rows[-1][2] == len(request.prompt_token_ids)
        if request.sampling.pooling == "mean":
            assert not outcome.num_cached_tokens

    def verify_tokens(self, outcome: RequestOutcome) -> None:
        request, end = outcome.request, outcome.finish_reasons[0]
        if request.sampling.pooling:
            self.verify_embedding(outcome)
            return
        limit = min(request.sampling.max_tokens or 0, MAX_MODEL_LEN - len(request.prompt_token_ids))
        alone = expected_tokens(request.prompt_token_ids, limit, VOCAB_SIZE, EOS_EVERY)
        assert outcome.token_ids == alone[: len(outcome.token_ids)]
        if end in (FinishReason.STOP, FinishReason.LENGTH):
            assert outcome.token_ids == alone


configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 50),
    max_prefill_tokens=st.sampled_from([None, 1, 3, 20, 100]),
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_blocks=st.integers(40, 60),
    num_host_slots=st.sampled_from([0, 1, 7, 60]),
    num_state_slots=st.sampled_from([0, 0, 3, 8, 60]),
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
    st.sampled_from(["", "", "", "last", "mean", "ahead"]),  # an embedding is asked for, or nothing
)
bursts = st.tuples(st.just("burst"), st.lists(asks, min_size=1, max_size=8))
events = st.one_of(
    bursts,
    bursts,
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(0, 50_000)),
    st.tuples(st.just("hold"), st.integers(0, 12), st.sampled_from(sorted(CAUSES))),
    st.tuples(st.just("release"), st.integers(0, 12)),
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
            for group, length, *rest in asked:
                world.submit([1 + (i // (group + 1)) % 3 for i in range(length)], *rest)
        case ("steps", count):
            world.at_ns += count * STEP_NS
        case ("abort", number):
            world.played.at(world.at_ns, Abort(f"r{number}"))
        case ("wait", delay_ns):
            world.at_ns += delay_ns
        case ("hold", number, cause):
            world.call(lambda: world.scheduler.hold(f"r{number}", cause, world.clock.now_ns()))
        case ("release", number):
            world.call(lambda: world.scheduler.release(f"r{number}", world.clock.now_ns()))
        case ("knobs", knobs):
            world.played.at(world.at_ns, Configure(0, knobs))


NO_BUDGET_AHEAD = SchedulerConfig(
    max_num_seqs=2, max_num_batched_tokens=6, max_prefill_tokens=1, max_model_len=MAX_MODEL_LEN, block_size=1,
    num_blocks=40, batching="static", starvation_bound_ms=0.0,
)  # fmt: skip
ASKED_AT_ONCE = [("burst", [(0, 1, 1, None, 0, kind)]) for kind in ("", "", "ahead")]


@example(NO_BUDGET_AHEAD, (False,) * 4, None, 1, ASKED_AT_ONCE)  # admitted by a plan that has no tokens left for it
@settings(max_examples=300, deadline=None)
@given(
    configs.map(shrink_cache),
    st.tuples(*[st.booleans()] * 4),
    st.sampled_from([None, 0.5, 0.95]),
    st.integers(1, 3),
    st.lists(events, min_size=3, max_size=30),
)
def test_laws_hold_under_anything(
    config: SchedulerConfig,
    kinds: tuple[bool, bool, bool, bool],
    chance: float | None,
    num_keys: int,
    script: list[tuple],
) -> None:
    plans_ahead, is_apart, drafts, late = kinds
    world = World(config, plans_ahead, "eager" if is_apart else "host", drafts, chance, late)
    world.num_keys = num_keys
    for event in script:
        play(world, event)
    play(world, ("knobs", {"paused": False}))
    world.call(world.release_all)
    world.run()
    world.verify()
