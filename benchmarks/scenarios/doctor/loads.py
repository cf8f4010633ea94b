"""Loads for the doctor's scenarios: schedules of token ids, drawn from a seed."""

import random
from collections.abc import Iterable
from typing import NamedTuple

from splittime.bench.schedule import Planned, Schedule

VOCABULARY = range(10, 4000)

TUNED_SEED = 1  # of the loads that the rules were tuned on

Ask = tuple[float, tuple[int, ...] | str, int]  # second, prompt, output tokens


class Size(NamedTuple):
    """By what a held-out load differs from the tuned one: factors. length: of prompts and answers. load_factor: of the
    tokens that are asked for in a second, so the rate's is load_factor / length."""

    length: float = 1.0
    load_factor: float = 1.0
    duration: float = 1.0

    @classmethod
    def of(cls, seed: int, is_ill: bool = True) -> "Size":
        if seed == TUNED_SEED:
            return cls()
        rng = random.Random(f"size of {seed}")
        length, load_factor = ((0.8, 1.0), (1.0, 1.2)) if is_ill else ((0.8, 1.25), (0.7, 1.1))
        return cls(rng.uniform(*length), rng.uniform(*load_factor), rng.uniform(0.9, 1.3))

    def load(self, rate: float, prompt: int, output: int, duration_s: float) -> tuple[float, float, int, int]:
        """Rate, duration, prompt and output of this size: what `chats` takes."""
        tokens = round(prompt * self.length), round(output * self.length)
        return rate * self.load_factor / self.length, duration_s * self.duration, *tokens


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
