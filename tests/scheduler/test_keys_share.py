"""Keys share slots, blocks and the tokens of a step: no key waits beyond its share, whatever another asks for."""

from collections import Counter

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_draft_rows import committed, planned
from test_scheduler import add, make_scheduler, shape, step

from splittime.core.shares import KeyShare
from splittime.core.step import RowResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.prompt_pass import TURN_TOKENS, Holdings, one_slot
from splittime.scheduler.scheduler import Scheduler
from splittime.web.tenants import Tenant, sharer_of, told_tenant


def flood(scheduler: Scheduler, count: int, tenant: str = "greedy", max_tokens: int = 50, **fields) -> None:
    for number in range(count):
        add(scheduler, f"{tenant}{number}", 4, max_tokens=max_tokens, tenant=tenant, **fields)


def running_of(scheduler: Scheduler) -> Counter[str]:
    return Counter(state.request.tenant for state in scheduler.running)


def test_a_newcomer_of_another_key_is_in_the_next_step_whatever_one_has_taken() -> None:
    scheduler = make_scheduler()
    flood(scheduler, 12)
    for now_ns in (10, 20, 30):
        step(scheduler, now_ns)
    add(scheduler, "other", 4, now_ns=35, tenant="other")
    plan, _ = step(scheduler, 40)
    assert shape(plan)["other"] == 4
    assert plan.preempted == ("greedy3",)  # the youngest of who holds most
    assert running_of(scheduler) == {"greedy": 3, "other": 1}


def test_the_runner_is_told_whose_each_request_is() -> None:
    scheduler = make_scheduler()
    for name in ("one", "other"):
        add(scheduler, name, 4, tenant=f"tenant {name}", cache_salt=f"salt {name}")
    told = {each.request_id: (each.tenant, each.cache_salt) for each in step(scheduler, 10)[0].admitted}
    assert told == {"one": ("tenant one", "salt one"), "other": ("tenant other", "salt other")}


def test_who_made_way_waits_for_the_policy_and_computes_little_again() -> None:
    scheduler = make_scheduler()
    flood(scheduler, 4)
    for now_ns in range(10, 80, 10):
        step(scheduler, now_ns)
    add(scheduler, "other", 4, now_ns=85, max_tokens=1, tenant="other")
    step(scheduler, 90)
    victim = scheduler._states["greedy3"]
    assert (victim.num_preemptions, victim.account.stage, victim.account.cause) == (1, Stage.PREEMPTED, Cause.POLICY)
    plan, _ = step(scheduler, 100)  # the slot is free again
    assert 0 < shape(plan)["greedy3"] <= 4  # a block; the others are in the cache
    assert victim.account.stage is Stage.DECODE


def test_slots_come_to_be_shared_by_weight() -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    flood(scheduler, 20, "light")
    step(scheduler, 10)
    flood(scheduler, 20, "heavy", weight=3.0)
    for now_ns in range(20, 120, 10):
        step(scheduler, now_ns)
    assert running_of(scheduler) == {"light": 2, "heavy": 6}
    assert scheduler.counts.num_preemptions <= 6


def test_tenants_behind_one_gateway_share_by_what_it_says_of_them() -> None:
    scheduler, gateway = make_scheduler(max_num_seqs=8), Tenant(name="gw", is_operator=True)
    for tenant in (Tenant(name="light"), Tenant(name="heavy", weight=3.0)):
        headers = [(name.encode(), value.encode()) for name, value in told_tenant(tenant).items()]
        sharer = sharer_of({"headers": headers}, gateway)
        flood(scheduler, 20, sharer.name, weight=sharer.weight)
        step(scheduler, 10)
    for now_ns in range(20, 120, 10):
        step(scheduler, now_ns)
    assert running_of(scheduler) == {"gw/light": 2, "gw/heavy": 6}


def test_prompt_tokens_are_shared_in_turns() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for number in range(3):
        add(scheduler, f"long{number}", 40, tenant="greedy")
    step(scheduler, 10)
    add(scheduler, "short", 6, now_ns=15, tenant="other")
    assert shape(step(scheduler, 20)[0])["short"] == 6


