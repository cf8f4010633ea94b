"""Rows that were to sample and could not yet (`RowResult.is_late`): their requests wait, with the cause, alone."""

import pytest
from guessing import Guesser

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Row
from splittime.engine.engine import Engine
from splittime.ledger.stages import Cause, Stage
from splittime.runner.drafting import DraftingRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class Turned:
    """An engine under a clock that ticks once a call. late: of each request, how often its next row that samples gives
    nothing. tokens: of each so far. guesser: tells drafts."""

    def __init__(self, late: dict[str, int], guesser: Guesser | None = None, **config: object) -> None:
        self.engine = Engine(
            Scheduler(SchedulerConfig(**{"num_blocks": 64, "block_size": 4, "max_model_len": 20, **config}))
        )
        self.late, self.now_ns = late, 0
        self.num_drafts = [0, 0]  # of rows that were not late, and that were
        self.rows: list[tuple[str, ...]] = []  # of each step, whose they were
        fake = FakeRunner(block_size=4, is_late=self._is_late)
        self.runner = fake if guesser is None else DraftingRunner(fake, guesser, lambda: self.now_ns)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.outputs: list[object] = []
        self.marks: dict[str, list[tuple[Stage, Cause | None]]] = {}

    def submit(self, name: str, max_tokens: int = 5, prompt: int = 6) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        request = Request(
            request_id=name, prompt_token_ids=tuple(range(1, prompt + 1)), sampling=sampling, submitted_ns=self.tick()
        )
        self.engine.submit(request, self.now_ns, self.now_ns)

    def _is_late(self, row: Row) -> bool:
        is_late = self.late.get(row.request_id, 0) > 0
        self.num_drafts[is_late] += len(row.draft_token_ids)
        self.late[row.request_id] = self.late.get(row.request_id, 0) - is_late
        return is_late

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def step(self) -> bool:
        plan = self.engine.begin(self.tick())
        if plan is not None:
            self.rows.append(tuple(row.request_id for row in plan.rows))
            self.engine.end(self.runner.run(plan), self.tick())
            self.engine._ended = None
        self.engine.scheduler.check()
        for one in self.engine.take_outputs():
            self.tokens[one.request_id] = self.tokens.get(one.request_id, ()) + one.token_ids
            self.marks.setdefault(one.request_id, []).extend((mark.stage, mark.cause) for mark in one.marks)
            self.outputs.append(one)
        return plan is not None

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def go_on(self, name: str) -> bool:
        return self.engine.go_on(name, self.tick())


def undisturbed(*names: str) -> dict[str, tuple[int, ...]]:
    turned = Turned({})
    for name in names:
        turned.submit(name)
    turned.run()
    return turned.tokens


@pytest.mark.parametrize("before", [0, 2], ids=["at the first token", "among the others"])
def test_who_is_late_waits_and_others_go_on(before: int) -> None:
    turned = Turned({})
    turned.submit("late")
    turned.submit("other")
    for _ in range(before):
        turned.step()
    turned.late["late"] = 1
    turned.run()
    assert turned.tokens["other"] == undisturbed("other")["other"]
    assert len(turned.tokens["late"]) == before
    assert turned.rows[before + 1 :] == [("other",)] * (4 - before)
    stage = Stage.DECODE_STALL if before else Stage.PREFILL_STALL
    assert (stage, Cause.GRAMMAR) in turned.marks["late"]
    assert turned.go_on("late")
    assert not turned.go_on("late")
    turned.run()
    assert turned.tokens == undisturbed("late", "other")
    assert not turned.engine.scheduler.has_requests


def test_an_engine_whose_requests_are_all_late_has_no_work_until_one_may_go_on() -> None:
    turned = Turned({"a": 3, "b": 1}, max_num_seqs=2)
    for name in "ab":
        turned.submit(name)
    turned.run()
    assert len(turned.rows) == 1
    turned.submit("waits")
    assert turned.engine.has_work  # somebody queues: whoever turns it waits a little
    assert not turned.step()
    for _ in range(3):
        assert turned.go_on("a")
        while turned.step():
            pass
    turned.go_on("b")
    turned.run()
    assert turned.tokens == undisturbed("a", "b", "waits")


def test_who_is_late_can_be_aborted_and_preempted() -> None:
    turned = Turned({"gone": 1, "late": 1}, num_blocks=7)
    turned.submit("late", max_tokens=16, prompt=4)
    turned.step()
    turned.submit("gone")
    turned.step()
    turned.engine.abort("gone", turned.tick())
    turned.step()
    assert not turned.go_on("gone")
    other = Turned({}, num_blocks=7)
    other.submit("late", max_tokens=16, prompt=4)
    other.run()
    assert turned.go_on("late")
    turned.run()
    assert turned.tokens["late"] == other.tokens["late"]
    assert [one.finish_reason for one in turned.outputs if one.finish_reason] == [
        FinishReason.ABORT, FinishReason.LENGTH
    ]  # fmt: skip


def test_who_was_preempted_while_it_waited_is_computed_anew_and_waits_no_more() -> None:
    turned = Turned({}, num_blocks=6)
    turned.submit("first", max_tokens=16, prompt=4)
    turned.submit("late", max_tokens=8, prompt=4)
    turned.step()
    turned.late["late"] = 1
    turned.run()
    turned.go_on("late")
    turned.run()
    alone = Turned({})
    alone.submit("late", max_tokens=8, prompt=4)
    alone.run()
    assert turned.tokens["late"] == alone.tokens["late"]
    assert turned.engine.scheduler.counts.num_preemptions == 1


def test_a_mask_that_was_found_lets_in_nobody_who_is_held_for_something_else() -> None:
    """Whoever had the id before left while its mask was late."""
    turned = Turned({"x": 1})
    turned.submit("x")
    turned.run()
    turned.engine.abort("x", turned.tick())
    sampling = SamplingParams(max_tokens=2, seed=1)
    again = Request(request_id="x", prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=turned.tick())
    turned.engine.submit(again, turned.now_ns, turned.now_ns, held_for=Cause.GRAMMAR)
    assert not turned.go_on("x")
    turned.run()
    assert len(turned.engine.scheduler.held) == 1
    assert turned.engine.release("x", turned.now_ns, turned.tick())
    turned.run()
    assert not turned.engine.scheduler.has_requests


def test_who_waits_for_a_mask_is_not_let_on_by_the_end_of_a_hold() -> None:
    turned = Turned({"x": 1})
    turned.submit("x")
    turned.run()
    assert not turned.engine.release("x", turned.now_ns, turned.tick())
    turned.run()
    assert len(turned.rows) == 1


def test_drafts_of_a_late_row_are_neither_right_nor_wrong() -> None:
    """Nobody looked at them: the drafter learns nothing, and no count has them."""
    guesser = Guesser(lambda name, tokens, count: expected_tokens(tokens, count), 1000)
    turned = Turned({}, guesser, max_model_len=200)
    turned.submit("r", max_tokens=100)
    while turned.engine.scheduler.has_requests:
        turned.late["r"] = len(turned.rows) % 3 == 0
        turned.step()
        turned.go_on("r")
    counts = turned.engine.scheduler.counts
    assert min(turned.num_drafts) > 20
    assert counts.draft_tokens == guesser.num_learnt == turned.num_drafts[False]
    assert 0 < counts.accepted_draft_tokens == guesser.num_learnt_right
    assert len(turned.tokens["r"]) == 100
