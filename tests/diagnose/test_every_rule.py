"""Every rule over drawn books: its finding says one thing, whatever the books say."""

import random

import msgspec
import pytest
from consistent import require_accepted, require_consistent
from test_rules_adapters_forms import caused
from test_rules_callers import held, left
from test_rules_client import directly, held_until, in_bursts, with_client
from ward import MS, Case, Guessing, Ward, ids

from splittime.core.errors import ConfigError, ErrorInfo
from splittime.core.facts import Machine, TokenCost
from splittime.diagnose.books import Books
from splittime.diagnose.doctor import _NEEDS, diagnose
from splittime.diagnose.finding import RULES, Finding
from splittime.ledger.stages import Cause

WEIGHTS = ("float32", "bfloat16", "int8", "int4 in groups of 64, head int8", "gguf: int4 in groups of 32", "gptq: int8")
REFUSALS = ("queued_requests", "not_ready", "asleep", "deadline_exceeded", "internal_error")


def drawn(seed: int) -> Books:
    """A server and its load, each of its faults there or not."""
    rng = random.Random(seed)
    books = _ward(rng).run(*_cases(rng))
    books = _with_refusals(rng, _with_facts(rng, books))
    books = _with_leavers(rng, _with_causes(rng, books))
    way = rng.choice([None, None, directly, in_bursts, held_until(200 * MS), held])
    is_whole = all(account.token_written_ns for account in books.accounts)
    if way is held and is_whole:
        return held(books, 4, 200, 20)
    return with_client(books, way) if way is not None and is_whole else books


def _ward(rng: random.Random) -> Ward:
    settings = {
        "max_num_seqs": rng.choice([2, 4, 64]),
        "max_num_batched_tokens": rng.choice([64, 512, 2048]),
        "max_prefill_tokens": rng.choice([None, 16, 128]),
        "policy": rng.choice(["fcfs", "fcfs", "shortest_prefill", "priority"]),
        "batching": rng.choice(["continuous", "continuous", "static"]),
        "enable_prefix_caching": rng.choice([True, False]),
    }
    if rng.random() < 0.3:
        settings |= {"num_blocks": 40, "max_model_len": 512}
    cores = rng.choice([1, 2, 4])
    return Ward(
        step_ms=rng.choice([0.3, 4.0, 20.0]),
        token_ms=rng.choice([0.01, 0.2, 1.0]),
        gap_ms=rng.choice([0.05, 0.05, 3.0]),
        wake_ms=rng.choice([0.0, 6.0]),
        take_ms=rng.choice([0.0, 0.0, 4.0]),
        wait_share=rng.choice([0.0, 0.0, 0.5]),
        sample_share=rng.choice([0.0, 0.0, 0.8]),
        stops_ms=rng.choice([[], [(t, 120) for t in range(0, 4000, 400)]]),
        machine=rng.choice([(1, cores), (cores, cores), (2 * cores, cores)]),
        beside=rng.choice([None, (0.2, 0.9)]),
        throttled=rng.choice([None, 0.8, 3.0]),
        quota=rng.choice([None, 0.5]),
        guessing=rng.choice([None, None, Guessing(most=6, share=rng.choice([0.0, 0.9]), take_ms=1.0)]),
        settings=settings,
    )