def test_one_slot_is_taken_in_turns() -> None:
    """By tokens: whoever waits gets it when the other was served `TURN_TOKENS` more."""
    scheduler = make_scheduler(max_num_seqs=1, max_model_len=4000, num_blocks=2000)
    add(scheduler, "greedy", 4, max_tokens=3000, tenant="greedy")
    step(scheduler, 10)
    add(scheduler, "other", 4, now_ns=15, max_tokens=3, tenant="other")
    now_ns, served = 20, 0
    while "other" not in shape(step(scheduler, now_ns)[0]):
        now_ns, served = now_ns + 10, served + 1
    assert TURN_TOKENS <= served <= TURN_TOKENS + 2


def test_blocks_are_shared_and_a_key_that_grows_preempts_its_own() -> None:
    scheduler = make_scheduler(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=32)
    flood(scheduler, 7, max_tokens=50)
    add(scheduler, "other", 8, max_tokens=20, tenant="other")
    for now_ns in range(10, 300, 10):
        step(scheduler, now_ns)
    assert scheduler.counts.num_preemptions > 0
    assert all(not name.startswith("other") for name in scheduler.request_ids)  # it has ended, undisturbed


def test_a_key_that_waits_for_blocks_is_passed_only_by_one_that_has_less() -> None:
    scheduler = make_scheduler(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=20, enable_prefix_caching=False)
    add(scheduler, "own", 4, max_tokens=40, tenant="greedy")
    add(scheduler, "held", 24, max_tokens=20, tenant="other")
    step(scheduler, 10)
    add(scheduler, "giant", 60, now_ns=15, max_tokens=2, tenant="greedy")
    add(scheduler, "small", 4, now_ns=16, max_tokens=2, tenant="other")
    begun: list[str] = []
    for now_ns in range(20, 900, 10):
        begun += [name for name in shape(step(scheduler, now_ns)[0]) if name not in begun]
        if "giant" in begun:
            break
    assert begun.index("small") < begun.index("giant")


def test_one_key_alone_is_never_preempted_for_itself() -> None:
    scheduler = make_scheduler(num_blocks=200)
    flood(scheduler, 30, max_tokens=5)
    for now_ns in range(10, 1000, 10):
        if not scheduler.has_requests:
            break
        step(scheduler, now_ns)
    assert not scheduler.has_requests
    assert scheduler.counts.num_preemptions == 0


def test_what_a_key_did_not_use_is_not_saved_up() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    flood(scheduler, 6, "early", max_tokens=40)
    for now_ns in range(10, 600, 10):
        step(scheduler, now_ns)
    flood(scheduler, 6, "late", max_tokens=40)
    counters = {share.name: share.counter for share in scheduler.queue.shares.waiting.values()}
    assert counters["late"] >= counters["early"]


NUM_KEYS = 4
asks = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 40), st.integers(1, 24), st.integers(0, 6)), min_size=1, max_size=40
)


# seven that run begin a block in the same step, six are free, and all but one end in it
ALL_AT_AN_EDGE = [(0, 1, 1, 0)] * 4 + [(0, 1, 1, 2), (0, 1, 1, 3), (0, 5, 21, 0), (0, 22, 20, 0), (0, 1, 15, 6)]
ALL_AT_AN_EDGE += [(0, 34, 12, 3), (0, 36, 6, 0), (0, 36, 6, 0), (0, 35, 3, 4)]


