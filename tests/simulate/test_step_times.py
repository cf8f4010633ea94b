"""The cost model: a known truth is found again, in noise and pauses; what is far from all that was seen is refused."""

import random
import statistics
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import ConfigError
from splittime.core.facts import Machine, TokenCost
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.simulate.cost import LIMITED, REACH, CostModel, Noise, OutOfRange, Pace, PaceOf, bucket_of, quantile
from splittime.simulate.fit import MIN_STEPS, Fit, fit
from splittime.simulate.replica import ModelCosts
from splittime.simulate.shape import StepShape, shape_of_record

TRUTH = {"step": 200_000, "prompts": 300_000, "row": 90_000, "token": 60_000, "kv": 40, "pair": 70}
HOST_NS, GAP_NS = 150_000, 50_000


def device_ns(shape: StepShape) -> float:
    prompt_tokens = shape.tokens - shape.decode_rows
    with_prompts = prompt_tokens * TRUTH["token"] + shape.prompt_pairs * TRUTH["pair"] + TRUTH["prompts"]
    decode = TRUTH["step"] + shape.decode_rows * TRUTH["row"] + shape.kv_tokens * TRUTH["kv"]
    return decode + with_prompts * (prompt_tokens > 0)


def a_record(rng: random.Random, step_id: int, begin_ns: int, factor: float, bend: float = 1.0) -> StepRecord:
    """A step of up to 16 rows that decode, and sometimes a prompt. bend: what steps of over 8 tokens take more."""
    rows = [(f"r{i}", rng.randrange(50, 1_000), 1) for i in range(rng.randrange(1, 17))]
    if rng.random() < 0.3:
        rows.append(("p", rng.choice((0, 128)), rng.randrange(8, 200)))
    num_prompt = sum(count for _, _, count in rows if count > 1)
    record = StepRecord(
        step_id=step_id,
        begin_ns=begin_ns,
        end_ns=begin_ns,
        plan_ns=0,
        launch_ns=0,
        device_ns=0,
        sample_ns=0,
        commit_ns=0,
        host_gap_ns=GAP_NS,
        idle_ns=0,
        rows=tuple(rows),
        prefill_tokens=num_prompt,
        decode_tokens=sum(count == 1 for _, _, count in rows),
        kv_tokens_read=sum(start + count for _, start, count in rows),
        blocks_used=0,
        num_running=len(rows),
        num_waiting=0,
    )
    shape = shape_of_record(record)
    took_ns = round(device_ns(shape) * factor * (bend if shape.tokens > 8 else 1.0))
    launch_ns = round(HOST_NS * factor)
    return msgspec.structs.replace(
        record, device_ns=took_ns, launch_ns=launch_ns, end_ns=begin_ns + took_ns + launch_ns
    )


