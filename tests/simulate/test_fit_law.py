"""The law of the cost model, over generated ledgers with random truths: it finds the truth among outliers, its
intervals hold it as often as they say, and what the steps do not tell apart has an interval that says so."""

import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from splittime.core.facts import TokenCost
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.simulate.cost import EXPERTS, IN_PIECES, Basis, CostModel
from splittime.simulate.fit import fit
from splittime.simulate.shape import StepShape, shape_of_record

DRAWS = 40
EXPERTS_OF_64 = 1 - 8 / 64
NOISE = 0.04
Rows = list[tuple[str, int, int]]


def a_truth(rng: random.Random, basis: Basis) -> list[float]:
    """What a step, and one more of each, takes in ns: each within a factor of four of what is usual."""
    usual = (4e6, 8e5, 2e5, 4e4, 300.0, 100.0, *((3e6,) if basis.captured_rows else ()))
    usual += (2e7,) if basis.idle_share else ()
    return [one * 2 ** rng.uniform(-1, 1) for one in usual]


def mixed(rng: random.Random) -> Rows:
    rows = [(f"r{i}", rng.randrange(20, 2_000), 1) for i in range(rng.randrange(1, 33))]
    return [*rows, ("p", rng.choice((0, 256)), rng.randrange(8, 256))] if rng.random() < 0.25 else rows


def whole_prompts(rng: random.Random) -> Rows:
    """Prompts of 128 tokens, each in one step, one at a time: a step with a prompt has 128 tokens of it."""
    rows = [(f"r{i}", rng.randrange(20, 2_000), 1) for i in range(rng.randrange(1, 33))]
    return [*rows, ("p", 0, 128)] if rng.random() < 0.25 else rows


def true_ns(truth: list[float], basis: Basis, shape: StepShape) -> float:
    return sum(one * value for one, value in zip(truth, basis.features(shape), strict=True))


def ledger(
    rng: random.Random,
    truth: list[float],
    basis: Basis,
    draw: Callable[[random.Random], Rows] = mixed,
    count: int = 800,
) -> list[StepRecord]:
    """Steps with noise, one in a hundred of which is interrupted for up to ten times as long."""
    made, now_ns = [], 0
    for number in range(count):
        rows = draw(rng)
        prefill = sum(tokens for _, _, tokens in rows if tokens > 1)
        record = StepRecord(
            **dict.fromkeys(("plan_ns", "launch_ns", "sample_ns", "commit_ns", "idle_ns"), 0),
            **dict.fromkeys(("blocks_used", "num_waiting", "end_ns", "device_ns"), 0),
            step_id=number,
            begin_ns=now_ns,
            host_gap_ns=0,
            rows=tuple(rows),
            prefill_tokens=prefill,
            decode_tokens=sum(tokens == 1 for _, _, tokens in rows),
            kv_tokens_read=sum(start + tokens for _, start, tokens in rows),
            num_running=len(rows),
        )
        shape = shape_of_record(record)
        factor = rng.lognormvariate(0, NOISE) * (rng.uniform(2, 10) if rng.random() < 0.01 else 1.0)
        taken = round(true_ns(truth, basis, shape) * factor)
        is_captured = basis.captured_rows is not None and not basis.is_in_pieces(shape)
        kind: Any = {"execution": "captured" if is_captured else "eager"} if basis.captured_rows else {}
        made.append(msgspec.structs.replace(record, device_ns=taken, end_ns=now_ns + taken, **kind))
        now_ns += taken
    return made


def facts_of(basis: Basis) -> ServerFacts:
    experts = {"num_experts": 64, "chosen_experts": 8} if basis.idle_share else {}
    cost = TokenCost(
        weight_bytes=1, kv_bytes_per_token=1, operations_per_token=1, operations_per_context_token=1, **experts
    )
    return ServerFacts(version="1", model="any", max_model_len=4096, cost=cost)


