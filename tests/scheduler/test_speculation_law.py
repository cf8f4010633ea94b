"""The law of drafts, in worlds whose steps take what is declared and swing by a tenth: never slower than none by more
than a few percent, and near the best fixed number, which the scheduler is not told. On a machine whose speed wanders by
a third as well, more is lost.

It decides by what steps took alone (`core.row_costs`), while each draft's chance is told to it truly. In one step of 64
a row has a draft more than is believed, as with real drafts, and where all steps have drafts one in 32 has none.
"""

import math
import random
from typing import NamedTuple

import pytest

from splittime.core.row_costs import RowCosts
from splittime.scheduler.speculation import MOST_DRAFTED_STEPS, _best_number

STEPS, EXPLORE, MOST = 400, 64, 16
SWING, SPIKES = 0.1, 0.01
DRIFT_MEMORY = 0.99  # of the machine's speed, with each step


class World(NamedTuple):
    """ms of a step, of a request's row, of a draft's, and of a row's having drafts."""

    step: float
    row: float
    draft: float
    drafted: float

    def ms(self, num_requests: int, num_drafts: int, num_drafted: int) -> float:
        return self.step + self.row * num_requests + self.draft * num_drafts + self.drafted * num_drafted


WORLDS = {
    "a small model, whose requests cost more than rows": World(0.3, 0.24, 0.13, 0.02),
    "a large model": World(20.0, 1.0, 1.0, 0.1),
    "a small one of 256 tokens of text": World(1.0, 0.15, 0.10, 0.03),
    "a middling one": World(9.0, 1.0, 1.0, 0.0),
    "one in which nothing is gained by company": World(0.3, 0.24, 0.24, 0.02),
}


def chances(accepted: float) -> list[float]:
    return [accepted**place for place in range(1, MOST + 1)]


def chosen(costs: RowCosts, num_requests: int, accepted: float) -> list[int]:
    """Returns how many drafts each request gets."""
    slots = sorted(((one, str(name)) for name in range(num_requests) for one in chances(accepted)), reverse=True)
    count = _best_number(slots, num_requests, costs) if costs.is_known else 0
    counts = [0] * num_requests
    for _, name in slots[:count]:
        counts[int(name)] += 1
    return counts


def ratio(world: World, num_requests: int, accepted: float, drift: float, seed: int) -> float:
    """Returns tokens a second with drafts over without, under the same swings of the machine. drift: how far its speed
    wanders, as a share."""
    rng, costs = random.Random(seed), RowCosts()
    tokens = took_ms = plain_ms = speed = 0.0
    last_plain = 0
    for number in range(1, STEPS + 1):
        is_plain = number - last_plain > MOST_DRAFTED_STEPS
        counts = [0] * num_requests if is_plain else chosen(costs, num_requests, accepted)
        counts[0] += number % EXPLORE == EXPLORE // 2
        speed = DRIFT_MEMORY * speed + rng.gauss(0, drift * math.sqrt(1 - DRIFT_MEMORY**2))
        swing = math.exp(speed + rng.gauss(0, SWING)) * (1.5 if rng.random() < SPIKES else 1.0)
        num_drafts, num_drafted = sum(counts), sum(map(bool, counts))
        last_plain = last_plain if num_drafts else number
        ms = swing * world.ms(num_requests, num_drafts, num_drafted)
        costs.learn(num_requests, 1e6 * ms, num_drafts, num_drafted)
        tokens += num_requests + sum(sum(chances(accepted)[:count]) for count in counts)
        took_ms, plain_ms = took_ms + ms, plain_ms + swing * world.ms(num_requests, 0, 0)
    return tokens / took_ms * plain_ms / (num_requests * STEPS)


def best_ratio(world: World, num_requests: int, accepted: float) -> float:
    """Returns that of the best number of drafts that all rows have in all steps."""
    plain = world.ms(num_requests, 0, 0)
    rates = [
        (1 + sum(chances(accepted)[:count])) * plain / world.ms(num_requests, count * num_requests, num_requests)
        for count in range(1, MOST + 1)
    ]
    return max(1.0, *rates)


@pytest.mark.parametrize(("drift", "least", "near"), [(0.0, 0.97, 0.92), (0.3, 0.93, 0.87)])
@pytest.mark.parametrize("accepted", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.sample(30)
def test_drafts_are_never_slower_than_none_and_near_the_best(
    name: str, num_requests: int, accepted: float, drift: float, least: float, near: float
) -> None:
    world = WORLDS[name]
    found = [ratio(world, num_requests, accepted, drift, seed) for seed in range(3)]
    mean = sum(found) / len(found)
    assert mean > least
    assert mean > near * best_ratio(world, num_requests, accepted)
