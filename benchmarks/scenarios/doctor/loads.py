"""Loads for the doctor's scenarios: schedules of token ids, drawn from a seed, for what a model can do."""

import random
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.scenarios.doctor.patients import WRITTEN_FOR, Patient
from splittime.bench.schedule import Planned, Schedule

VOCABULARY = range(10, 4000)

TUNED_SEED = 1  # of the loads that the rules were tuned on

LEAST_REQUESTS, MOST_S = 28, 12.0  # the doctor says little of fewer; a load of a slow model goes on for up to so long
ROOM = 0.5  # of its time that a slower model may be asked for though the written load asks less
CROWDED = 0.4  # of the model's time: such a load is about how much it is, on a faster machine as well

Ask = tuple[float, tuple[int, ...] | str, int]  # second, prompt, output tokens


class Size(NamedTuple):
    """By what a load differs from what is written down: factors. length: of prompts and answers. load_factor: of the
    tokens that are asked for in a second, so the rate's is load_factor / length. patient: who is asked."""

    patient: Patient
    length: float = 1.0
    load_factor: float = 1.0
    duration: float = 1.0

    @classmethod
    def of(cls, seed: int, patient: Patient, is_ill: bool = True) -> "Size":
        """Returns the tuned size for the tuned seed, a drawn one for each other, which is held out."""
        if seed == TUNED_SEED:
            return cls(patient)
        rng = random.Random(f"size of {seed}")
        length, load_factor = ((0.8, 1.0), (1.0, 1.2)) if is_ill else ((0.8, 1.25), (0.7, 1.1))
        return cls(patient, rng.uniform(*length), rng.uniform(*load_factor), rng.uniform(0.9, 1.3))

    def load(self, rate: float, prompt: int, output: int, duration_s: float) -> tuple[float, float, int, int]:
        """Rate, duration, prompt and output of this size: what `chats` takes. The rate is such that the model is asked
        for the same part of its time as of the machine that it was written for, or for `ROOM` of it."""
        tokens = self.tokens(prompt), self.tokens(output)
        written, alone_s = rate * self.load_factor / self.length, self.patient.pace.work_s(*tokens)
        asked = written * WRITTEN_FOR.work_s(prompt * self.length, output * self.length)
        allowed = max(asked, ROOM) / alone_s
        rate_now = allowed if asked > CROWDED else min(written, allowed)
        duration_s *= self.duration
        least = min(LEAST_REQUESTS, written * duration_s)
        if rate_now * duration_s < least:
            duration_s = min(least / rate_now, max(duration_s, MOST_S))
            rate_now = max(rate_now, least / duration_s)
        return rate_now, duration_s, *tokens

    def tokens(self, number: float) -> int:
        return self.patient.tokens(number * self.length)


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
