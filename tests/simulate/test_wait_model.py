"""The predicted wait: from states whose truth can be counted, and against the waits of a simulated server."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from test_online_cost import a_record

from splittime.core.engine import EngineStats
from splittime.ledger.account import REFUSED, ClosedAccount
from splittime.scheduler.admission import Admission, QueueLimits
from splittime.simulate.shape import StepShape
from splittime.simulate.wait import MIN_REQUESTS, Begun, OutputLengths, WaitModel

MS = 1_000_000
KNOBS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 104,
    "max_prefill_tokens": 100,
    "enable_chunked_prefill": True,
    "batching": "continuous",
}


def takes_ns(shape: StepShape) -> float:
    """1 ms a step, and 0.1 ms for each prompt token."""
    return MS + 0.1 * MS * (shape.tokens - shape.decode_rows)


def ended(output_tokens: int, cached_tokens: int = 0) -> ClosedAccount:
    return ClosedAccount(
        request_id="r",
        group_id="r",
        model="m",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=0,
        end_ns=1,
        intervals=(),
        finish_reason="length",
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def waits(running: Sequence[Begun] = (), *, steps: int = 600, length: int = 20, **gauges: object) -> WaitModel:
    """A model that has seen so many steps, and 50 requests of this length."""
    given = {"knobs": KNOBS, "blocks_total": 1_000, **gauges}
    model, rng = WaitModel(lambda: running, lambda: EngineStats(0, **given)), random.Random(1)
    for number in range(steps):
        model.take(a_record(rng, number * 100 * MS, takes_ns))
    for _ in range(50):
        model.take(ended(length))
    return model


def decoding(*so_far: int) -> list[Begun]:
    return [Begun(f"d{place}", 100, count, 20) for place, count in enumerate(so_far)]


def lengths(*values: int) -> OutputLengths:
    made = OutputLengths()
    for value in values:
        made.add(value)
    return made


def test_lengths_are_unknown_until_some_have_ended() -> None:
    assert lengths(*[10] * (MIN_REQUESTS - 1)).left(0, 100) is None
    assert lengths(*[10] * MIN_REQUESTS).left(0, 100) == 10


def test_what_is_left_is_the_mean_of_those_that_were_longer() -> None:
    known = lengths(*[10] * 10, *[100] * 10)
    assert known.left(0, 1_000) == pytest.approx(55)
    assert known.left(10, 1_000) == pytest.approx(90)
    assert known.left(10, 40) == pytest.approx(30)  # it may have 40
    assert known.left(0, 40) == pytest.approx(25)
    assert known.left(99, 1_000) == pytest.approx(1)
    assert known.left(100, 1_000) == pytest.approx(55)  # longer than all: a mean one
    assert known.left(100, 103) == pytest.approx(3)


def test_nobody_waits_in_an_empty_server_but_for_the_own_prompt() -> None:
    wait_s, ttft_s = waits().wait_s(0, 0, 250)
    assert wait_s == 0
    assert ttft_s == pytest.approx(0.028, rel=0.02)  # three steps, and 25 ms of prompt


def test_the_next_slot_is_free_when_the_first_has_its_last_token() -> None:
    """Of 4 slots; the steps' first millisecond half over, on average of what the last step took."""
    running = decoding(5, 12, 17, 18)
    model = waits(running)
    half_s = (model._last.end_ns - model._last.begin_ns) / 2e9
    assert model.wait_s(0, 0, 1)[0] == pytest.approx(0.002 + half_s, rel=0.05)
    assert model.wait_s(1, 0, 1)[0] == pytest.approx(0.003 + half_s, rel=0.05)
    assert model.wait_s(3, 0, 1)[0] == pytest.approx(0.015 + half_s, rel=0.05)
    assert model.wait_s(4, 0, 1)[0] == pytest.approx(0.022 + half_s, rel=0.05)  # the first slot, once more round
    assert model.wait_s(4, 1_000, 1)[0] == pytest.approx(0.122 + half_s, rel=0.05)  # with their prompts


def test_with_free_slots_the_prompts_before_it_are_the_wait() -> None:
    model = waits(decoding(1))
    half_s = (model._last.end_ns - model._last.begin_ns) / 2e9
    assert model.wait_s(2, 1_000, 1)[0] == pytest.approx(0.110 + half_s, rel=0.05)  # ten steps of 100 tokens


def test_a_prompt_that_is_half_computed_counts_with_its_other_half() -> None:
    model = waits([Begun("p", 300, 0, 20)])
    rows = (("p", 100, 100),)
    last = model._last
    model._last = type(last)(**{name: getattr(last, name) for name in last.__struct_fields__} | {"rows": rows})
    half_s = (last.end_ns - last.begin_ns) / 2e9
    assert model.wait_s(0, 0, 1)[0] == pytest.approx(0.011 + half_s, rel=0.05)


def test_without_blocks_there_is_no_slot_either() -> None:
    alone, full = waits(decoding(10), blocks_used=100), waits(decoding(10), blocks_used=900)
    assert full.wait_s(0, 0, 1)[0] > alone.wait_s(0, 0, 1)[0] + 0.008  # the ten tokens that the other has left


def test_what_the_prefix_cache_has_is_not_waited_for() -> None:
    model = waits()
    before = model.wait_s(0, 0, 1_000)[1]
    for _ in range(200):
        model.take(ended(20, cached_tokens=90))
    assert model.wait_s(0, 0, 1_000)[1] == pytest.approx(before / 10, rel=0.15)


