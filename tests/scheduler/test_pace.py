"""The time of steps is shared among keys: rows sit out where they make another key's tokens late, and not where not."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduler import add, make_scheduler, shape

from splittime.core.shares import KeyShare
from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.planner import KeyPace
from splittime.scheduler.scheduler import Scheduler


def timed_step(scheduler: Scheduler, now_ns: int, base_ns: int, row_ns: int) -> tuple[StepPlan, int]:
    """Returns the plan and when it was committed: a step takes `base_ns`, and `row_ns` for each token."""
    plan = scheduler.plan(now_ns)
    assert plan is not None
    rows = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in plan.rows)
    now_ns += base_ns + row_ns * sum(row.num_tokens for row in plan.rows)
    scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns)
    scheduler.check()
    return plan, now_ns


def tokens_beside(base_ns: int, row_ns: int, weight: float = 1.0) -> tuple[float, float]:
    """Returns what a token of a request takes beside 15 rows of another key, in steps of its own alone, and what part
    of the steps those have."""
    scheduler = make_scheduler(max_num_seqs=16, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=64)
    for number in range(15):
        add(scheduler, f"many{number}", 1, max_tokens=3000, tenant="many")
    _, now_ns = timed_step(scheduler, 10, base_ns, row_ns)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=1000, tenant="one", weight=weight)
    began_ns, num_with_many, num_of_one = now_ns, 0, 0
    for _ in range(600):
        plan, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
        num_with_many += "many0" in shape(plan)
        num_of_one += "one" in shape(plan)
    return (now_ns - began_ns) / num_of_one / (base_ns + row_ns), num_with_many / 600


def test_tokens_come_half_as_fast_beside_a_key_whose_rows_cost_much() -> None:
    slowed, part = tokens_beside(base_ns=0, row_ns=1000)
    assert slowed == pytest.approx(2.0, rel=0.15)
    assert 0.03 < part < 0.2


def test_by_weight() -> None:
    assert tokens_beside(base_ns=0, row_ns=1000, weight=3.0)[0] == pytest.approx(4 / 3, rel=0.15)


def test_nobody_sits_out_where_a_batch_costs_little_more_than_a_row() -> None:
    slowed, part = tokens_beside(base_ns=100_000, row_ns=1000)
    assert slowed < 1.2
    assert part > 0.9


def test_short_requests_that_end_in_their_first_step_do_not_stop_another_keys_streams() -> None:
    """They are in no plan as running ones, so that nobody sits out for them: what is owed to them does not add up."""
    scheduler = make_scheduler(max_num_seqs=32, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=64)
    for number in range(20):
        add(scheduler, f"many{number}", 1, max_tokens=3000, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    for number in range(100):
        add(scheduler, f"short{number}", 1, now_ns=now_ns, max_tokens=1, tenant="one")
        _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    add(scheduler, "stream", 1, now_ns=now_ns, max_tokens=1000, tenant="one")
    shapes = []
    for _ in range(200):
        plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
        shapes.append(shape(plan))
    num_alone = [number for number, rows in enumerate(shapes[1:]) if "many0" in rows][:1]
    assert num_alone
    assert num_alone[0] <= 42  # two steps of all


def test_who_sits_out_stalls_for_the_policy_and_a_key_alone_never_does() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, 1, max_tokens=50, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=3, tenant="one")
    _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    assert shape(plan) == {"one": 1}
    account = scheduler._states["a"].account
    assert (account.stage, account.cause) == (Stage.DECODE_STALL, Cause.POLICY)
    scheduler.abort("one", now_ns)
    assert set(shape(timed_step(scheduler, now_ns, 0, 1000)[0])) == {"a", "b", "c"}


def stream_beside(
    others: list[tuple[str, int, int]], base_ns: int, row_ns: int, steps: int = 120, budget: int = 64
) -> tuple[float, int]:
    """Returns how much slower a stream is than alone beside others, and the most steps in a row without it. others: the
    key of each request, its prompt and its tokens; who has ended comes again, under the next key of as many `*`."""
    scheduler = make_scheduler(
        max_num_seqs=16, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    add(scheduler, "stream", 1, max_tokens=3000, tenant="stream")
    now_ns = 10
    for _ in range(3):
        _, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
    began_ns, missed, most_missed, num_rows = now_ns, 0, 0, 0
    for number in range(steps):
        for place, (key, num_prompt, max_tokens) in enumerate(others):
            if not any(name.startswith(f"{place}-") for name in scheduler.request_ids) and number >= place:
                tenant = key.replace("*", str(number))
                add(scheduler, f"{place}-{number}", num_prompt, now_ns, max_tokens, tenant=tenant)
        plan, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
        missed = 0 if "stream" in shape(plan) else missed + 1
        most_missed, num_rows = max(missed, most_missed), num_rows + (not missed)
    return (now_ns - began_ns) / num_rows / (base_ns + row_ns), most_missed


@pytest.mark.parametrize("keys", ["abcd", "****"])
@pytest.mark.parametrize("num_prompt", [1, 8, 16])
@pytest.mark.parametrize("base_ns", [0, 100_000])
def test_short_requests_of_others_keep_no_stream_from_its_rows(keys: str, num_prompt: int, base_ns: int) -> None:
    _, most_missed = stream_beside([(key, num_prompt, 1) for key in keys], base_ns, 1000, budget=16)
    assert most_missed <= len(keys)


# the steps of prompts are longer than any of all, so nobody must be let off by what the latest one of all took
PROMPTS_WHILE_ONE_SITS_OUT = [("a", 2, 2), ("a", 1, 2), ("a", 1, 7), ("a", 32, 1), ("b", 1, 7)]
PROMPTS_WHILE_ONE_SITS_OUT += [("a", 37, 1), ("d", 28, 16), ("b", 1, 27)]
requests_of_others = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8
)


@settings(max_examples=20, deadline=None)
@given(requests_of_others, st.sampled_from([0, 1000, 5000, 100_000]))
@example([("a", 1, 1)] * 2, 0)  # steps of three rows say little of what one takes
@example(PROMPTS_WHILE_ONE_SITS_OUT, 0)
def test_a_stream_has_its_share_of_the_time_whatever_other_keys_ask_for(
    others: list[tuple[str, int, int]], base_ns: int
) -> None:
    num_keys = 1 + len({key for key, _, _ in others})
    slowed, most_missed = stream_beside(others, base_ns, 1000)
    assert slowed <= 1.25 * num_keys
    assert most_missed <= 4 * num_keys


@pytest.mark.parametrize("keys", ["a", "abc"])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(200, 2), (200, 20), (24, 3)])
@pytest.mark.parametrize("base_ns", [0, 20_000])
def test_a_stream_has_its_share_where_steps_are_planned_ahead(
    keys: str, num_prompt: int, max_tokens: int, base_ns: int
) -> None:
    """Who owes for a prompt has its next row planned before that is known: that lets it off nothing."""
    scheduler = make_scheduler(
        max_num_seqs=16, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=256, enable_prefix_caching=False
    )
    add(scheduler, "stream", 1, max_tokens=3000, tenant="stream")
    now_ns, longest_ns, num_rows, running = 0, 0, 0, None
    for number in range(800):
        for key in keys:
            if not any(name.startswith(key) for name in scheduler.request_ids):
                add(scheduler, f"{key}{number}", num_prompt, now_ns, max_tokens, tenant=key)
        plan = scheduler.plan(now_ns)
        if running is not None:
            took_ns = base_ns + 1000 * sum(row.num_tokens for row in running.rows)
            now_ns, longest_ns = now_ns + took_ns, max(longest_ns, took_ns)
            rows = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in running.rows)
            scheduler.commit(running, StepResult(running.step_id, rows), now_ns)
        num_rows += plan is not None and "stream" in shape(plan)
        running = plan
    assert (now_ns - 2 * longest_ns) / num_rows / (base_ns + 1000) <= 1.2 * (1 + len(keys))


@pytest.mark.parametrize("num_steps", [10, 100])
def test_a_key_that_had_little_has_saved_nothing_up(num_steps: int) -> None:
    """Many keys ask once and are gone with what they owe; then the key floods, and another comes."""
    scheduler = make_scheduler(
        max_num_seqs=64, max_model_len=4000, num_blocks=4000, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    add(scheduler, "stream", 1, max_tokens=3000, tenant="many")
    now_ns, num_rows = 10, 0
    for number in range(num_steps):
        add(scheduler, f"once{number}", 40, now_ns, 1, tenant=f"key{number}")
        _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    began_ns = now_ns
    for number in range(30):
        add(scheduler, f"flood{number}", 1, now_ns, 3000, tenant="many")
    add(scheduler, "one", 1, now_ns, 3000, tenant="one")
    for _ in range(200):
        plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
        num_rows += "one" in shape(plan)
    assert (now_ns - began_ns) / num_rows <= 2.5 * 1000


def test_a_key_that_cannot_have_rows_lets_the_others_go_on_and_marks_nothing() -> None:
    """Its prompt is too large for the blocks that the other leaves."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400, num_blocks=100)
    for number in range(3):
        add(scheduler, f"small{number}", 16, max_tokens=90, tenant="many")
    now_ns = 10
    for _ in range(3):
        _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    add(scheduler, "large", 370, now_ns=now_ns, max_tokens=2, tenant="one")
    before = len(scheduler._states["small0"].account.marks)
    for _ in range(50):
        plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
        assert set(shape(plan)) == {"small0", "small1", "small2"}
    assert len(scheduler._states["small0"].account.marks) == before