def records(
    seed: int, count: int = 600, noise: float = 0.05, slow: float = 1.0, bend: float = 1.0, pauses: float = 0.005
) -> list[StepRecord]:
    """Steps one after the other. slow: how long the second half of them takes against the first; some pause."""
    rng, made, now_ns = random.Random(seed), [], 0
    for number in range(1, count + 1):
        pause = 20.0 if rng.random() < pauses else 1.0
        factor = rng.lognormvariate(0, noise) * pause * (slow if number > count // 2 else 1.0)
        made.append(a_record(rng, number, now_ns, factor, bend))
        now_ns = made[-1].end_ns + GAP_NS
    return made


def one_after_the_other(rng: random.Random, factors: list[float], gap_ns: Callable[[], int]) -> list[StepRecord]:
    """Steps that take so many times what they should, and the gaps before them."""
    made, now_ns = list[StepRecord](), 0
    for number, factor in enumerate(factors, 1):
        record = a_record(rng, number, now_ns, factor)
        gap = gap_ns()
        made.append(msgspec.structs.replace(record, host_gap_ns=gap, begin_ns=now_ns + gap, end_ns=record.end_ns + gap))
        now_ns = made[-1].end_ns
    return made


@pytest.fixture(scope="module")
def fitted() -> Fit:
    return fit(records(0))


def fresh_shapes(seed: int, count: int = 200) -> list[StepShape]:
    return [shape_of_record(record) for record in records(seed, count)]


def test_the_truth_is_found_in_noise_and_pauses(fitted: Fit) -> None:
    for shape in fresh_shapes(1):
        assert fitted.model.step_time(shape).device_ns == pytest.approx(device_ns(shape), rel=0.12)
    errors = [fitted.model.step_time(s).device_ns / device_ns(s) - 1 for s in fresh_shapes(2)]
    assert abs(statistics.mean(errors)) < 0.04
    assert fitted.model.errors.median_relative < 0.08


def test_the_host_has_its_parts(fitted: Fit) -> None:
    time = fitted.model.step_time(StepShape(4, 4, 4, 1_000, 0))
    assert time.launch_ns == pytest.approx(HOST_NS, rel=0.1)
    assert time.host_gap_ns == pytest.approx(GAP_NS, rel=0.1)
    assert (time.plan_ns, time.sample_ns, time.commit_ns, time.moves_ns) == (0, 0, 0, 0)


def test_intervals_of_the_coefficients_hold_the_truth() -> None:
    """What 40 draws of the model say of a step: the truth lies within nine tenths of them nine times of ten."""
    shape, held = StepShape(8, 8, 8, 4_000, 0), 0
    for seed in range(20):
        model = fit(records(seed, count=300)).model
        model = msgspec.structs.replace(model, buckets={})
        rng = random.Random(seed)
        drawn = sorted(model.sample(rng).step_time(shape).device_ns for _ in range(40))
        held += drawn[1] <= device_ns(shape) <= drawn[-2]
    assert 14 <= held <= 20


def chunks_of_eight(count: int = 200) -> list[StepRecord]:
    """Steps of a budget of 8, in 4 ms each however much of a prompt they compute; every other one decodes in 3."""
    made, now_ns, rng = list[StepRecord](), 0, random.Random(7)
    for number in range(1, count + 1):
        tokens = 0 if number % 2 else rng.choice((4, 8, 8, 8))
        took_ns = round((4_000_000 if tokens else 3_000_000) * rng.lognormvariate(0, 0.02))
        shape = {"rows": (("p", 0, tokens or 1),), "prefill_tokens": tokens, "decode_tokens": int(not tokens)}
        times = {"launch_ns": 0, "device_ns": took_ns, "end_ns": now_ns + took_ns}
        record = a_record(random.Random(number), number, now_ns, 1.0)
        made.append(msgspec.structs.replace(record, **shape, **times, kv_tokens_read=tokens or 1, num_running=1))
        now_ns = made[-1].end_ns + GAP_NS
    return made


@pytest.mark.parametrize(("peak", "least_ms", "most_ms"), [(1e12, 4.2, 7.5), (2e11, 7.8, 8.2)])
def test_a_prompt_twice_as_large_takes_from_no_more_to_twice_as_much(
    peak: float, least_ms: float, most_ms: float
) -> None:
    """The recorded steps attain 2e11 operations a second. A machine that can do no more takes twice as long for 16
    tokens as for 8; of one that could do five times that nobody knows, and the draws reach from one to the other."""
    cost = TokenCost(weight_bytes=1, kv_bytes_per_token=1, operations_per_token=10**8, operations_per_context_token=1)
    machine = Machine(cpu="any", threads=2, operations_per_s=peak)
    facts = ServerFacts(version="1", model="any", max_model_len=4096, cost=cost, machine=machine)
    model = msgspec.structs.replace(fit(chunks_of_eight(), facts).model, buckets={})

    def took_ms(costs: CostModel, *shape: int) -> float:
        return costs.step_time(StepShape(*shape)).device_ns / 1e6

    drawn = sorted(took_ms(model.sample(random.Random(seed)), 1, 16, 0, 16, 136) for seed in range(60))
    assert [drawn[3], drawn[-4]] == pytest.approx([least_ms, most_ms], rel=0.1)
    assert drawn[3] < took_ms(model, 1, 16, 0, 16, 136) < drawn[-4]
    assert took_ms(model, 1, 8, 0, 8, 36) == pytest.approx(4.0, rel=0.05), "as it was recorded"


@pytest.mark.parametrize("every", [8, 40, 100])
def test_a_prompt_of_a_recorded_size_takes_what_it_took_however_rare_it_was(every: int) -> None:
    """Long prompts attain all of the peak; the others, of 12 tokens, wait for the weights, as most after cache hits."""
    made, now_ns, rng = list[StepRecord](), 0, random.Random(7)
    for number in range(1, 601):
        tokens = 12 if number % every else 512
        rows = (("p", 0, tokens), ("d", 300, 1))
        took_ns = round(max(3_000_000, tokens * 100_000) * rng.lognormvariate(0, 0.02))
        record = a_record(rng, number, now_ns, 1.0)
        shape = {"rows": rows, "prefill_tokens": tokens, "decode_tokens": 1, "kv_tokens_read": tokens + 301}
        times = {"launch_ns": 0, "device_ns": took_ns, "end_ns": now_ns + took_ns}
        made.append(msgspec.structs.replace(record, **shape, **times, num_running=2))
        now_ns = made[-1].end_ns + GAP_NS
    cost = TokenCost(weight_bytes=1, kv_bytes_per_token=1, operations_per_token=10**8, operations_per_context_token=1)
    machine = Machine(cpu="any", threads=2, operations_per_s=1e12)
    model = fit(made, ServerFacts(version="1", model="any", max_model_len=4096, cost=cost, machine=machine)).model
    shape = shape_of_record(next(record for record in made if record.prefill_tokens == 512))
    took_ms = [
        costs.step_time(shape).device_ns / 1e6
        for costs in (model, *(model.sample(random.Random(n)) for n in range(20)))
    ]
    assert took_ms[0] == pytest.approx(51.2, rel=0.03)
    assert sorted(took_ms)[1:-1] == pytest.approx([51.2] * 19, rel=0.1)


def test_draws_differ_and_are_the_same_for_the_same_seed(fitted: Fit) -> None:
    draws = [fitted.model.sample(random.Random(seed)).device for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(value >= 0 for draw in draws for value in draw)


def test_the_machine_s_pace_is_found() -> None:
    made = records(3, slow=1.5)
    model, pace = fit(made)
    for shape in (StepShape(4, 4, 4, 900, 0), StepShape(4, 40, 3, 900, 60)):
        slowed = pace.at(made[-1].begin_ns, shape) / pace.at(made[0].begin_ns, shape)
        assert slowed == pytest.approx(1.5, rel=0.15)
    assert model.errors.drift > 0.1
    assert fit(records(3)).model.errors.drift < 0.06


def test_pace_holds_from_its_instant_on() -> None:
    pace = Pace(PaceOf((100, 200), (1.0, 2.0)), PaceOf((150,), (3.0,)))
    decode, prompt = StepShape(2, 2, 2, 90, 0), StepShape(2, 9, 1, 90, 40)
    assert [pace.at(now_ns, decode) for now_ns in (0, 100, 199, 200, 10**9)] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert [pace.at(now_ns, prompt) for now_ns in (0, 10**9)] == [3.0, 3.0]


def test_another_hour_is_slower_or_faster_throughout() -> None:
    pace = Pace(PaceOf((100, 200), (1.0, 2.0)), PaceOf((150,), (3.0,)))
    assert pace.times(1.5) == Pace(PaceOf((100, 200), (1.5, 3.0)), PaceOf((150,), (4.5,)))


def test_what_is_not_linear_is_in_the_buckets() -> None:
    model = fit(records(4, bend=1.6)).model
    few, many = StepShape(7, 7, 7, 3_000, 0), StepShape(14, 14, 14, 7_000, 0)
    assert model.step_time(few).device_ns == pytest.approx(device_ns(few), rel=0.15)
    assert model.step_time(many).device_ns == pytest.approx(device_ns(many) * 1.6, rel=0.15)
    lines = msgspec.structs.replace(model, buckets={})
    assert abs(lines.step_time(few).device_ns / device_ns(few) - 1) > 0.15


def test_noise_is_as_wide_as_that_of_the_steps() -> None:
    model = fit(records(5, count=2_000, noise=0.2, pauses=0.0)).model
    noise, shape = Noise(random.Random(0), model.persistence), StepShape(8, 8, 8, 4_000, 0)
    times = [model.step_time(shape, 1.0, noise.next()).device_ns for _ in range(4_000)]
    expected = model.step_time(shape).device_ns
    assert statistics.mean(times) == pytest.approx(expected, rel=0.05)
    within = sum(abs(time / statistics.median(times) - 1) < 0.2 for time in times) / len(times)
    assert 0.55 < within < 0.8  # a standard deviation of a fifth: two thirds


@pytest.mark.parametrize("seed", range(4))
def test_steps_and_gaps_take_together_what_was_recorded(seed: int) -> None:
    """On a busy machine half of a gap's time is in those that are many times as long as most, and one step in hundreds
    is stopped for as long as a hundred take: a replay that leaves either out is too fast, each time."""
    rng = random.Random(seed)
    factors = [rng.lognormvariate(0, 0.4) for _ in range(2_000)]
    for place in rng.sample(range(2_000), 4):
        factors[place] *= 100
    made = one_after_the_other(rng, factors, lambda: round(GAP_NS * rng.lognormvariate(0, 1.5)))
    model, pace = fit(made)
    shapes = [(shape_of_record(record), record.begin_ns) for record in made]
    times = [
        costs.of(*each) for number in range(8) for costs in [ModelCosts(model, pace, number, 1.0)] for each in shapes
    ]
    taken_ns, gaps_ns = sum(r.device_ns + r.launch_ns for r in made), sum(r.host_gap_ns for r in made[1:])
    assert sum(time.host_gap_ns for time in times) / 8 == pytest.approx(gaps_ns, rel=0.1)
    assert sum(time.step_ns for time in times) / 8 == pytest.approx(taken_ns, rel=0.1)
    middle = statistics.median(time.step_ns for time in times)
    assert middle == pytest.approx(statistics.median(r.device_ns + r.launch_ns for r in made), rel=0.1)


def test_a_pause_tells_nothing_of_the_next_step() -> None:
    """Slow steps come together, and pauses do not: else one in hundreds is simulated as three in a row."""
    rng = random.Random(7)
    factors = [rng.lognormvariate(0, 0.05) * (20 if rng.random() < 0.005 else 1) for _ in range(3_000)]
    model, pace = fit(one_after_the_other(rng, factors, lambda: GAP_NS))
    assert model.persistence < 0.5
    model, shape = msgspec.structs.replace(model, persistence=0.95), StepShape(8, 8, 8, 4_000, 0)
    costs, usual_ns = ModelCosts(model, pace, 0, 1.0), model.step_time(shape).step_ns
    are_long = [costs.of(shape, 0).step_ns > 5 * usual_ns for _ in range(20_000)]
    pairs = sum(one and other for one, other in pairwise(are_long))
    assert 0.001 < sum(are_long) / 20_000 < 0.02
    assert pairs < sum(are_long) / 10


def test_what_slows_one_step_slows_the_next() -> None:
    rng, level, factors = random.Random(1), 0.0, []
    for _ in range(1_000):
        level = 0.9 * level + 0.44 * rng.gauss(0, 1)
        factors.append(2 ** (level / 3))
    made, now_ns = [], 0
    for number, factor in enumerate(factors, 1):
        made.append(a_record(rng, number, now_ns, factor))
        now_ns = made[-1].end_ns + GAP_NS
    assert fit(made).model.persistence > 0.6
    assert fit(records(0, noise=0.1)).model.persistence < 0.2
    noise = Noise(random.Random(0), 0.9)
    values = [noise.next() for _ in range(20_000)]
    assert statistics.correlation(values[:-1], values[1:]) == pytest.approx(0.9, abs=0.03)
    assert statistics.stdev(values) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (StepShape(40, 40, 40, 1_000, 0), "rows"),
        (StepShape(2, 600, 0, 1_000, 0), "tokens"),
        (StepShape(2, 2, 2, 10**6, 0), "kv_tokens"),
        (StepShape(1, 100, 0, 100, 10**7), "prompt_pairs"),
        (StepShape(2, 2, 2, 1_000, 0, moved_blocks=1), "moved_blocks"),
    ],
)
def test_what_is_far_from_all_that_was_seen_is_refused(fitted: Fit, shape: StepShape, name: str) -> None:
    with pytest.raises(OutOfRange, match=f"{name}; of the recorded ones none has more than") as raised:
        fitted.model.step_time(shape)
    assert raised.value.info.param == name


