"""Copies of evicted blocks in host memory, as the scheduler plans them and the engine accounts for them.

`Contents` computes like any runner but keeps, in the place of each token's KV, the tokens up to it: each row then looks
whether every one of its blocks holds what its request has been told, up to where the row begins.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, Admitted, Row, RowResult, StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.messages import StepOutput
from splittime.engine.engine import Engine
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

BLOCK = 4
Prefix = tuple[int, ...]


class Contents:
    """A runner whose slots hold whole prefixes. Token n of a request is n: nothing is chosen."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, Prefix]] = {}
        self.host: dict[int, dict[int, Prefix]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.num_restored = 0
        self._launched: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self.run(self._launched.pop(0))

    def run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.tokens[request_id], self.tables[request_id]
        for admitted in plan.admitted:
            self._learn(admitted)
        self.host |= {slot: dict(self.blocks[block]) for block, slot in plan.offloads}
        self.blocks |= {block: dict(self.host[slot]) for slot, block in plan.restores}
        self.num_restored += len(plan.restores)
        return StepResult(plan.step_id, tuple(self._row(row) for row in plan.rows))

    def _learn(self, admitted: Admitted) -> None:
        self.tokens[admitted.request_id] = list(admitted.token_ids)
        self.tables[admitted.request_id] = []

    def _row(self, row: Row) -> RowResult:
        tokens, table = self.tokens[row.request_id], self.tables[row.request_id]
        table.extend(row.new_block_ids)
        if row.token_ids != (PENDING,):
            tokens[row.start :] = row.token_ids
        for position in range(row.start):
            held = self.blocks[table[position // BLOCK]].get(position % BLOCK)
            assert held == tuple(tokens[: position + 1]), f"{row.request_id} reads {held} at position {position}"
        for position in range(row.start, row.start + len(row.token_ids)):
            self.blocks.setdefault(table[position // BLOCK], {})[position % BLOCK] = tuple(tokens[: position + 1])
        if not row.num_samples:
            return RowResult(row.request_id)
        tokens.append(len(tokens))
        return RowResult(row.request_id, (tokens[-1],))


def make(num_blocks: int = 8, num_host_slots: int = 16, **changes: object) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32, "block_size": BLOCK, **changes}
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, num_host_slots=num_host_slots, **given))  # type: ignore[arg-type]


def ask(name: str, prompt: Prefix, max_tokens: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=0)


def prompt_of(group: int, length: int) -> Prefix:
    return tuple(100 * group + place for place in range(length))


def drained(crank: Crank) -> Iterator[StepOutput]:
    while crank.has_work:
        output = crank.turn()
        crank.engine.scheduler.check()
        assert output is not None
        yield output


@pytest.fixture
def crank() -> Crank:
    clock = VirtualClock()
    return Crank(EngineParts(Engine(make()), FakeRunner(BLOCK, step_ns=100, clock=clock, move_ns=7)), clock)


def test_a_returning_prompt_is_copied_back_and_the_books_say_so(crank: Crank) -> None:
    records, host_tokens = [], {}
    for name, group in (("a", 1), ("b", 2), ("again", 1)):
        crank.submit(ask(name, prompt_of(group, 25)), 0)
        for output in drained(crank):
            records += [output.record] if output.record is not None else []
            host_tokens |= {news.request_id: news.num_host_tokens for news in output.outputs}
    verify_steps(records)
    stats = crank.stats()
    assert host_tokens == {"a": 0, "b": 0, "again": 20}  # its first block is still on the device
    assert (stats.prefix_hit_tokens, stats.prefix_host_hit_tokens, stats.restored_tokens) == (24, 20, 20)
    assert [record.restore_ns for record in records if record.restored_blocks] == [7 * 5]
    assert sum(record.restored_blocks for record in records) == 5
    assert sum(record.offload_ns for record in records) == 7 * stats.offloaded_tokens // BLOCK > 0
    assert (stats.host_blocks_total, stats.host_blocks_used) == (16, stats.offloaded_tokens // BLOCK)


def test_the_time_of_the_copies_is_the_devices(crank: Crank) -> None:
    from splittime.ledger.derive import device_book, verify_device_book

    records = []
    for name, group in (("a", 1), ("b", 2), ("again", 1)):
        crank.submit(ask(name, prompt_of(group, 25)), 0)
        records += [output.record for output in drained(crank) if output.record is not None]
    book = device_book(records)
    verify_device_book(book, records)
    moved_ns = sum(record.offload_ns + record.restore_ns for record in records)
    assert sum(book.share_ns.values()) == moved_ns + sum(record.device_ns for record in records)


def test_a_plan_that_comes_to_nothing_keeps_its_copies_for_the_next() -> None:
    scheduler = make(num_blocks=7, max_model_len=28)
    runner = Contents()
    for name, group in (("a", 1), ("b", 2)):
        scheduler.submit(ask(name, prompt_of(group, 25)), 0)
        while scheduler.has_requests:
            plan = scheduler.plan(0)
            assert plan is not None
            scheduler.commit(plan, runner.run(plan), 0)
    scheduler.submit(ask("again", prompt_of(1, 25)), 0)
    scheduler.configure({"paused": True})
    assert scheduler.plan(0) is None
    scheduler.configure({"paused": False})
    plan = scheduler.plan(0)
    assert plan is not None
    assert len(plan.restores) == 6
    scheduler.abort("again", 0)  # before it is carried out
    scheduler.check()
    scheduler.commit(plan, runner.run(plan), 0)
    scheduler.submit(ask("once more", prompt_of(1, 25)), 0)
    plan = scheduler.plan(0)
    assert plan is not None
    assert plan.restores == ()  # they are on the device again
    scheduler.commit(plan, runner.run(plan), 0)


def test_a_preempted_request_finds_its_blocks_in_host_memory() -> None:
    """Its blocks went to whom it had to give way; when they are done, its own come back and little is recomputed."""
    computed = {}
    for num_host_slots in (0, 16):
        clock = VirtualClock()
        scheduler = make(num_blocks=8, num_host_slots=num_host_slots)
        crank = Crank(EngineParts(Engine(scheduler), FakeRunner(BLOCK, step_ns=100, clock=clock)), clock)
        crank.submit(ask("first", prompt_of(1, 13), max_tokens=19), 0)
        crank.submit(ask("victim", prompt_of(2, 12), max_tokens=19), 0)
        records = [output.record for output in drained(crank) if output.record is not None]
        verify_steps(records)
        assert scheduler.counts.num_preemptions > 0
        computed[num_host_slots] = sum(
            count for record in records for name, _, count in record.rows if name == "victim"
        )
    assert computed[16] < computed[0] - BLOCK
    assert scheduler.cache.host is not None
    assert scheduler.cache.host.num_restored > 0


def test_without_the_tier_plans_move_nothing() -> None:
    scheduler = make(num_host_slots=0)
    runner = Contents()
    for name in ("a", "b"):
        scheduler.submit(ask(name, prompt_of(1 + (name == "b"), 25), max_tokens=4), 0)
    while scheduler.has_requests:
        plan = scheduler.plan(0)
        assert plan is not None
        assert (plan.offloads, plan.restores) == ((), ())
        scheduler.commit(plan, runner.run(plan), 0)


EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 30), st.integers(1, 12)),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(13, 30), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("knob"), st.sampled_from(["enable_prefix_caching", "paused"]), st.booleans()),
    st.tuples(st.just("knob"), st.just("batching"), st.sampled_from(["static", "continuous"])),
)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(8, 14),
    st.integers(1, 24),
    st.booleans(),
    st.booleans(),
    st.lists(EVENTS, min_size=4, max_size=40),
)
def test_every_row_reads_its_own_prefix(
    num_blocks: int, num_host_slots: int, is_ahead: bool, chunks: bool, script: list
) -> None:
    """Prompts of four families come back through a cache that holds one or two of them."""
    clock, runner = VirtualClock(), Contents()
    scheduler = make(num_blocks, num_host_slots, enable_chunked_prefill=chunks)
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=is_ahead), runner), clock)
    for number, event in enumerate(script):
        match event:
            case ("ask", group, length, max_tokens):
                crank.submit(ask(f"r{number}", prompt_of(group, length), max_tokens), clock.now_ns())
            case ("step", count):
                for _ in range(count):
                    crank.turn()
                    scheduler.check()
            case ("abort", which):
                crank.abort(f"r{which}")
            case ("knob", name, value):
                crank.configure({name: value})
    crank.configure({"paused": False})
    for _ in drained(crank):
        pass
    assert scheduler.cache.num_used == 0
    if scheduler.cache.host is not None:
        assert scheduler.cache.host.num_restored == runner.num_restored
