"""What a step's record says: what was read and computed, when there was no work, and whose each nanosecond was."""

from dataclasses import dataclass

import msgspec
import pytest
from guessing import Guesser
from msgspec import UNSET

from benchmarks.fake_runner import FakeRunner, expected_tokens
from splittime.core.clock import VirtualClock
from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.engine.recorder import ThreadTime
from splittime.ledger.stages import Cause
from splittime.ledger.steps import StepRecord, Told, verify_steps
from splittime.runner.drafting import DraftingRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.scheduler.state import RequestState

CONFIG = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=40, block_size=4, num_blocks=10)
STEP_NS = 1000


class Ticking(VirtualClock):
    """Each look at it costs a nanosecond, so that planning and committing take time."""

    def now_ns(self) -> int:
        self.advance(1)
        return super().now_ns()


class Telling(FakeRunner):
    """Tells of its steps what the test says, whatever they took."""

    told: dict[str, object]

    def run(self, plan: StepPlan) -> StepResult:
        return msgspec.structs.replace(super().run(plan), **self.told)


def made(
    clock: VirtualClock,
    told: dict[str, object] | None = None,
    config: SchedulerConfig = CONFIG,
    processor: "Kernel | None" = None,
) -> Crank:
    runner = Telling(config.block_size, step_ns=STEP_NS, clock=clock)
    runner.told = told or {}
    return Crank(EngineParts(Engine(Scheduler(config)), runner), clock, processor=processor)  # type: ignore[arg-type]


def ask(
    crank: Crank,
    clock: VirtualClock,
    name: str,
    num_prompt: int = 3,
    max_tokens: int = 2,
    held_for: Cause | None = None,
    deadline_ns: int | None = None,
) -> None:
    now_ns, sampling = clock.now_ns(), SamplingParams(max_tokens=max_tokens, seed=0)
    prompt, about = tuple(range(1, num_prompt + 1)), {"submitted_ns": now_ns, "deadline_ns": deadline_ns}
    crank.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, **about), now_ns, held_for)


def records_of(crank: Crank) -> list[StepRecord]:
    records = []
    while crank.has_work:
        output = crank.turn()
        assert output is not None
        records += [output.record] if output.record is not None else []
    return records


def stepped(crank: Crank) -> StepRecord:
    output = crank.turn()
    assert output is not None
    assert output.record is not None
    return output.record


def test_what_was_read_and_computed_and_who_was_there() -> None:
    clock = VirtualClock()
    crank = made(clock)
    for name, num_prompt in (("a", 6), ("b", 3), ("c", 2)):
        ask(crank, clock, name, num_prompt)
    records = records_of(crank)
    verify_steps(records)
    assert [record.rows for record in records] == [
        (("a", 0, 4),),
        (("a", 4, 2), ("b", 0, 2)),
        (("a", 6, 1), ("b", 2, 1)),
        (("b", 3, 1), ("c", 0, 2)),
        (("c", 2, 1),),
    ]
    assert [record.prefill_tokens for record in records] == [4, 4, 0, 2, 0]
    assert [record.decode_tokens for record in records] == [0, 0, 2, 1, 1]
    assert [record.kv_tokens_read for record in records] == [4, 8, 10, 6, 3]
    assert [record.num_running for record in records] == [1, 2, 1, 1, 0]
    assert [record.num_waiting for record in records] == [2, 1, 1, 0, 0]
    assert [record.blocks_used for record in records] == [2, 3, 1, 1, 0]
    assert [record.step_id for record in records] == [1, 2, 3, 4, 5]
    assert crank.stats().num_steps == 5


def test_who_came_and_went_before_a_step_in_which_order() -> None:
    clock = VirtualClock()
    crank = made(clock)
    ask(crank, clock, "a", max_tokens=2)
    ask(crank, clock, "b", held_for=Cause.GRAMMAR)
    ask(crank, clock, "c")
    assert crank.hold("c", Cause.KV_IMPORT)
    assert crank.release("b", 0)
    crank.abort("c")
    crank.abort("gone")
    assert not crank.release("a", 0)
    assert not crank.go_on("a")
    ask(crank, clock, "too long", 99)
    first, second = stepped(crank), stepped(crank)
    crank.fail("b", ErrorInfo("server", "broken", "it broke", 500))
    ask(crank, clock, "d", max_tokens=1)
    (third,) = records_of(crank)
    came = [("a", "came"), ("b", "held"), ("c", "came"), ("c", "held"), ("b", "released"), ("c", "left")]
    assert first.comings == tuple(came)
    assert second.comings == (("a", 5),)
    assert third.comings == (("b", "left"), ("d", "came"), ("d", 4))