def test_copies_take_what_a_block_takes() -> None:
    made = records(6)
    moving = [
        msgspec.structs.replace(r, offloaded_blocks=3, offload_ns=3_000, end_ns=r.end_ns + 3_000) for r in made[::7]
    ]
    model = fit([*moving, *made]).model
    assert model.step_time(StepShape(2, 2, 2, 900, 0, moved_blocks=5)).moves_ns == 5_000
    assert model.step_time(StepShape(2, 2, 2, 900, 0)).moves_ns == 0


def test_a_machine_that_takes_twice_as_long_takes_it_in_every_part() -> None:
    moves = {"offloaded_blocks": 3, "offload_ns": 3_000, "host_gap_ns": 0}
    moving = [msgspec.structs.replace(record, end_ns=record.end_ns + 3_000, **moves) for record in records(6)]
    model = fit(moving).model
    slower, shape = model.times(2.0), StepShape(4, 20, 3, 900, 60, moved_blocks=5)
    twice = [2 * part for part in model.step_time(shape)]
    assert slower.step_time(shape) == pytest.approx(twice, abs=2)
    assert slower.step_time(shape).moves_ns == 10_000
    spread, wider = (np.array(each.covariance) for each in (model, slower))
    assert np.sqrt(np.diag(wider)) == pytest.approx(2 * np.sqrt(np.diag(spread)))