def test_who_awaits_what_may_come_keeps_that_cause_while_its_key_sits_out_and_while_paused() -> None:
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=400, max_model_len=400)
    for name in "abcdef":
        add(scheduler, name, 1, max_tokens=90, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    plan = scheduler.plan(now_ns)
    assert plan is not None
    now_ns += 6000
    rows = [
        RowResult(row.request_id, () if row.request_id == "a" else (7,), is_late=row.request_id == "a")
        for row in plan.rows
    ]
    scheduler.commit(plan, StepResult(plan.step_id, tuple(rows)), now_ns)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=40, tenant="one")
    sat_out = False
    for _ in range(6):
        plan, now_ns = timed_step(scheduler, now_ns, 0, 1000)
        sat_out |= "b" not in shape(plan)
        assert scheduler._states["a"].account.cause is Cause.GRAMMAR
    assert sat_out
    scheduler.configure({"paused": True})
    assert scheduler.plan(now_ns) is None
    assert scheduler._states["a"].account.cause is Cause.GRAMMAR
    assert scheduler._states["b"].account.cause is Cause.PAUSED


def test_nobody_owes_for_steps_that_its_key_had_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=16, num_blocks=400, max_model_len=400)
    for number in range(8):
        add(scheduler, f"many{number}", 1, max_tokens=90, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=1, tenant="one")
    for _ in range(3):  # the second is charged
        _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    add(scheduler, "other", 1, now_ns=now_ns, max_tokens=9, tenant="other")
    assert len(shape(timed_step(scheduler, now_ns, 0, 1000)[0])) == 9