@pytest.mark.parametrize(
    "gauges",
    [
        {"is_paused": True},
        {"knobs": {}},
        {"knobs": {**KNOBS, "batching": "static"}},
        {"steps": 40},
    ],
)
def test_what_it_cannot_tell_it_leaves_to_the_departures(gauges: dict) -> None:
    model = waits(**gauges)
    assert model.wait_s(0, 0, 1) is None
    room = Admission(QueueLimits(10, 1_000), predictor=model)
    assert room.expected_wait() is None
    room.enter(0, count=1, tokens=10, deadline_ns=None).leave(3 * MS)
    assert room.expected_wait() == (0, 0, "departures")


def test_while_no_length_is_known_only_free_slots_can_be_told_of() -> None:
    model = WaitModel(lambda: decoding(1, 1, 1, 1), lambda: EngineStats(0, knobs=KNOBS, blocks_total=100))
    for number in range(600):
        model.take(a_record(random.Random(number), number, takes_ns))
    assert model.wait_s(0, 0, 1) is None


def test_what_runs_is_looked_at_once_until_a_step_or_a_request_ends() -> None:
    running, looks = decoding(5, 12, 17, 18), 0

    def look() -> list[Begun]:
        nonlocal looks
        looks += 1
        return list(running)

    gauges = {"knobs": KNOBS, "blocks_total": 1_000, "num_running": 4}
    model, rng = WaitModel(look, lambda: EngineStats(0, **gauges)), random.Random(1)
    for number in range(600):
        model.take(a_record(rng, number * 100 * MS, takes_ns))
    for _ in range(50):
        model.take(ended(20))
    first = model.wait_s(0, 0, 1)
    for _ in range(100):
        assert model.wait_s(0, 0, 1) == first
    assert looks == 1
    running.clear()
    model.take(msgspec.structs.replace(ended(0), finish_reason=REFUSED))  # nothing that ran has ended
    assert model.wait_s(0, 0, 1) == first
    model.take(ended(0))  # its prompt was being computed
    assert model.wait_s(0, 0, 1)[0] == 0
    running += decoding(1, 1, 1, 1)
    model.take(a_record(rng, 10**12, takes_ns))
    assert model.wait_s(0, 0, 1)[0] > 0
    assert looks == 3
    running.clear()
    gauges["num_running"] = 0  # an engine that has lost its requests makes no step
    assert model.wait_s(0, 0, 1)[0] == 0


def test_who_asks_the_same_is_told_what_was_found_until_a_step_or_a_request_ends(monkeypatch) -> None:
    """A refusal asks twice, and at ten times overload that was a fifth of what it took."""
    model = waits(decoding(18, 15, 10, 2))
    asked, total_ns = list[tuple[float, ...]](), model.cost.total_ns
    monkeypatch.setattr(model.cost, "total_ns", lambda features: asked.append(features) or total_ns(features))
    first = model.wait_s(1, 100, 1)
    looked = len(asked)
    assert (model.wait_s(1, 100, 1), len(asked)) == (first, looked)
    assert (model.wait_s(2, 100, 1) != first, len(asked)) == (True, 2 * looked)
    model.take(ended(200))
    assert (model.wait_s(1, 100, 1) is not None, len(asked)) == (True, 3 * looked)
    model.take(ended(200, cached_tokens=90))
    assert model.wait_s(1, 100, 1) != first


def test_admission_asks_the_model_and_says_so() -> None:
    room = Admission(QueueLimits(10, 1_000), predictor=waits(decoding(5, 12, 17, 18)))
    assert room.expected_wait().estimate == "model"


def test_rows_that_decode_count_no_longer_than_they_have_tokens() -> None:
    """Ten steps of prompts; the one that decodes has 2 tokens left, those in the queue 20 each at most."""

    def takes(shape: StepShape) -> float:
        return takes_ns(shape) + MS * shape.decode_rows

    def wait_s(running: list[Begun], requests: int) -> float:
        model, rng = (
            WaitModel(lambda: running, lambda: EngineStats(0, knobs=KNOBS, blocks_total=1_000)),
            random.Random(1),
        )
        for number in range(1_000):
            model.take(a_record(rng, number * 100 * MS, takes))
        for _ in range(50):
            model.take(ended(20))
        return model.wait_s(requests, 1_000, 1)[0] - (model._last.end_ns - model._last.begin_ns) / 2e9

    assert wait_s(decoding(18), 0) == pytest.approx(0.110 + 0.002, rel=0.05)
    assert wait_s(decoding(10), 0) == pytest.approx(0.110 + 0.010, rel=0.05)
    assert wait_s(decoding(18), 2) == pytest.approx(0.110 + 0.020, rel=0.05)  # two at a time, in ten steps


@pytest.mark.parametrize(("weight", "is_given"), [(1.0, True), (0.3, True), (0.2, False), (0.1, False)])
def test_a_key_is_given_slots_by_its_weight(weight: float, is_given: bool) -> None:
    """Four hold slots of another key: a light key would soon have as much."""
    model = waits(decoding(10, 10, 10, 10))
    known = model.wait_s(0, 0, 1, "light", weight)
    behind = model.wait_s(0, 0, 1)
    assert known is not None
    assert behind is not None
    assert (known[0] < behind[0]) is is_given