class Watched:
    """Greedy keys, an innocent one that asks again and again for little, of one and the same prompt or of new ones, and
    one with a stream that goes on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.now_ns, self.num_late, self.num_spared = scheduler, 10, 0, 0
        self.stream()

    def stream(self) -> None:
        if "stream" not in self.scheduler.request_ids:
            add(self.scheduler, "stream", 1, self.now_ns, 40, tenant="stream")

    def step(self) -> None:
        """Whoever is preempted for another key is so for one that is admitted and stays."""
        self.stream()
        self.now_ns += 10
        lacked_blocks = self.lacks_blocks()
        spent = self.scheduler.counts.num_preemptions
        plan, _ = step(self.scheduler, self.now_ns)
        self.num_late = 0 if "stream" in shape(plan) else self.num_late + 1
        assert self.num_late <= 2 * NUM_KEYS, "the stream gets no rows"
        victims = self.scheduler.victims
        assert len(victims) == len(set(victims)) == self.scheduler.counts.num_preemptions - spent
        admitted = {each.request_id for each in plan.admitted}
        assert not admitted & set(victims), "one was preempted and admitted again"
        assert not set(victims) or admitted or lacked_blocks, "one was preempted for nobody"

    def lacks_blocks(self) -> bool:
        """Whether there are too few for those that run to go on, all of them."""
        cache = self.scheduler.cache
        full = [state for state in self.scheduler.running if len(state.lease.block_ids) * 4 == state.num_computed]
        return len(full) > cache.num_free

    def ask(self, name: str, num_prompt: int) -> None:
        """Until it has ended: the bound does not count the plans in which one that made way gets its first token
        since, and these are not many either."""
        add(self.scheduler, name, num_prompt, self.now_ns, 1, tenant="innocent")
        waited = num_uncounted = 0
        while name in self.scheduler.request_ids:
            is_spared = any(len(state.token_ids) <= state.spared_until for state in self.scheduler.running)
            waited, num_uncounted = waited + (not is_spared), num_uncounted + is_spared
            assert waited <= NUM_KEYS
            assert num_uncounted <= 3 * NUM_KEYS
            self.step()


@settings(max_examples=100, deadline=None)
@given(asks, st.integers(5, 8), st.booleans(), st.booleans(), st.sets(st.integers(0, 39), max_size=8))
@example(ALL_AT_AN_EDGE, 7, False, True, set())
def test_no_key_waits_beyond_its_share_whatever_the_others_do(
    asked: list[tuple[int, int, int, int]], slots: int, caches: bool, has_prefix: bool, aborts: set[int]
) -> None:
    """The bound: where each key has a slot and blocks by its share, and the first of each fits a step, a key with
    nothing running gets its first row within as many plans as there are keys, not counting those in which one that made
    way before gets its first token since. Greedy keys come, grow, are aborted and preempted."""
    scheduler = make_scheduler(
        max_num_seqs=slots, max_num_batched_tokens=64, num_blocks=70, enable_prefix_caching=caches
    )
    watched = Watched(scheduler)
    for number, (key, num_prompt, max_tokens, steps) in enumerate(asked):
        add(scheduler, f"g{number}", num_prompt, watched.now_ns, max_tokens, tenant=f"greedy{key}")
        for _ in range(steps):
            watched.step()
        if number in aborts:
            scheduler.abort(f"g{number}", watched.now_ns + 6)
        watched.ask("innocent" if has_prefix else f"innocent{number}", 4 + 20 * has_prefix)
    scheduler.abort("stream", watched.now_ns + 6)
    while scheduler.has_requests:
        watched.now_ns += 10
        step(scheduler, watched.now_ns)
    assert scheduler.cache.num_used == 0


@pytest.mark.parametrize(("num_blocks", "has_drafts"), [(8, False), (9, False), (13, True)])
def test_drafts_leave_a_block_for_each_who_runs(num_blocks: int, has_drafts: bool) -> None:
    """Else the next step would have to preempt somebody for what may turn out wrong."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=32, max_num_batched_tokens=64)
    for name in "abc":
        add(scheduler, name, 7, max_tokens=20)
    plan = planned(scheduler, 10)
    rows = [RowResult(row.request_id, (7,), draft_token_ids=(8,) * 9) for row in plan.rows]
    committed(scheduler, plan, 20, *rows)
    plan = planned(scheduler, 30)
    assert any(row.draft_token_ids for row in plan.rows) == has_drafts
    assert scheduler.cache.num_free >= min(3, num_blocks - 6)


