"""The illnesses, made: settings, a load and what spoils it, so that on the packaged model one thing is wrong.

Seed 1 is the load on which the rules were tuned. Every further seed is held out: it draws other instants and tokens,
and a `Size` too, so rates, lengths and durations are others. An illness stays at least as strong, or it would be
another question; a healthy load may be a little lighter or heavier.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from benchmarks.scenarios.doctor.loads import TUNED_SEED, Ask, Size, chats, ids, instants, schedule
from benchmarks.scenarios.doctor.proxies import Buffering, DelayedAck, SlowReader, Spoiler
from splittime.loadgen.schedule import Planned, Schedule

DURATION_S = 10.0
BLOCK_BYTES = 32768  # of the packaged model: 16 tokens, keys and values, 4 layers of 4 heads of 32, bfloat16

Load = Callable[[int], Schedule]


class Ward(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. expected: the finding that must come first, None for a healthy one; a limit comes first where no
    illness is named. model: of `large_models`, None for the packaged one.

    settings: of `splittime serve`. sabotage: what `sabotage/sitecustomize.py` does in the server.
    blocks_client: the client's own event loop is blocked now and then. is_early: the load begins with the process.
    """

    name: str
    expected: str | None
    load: Load
    settings: tuple[str, ...] = ()
    spoiler: Callable[[], Spoiler] | None = None
    sabotage: str = ""
    blocks_client: bool = False
    is_early: bool = False
    model: str | None = None


def _poisson(rate: float, prompt: int, output: int, duration_s: float = DURATION_S, is_ill: bool = True) -> Load:
    def load(seed: int) -> Schedule:
        size = Size.of(seed, is_ill)
        return schedule(chats(random.Random(seed), *size.load(rate, prompt, output, duration_s)), seed)

    return load


def _chats_and_long(rate: float, output: int, long_tokens: int, every_s: float, chat_tokens: int = 16) -> Load:
    def load(seed: int) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed)
        rate_now, duration_s, prompt, _ = size.load(rate, chat_tokens, output, DURATION_S)
        asks: list[Ask] = chats(rng, rate_now, duration_s, prompt, output)
        pause_s, tokens = every_s, long_tokens - rng.randrange(100) * (seed != TUNED_SEED)
        asks += [(0.5 + pause_s * i, ids(rng, tokens), 2) for i in range(int((duration_s - 0.5) / pause_s))]
        return schedule(asks, seed)

    return load


Make = Callable[[random.Random, tuple[int, ...], float], tuple[int, ...]]


def _made_of(make: Make, shared: int, rate: float, is_ill: bool = True) -> Load:
    """Prompts made of a shared part and of something of their own, which the seed's size makes longer or shorter."""

    def load(seed: int) -> Schedule:
        rng, size = random.Random(seed), Size.of(seed, is_ill)
        common = ids(rng, round(shared * size.length))
        rate_now, duration_s, _, _ = size.load(rate, 1, 1, DURATION_S)
        found = chats(rng, rate_now, duration_s, 1, 1)
        return schedule([(at_s, make(rng, common, size.length), 12) for at_s, _, _ in found], seed)

    return load


def _texts(seed: int) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed)
    words = [f"word{i}" for i in range(200)]
    found = chats(rng, 5 * size.load_factor, DURATION_S * size.duration, 1, 1)
    return schedule([(at_s, " ".join(rng.choices(words, k=6)), 8) for at_s, _, _ in found], seed)


def _wide_answers(seed: int) -> Schedule:
    """Long answers with log-probabilities: about a kilobyte a token."""
    size = Size.of(seed)
    plain = schedule(chats(random.Random(seed), 3 * size.load_factor, DURATION_S * size.duration, 16, 500), seed)
    wide: dict[str, Any] = {"logprobs": 10}
    requests = tuple(msgspec.structs.replace(planned, body=wide) for planned in plain.requests)
    return msgspec.structs.replace(plain, requests=requests)


def _from_the_start(seed: int) -> Schedule:
    rng, size = random.Random(seed), Size.of(seed)
    pause_ns = int(0.1e9 / size.load_factor)
    requests = [Planned(index=i, at_ns=pause_ns * i, prompt=ids(rng, 24), output_tokens=8) for i in range(160)]
    return Schedule(seed=seed, requests=tuple(requests))