def test_twice_the_most_is_not_far(fitted: Fit) -> None:
    rows = int(fitted.model.most[0] * REACH)
    assert fitted.model.step_time(StepShape(rows, rows, 10, 1_000, 0)).device_ns > 0


def test_a_prompt_of_twice_the_most_tokens_is_not_far_though_it_has_four_times_the_pairs(fitted: Fit) -> None:
    most = dict(zip(LIMITED, fitted.model.most, strict=True))["prompt_pairs"]
    assert fitted.model.step_time(StepShape(1, 100, 0, 100, 4 * most)).device_ns > 0
    with pytest.raises(OutOfRange, match="prompt_pairs"):
        fitted.model.step_time(StepShape(1, 100, 0, 100, 4 * most + 1))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="49 steps are too few"):
        fit(records(0, count=MIN_STEPS - 1))


@pytest.mark.parametrize("wrong", [{"device_ns": -1}, {"end_ns": 0}, {"end_ns": 2**62}])
def test_steps_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    steps = records(0)
    with pytest.raises(ConfigError, match="that cannot be"):
        fit([msgspec.structs.replace(steps[0], **wrong), *steps[1:]])


def test_steps_that_no_model_explains_are_refused() -> None:
    """Times that have nothing to do with what was computed, of four orders of magnitude."""
    rng, steps = random.Random(7), []
    for step in records(7, count=400):
        took_ns = round(10 ** rng.uniform(4, 8))
        times = {"device_ns": took_ns, "launch_ns": 0, "host_gap_ns": 0, "end_ns": step.begin_ns + took_ns}
        steps.append(msgspec.structs.replace(step, **times))
    with pytest.raises(ConfigError, match="the model is off by") as raised:
        fit(steps)
    assert raised.value.info.value > raised.value.info.limit == 1.0
    assert "Record more, on a quiet machine" in str(raised.value.info.hint)


