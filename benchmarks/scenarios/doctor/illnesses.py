"""The illnesses, made: settings, a load and what spoils it, so that one thing is wrong with the model that is served.

Seed 1 is the load on which the rules were tuned. Every further seed is held out: it draws other instants and tokens,
and a `Size` too, so rates, lengths and durations are others. An illness stays at least as strong, or it would be
another question. `healthy` has the servers with which nothing is wrong.
"""

from functools import partial

from benchmarks.scenarios.doctor.beside import neighbours, pausing, sleeping, stopped_once, stopping
from benchmarks.scenarios.doctor.kinds import (
    asked_again,
    asking,
    behind,
    burst,
    by_turns,
    chats_and_long,
    each,
    from_the_start,
    hung_up,
    in_forms,
    long_context,
    long_ones_last,
    made_of,
    messages,
    mixed_answers,
    one_burst,
    poisson,
    shared_tokens,
    short_and_long,
    sliding,
    texts,
    wide_answers,
)
from benchmarks.scenarios.doctor.loads import Size, ids
from benchmarks.scenarios.doctor.patients import Patient
from benchmarks.scenarios.doctor.proxies import Buffering, Deadline, DelayedAck, Delaying, Failing, SlowReader
from benchmarks.scenarios.doctor.wards import ADAPTERS, Ward, adapters, slow_template
from benchmarks.scenarios.form_schemas import schemas


def small_cache(patient: Patient) -> tuple[str, ...]:
    return patient.cache(40, 512)


def forgetful_cache(patient: Patient) -> tuple[str, ...]:
    """Room for four of the twelve prefixes that are in use."""
    tokens = shared_tokens(400, Size(patient))
    size = 4 * tokens // BLOCK * patient.block_bytes
    return ("--max-model-len", str(2 * tokens), "--kv-cache-memory-bytes", str(size), "--max-num-seqs", "2")


def few_queued_tokens(patient: Patient) -> tuple[str, ...]:
    """Room for one that waits, and not for two."""
    return ("--max-queued-prompt-tokens", str(round(1.6 * patient.tokens(60))))


def too_short(patient: Patient) -> Deadline:
    """Half of what a request of this load takes alone."""
    return Deadline(round(500 * patient.pace.work_s(patient.tokens(24), patient.tokens(120))))


def behind_one_slot(patient: Patient) -> Deadline:
    """Three times what a request of this load takes alone."""
    return Deadline(round(3000 * patient.pace.work_s(patient.tokens(24), patient.tokens(40))))


def checking(patient: Patient) -> Delaying:
    return Delaying(max(0.3, 30 * patient.pace.step_s))


BLOCK = 16  # tokens
GUESSING = ("--speculative-config", '{"method": "suffix"}')
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048")
FORMS = schemas(400, 7)
STEADY_STREAMS = "max_stall_p90=15ms"
SHORT_FIRST = ("--policy", "shortest_prefill", "--starvation-bound-ms", "60000")
PRIORITIES = ("--policy", "priority", "--starvation-bound-ms", "60000")

