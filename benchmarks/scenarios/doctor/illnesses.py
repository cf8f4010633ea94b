"""The illnesses, made: settings, a load and what spoils it, so that on the packaged model one thing is wrong.

Seed 1 is the load on which the rules were tuned. Every further seed is held out: it draws other instants and tokens,
and a `Size` too, so rates, lengths and durations are others. An illness stays at least as strong, or it would be
another question; a healthy load may be a little lighter or heavier.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec

from benchmarks.scenarios.doctor.beside import neighbours, pausing, sleeping, stopping
from benchmarks.scenarios.doctor.kinds import (
    Load,
    asking,
    burst,
    chats_and_long,
    from_the_start,
    long_context,
    made_of,
    mixed_answers,
    poisson,
    short_and_long,
    texts,
    wide_answers,
)
from benchmarks.scenarios.doctor.loads import ids
from benchmarks.scenarios.doctor.proxies import Buffering, Deadline, DelayedAck, Delaying, SlowReader, Spoiler

BLOCK_BYTES = 32768  # of the packaged model: 16 tokens, keys and values, 4 layers of 4 heads of 32, bfloat16


class Ward(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. expected: the finding that must come first, None for a healthy one; a limit comes first where no
    illness is named. model: of `large_models`, None for the packaged one.

    settings: of `splittime serve`. sabotage: what `sabotage/sitecustomize.py` does in the server.
    beside: what goes on while the load runs (`beside`).
    blocks_client: the client's own event loop is blocked now and then. is_early: the load begins with the process.
    """

    name: str
    expected: str | None
    load: Load
    settings: tuple[str, ...] = ()
    spoiler: Callable[[], Spoiler] | None = None
    sabotage: str = ""
    beside: Callable[[str], AbstractAsyncContextManager[None]] | None = None
    blocks_client: bool = False
    is_early: bool = False
    model: str | None = None


SMALL_CACHE = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(40 * BLOCK_BYTES))
GUESSING = ("--speculative-config", '{"method": "suffix"}')
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048")

