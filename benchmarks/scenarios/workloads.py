"""Requests that show what a mechanism is worth, in the size of a machine: `CPU`, `CARD` or, to try the scripts, `TINY`.

Prompts are random tokens of the vocabulary's first few hundred; outputs have the length that is asked for.
"""

import math
import random
from dataclasses import dataclass

from benchmarks.scenarios.engine_driver import Arrival

FIRST_TOKEN = 10


@dataclass(frozen=True)
class Sizes:
    """slots: requests at once. budget: tokens a step. vocabulary: ids are below it. max_model_len: of the engine.

    mixed: requests, longest output, mean of what it is over 8 tokens (with a variation: of all), prompt. variation:
    standard deviation over mean of outputs, log-normal then and cut at the longest. chats: how many, their outputs.
    long_prompts: how many, tokens, seconds apart. budgets: that prompts are cut to. shared: prompts, tokens of each,
    seconds apart. reserved: requests, prompt from and to, mean and longest output; a reservation is the longest
    of both. kv_tokens: memory that reservations share.
    """

    slots: int = 16
    budget: int = 128
    vocabulary: int = 4000
    max_model_len: int = 2048
    mixed: tuple[int, int, float, int] = (96, 256, 50, 32)
    variation: float | None = None
    chats: tuple[int, int] = (8, 300)
    long_prompts: tuple[int, int, float] = (5, 1500, 0.5)
    budgets: tuple[int, ...] = (128,)
    shared: tuple[int, int, float] = (24, 800, 0.1)
    reserved: tuple[int, int, int, float, int] = (64, 50, 400, 100, 300)
    kv_tokens: int = 16 * 700

    @property
    def reservation_tokens(self) -> int:
        return self.reserved[2] + self.reserved[4]


CPU = Sizes()
CARD = Sizes(
    slots=64,
    budget=8192,
    mixed=(384, 512, 100, 128),
    chats=(32, 300),
    long_prompts=(5, 8000, 0.5),
    budgets=(4096, 2048, 1024, 512),
    shared=(24, 4000, 0.05),
    reserved=(256, 500, 1500, 300, 700),
    kv_tokens=64 * 2200,
    max_model_len=8192,
)
TINY = Sizes(
    slots=4,
    budget=64,
    vocabulary=120,
    max_model_len=128,
    mixed=(6, 12, 4, 4),
    chats=(2, 12),
    long_prompts=(1, 100, 0.0),
    budgets=(16, 8),
    shared=(3, 40, 0.0),
    reserved=(6, 4, 20, 6, 20),
    kv_tokens=4 * 40,
)


def random_prompt(rng: random.Random, length: int, sizes: Sizes) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, sizes.vocabulary) for _ in range(length)]


def output_length(rng: random.Random, mean: float, longest: int) -> int:
    """8 to `longest`, geometric-like: many short ones and a few long ones."""
    return min(longest, 8 + int(rng.expovariate(1 / mean)))


def _mixed_length(rng: random.Random, mean: float, longest: int, variation: float | None) -> int:
    if variation is None:
        return output_length(rng, mean, longest)
    sigma = math.sqrt(math.log(1 + variation**2))
    return min(longest, max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def mixed_outputs(rng: random.Random, sizes: Sizes) -> list[Arrival]:
    """All at once; the many short ones wait for the few long ones."""
    count, longest, mean, prompt = sizes.mixed
    lengths = [_mixed_length(rng, mean, longest, sizes.variation) for _ in range(count)]
    return [Arrival(0.0, random_prompt(rng, prompt, sizes), length) for length in lengths]


def long_prompts_among_decodes(rng: random.Random, sizes: Sizes) -> list[Arrival]:
    """Chats decode; now and then a long prompt with 4 tokens of output arrives."""
    (chats, output), (count, tokens, apart_s) = sizes.chats, sizes.long_prompts
    made = [Arrival(0.0, random_prompt(rng, 16, sizes), output) for _ in range(chats)]
    return made + [
        Arrival(0.3 * bool(apart_s) + apart_s * i, random_prompt(rng, tokens, sizes), 4) for i in range(count)
    ]


def shared_prefixes(rng: random.Random, sizes: Sizes, share: float) -> list[Arrival]:
    """A first request that leaves its prefix behind, then those that share `share` of it, one after the other."""
    count, length, apart_s = sizes.shared
    prefix = random_prompt(rng, int(length * share), sizes)
    prompts = [prefix + random_prompt(rng, length - len(prefix), sizes) for _ in range(count + 1)]
    begin_s = 1.0 if apart_s else 0.0
    return [Arrival(0.0 if i == 0 else begin_s + apart_s * i, prompt, 8) for i, prompt in enumerate(prompts)]


def unknown_lengths(rng: random.Random, sizes: Sizes) -> list[Arrival]:
    """All at once, of lengths that nobody knows before, all below the longest context."""
    count, least, most, mean, longest = sizes.reserved
    return [
        Arrival(0.0, random_prompt(rng, rng.randint(least, most), sizes), output_length(rng, mean, longest))
        for _ in range(count)
    ]