def test_what_could_not_be_planned_is_told_once_until_something_comes() -> None:
    """`a` waits for its mask, and `b` for the slot of `a`; `c` does not come in time."""
    clock, is_late = VirtualClock(), [True]
    runner = FakeRunner(4, step_ns=STEP_NS, clock=clock, is_late=lambda row: is_late.pop() if is_late else False)
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    crank = Crank(EngineParts(Engine(Scheduler(config)), runner), clock)
    ask(crank, clock, "a")
    assert stepped(crank).late_rows == (("a", 0),)
    assert crank.turn() is None  # nobody waits
    ask(crank, clock, "b")
    for _ in range(3):
        clock.advance(5)
        assert crank.turn() is None
    ask(crank, clock, "c", deadline_ns=STEP_NS + 25)
    clock.advance(5)
    assert crank.turn() is None
    clock.advance(5)
    output = crank.turn()
    assert output is not None
    assert [one.finish_reason for one in output.outputs] == [FinishReason.DEADLINE]
    assert crank.go_on("a")
    told = (("b", "came"), STEP_NS + 5, ("c", "came"), STEP_NS + 20, STEP_NS + 25, ("a", "went_on"))
    assert stepped(crank).comings == told


def test_an_end_behind_which_nobody_waits_has_its_instant() -> None:
    """`a` waits for its mask until its deadline, alone."""
    clock = VirtualClock()
    runner = FakeRunner(4, step_ns=STEP_NS, clock=clock, is_late=lambda row: row.request_id == "a")
    crank = Crank(EngineParts(Engine(Scheduler(CONFIG)), runner), clock)
    ask(crank, clock, "a", deadline_ns=STEP_NS + 10)
    assert stepped(crank).late_rows == (("a", 0),)
    clock.advance(15)
    assert crank.turn() is not None
    ask(crank, clock, "b")
    assert stepped(crank).comings == (STEP_NS + 15, ("b", "came"))


def test_planning_and_committing_are_parts_of_a_step() -> None:
    clock = Ticking()
    crank = made(clock)
    ask(crank, clock, "a", max_tokens=3)
    records = records_of(crank)
    verify_steps(records)
    for record in records:
        assert (record.plan_ns, record.launch_ns, record.device_ns, record.commit_ns) == (1, 2, STEP_NS, 1)
    assert [record.host_gap_ns for record in records[1:]] == [1, 1]


def test_there_is_no_work_from_the_last_end_until_somebody_comes() -> None:
    clock = VirtualClock()
    crank = made(clock)
    records = []
    for name, idle_ns in (("a", 70), ("b", 500), ("c", 0), ("d", 9)):
        clock.advance(idle_ns)
        ask(crank, clock, name)
        clock.advance(3)  # there is work now: it is the host's time
        records += records_of(crank)
    verify_steps(records)
    assert [(record.idle_ns, record.host_gap_ns) for record in records if record.step_id % 2] == [
        (0, 0),  # nothing was before it
        (500, 3),
        (0, 3),
        (9, 3),
    ]
    assert all(not record.idle_ns and not record.host_gap_ns for record in records if not record.step_id % 2)


@dataclass
class Case:
    told: dict[str, object]
    parts: tuple[int, int, int, int, int]  # offload, restore, device, sample, launch
    collective_ns: int = 0


@pytest.mark.parametrize(
    "case",
    [
        Case({"device_ns": 600, "sample_ns": 300, "collective_ns": 50}, (0, 0, 600, 300, 100), 50),
        Case({"device_ns": 900, "sample_ns": 300, "collective_ns": 2000}, (0, 0, 900, 100, 0), 1000),
        Case({"device_ns": 2000, "sample_ns": 300, "collective_ns": 950}, (0, 0, 1000, 0, 0), 950),
    ],
)
def test_what_a_runner_tells_is_held_to_what_the_host_saw(case: Case) -> None:
    clock = VirtualClock()
    crank = made(clock, case.told)
    ask(crank, clock, "a")
    records = records_of(crank)
    verify_steps(records)
    for record in records:
        found = record.offload_ns, record.restore_ns, record.device_ns, record.sample_ns, record.launch_ns
        assert found == case.parts
        assert record.collective_ns == case.collective_ns


@pytest.mark.parametrize(("told_ns", "gap_ns"), [(0, 0), (40, 40), (45, 45), (46, 45), (10**6, 45)])
def test_the_device_waited_no_longer_than_the_host_left_it_alone(told_ns: int, gap_ns: int) -> None:
    """20 of the step before and 20 of this one are the runner's, but not the device's; 5 lie between the two."""
    clock = VirtualClock()
    crank = made(clock, {"device_ns": STEP_NS - 20, "execution": "eager", "gap_ns": told_ns})
    ask(crank, clock, "a")
    first = stepped(crank)
    clock.advance(5)
    second = stepped(crank)
    verify_steps([first, second])
    assert (first.gap_ns, second.gap_ns) == (0, gap_ns)