ILLNESSES: tuple[Ward, ...] = (
    Ward(name="one slot", expected="slot_bound", settings=("--max-num-seqs", "1"), load=poisson(13, 24, 40)),
    Ward(name="a small cache", expected="kv_bound", settings=SMALL_CACHE, load=poisson(13, 200, 100)),
    Ward(
        name="answers outgrow the cache",
        expected="preemption_thrash",
        settings=SMALL_CACHE,
        load=poisson(3, 16, 380, 14.0),
    ),
    Ward(name="too many arrivals", expected="overload", load=poisson(70, 300, 16, 6.0)),
    Ward(
        name="whole prompts beside chats",
        expected="prefill_interference",
        settings=WHOLE_PROMPTS,
        load=chats_and_long(4, 200, 1900, 0.8),
    ),
    Ward(
        name="short prompts behind long ones",
        expected="head_of_line",
        settings=("--max-prefill-tokens", "128"),
        load=chats_and_long(8, 3, 1900, 1.3),
    ),
    Ward(
        name="a tiny token budget",
        expected="token_budget_bound",
        settings=("--max-prefill-tokens", "8"),
        load=poisson(8, 200, 4),
    ),
    Ward(
        name="shared prefix, cache off",
        expected="uncached_reuse",
        settings=("--no-enable-prefix-caching",),
        load=made_of(lambda rng, common, length: common + ids(rng, round(30 * length)), 500, 4),
    ),
    Ward(
        name="a timestamp first",
        expected="prefix_broken",
        load=made_of(lambda rng, common, _: ids(rng, 8) + common, 500, 4),
    ),
    Ward(
        name="a blob twice in each prompt",
        expected="repeated_part",
        load=made_of(lambda rng, _, length: 2 * ids(rng, round(280 * length)), 1, 4),
    ),
    Ward(name="a slow tokenizer", expected="slow_tokenizing", sabotage="tokenizer", load=texts),
    Ward(name="an event loop that is held up", expected="loop_stalls", sabotage="loop", load=poisson(8, 24, 4)),
    Ward(name="a host that dawdles between steps", expected="host_bound", sabotage="host", load=poisson(3, 24, 40)),
    Ward(name="collections of garbage", expected="gc_pauses", sabotage="gc", load=poisson(4, 24, 40)),
    Ward(name="load from the start of the process", expected="cold_start", is_early=True, load=from_the_start),
    Ward(name="a proxy that buffers", expected="buffering_proxy", spoiler=Buffering, load=poisson(4, 24, 60)),
    Ward(name="a proxy under Nagle", expected="nagle", spoiler=DelayedAck, load=poisson(3, 24, 60)),
    Ward(name="a client that blocks", expected="client_bound", blocks_client=True, load=poisson(4, 24, 40)),
    Ward(
        name="large weights, small batches",
        expected="weight_bandwidth_bound",
        model="weights",
        settings=("--max-model-len", "1024"),
        load=poisson(2.2, 8, 8, 12.0),
    ),
    Ward(
        name="long contexts",
        expected="kv_bandwidth_bound",
        model="kv",
        settings=("--max-model-len", "1536", "--kv-cache-memory-bytes", str(600 << 20)),
        load=long_context,
    ),
    Ward(name="paused for a quarter of the time", expected="paused", beside=pausing, load=poisson(3, 24, 80)),
    Ward(name="stopped from outside", expected="engine_stopped", beside=stopping, load=poisson(3, 24, 80)),
    Ward(name="neighbours on every core", expected="cpu_starved", beside=neighbours, load=poisson(3, 24, 80)),
    Ward(name="put to sleep", expected="sleeping", beside=sleeping, load=poisson(8, 24, 10)),
    Ward(
        name="eight threads",
        expected="too_many_threads",
        settings=("--num-threads", "8"),
        load=poisson(3, 60, 40),
    ),
    Ward(
        name="one thread for large weights",
        expected="too_few_threads",
        model="weights",
        settings=("--max-model-len", "1024", "--num-threads", "1"),
        load=poisson(1.2, 8, 8, 25.0),
    ),
    Ward(
        name="static batches",
        expected="static_batching",
        settings=("--batching", "static", "--max-num-seqs", "8"),
        load=mixed_answers,
    ),
    Ward(
        name="a policy that starves",
        expected="starvation",
        settings=("--policy", "shortest_prefill", "--starvation-bound-ms", "60000"),
        load=short_and_long,
    ),
    Ward(name="a gateway that checks", expected="slow_way", spoiler=Delaying, load=poisson(4, 24, 40)),
    Ward(
        name="much asked of each token",
        expected="sampling_bound",
        load=asking(poisson(3, 24, 60), logprobs=20, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
    ),
    Ward(
        name="deadlines too short",
        expected="deadlines_missed",
        spoiler=partial(Deadline, 120),
        load=poisson(4, 24, 120),
    ),
    Ward(
        name="a queue for one",
        expected="queue_bound",
        settings=("--max-queued-requests", "1"),
        load=poisson(14, 60, 10),
    ),
    Ward(
        name="sixteen choices each",
        expected="slot_bound",
        settings=("--max-num-seqs", "4"),
        load=asking(poisson(2.5, 24, 24), n=16, temperature=1.0),
    ),
    Ward(name="one sender's burst", expected="burst", load=burst),
    Ward(
        name="a budget of 16",
        expected="token_budget_bound",
        settings=("--max-num-batched-tokens", "16", "--max-num-seqs", "16"),
        load=poisson(4, 300, 4),
    ),
    Ward(
        name="guesses at random",
        expected="speculation_costs",
        settings=GUESSING,
        sabotage="guesses",
        load=poisson(3, 24, 60),
    ),
    Ward(name="clients that read slowly", expected="slow_client", spoiler=SlowReader, load=wide_answers),
)

_SHARED = made_of(lambda rng, common, length: common + ids(rng, round(30 * length)), 300, 4, is_ill=False)
_well = partial(poisson, is_ill=False)
HEALTHY: tuple[Ward, ...] = (
    Ward(name="a few chats", expected=None, load=_well(4, 24, 40, 9.0)),
    Ward(name="more chats", expected=None, load=_well(8, 40, 24, 8.0)),
    Ward(name="longer prompts", expected=None, load=_well(3, 180, 24, 10.0)),
    Ward(name="shared prefixes, cache on", expected=None, load=_SHARED),
    Ward(name="drawn answers", expected=None, load=asking(_well(4, 24, 40, 9.0), temperature=0.8, top_p=0.95)),
    Ward(
        name="deadlines that are met",
        expected=None,
        spoiler=partial(Deadline, 20000),
        load=_well(4, 24, 40, 9.0),
    ),
    Ward(
        name="short ones first, no contention", expected=None, settings=("--policy", "shortest_prefill"), load=_SHARED
    ),
    Ward(name="guessing ahead", expected=None, settings=GUESSING, load=_well(4, 24, 40, 9.0)),
    Ward(name="eight slots, enough", expected=None, settings=("--max-num-seqs", "8"), load=_well(5, 24, 40, 8.0)),
)