def interval(model: CostModel, shape: StepShape, rng: random.Random) -> tuple[float, float]:
    """Returns within what nine of ten draws of the model have the step."""
    drawn = sorted(model.sample(rng).step_time(shape).device_ns for _ in range(DRAWS))
    return drawn[DRAWS // 20 - 1], drawn[-(DRAWS // 20)]


class Held:
    """How often intervals held what they are for."""

    def __init__(self) -> None:
        self.count = self.held = 0
        self.errors: list[float] = []
        self.widths: list[float] = []

    def add(self, model: CostModel, shape: StepShape, true: float, rng: random.Random) -> None:
        low, high = interval(model, shape, rng)
        self.count += 1
        self.held += low <= true <= high
        self.errors.append(abs(model.step_time(shape).device_ns / true - 1))
        self.widths.append((high - low) / true)

    @property
    def share(self) -> float:
        return self.held / self.count


BASES = {
    "a host": Basis(),
    "a device that captures": Basis(captured_rows=16),
    "a mixture of experts": Basis(idle_share=EXPERTS_OF_64),
}
LEDGERS = [12, pytest.param(60, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("num_ledgers", LEDGERS)
@pytest.mark.parametrize("name", BASES)
def test_steps_are_predicted_and_their_intervals_hold(name: str, num_ledgers: int) -> None:
    """Single steps of another ledger, whose noise the draws have too."""
    basis, held, count, errors = BASES[name], 0, 0, []
    for seed in range(num_ledgers):
        rng = random.Random(seed)
        truth = a_truth(rng, basis)
        model = fit(ledger(rng, truth, basis), facts_of(basis)).model
        assert model.basis == basis
        models = [model.sample(rng) for _ in range(DRAWS)]
        for record in ledger(rng, truth, basis, count=60):
            shape = shape_of_record(record)
            drawn = sorted(one.step_time(shape, 1.0, rng.gauss(0, 1)).device_ns for one in models)
            held += drawn[DRAWS // 20 - 1] <= record.device_ns <= drawn[-(DRAWS // 20)]
            count += 1
            errors.append(abs(model.step_time(shape).device_ns / record.device_ns - 1))
    assert statistics.median(errors) <= 0.05
    assert 0.85 <= held / count <= 0.95


@pytest.mark.parametrize("num_ledgers", LEDGERS)
def test_what_the_steps_do_not_tell_apart_has_a_wide_interval(num_ledgers: int) -> None:
    """Where all prompts have one length, a step of half a prompt may take much or little of a whole one's time; a step
    of a whole one is as sure as it is."""
    halves, wholes = Held(), Held()
    for seed in range(num_ledgers):
        rng = random.Random(seed)
        truth = a_truth(rng, Basis())
        model = msgspec.structs.replace(fit(ledger(rng, truth, Basis(), whole_prompts)).model, buckets={})
        assert model.unsure == ("step with prompts", "prompt token", "pair of prompt positions")
        for held, tokens in ((halves, 64), (wholes, 128)):
            shape = StepShape(2, 1 + tokens, 1, 500 + tokens, tokens * (tokens + 1) // 2)
            held.add(model, shape, true_ns(truth, Basis(), shape), rng)
    assert halves.share >= 0.75
    assert wholes.share >= 0.75
    assert statistics.median(halves.widths) > 0.2
    assert statistics.median(wholes.widths) < 0.03


def test_a_ledger_that_tells_all_apart_is_sure_of_all() -> None:
    rng = random.Random(1)
    assert fit(ledger(rng, a_truth(rng, Basis()), Basis())).model.unsure == ()


def test_a_mixture_reads_more_experts_with_more_tokens_and_others_have_no_such_term() -> None:
    rng, basis = random.Random(2), BASES["a mixture of experts"]
    truth = a_truth(rng, basis)
    records = ledger(rng, truth, basis)
    model, blind = fit(records, facts_of(basis)).model, fit(records, facts_of(Basis())).model
    assert model.device[model.basis.names.index(EXPERTS)] == pytest.approx(truth[-1], rel=0.1)
    assert EXPERTS not in blind.basis.names
    times = [model.step_time(StepShape(rows, rows, rows, 100 * rows, 0)).device_ns for rows in (1, 2, 30, 31)]
    assert times[1] - times[0] > 3 * (times[3] - times[2])


def test_a_step_in_pieces_has_a_constant_of_its_own_and_a_host_s_part_too() -> None:
    rng, basis = random.Random(3), BASES["a device that captures"]
    truth = a_truth(rng, basis)
    slower = [
        msgspec.structs.replace(r, launch_ns=launch_ns, end_ns=r.end_ns + launch_ns)
        for r in ledger(rng, truth, basis)
        for launch_ns in (500_000 if r.execution == "eager" else 50_000,)
    ]
    model = fit(slower).model
    assert model.device[model.basis.names.index(IN_PIECES)] == pytest.approx(truth[6], rel=0.15)
    captured, eager = (model.step_time(StepShape(rows, rows, rows, 100 * rows, 0)) for rows in (16, 17))
    assert (captured.launch_ns, eager.launch_ns) == (pytest.approx(50_000, rel=0.1), pytest.approx(500_000, rel=0.1))
    assert fit([r for r in slower if r.execution == "captured"]).model.basis == Basis()
