"""Loads for the doctor's scenarios: schedules of token ids, drawn from a seed."""

import random
from collections.abc import Iterable

from splittime.loadgen.schedule import Planned, Schedule

VOCABULARY = range(10, 4000)

Ask = tuple[float, tuple[int, ...] | str, int]  # second, prompt, output tokens


def ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choice(VOCABULARY) for _ in range(length))


def instants(rng: random.Random, rate: float, duration_s: float) -> list[float]:
    """True Poisson."""
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < duration_s:
        found.append(at_s)
    return found


def chats(rng: random.Random, rate: float, duration_s: float, prompt: int, output: int) -> list[Ask]:
    """Independent prompts; lengths within a quarter of what is given."""
    return [
        (at_s, ids(rng, _about(rng, prompt)), max(1, _about(rng, output))) for at_s in instants(rng, rate, duration_s)
    ]


def _about(rng: random.Random, length: int) -> int:
    return rng.randint(max(1, length * 3 // 4), max(1, length * 5 // 4))


def schedule(asks: Iterable[Ask], seed: int) -> Schedule:
    """In order of time."""
    planned = [
        Planned(
            index=index,
            at_ns=int(at_s * 1e9),
            prompt=prompt,
            output_tokens=output,
        )
        for index, (at_s, prompt, output) in enumerate(sorted(asks, key=lambda ask: ask[0]))
    ]
    return Schedule(seed=seed, requests=tuple(planned))