ILLNESSES: tuple[Ward, ...] = (
    # ---- settings of the server
    Ward(name="one slot", expected="slot_bound", settings=("--max-num-seqs", "1"), load=poisson(13, 24, 40)),
    Ward(
        name="long answers in four slots",
        expected="slot_bound",
        settings=("--max-num-seqs", "4"),
        load=poisson(13, 16, 240),
    ),
    Ward(
        name="sixteen choices each",
        expected="slot_bound",
        settings=("--max-num-seqs", "4"),
        load=asking(poisson(2.5, 24, 24), n=16, temperature=1.0),
    ),
    Ward(
        name="deadlines behind one slot",
        expected="slot_bound",
        settings=("--max-num-seqs", "1"),
        spoiler=behind_one_slot,
        load=poisson(15, 24, 40),
    ),
    Ward(name="a small cache", expected="kv_bound", settings=small_cache, load=poisson(13, 200, 100)),
    Ward(
        name="answers outgrow the cache",
        expected="preemption_thrash",
        also=("kv_bound",),
        settings=small_cache,
        load=poisson(5.5, 16, 250, 12.0),
    ),
    Ward(name="too many arrivals", expected="overload", load=poisson(70, 300, 16, 6.0)),
    Ward(
        name="whole prompts beside chats",
        expected="prefill_interference",
        also=("head_of_line",),
        settings=WHOLE_PROMPTS,
        slo=STEADY_STREAMS,
        load=chats_and_long(6, 200, 1900, 0.4),
    ),
    Ward(
        name="prompts beside streams that must be steady",
        expected="prefill_interference",
        also=("head_of_line",),
        settings=("--max-prefill-tokens", "1024", "--max-num-batched-tokens", "1024"),
        slo="itl_p99=25ms",
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
        name="a budget of 16",
        expected="token_budget_bound",
        settings=("--max-num-batched-tokens", "16", "--max-num-seqs", "16"),
        load=poisson(4, 300, 4),
    ),
    Ward(
        name="a queue for one",
        expected="queue_bound",
        settings=("--max-queued-requests", "1"),
        load=poisson(14, 60, 10),
    ),
    Ward(
        name="a queue of few tokens",
        expected="queue_bound",
        settings=few_queued_tokens,
        load=poisson(14, 60, 10),
    ),
    Ward(
        name="static batches",
        expected="static_batching",
        settings=("--batching", "static", "--max-num-seqs", "8"),
        load=mixed_answers,
    ),
    Ward(name="a policy that starves", expected="starvation", settings=SHORT_FIRST, load=short_and_long),
    Ward(
        name="long prompts of low priority",
        expected="starvation",
        settings=PRIORITIES,
        load=long_ones_last(short_and_long),
    ),
    Ward(name="eight threads", expected="too_many_threads", settings=("--num-threads", "8"), load=poisson(3, 60, 40)),
    Ward(
        name="one thread for long steps",
        expected="too_few_threads",
        on=("other",),
        settings=("--num-threads", "1"),
        load=poisson(3, 60, 40),
    ),
    Ward(
        name="one thread for large weights",
        expected="too_few_threads",
        model="weights",
        settings=("--max-model-len", "1024", "--num-threads", "1"),
        load=poisson(1.2, 8, 8, 20.0),
    ),
    # ---- prompts, and what is kept of them
    Ward(
        name="shared prefix, cache off",
        expected="uncached_reuse",
        settings=("--no-enable-prefix-caching",),
        load=made_of(behind(30), 500, 4),
    ),
    Ward(
        name="a shared part shorter than a block",
        expected="uncached_reuse",
        settings=("--block-size", "256"),
        load=made_of(behind(20), 220, 5, output=4),
    ),
    Ward(
        name="more prefixes than the cache has room for",
        expected="uncached_reuse",
        settings=forgetful_cache,
        load=made_of(behind(16), 400, 4, output=4, groups=12),
    ),
    Ward(
        name="a timestamp first",
        expected="prefix_broken",
        load=made_of(lambda rng, common, of_size: ids(rng, 8) + common, 500, 4),
    ),
    Ward(
        name="a blob twice in each prompt",
        expected="repeated_part",
        load=made_of(lambda rng, common, of_size: 2 * ids(rng, max(128, of_size(280))), 1, 4),
    ),
    Ward(name="thoughts that the client drops", expected="history_differs", load=by_turns(drops=True)),
    Ward(name="a window that slides over the history", expected="history_differs", load=sliding),
    # ---- what is asked of tokens, and what waits for something of its own
    Ward(
        name="much asked of each token",
        expected="sampling_bound",
        load=asking(poisson(3, 24, 60), logprobs=20, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
    ),
    Ward(
        name="four adapters, room for one",
        expected="adapters_wait",
        settings=("--max-loras", "1"),
        furnish=partial(adapters, count=4),
        load=each(poisson(7, 24, 60), lambda planned: {"model": ADAPTERS[planned.index % 4]}),
    ),
    Ward(
        name="a new form for each request",
        expected="forms_wait",
        sabotage="masks",
        load=in_forms(poisson(3, 24, 20), lambda index: FORMS[index]),
    ),
    Ward(
        name="guesses at random",
        expected="speculation_costs",
        settings=GUESSING,
        sabotage="guesses",
        load=poisson(3, 24, 60),
    ),
    Ward(
        name="deadlines too short",
        expected="deadlines_missed",
        spoiler=too_short,
        load=poisson(4, 24, 120),
    ),
    # ---- the server's own processes
    Ward(name="a slow tokenizer", expected="slow_tokenizing", sabotage="tokenizer", load=texts),
    Ward(
        name="a template of loops within loops",
        expected="slow_tokenizing",
        furnish=slow_template,
        load=messages(poisson(4, 24, 8), 12),
    ),
    Ward(name="an event loop that is held up", expected="loop_stalls", sabotage="loop", load=poisson(8, 24, 4)),
    Ward(name="a host that dawdles between steps", expected="host_bound", sabotage="host", load=poisson(3, 24, 40)),
    Ward(
        name="a host that looks back over each answer",
        expected="host_bound",
        sabotage="looks_back",
        load=poisson(2.4, 24, 120),
    ),
    Ward(name="an engine that wakes late", expected="engine_loop_late", sabotage="late", load=poisson(4, 24, 8)),
    Ward(name="collections of garbage", expected="gc_pauses", sabotage="gc", load=poisson(4, 24, 40)),
    Ward(name="load from the start of the process", expected="cold_start", is_early=True, load=from_the_start),
    Ward(name="paused for a quarter of the time", expected="paused", beside=pausing, load=poisson(3, 24, 80)),
    Ward(name="put to sleep", expected="sleeping", beside=sleeping, load=poisson(8, 24, 10)),
    # ---- the machine
    Ward(name="stopped from outside", expected="engine_stopped", beside=stopping, load=poisson(3, 24, 80)),
    Ward(name="stopped once, for seconds", expected="engine_stopped", beside=stopped_once, load=poisson(4, 24, 40)),
    Ward(name="neighbours on every core", expected="cpu_starved", beside=neighbours, load=poisson(3, 24, 80)),
    Ward(
        name="neighbours beside a few long prompts",
        expected="cpu_starved",
        beside=neighbours,
        load=poisson(2.5, 500, 2),
    ),
    Ward(name="a quota of less than half a core", expected="cpu_quota", quota=0.4, load=poisson(8, 100, 60)),
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
    # ---- clients, and the way to them
    Ward(
        name="a proxy that buffers",
        expected="buffering_proxy",
        spoiler=lambda patient: Buffering(),
        load=poisson(4, 24, 60),
    ),
    Ward(name="a proxy under Nagle", expected="nagle", spoiler=lambda patient: DelayedAck(), load=poisson(3, 24, 60)),
    Ward(name="a gateway that checks", expected="slow_way", spoiler=checking, load=poisson(4, 24, 40)),
    Ward(
        name="a proxy that drops every fifth request",
        expected="requests_fail",
        spoiler=lambda patient: Failing(5),
        load=poisson(5, 24, 24),
    ),
    Ward(
        name="clients that read slowly", expected="slow_client", spoiler=lambda patient: SlowReader(), load=wide_answers
    ),
    Ward(name="a client that blocks", expected="client_bound", blocks_client=True, load=poisson(4, 24, 40)),
    Ward(
        name="a client that has two in flight", expected="client_backlog", max_in_flight=2, load=poisson(13, 100, 100)
    ),
    Ward(
        name="callers who ask again too soon",
        expected="asked_again",
        load=asked_again(poisson(2, 1500, 8), after=0.5, tries=4),
    ),
    Ward(
        name="callers who left, and are computed for",
        expected="computed_for_nobody",
        sabotage="deaf",
        load=hung_up(poisson(3, 24, 120), after=0.3),
    ),
    Ward(name="one sender's burst", expected="burst", load=burst),
    Ward(name="seventy at once", expected="burst", load=one_burst),
)
