"""The loads of the doctor's scenarios, each a function of its seed (`loads.Size` says how further seeds differ)."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.scenarios.doctor.loads import TUNED_SEED, Ask, Size, chats, ids, instants, schedule
from splittime.bench.schedule import Planned, Schedule

DURATION_S = 10.0

Load = Callable[[int], Schedule]


def poisson(rate: float, prompt: int, output: int, duration_s: float = DURATION_S, is_ill: bool = True) -> Load:
    def load(seed: int) -> Schedule:
        size = Size.of(seed, is_ill)
        return schedule(chats(random.Random(seed), *size.load(rate, prompt, output, duration_s)), seed)

    return load


def chats_and_long(rate: float, output: int, long_tokens: int, every_s: float, chat_tokens: int = 16) -> Load:
    def load(seed: int) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed)
        rate_now, duration_s, prompt, _ = size.load(rate, chat_tokens, output, DURATION_S)
        asks: list[Ask] = chats(rng, rate_now, duration_s, prompt, output)
        pause_s, tokens = every_s, long_tokens - rng.randrange(100) * (seed != TUNED_SEED)
        asks += [(0.5 + pause_s * i, ids(rng, tokens), 2) for i in range(int((duration_s - 0.5) / pause_s))]
        return schedule(asks, seed)

    return load


Make = Callable[[random.Random, tuple[int, ...], float], tuple[int, ...]]


def made_of(make: Make, shared: int, rate: float, is_ill: bool = True) -> Load:
    """Prompts made of a shared part and of something of their own, which the seed's size makes longer or shorter."""

    def load(seed: int) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed, is_ill)
        common = ids(rng, round(shared * size.length))
        rate_now, duration_s, _, _ = size.load(rate, 1, 1, DURATION_S)
        found = chats(rng, rate_now, duration_s, 1, 1)
        return schedule([(at_s, make(rng, common, size.length), 12) for at_s, _, _ in found], seed)

    return load


def texts(seed: int) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed)
    words = [f"word{i}" for i in range(200)]
    found = chats(rng, 5 * size.load_factor, DURATION_S * size.duration, 1, 1)
    return schedule([(at_s, " ".join(rng.choices(words, k=6)), 8) for at_s, _, _ in found], seed)


def wide_answers(seed: int) -> Schedule:
    """Long answers with log-probabilities: about a kilobyte a token."""
    size = Size.of(seed)
    plain = schedule(chats(random.Random(seed), 3 * size.load_factor, DURATION_S * size.duration, 16, 500), seed)
    wide: dict[str, Any] = {"logprobs": 10}
    requests = tuple(msgspec.structs.replace(planned, body=wide) for planned in plain.requests)
    return msgspec.structs.replace(plain, requests=requests)


def from_the_start(seed: int) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed)
    pause_ns = int(0.1e9 / size.load_factor)
    requests = [Planned(index=i, at_ns=pause_ns * i, prompt=ids(rng, 24), output_tokens=8) for i in range(160)]
    return Schedule(seed=seed, requests=tuple(requests))


def long_context(seed: int) -> Schedule:
    """One long prompt, and when it is in the prefix cache, many that begin with it."""
    rng, size = random.Random(seed), Size.of(seed)
    common = ids(rng, round(1000 * size.length))
    later = [5.0 + at_s for at_s in instants(rng, 4.0 * size.load_factor, 11.0 * size.duration)]
    return schedule([(at_s, common + ids(rng, 8), 100) for at_s in [0.0, *later]], seed)


def mixed_answers(seed: int) -> Schedule:
    """Every other answer is long."""
    rng, size = random.Random(seed), Size.of(seed)
    found = chats(rng, *size.load(12, 24, 20, DURATION_S))
    return schedule([(at_s, prompt, 6 if i % 2 else 120) for i, (at_s, prompt, _) in enumerate(found)], seed)


def asking(load: Load, **body: Any) -> Load:
    """The same requests, each with these fields."""

    def ask(seed: int) -> Schedule:
        plain = load(seed)
        requests = tuple(msgspec.structs.replace(planned, body=body) for planned in plain.requests)
        return msgspec.structs.replace(plain, requests=requests)

    return ask


def burst(seed: int) -> Schedule:
    """A steady few, and one sender's whole batch at once, twice."""
    rng, size = random.Random(seed), Size.of(seed)
    steady = chats(rng, 6 * size.load_factor, 16.0, 24, 12)
    at_once = [(at_s + i * 0.0005, ids(rng, 200), 40) for at_s in (4.0, 10.0) for i in range(40)]
    return schedule([*steady, *at_once], seed)


def short_and_long(seed: int) -> Schedule:
    """Nearly more short prompts than can be served, and long ones among them."""
    rng, size = random.Random(seed), Size.of(seed)
    asks = chats(rng, 60 * size.load_factor, 14.0, 340, 4)
    asks += [(0.5 + i, ids(rng, 1500), 6) for i in range(10)]
    return schedule(asks, seed)