def test_it_crosses_json_unchanged(fitted: Fit) -> None:
    encoded = msgspec.json.encode(fitted.model)
    assert msgspec.json.decode(encoded, type=CostModel) == fitted.model


@given(st.integers(1, 16), st.integers(0, 200), st.integers(0, 8_000), st.floats(0.1, 10), st.floats(-8, 8))
def test_no_part_is_negative_and_slower_takes_longer(
    fitted: Fit, rows: int, prompt: int, kv: int, pace: float, noise: float
) -> None:
    shape = StepShape(rows, rows + prompt, rows, kv, prompt * 10)
    time = fitted.model.step_time(shape, pace, noise)
    assert min(time) >= 0
    assert time.step_ns == sum(time) - time.host_gap_ns
    assert fitted.model.step_time(shape, pace * 1.5, noise).step_ns > time.step_ns


def test_steps_alike_have_one_name() -> None:
    shapes = [StepShape(1, 1, 1, 9, 0), StepShape(3, 3, 3, 9, 0), StepShape(4, 4, 4, 9, 0), StepShape(3, 4, 2, 9, 3)]
    assert [bucket_of(shape) for shape in shapes] == [
        "decode, up to 1",
        "decode, up to 4",
        "decode, up to 4",
        "prompts, up to 4",
    ]
    assert bucket_of(StepShape(1, 9_000, 0, 9_000, 9)) == "prompts, over 4096"


def test_quantiles_by_standard_deviations() -> None:
    values = tuple(float(i) for i in range(100))
    assert [quantile(values, deviations) for deviations in (-9, -1, 0, 1, 9)] == [0.0, 15.0, 50.0, 84.0, 99.0]