def _cases(rng: random.Random) -> list[Case]:
    every_ms, prompt, output = rng.choice([5, 60, 250]), rng.choice([16, 100, 400]), rng.choice([1, 12, 40])
    together, shared = rng.choice([1, 1, 12]), ids(rng.choice([0, 0, 80]), 77)
    more = {
        "tokenize_ms": rng.choice([0.1, 0.1, 50.0]),
        "client_wait_ms": rng.choice([0.0, 0.0, 150.0]),
        "deadline_ms": rng.choice([None, None, 400.0]),
        "n": rng.choice([1, 1, 4]),
    }
    return [Case(every_ms * (i // together * together), shared + ids(prompt, i), output, **more) for i in range(48)]


def _with_facts(rng: random.Random, books: Books) -> Books:
    ready_ns = books.accounts[0].start_ns - rng.choice([0, 10**10])
    pauses = rng.choice([(), tuple((books.accounts[0].start_ns + i * 200 * MS, 60 * MS) for i in range(20))])
    engine = msgspec.structs.replace(books.facts.processes[0], ready_ns=ready_ns, pauses=pauses)
    rates = rng.choice([{}, {"read_bytes_per_s": 1e9}, {"read_bytes_per_s": 1e9, "operations_per_s": 1e9}])
    cost = TokenCost(
        weight_bytes=rng.choice([1, 3_000_000, 15_000_000]),
        kv_bytes_per_token=rng.choice([1, 8_000]),
        operations_per_token=rng.choice([1, 150_000, 900_000]),
        operations_per_context_token=0,
    )
    told = {
        "weights": rng.choice(WEIGHTS),
        "kv_cache_dtype": rng.choice(["float32", "bfloat16", "int8"]),
        "kernels": "native",
        "tensor_parallel_size": 1,
        "speculative_config": None,
        "num_threads_reason": rng.choice(["one a core", "as asked"]),
        "prefill_ns_per_token": rng.choice([0, 20_000, 3_000_000]),
    }
    machine = Machine(cpu="any", threads=books.facts.machine.threads, cores=books.facts.machine.cores, **rates)
    settings = {**books.facts.settings, **told}
    facts = msgspec.structs.replace(books.facts, settings=settings, machine=machine, cost=cost, processes=(engine,))
    return msgspec.structs.replace(books, facts=facts)


def _with_causes(rng: random.Random, books: Books) -> Books:
    """Waits for a slot, stated as of another cause."""
    cause = rng.choice([None, Cause.GRAMMAR, Cause.LORA_SLOTS, Cause.PAUSED])
    if cause is None:
        return books
    told = caused(books, cause, adapters=rng.choice([0, 6]), max_loras=rng.choice([1, 4]))
    thoughts = rng.choice([0, 5, 200])
    accounts = tuple(msgspec.structs.replace(account, reasoning_tokens=thoughts) for account in told.accounts)
    return msgspec.structs.replace(told, accounts=accounts)


def _with_leavers(rng: random.Random, books: Books) -> Books:
    """Every other caller left, with an effect, or without one."""
    way, accounts = rng.choice(["stay", "stay", "leave", "unheard"]), books.accounts
    if way == "stay":
        return books
    half = [(a.start_ns + a.end_ns) // 2 if at % 2 else None for at, a in enumerate(accounts)]
    gone = [
        a if at_ns is None else left(a, at_ns) if way == "leave" else msgspec.structs.replace(a, cancelled_ns=at_ns)
        for a, at_ns in zip(accounts, half, strict=True)
    ]
    return msgspec.structs.replace(books, accounts=tuple(gone))


def _with_refusals(rng: random.Random, books: Books) -> Books:
    code = rng.choice([None, None, *REFUSALS])
    if code is None:
        return books
    error = ErrorInfo("overloaded_error", "no", code, 500 if code == "internal_error" else 503)
    is_late = code in ("deadline_exceeded", "internal_error")
    failed = [
        msgspec.structs.replace(a, error=error, finish_reason="error" if is_late else "refused") if i % 5 == 0 else a
        for i, a in enumerate(books.accounts)
    ]
    return msgspec.structs.replace(books, accounts=tuple(failed))


MUST_BE_FOUND = """
adapters_wait buffering_proxy burst client_backlog cold_start computed_for_nobody
cpu_quota cpu_starved deadlines_missed engine_stopped forms_wait gc_pauses
kv_bound overload paused queue_bound requests_fail sampling_bound
sleeping slot_bound slow_client slow_tokenizing slow_way static_batching
token_budget_bound too_many_threads weight_bandwidth_bound
"""
SEEDS = range(40)
FOUND: dict[int, set[str]] = {}  # by seed


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_rule_finds_says_one_thing(seed):
    books, found = drawn(seed), FOUND.setdefault(seed, set())
    for name, rule in RULES.items():
        if any(_NEEDS[need](books) for need in rule.needs):
            continue
        answer = rule.check(books)
        if isinstance(answer, Finding):
            found.add(name)
            require_consistent(answer, books)
    for finding in diagnose(books).findings:
        require_consistent(finding, books)


def test_these_rules_found_something():
    """Else the others show nothing."""
    for seed in set(SEEDS) - set(FOUND):
        test_what_a_rule_finds_says_one_thing(seed)
    found = set().union(*FOUND.values())
    missing = set(MUST_BE_FOUND.split()) - found
    assert not missing, sorted(missing)


def test_flags_that_would_be_refused_are_seen_to_be():
    books = drawn(0)
    with pytest.raises(ConfigError):
        require_accepted(("--max-num-seqs", "4096"), books)
    with pytest.raises(ConfigError):
        require_accepted(("--max-no-such", "1"), books)