def beside_a_flood(num_many: int, base_ns: int) -> tuple[float, float]:
    """Returns how much longer 100 tokens of a stream take beside so many answers of 2,000 tokens than alone, but for a
    step, and how many steps of all a request of two tokens takes that comes meanwhile."""
    row_ns = 1000
    scheduler = make_scheduler(max_num_seqs=64, max_model_len=4000, num_blocks=40_000, max_num_batched_tokens=256)
    for number in range(num_many):
        add(scheduler, f"many{number}", 4, max_tokens=2000, tenant="many")
    now_ns = 10
    for _ in range(5):
        _, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
    add(scheduler, "stream", 1, now_ns=now_ns, max_tokens=100, tenant="stream")
    began_ns, whole_ns, asked_ns, told_ns = now_ns, base_ns + 64 * row_ns, 0, 0
    for number in range(1000):
        if number == 40:
            asked_ns = now_ns
            add(scheduler, "hello", 2, now_ns=now_ns, max_tokens=2, tenant="other")
        _, now_ns = timed_step(scheduler, now_ns, base_ns, row_ns)
        if number >= 40 and "hello" not in scheduler.request_ids:
            told_ns = told_ns or now_ns
        if "stream" not in scheduler.request_ids:
            break
    took_ns = now_ns - began_ns - whole_ns  # plus a step
    return took_ns / (100 * (base_ns + row_ns)), (told_ns - asked_ns) / whole_ns