def _long_context(seed: int) -> Schedule:
    """One long prompt, and when it is in the prefix cache, many that begin with it."""
    rng, size = random.Random(seed), Size.of(seed)
    common = ids(rng, round(1000 * size.length))
    later = [5.0 + at_s for at_s in instants(rng, 4.0 * size.load_factor, 11.0 * size.duration)]
    return schedule([(at_s, common + ids(rng, 8), 100) for at_s in [0.0, *later]], seed)


SMALL_CACHE = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(40 * BLOCK_BYTES))
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048")

ILLNESSES: tuple[Ward, ...] = (
    Ward(name="one slot", expected="slot_bound", settings=("--max-num-seqs", "1"), load=_poisson(13, 24, 40)),
    Ward(name="a small cache", expected="kv_bound", settings=SMALL_CACHE, load=_poisson(7, 200, 100)),
    Ward(
        name="answers outgrow the cache",
        expected="preemption_thrash",
        settings=SMALL_CACHE,
        load=_poisson(3, 16, 380, 14.0),
    ),
    Ward(name="too many arrivals", expected="overload", load=_poisson(70, 300, 16, 6.0)),
    Ward(
        name="whole prompts beside chats",
        expected="prefill_interference",
        settings=WHOLE_PROMPTS,
        load=_chats_and_long(4, 200, 1900, 0.5),
    ),
    Ward(
        name="short prompts behind long ones",
        expected="head_of_line",
        settings=("--max-prefill-tokens", "128"),
        load=_chats_and_long(8, 3, 1900, 1.3),
    ),
    Ward(
        name="a tiny token budget",
        expected="token_budget_bound",
        settings=("--max-prefill-tokens", "8"),
        load=_poisson(8, 200, 4),
    ),
    Ward(
        name="shared prefix, cache off",
        expected="uncached_reuse",
        settings=("--no-enable-prefix-caching",),
        load=_made_of(lambda rng, common, length: common + ids(rng, round(30 * length)), 500, 4),
    ),
    Ward(
        name="a timestamp first",
        expected="prefix_broken",
        load=_made_of(lambda rng, common, _: ids(rng, 8) + common, 500, 4),
    ),
    Ward(
        name="a blob twice in each prompt",
        expected="repeated_part",
        load=_made_of(lambda rng, _, length: 2 * ids(rng, round(280 * length)), 1, 4),
    ),
    Ward(name="a slow tokenizer", expected="slow_tokenizing", sabotage="tokenizer", load=_texts),
    Ward(name="an event loop that is held up", expected="loop_stalls", sabotage="loop", load=_poisson(8, 24, 4)),
    Ward(name="a host that dawdles between steps", expected="host_bound", sabotage="host", load=_poisson(3, 24, 40)),
    Ward(name="collections of garbage", expected="gc_pauses", sabotage="gc", load=_poisson(4, 24, 40)),
    Ward(name="load from the start of the process", expected="cold_start", is_early=True, load=_from_the_start),
    Ward(name="a proxy that buffers", expected="buffering_proxy", spoiler=Buffering, load=_poisson(4, 24, 60)),
    Ward(name="a proxy under Nagle", expected="nagle", spoiler=DelayedAck, load=_poisson(3, 24, 60)),
    Ward(name="a client that blocks", expected="client_bound", blocks_client=True, load=_poisson(4, 24, 40)),
    Ward(
        name="large weights, small batches",
        expected="weight_bandwidth_bound",
        model="weights",
        settings=("--max-model-len", "1024"),
        load=_poisson(2.2, 8, 8, 12.0),
    ),
    Ward(
        name="long contexts",
        expected="kv_bandwidth_bound",
        model="kv",
        settings=("--max-model-len", "1536", "--kv-cache-memory-bytes", str(600 << 20)),
        load=_long_context,
    ),
    Ward(name="clients that read slowly", expected="slow_client", spoiler=SlowReader, load=_wide_answers),
)

_SHARED = _made_of(lambda rng, common, length: common + ids(rng, round(30 * length)), 300, 4, is_ill=False)
_well = partial(_poisson, is_ill=False)
HEALTHY: tuple[Ward, ...] = (
    Ward(name="a few chats", expected=None, load=_well(4, 24, 40, 9.0)),
    Ward(name="more chats", expected=None, load=_well(8, 40, 24, 8.0)),
    Ward(name="longer prompts", expected=None, load=_well(3, 180, 24, 10.0)),
    Ward(name="shared prefixes, cache on", expected=None, load=_SHARED),
    Ward(name="eight slots, enough", expected=None, settings=("--max-num-seqs", "8"), load=_well(5, 24, 40, 8.0)),
)
