"""The confusion matrix in the ward: servers ill in one known way, whose illness must be named first, and healthy ones
of many kinds, which must stay silent. Whoever made them had not written the rules."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from consistent import require_consistent
from msgspec.structs import replace
from test_rules_adapters_forms import SLOTS, caused
from test_rules_callers import held, impatient, unheard
from test_rules_client import held_until, in_bursts, with_client
from test_rules_host import with_host
from test_rules_prompts import after_another, blocks_of, conversation
from test_rules_queue import poisson
from ward import MS, Case, Guessing, Ward, ids

from splittime.core.facts import Machine
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import NOTHING_FOUND
from splittime.ledger.stages import Cause

Books = Any
TRIALS = ("speculation_would_pay",)  # told of the healthy: nothing is wrong with a server that does not guess
SHORT_FIRST = {
    "policy": "shortest_prefill",
    "max_prefill_tokens": 128,
    "max_num_batched_tokens": 256,
    "starvation_bound_ms": 60_000.0,
}
LARGE_STEPS = {"max_prefill_tokens": 2048, "max_num_batched_tokens": 2048}


def with_output(cases: list[Case], output: Callable[[int], int]) -> list[Case]:
    return [Case(case.at_ms, case.prompt, output(i)) for i, case in enumerate(cases)]


def calm(**ward: Any) -> Books:
    return Ward(**ward).run(*poisson(8, 80, output=60))


def mixed() -> Books:
    """Answers of many lengths."""
    return Ward().run(*with_output(poisson(8, 80), lambda i: random.Random(i).randrange(20, 160)))


def interfering() -> Books:
    long = [Case(200 + 700 * i, ids(1500, 900 + i), 2) for i in range(20)]
    return Ward(token_ms=0.3, settings=LARGE_STEPS).run(*poisson(4, 60, output=100), *long)


def starving() -> Books:
    shorts = [Case(36 * i, ids(200, i), 2) for i in range(300)]
    long = [Case(100 + 700 * i, ids(1200, 1000 + i), 2) for i in range(8)]
    return Ward(step_ms=4, token_ms=0.14, settings=SHORT_FIRST).run(*shorts, *long)


def bursting() -> Books:
    burst = [Case(8000 + i * 0.1, ids(100, 500 + i), 30) for i in range(60)]
    return Ward(step_ms=1, token_ms=0.8).run(*poisson(4, 80, output=10), *burst)


def without_server(books: Books) -> Books:
    """What a client saw, of a server that says nothing of itself."""
    return msgspec.structs.replace(books, accounts=(), steps=(), facts=None)


def each(count: int, every_ms: int, prompt: int, output: int, **more: Any) -> list[Case]:
    return [Case(every_ms * i, ids(prompt, i), output, **more) for i in range(count)]


def slowed(**more: Any) -> list[Case]:
    return [Case(case.at_ms, case.prompt, 10, **more) for case in poisson(8, 80)]


def deadlines() -> list[Case]:
    return [Case(120 * i, ids(16, i), 80, deadline_ms=250 if i % 2 else None) for i in range(60)]


def slow_start(times: float) -> Books:
    """Five seconds of steps that take so many times longer than later."""
    cold, warm = Ward(step_ms=4 * (1 + times)), Ward(step_ms=4)
    early = cold.run(*(Case(100 * i, ids(32, i), 10) for i in range(40)))
    warm.clock.advance(cold.clock.now_ns())
    late = warm.run(*(Case(5000 + 100 * i, ids(32, 100 + i), 10) for i in range(40)))
    renamed = tuple(replace(account, request_id=f"late-{account.request_id}") for account in late.accounts)
    engine = replace(late.facts.processes[0], ready_ns=early.accounts[0].start_ns)
    facts = replace(late.facts, processes=(engine,))
    return replace(late, facts=facts, accounts=early.accounts + renamed, steps=early.steps + late.steps)


def measured(books: Books, told: dict[str, Any] | None = None, rates: dict[str, float] | None = None) -> Books:
    """On a machine whose ceilings are far from what the steps take, or of which one was not measured."""
    machine = Machine(cpu="any", threads=2, cores=2, **(rates or {"read_bytes_per_s": 1e9, "operations_per_s": 1e9}))
    cost = replace(books.facts.cost, weight_bytes=1_200_000, operations_per_token=20_000)
    settings = books.facts.settings | {"weights": "bfloat16", "kv_cache_dtype": "bfloat16"} | (told or {})
    return replace(books, facts=replace(books.facts, machine=machine, cost=cost, settings=settings))


FOUR, FEW_BLOCKS = {"max_num_seqs": 4}, {"num_blocks": 40, "max_model_len": 512}
ILL: dict[str, tuple[set[str], Callable[[], Books]]] = {
    "four slots": ({"slot_bound"}, lambda: Ward(settings=FOUR).run(*poisson(40, 200))),
    "four slots, and a fifth without a processor": (
        {"slot_bound"},
        lambda: Ward(settings=FOUR, wait_share=0.25).run(*poisson(40, 200)),
    ),
    "a neighbour that has most of a core": (
        {"cpu_starved"},
        lambda: calm(wait_share=0.3, beside=(0.2, 0.9)),
    ),
    "a neighbour, and four slots": (
        {"slot_bound"},
        lambda: Ward(settings=FOUR, wait_share=0.3, beside=(0.2, 0.9)).run(*poisson(40, 200)),
    ),
    "an engine that wakes late": (
        {"engine_loop_late"},
        lambda: Ward(wake_ms=8).run(*with_output(each(80, 200, 16, 1), lambda i: 1 + i % 3)),
    ),
    "an engine slow to take in choices": (
        {"engine_loop_late"},
        lambda: Ward(take_ms=5).run(*each(40, 300, 16, 2, n=8)),
    ),
    "no processor": ({"cpu_starved"}, lambda: calm(wait_share=0.8)),
    "too many tokens": ({"overload"}, lambda: Ward(step_ms=0.1, token_ms=2.0).run(*poisson(16, 200))),
    "few blocks": (
        {"kv_bound"},
        lambda: Ward(settings=FEW_BLOCKS).run(*poisson(25, 120, prompt=100, output=60)),
    ),
    "a budget of 16": (
        {"token_budget_bound"},
        lambda: Ward(settings={"max_prefill_tokens": 16}).run(*poisson(4, 100, prompt=300, output=5)),
    ),
    "long prompts among chats": ({"prefill_interference", "head_of_line"}, interfering),
    "a slow host": ({"host_bound"}, lambda: calm(step_ms=1, gap_ms=2, execution="host")),
    "sampling at 43 %": ({"sampling_bound"}, lambda: calm(sample_share=0.75)),
    "stopped from outside": (
        {"engine_stopped"},
        lambda: Ward(stops_ms=[(t, 120) for t in range(0, 10_000, 400)]).run(*poisson(6, 60, output=80)),
    ),
    "static batches": (
        {"static_batching"},
        lambda: Ward(settings={"batching": "static", "max_num_seqs": 8}).run(
            *with_output(poisson(8, 80), lambda i: 10 if i % 2 else 150)
        ),
    ),
    "a policy that starves": ({"starvation"}, starving),
    "a burst": ({"burst"}, bursting),
    "sixteen choices": ({"slot_bound"}, lambda: Ward(settings={"max_num_seqs": 8}).run(*each(25, 300, 16, 40, n=16))),
    "a slow tokenizer": ({"slow_tokenizing"}, lambda: Ward().run(*slowed(tokenize_ms=60))),
    "slow clients": ({"slow_client"}, lambda: Ward().run(*slowed(client_wait_ms=200))),
    "deadlines too short": ({"deadlines_missed"}, lambda: Ward().run(*deadlines())),
    "a gateway that holds the answer's begin": ({"slow_way"}, lambda: with_client(mixed(), held_until(300 * MS))),
    "a proxy that buffers": ({"buffering_proxy"}, lambda: with_client(mixed(), in_bursts)),
    "a cold start": ({"cold_start"}, lambda: slow_start(4.0)),
    "whole prompts among chats": (
        {"prefill_interference", "head_of_line"},
        lambda: Ward(token_ms=0.4, settings=LARGE_STEPS | {"enable_chunked_prefill": False}).run(
            *poisson(4, 60, output=100), *[Case(200 + 700 * i, ids(1500, 900 + i), 2) for i in range(20)]
        ),
    ),
    "four slots of a small step, on a machine with ceilings": (
        {"slot_bound"},
        lambda: measured(
            Ward(settings=FOUR | {"max_num_batched_tokens": 16}).run(*poisson(40, 200)),
            rates={"read_bytes_per_s": 4e8, "operations_per_s": 1e9},
        ),
    ),
    "wrong guesses": ({"speculation_costs"}, lambda: calm(token_ms=0.4, guessing=Guessing(most=6))),
    "guesses that take long to make": (
        {"speculation_costs"},
        lambda: calm(guessing=Guessing(most=2, share=0.2, take_ms=4)),
    ),
    "wrong guesses, and four slots": (
        {"slot_bound", "speculation_costs"},
        lambda: Ward(token_ms=0.4, settings=FOUR, guessing=Guessing(most=6)).run(*poisson(40, 200)),
    ),
    "a quota of half a core": (
        {"cpu_quota"},
        lambda: calm(wait_share=1.0, beside=(0.1, 0.5), throttled=0.95, machine=(1, 1), quota=0.5),
    ),
    "two threads in a quota of one and a half": (
        {"cpu_quota"},
        lambda: calm(wait_share=1.0, beside=(0.1, 0.0), throttled=2.0, machine=(2, 1), quota=1.5),
    ),
    "a quota, and neighbours who take more": (
        {"cpu_starved"},
        lambda: calm(wait_share=1.0, beside=(0.1, 1.5), throttled=0.3, machine=(1, 1), quota=0.8),
    ),
    "busy loops beside few steps": (
        {"cpu_starved"},
        lambda: Ward(step_ms=30, wait_share=6.0, beside=(0.0, 4.0)).run(*each(30, 400, 16, 1)),
    ),
    "one burst and nothing else": ({"burst"}, lambda: Ward(settings=SLOTS).run(*each(70, 0, 60, 30))),
    "bursts and nothing else": (
        {"burst"},
        lambda: Ward(settings=FOUR).run(*[Case(5000 * (i // 40), ids(60, i), 30) for i in range(120)]),
    ),
    "callers who ask again": ({"asked_again"}, lambda: impatient(3, 200)),
    "callers who ask again, and four slots": ({"asked_again"}, lambda: impatient(4, 200, prompts=40, slots=4)),
    "callers who left and were not heard": (
        {"computed_for_nobody"},
        lambda: unheard(Ward().run(*poisson(8, 80, output=80)), 200),
    ),
    "a client that has four in flight": ({"client_backlog"}, lambda: without_server(held(calm(), 4, 160, 20))),
    "six adapters, and room for two": (
        {"adapters_wait"},
        lambda: caused(Ward(settings=SLOTS).run(*poisson(25, 120)), Cause.LORA_SLOTS, 6),
    ),
    "forms that are compiled": (
        {"forms_wait"},
        lambda: caused(Ward(settings=SLOTS).run(*poisson(25, 100)), Cause.GRAMMAR),
    ),
    "a shared part shorter than a block": (
        {"uncached_reuse"},
        lambda: blocks_of(256).run(*after_another(*(ids(200, 7) + ids(25, 50 + i) for i in range(40)))),
    ),
    "a template that drops thoughts": ({"history_differs"}, lambda: conversation(True)),
    "a host that looks back over each answer": (
        {"host_bound"},
        lambda: with_host(
            Ward(step_ms=20).run(*poisson(0.3, 40, output=120)), lambda rows, answered: 200_000 * answered
        ),
    ),
}
HEALTHY: dict[str, Callable[[], Books]] = {
    "calm": calm,
    "a tenth without a processor": lambda: calm(wait_share=0.18),
    "a neighbour of a twentieth": lambda: calm(wait_share=0.15, beside=(0.3, 0.05)),
    "waits for its own processes": lambda: calm(wait_share=0.3, beside=(1.0, 0.1)),
    "a pause of a second in an hour": lambda: Ward(
        knobs=[(1_800_000, {"paused": True}), (1_801_000, {"paused": False})]
    ).run(*each(360, 10_000, 16, 60)),
    "a little late to wake": lambda: Ward(wake_ms=0.8).run(*each(80, 200, 16, 20)),
    "busy": lambda: Ward().run(*poisson(20, 200, output=40)),
    "long prompts alone": lambda: Ward(token_ms=0.1).run(*each(40, 900, 800, 20)),
    "arrivals by eights": lambda: Ward().run(*[Case(1000 * (i // 8) + i % 8, ids(32, i), 20) for i in range(120)]),
    "small and fast": lambda: Ward(step_ms=0.4, token_ms=0.01, gap_ms=0.15).run(*poisson(50, 300, output=60)),
    "a hop of two milliseconds": lambda: with_client(calm(), lambda written_ns: [at + 1_800_000 for at in written_ns]),
    "right guesses": lambda: calm(guessing=Guessing(share=0.9)),
    "wrong guesses that cost nothing": lambda: calm(token_ms=0.005, guessing=Guessing(most=8)),
    "a guess or two now and then": lambda: calm(token_ms=0.2, guessing=Guessing(most=2, share=0.5, asked=0.2)),
    "a quota that is not used up": lambda: calm(wait_share=0.05, beside=(0.3, 0.1), throttled=0.2, quota=1.5),
    "a caller now and then who asks again": lambda: impatient(2, 20, prompts=40),
    "callers who leave and are heard": lambda: unheard(calm(), 5, every=3),
    "a client whose cap is not reached": lambda: without_server(held(calm(), 8, 160, 25)),
    "thoughts that stay": lambda: conversation(False),
    "blocks of 256 that are filled": lambda: blocks_of(256).run(
        *after_another(*(ids(530, 7) + ids(32, 50 + i) for i in range(40)))
    ),
    "a batch of twenty-four that is served at once": lambda: Ward(token_ms=0.02).run(*each(24, 0, 32, 60)),
    "prompts in steps as the product makes them": lambda: Ward(
        token_ms=0.4, settings={"max_prefill_tokens": 600, "max_num_batched_tokens": 1024}
    ).run(*poisson(2, 60, output=100), *[Case(500 + 900 * i, ids(500, 900 + i), 20) for i in range(20)]),
    "a start with a few slow steps": lambda: slow_start(0.3),
    "weights of 4 bits from a file, and prompts": lambda: measured(calm(), {"weights": "gguf: int4 in groups of 32"}),
    "without a ceiling of products": lambda: measured(calm(), rates={"read_bytes_per_s": 1e9}),
    "short prompts first": lambda: Ward(settings={"policy": "shortest_prefill"}).run(*poisson(8, 100)),
}


@pytest.mark.parametrize("case", ILL)
def test_an_illness_is_named_first(case: str) -> None:
    expected, make = ILL[case]
    books = make()
    diagnosis = diagnose(books)
    for finding in diagnosis.findings:
        require_consistent(finding, books)
    assert diagnosis.findings, [(whose.owner, whose.share) for whose in diagnosis.spent]
    assert diagnosis.findings[0].name in expected


@pytest.mark.parametrize("case", HEALTHY)
def test_the_healthy_have_no_illness(case: str) -> None:
    diagnosis = diagnose(HEALTHY[case]())
    assert [finding.name for finding in diagnosis.findings if finding.name not in TRIALS] == []
    assert diagnosis.exit_code == NOTHING_FOUND