@pytest.mark.parametrize("runs_on", [False, True])
def test_what_a_key_had_while_nobody_wanted_it_is_not_held_against_it(runs_on: bool) -> None:
    """One key decodes much, another is admitted last: the first one's next prompt does not wait for a flood of the
    other's prompts."""
    scheduler = make_scheduler(
        max_num_seqs=64, max_num_batched_tokens=64, max_model_len=4000, num_blocks=8000, enable_prefix_caching=False
    )
    for number in range(8):
        add(scheduler, f"busy{number}", 1, max_tokens=500 if runs_on else 100, tenant="busy")
    step(scheduler, 10)
    add(scheduler, "late", 1, now_ns=15, max_tokens=500 if runs_on else 1, tenant="late")
    for now_ns in range(20, 1500, 10):
        if scheduler.has_requests:
            step(scheduler, now_ns)
    for number in range(60):
        add(scheduler, f"flood{number}", 200, now_ns=1505, max_tokens=20, tenant="late")
    step(scheduler, 1510)
    add(scheduler, "hello", 4, now_ns=1515, max_tokens=5, tenant="busy")
    begun = [set(shape(step(scheduler, now_ns)[0])) for now_ns in range(1520, 1560, 10)]
    assert any("hello" in names for names in begun)


def test_nobody_is_preempted_for_a_slot_of_one_that_would_lack_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_model_len=400, num_blocks=100)
    for number in range(8):
        add(scheduler, f"many{number}", 16, max_tokens=60, tenant="greedy")
    for now_ns in (10, 20, 30):
        step(scheduler, now_ns)
    add(scheduler, "large", 370, now_ns=35, max_tokens=2, tenant="other")
    for now_ns in range(40, 500, 10):
        assert not step(scheduler, now_ns)[0].preempted
    assert scheduler.counts.num_preemptions == 0


@pytest.mark.parametrize("num_cached", [0, 600, 1200])
def test_a_key_whose_prefix_is_cached_gets_the_blocks_that_it_lacks(num_cached: int) -> None:
    """What it finds is as little free to others as what it would take."""
    scheduler = make_scheduler(max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=4000, num_blocks=1000)
    now_ns = 10
    if num_cached:
        add(scheduler, "a", num_cached, max_tokens=1, tenant="other")
        step(scheduler, now_ns)
    for number in range(4):
        add(scheduler, f"b{number}", 600, now_ns, max_tokens=3000, tenant="greedy")
    while scheduler.cache.num_free > 312 or now_ns < 30:
        now_ns += 10
        step(scheduler, now_ns)
    add(scheduler, "a", 1250, now_ns + 5, max_tokens=1, tenant="other")
    plan, _ = step(scheduler, now_ns + 10)
    assert "a" in shape(plan)
    assert plan.preempted


def test_a_block_that_several_hold_counts_once() -> None:
    """Sixteen answers to one prompt hold little, so a key with less to spare takes nothing from them."""
    scheduler = make_scheduler(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=400, num_blocks=120)
    add(scheduler, "shared", 161, max_tokens=20, tenant="many")
    step(scheduler, 10)
    for number in range(15):
        sharer = scheduler._states["shared"].request
        scheduler.submit(msgspec.structs.replace(sharer, request_id=f"s{number}"), 15)
    step(scheduler, 20)
    assert running_of(scheduler) == {"many": 16}
    held = sum(scheduler.cache.part_of(state.lease) for state in scheduler.running)
    assert held == pytest.approx(scheduler.cache.num_used)
    for number in range(12):
        add(scheduler, f"a{number}", 24, 25, max_tokens=3, tenant="other")
    assert not step(scheduler, 30)[0].preempted
    assert running_of(scheduler) == {"many": 16, "other": 10}