@pytest.mark.parametrize("base_ns", [0, 10_000, 100_000, 1_000_000])
def test_beside_a_flood_another_key_takes_twice_as_long_and_a_step(base_ns: int) -> None:
    stream, hello = beside_a_flood(128, base_ns)
    assert stream <= 2.1
    assert hello <= 2.1


class Paced:
    """Steps of two keys, one with nearly all of the tokens."""

    def __init__(self) -> None:
        self.pace, self.now_ns, self.num_steps = KeyPace(), 0, 0
        self.shares = {name: KeyShare(name) for name in ("many", "one", "other")}

    def step(self, took_ns: int, *, sit_out: str = "", **tokens: int) -> None:
        by_id = {name: SimpleNamespace(share=self.shares[name], is_ahead=False) for name in tokens}
        rows = [Row(name, 0, (7,), (), 1) for name, count in tokens.items() for _ in range(count)]
        self.num_steps += 1
        out = {sit_out: self.shares[sit_out]} if sit_out else {}
        self.pace.begin(self.num_steps, self.now_ns, rows, by_id, out)  # type: ignore[arg-type]
        self.now_ns += took_ns
        self.pace.end(self.num_steps, self.now_ns)

    def who(self, *, gets_row: bool = True) -> set[str]:
        state = SimpleNamespace(share=self.shares["one"], is_ahead=False, gets_row=gets_row)
        return set(self.pace.who_sits_out(self.shares, [state]))  # type: ignore[list-item]


def test_nobody_owes_more_than_the_steps_that_it_was_in() -> None:
    """Two: the second was planned before the first was committed."""
    paced = Paced()
    for _ in range(2):
        paced.step(30_000, many=29, one=1)
    assert paced.who() == {"many"}
    assert paced.who(gets_row=False) == set()
    for _ in range(60):
        paced.step(1000, sit_out="many", one=1)
    assert paced.who() != {"many"}


def test_who_is_alone_owes_nothing_any_more_and_a_newcomer_begins_level() -> None:
    paced = Paced()
    for _ in range(3):
        paced.step(30_000, many=29, one=1)
    level_ns = paced.pace._level_ns
    paced.step(1000, sit_out="many", one=1, other=1)
    assert paced.shares["other"].spent_ns >= level_ns
    assert "many" in paced.who()
    paced.pace.stay_alone(paced.shares["many"])
    assert paced.who() == set()


@pytest.mark.parametrize("is_planned", [False, True])
def test_steps_that_are_not_planned_are_those_of_a_key_alone_too(is_planned: bool) -> None:
    scheduler = make_scheduler(max_num_seqs=16, num_blocks=400, max_model_len=400)
    for number in range(8):
        add(scheduler, f"many{number}", 1, max_tokens=90, tenant="many")
    _, now_ns = timed_step(scheduler, 10, 0, 1000)
    add(scheduler, "one", 1, now_ns=now_ns, max_tokens=50, tenant="one")
    _, now_ns = timed_step(scheduler, now_ns, 0, 1000)
    share, planner = scheduler._states["many0"].share, scheduler._planner
    assert share.spent_ns > planner.pace._level_ns
    scheduler.abort("one", now_ns)
    if is_planned:
        timed_step(scheduler, now_ns, 0, 1000)
    else:
        planner.pass_steps(1)
    assert share.spent_ns <= planner.pace._level_ns
