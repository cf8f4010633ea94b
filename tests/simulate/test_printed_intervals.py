"""Intervals of a prediction, held against worlds whose truth is known: there the change is made, in another hour."""

import math
import random

import msgspec
import pytest
from known_replicas import REPLICA

from splittime.plan.load import requests_for
from splittime.simulate.change import Change
from splittime.simulate.cost import BUCKET_EDGES, OutOfRange, ShapeBucket
from splittime.simulate.draws import OTHER_HOUR
from splittime.simulate.recorded import Recorded
from splittime.simulate.replica import Replica
from splittime.simulate.what_if import predict

FIGURES = ("ttft_ms_p50", "ttft_ms_p90", "itl_ms_p50", "itl_ms_p90", "e2e_ms_p50", "e2e_ms_p90", "e2e_ms_mean")
NINE_OF_TEN = 19  # draws: the fewest of which one more lies within the interval so often
DEVIATIONS = (-1.6, -1.0, -0.7, -0.4, -0.15, 0.1, 0.35, 0.65, 1.0, 1.7)


def world(rng: random.Random) -> Replica:
    """Returns a server whose steps are not on the model's lines, and differ from each other, the next like the last."""
    spread = rng.choice((0.05, 0.2, 0.4))
    noise = [math.exp(spread * deviation) for deviation in DEVIATIONS]
    noise = [each / (sum(noise) / len(noise)) for each in noise]
    names = [f"{kind}, up to {edge}" for kind in ("decode", "prompts") for edge in BUCKET_EDGES]
    costs = msgspec.structs.replace(
        REPLICA.costs,
        device=tuple(ns * rng.uniform(0.5, 2) for ns in (4e6, 2e6, 6e5, 4e4, 400.0, 2000.0)),
        buckets={name: ShapeBucket(100, rng.uniform(0.8, 1.25), tuple(noise)) for name in names},
        persistence=rng.choice((0.0, 0.5, 0.9)),
    )
    config = msgspec.structs.replace(REPLICA.config, max_num_seqs=rng.choice((2, 4)))
    return msgspec.structs.replace(REPLICA, costs=costs, config=config)


def within(seed: int) -> dict[str, tuple[bool, bool]]:
    """Returns of each figure whether its interval holds what a later run has over the recorded one, and whether the
    change's own interval does. Nothing, where the change needs steps that were not seen."""
    rng = random.Random(seed)
    true = world(rng)
    slots = true.config.max_num_seqs
    load = {"rate": slots * rng.uniform(1.5, 5), "input_tokens": "uniform:20:200", "output_tokens": "uniform:3:12"}
    requests = requests_for({**load, "duration_s": 30.0, "seed": seed}, true)[:30]
    books = true.run(requests, Change(), seed=1_000 + seed)
    change = Change({"max_num_seqs": rng.choice((1, 2 * slots))})
    try:
        told = predict(Recorded(books.accounts, books.steps, true.facts), change, NINE_OF_TEN)
    except OutOfRange:
        return {}
    later = true.slower(math.exp(OTHER_HOUR * rng.gauss(0, 1))).figures(requests, change, seed=5_000 + seed)
    found = {}
    for figure in map(told.figure, FIGURES):
        ratio = later[figure.name] / figure.recorded
        assert figure.after == pytest.approx(figure.recorded * figure.ratio)
        found[figure.name] = figure.low <= ratio <= figure.high, figure.own_low <= ratio <= figure.own_high
    return found


@pytest.mark.parametrize(("worlds", "least"), [(3, 0.7), pytest.param(30, 0.85, marks=pytest.mark.sweep)])
def test_a_later_run_lies_within_the_interval_nine_times_of_ten(worlds: int, least: float) -> None:
    """What the change does by itself, in the same hour and with the same noise, is narrower: two equal runs differ."""
    held = [held for seed in range(worlds) for held in within(seed).values()]
    assert len(held) > 4 * worlds
    printed, own = (sum(side) / len(held) for side in zip(*held, strict=True))
    assert printed >= least
    assert own < printed - 0.1