def test_blocks_that_victims_share_come_free_with_the_last_of_them() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=400, num_blocks=100)
    add(scheduler, "shared", 320, max_tokens=20, tenant="many")
    step(scheduler, 10)
    sharer = scheduler._states["shared"].request
    for number in range(3):
        scheduler.submit(msgspec.structs.replace(sharer, request_id=f"s{number}"), 15)
    step(scheduler, 20)
    add(scheduler, "a", 120, 25, max_tokens=3, tenant="other")
    plan, _ = step(scheduler, 30)
    assert "a" in shape(plan)
    assert set(plan.preempted) == {"shared", "s0", "s1", "s2"}


def test_who_was_spared_does_not_shield_another_key_that_has_too_much() -> None:
    scheduler = make_scheduler(max_num_seqs=6, max_num_batched_tokens=64)
    flood(scheduler, 3, "most")
    flood(scheduler, 3, "second", max_tokens=90)
    step(scheduler, 10)
    for state in scheduler.running:
        if state.request.tenant == "most":
            state.spared_until = 1000
    add(scheduler, "other", 4, now_ns=15, tenant="other")
    assert step(scheduler, 20)[0].preempted == ("second2",)


@pytest.mark.parametrize(("taker", "victim"), [(2**31 - 1, -5), (2**31 - 1, 0), (1, 0), (0, -5), (3, 3), (-5, 0)])
def test_who_asks_to_come_last_takes_from_nobody_before_it(taker: int, victim: int) -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy="priority")
    flood(scheduler, 2, priority=victim)
    step(scheduler, 10)
    add(scheduler, "other", 4, now_ns=15, tenant="other", priority=taker)
    plan, _ = step(scheduler, 20)
    assert bool(plan.preempted) == ("other" in shape(plan)) == (taker <= max(0, victim))


@pytest.mark.parametrize(("lacking", "num_victims"), [(1, 1), (2, 2), (3, 0), (5, 0)])
def test_a_key_gives_down_to_what_the_taker_would_have_and_nothing_if_that_is_too_little(
    lacking: int, num_victims: int
) -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    flood(scheduler, 3)
    step(scheduler, 10)
    holdings = Holdings(scheduler.running, one_slot)
    assert len(holdings.who_gives(KeyShare("taker"), 1, lacking, one_slot)) == num_victims


def test_nobody_is_preempted_for_a_prompt_that_does_not_fit_the_step() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=16, num_blocks=20, enable_chunked_prefill=False)
    for number in range(2):
        add(scheduler, f"greedy{number}", 28, max_tokens=4, tenant="greedy")
    step(scheduler, 10)
    step(scheduler, 20)
    assert running_of(scheduler) == {"greedy": 2}
    for name in ("x", "y"):
        add(scheduler, name, 12, now_ns=25, tenant=name)
    plan, _ = step(scheduler, 30)
    assert len(shape(plan)) == 3
    assert not plan.preempted


def test_nobody_is_preempted_for_a_step_that_computes_no_more_prompts() -> None:
    """A decode row that is taken back makes no room among the tokens of prompts."""
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=64, max_prefill_tokens=8)
    flood(scheduler, 2)
    step(scheduler, 10)
    for name in ("x", "y"):
        add(scheduler, name, 12, now_ns=25, tenant=name)
    plan, _ = step(scheduler, 30)
    assert (shape(plan), plan.preempted) == ({"greedy0": 1, "greedy1": 1, "x": 8}, ())
    plan, _ = step(scheduler, 40)
    assert (shape(plan), plan.preempted) == ({"greedy0": 1, "y": 8}, ("greedy1",))


@pytest.mark.parametrize("chunks", [True, False])
def test_a_decode_row_that_is_taken_back_makes_room_for_a_chunk(chunks: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=3, enable_chunked_prefill=chunks)
    for number in range(3):
        add(scheduler, f"greedy{number}", 1, max_tokens=20, tenant="greedy")
    step(scheduler, 10)
    add(scheduler, "x", 12, now_ns=25, tenant="x")
    plan, _ = step(scheduler, 30)
    assert (shape(plan).get("x", 0), plan.preempted) == ((1, ("greedy2",)) if chunks else (0, ()))