def test_of_the_devices_waiting_what_was_no_work_is_left_out() -> None:
    clock = VirtualClock()
    crank = made(clock, {"execution": "eager", "gap_ns": 504})
    ask(crank, clock, "a", max_tokens=1)
    records_of(crank)
    clock.advance(500)
    ask(crank, clock, "b", max_tokens=1)
    clock.advance(9)
    (record,) = records_of(crank)
    assert (record.idle_ns, record.host_gap_ns, record.gap_ns) == (500, 9, 4)


class Kernel:
    """Counts as the kernel does; the test says what a thread was given."""

    def __init__(self) -> None:
        self.given = ThreadTime(0, 0)

    def pass_time(self, ran_ns: int, waited_ns: int) -> None:
        self.given = ThreadTime(self.given.ran_ns + ran_ns, self.given.waited_ns + waited_ns)

    def now(self) -> ThreadTime:
        return self.given


@pytest.mark.parametrize(
    ("told", "ran_ns", "waited_ns", "expected"),
    [
        ({}, 700, 200, (200, 105)),
        ({"collective_ns": 30}, 700, 200, (200, 75)),
        ({}, 0, 5000, (1005, 0)),
        ({}, 5000, 0, (0, 0)),
        ({"execution": "eager"}, 100, 300, (300, None)),
    ],
)
def test_whose_the_processor_was(told: dict, ran_ns: int, waited_ns: int, expected: tuple) -> None:
    """Of a step of 1000 and 5 before it. What was given while there was no work belongs to no step."""
    clock, kernel = VirtualClock(), Kernel()
    kernel.pass_time(77, 88)
    crank = made(clock, told, processor=kernel)
    ask(crank, clock, "a", max_tokens=1)
    records_of(crank)
    clock.advance(300)
    kernel.pass_time(100, 200)
    ask(crank, clock, "b", max_tokens=1)
    clock.advance(5)
    kernel.pass_time(ran_ns, waited_ns)
    (record,) = records_of(crank)
    assert (record.idle_ns, record.host_gap_ns) == (300, 5)
    assert (record.cpu_wait_ns, record.off_cpu_ns) == expected


def test_a_step_is_charged_with_what_was_given_since_the_one_before() -> None:
    clock, kernel = VirtualClock(), Kernel()
    crank = made(clock, processor=kernel)
    ask(crank, clock, "a", max_tokens=3)
    told = []
    for waited_ns in (10, 0, 500):
        kernel.pass_time(100, waited_ns)
        record = stepped(crank)
        told.append((record.cpu_wait_ns, record.off_cpu_ns))
    assert told == [(10, 890), (0, 900), (500, 400)]


@pytest.mark.parametrize(("chance", "told"), [(1 / 3, [333, 111, 37, 12, 4, 1, 0, 0]), (1.0, [1000] * 8), (None, None)])
def test_what_is_told_of_drafts_is_what_the_scheduler_goes_by(chance: float | None, told: list[int] | None) -> None:
    """The chances are whole thousandths before the scheduler sees them, so the record is exact."""
    clock = VirtualClock()
    config = msgspec.structs.replace(CONFIG, max_num_batched_tokens=16)
    guesser = Guesser(lambda name, tokens, count: expected_tokens(tokens, count), 1000, chance)
    drafting = DraftingRunner(FakeRunner(4, step_ns=STEP_NS, clock=clock), guesser, now_ns=clock.now_ns)
    crank = Crank(EngineParts(Engine(Scheduler(config)), drafting), clock)
    ask(crank, clock, "a", max_tokens=30)
    ask(crank, clock, "b", max_tokens=30)
    num_told = 0
    while crank.has_work:
        output = crank.turn()
        seen = {state.request_id: _told_to(state) for state in crank.engine.scheduler.running if state.draft_token_ids}
        recorded = {name: one for name, one in output.record.told_drafts if name in seen}
        assert recorded == seen
        for one in seen.values():
            assert one == (tuple(told[: len(one)]) if told else one)
        num_told += len(seen)
        assert output.record.drafts is UNSET or output.record.drafts, "nothing is written of none"
        verify_steps([output.record])
    assert num_told > 10


def _told_to(state: RequestState) -> Told:
    """What the scheduler goes by, as a record has it."""
    return tuple(chance * 1000 for chance in state.draft_survival) or len(state.draft_token_ids)
