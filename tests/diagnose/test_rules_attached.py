"""The books of a vLLM that ours are kept in: each finding in its words, and silence about what it does not have."""

import msgspec
import pytest
from attached import OUR_WORDS, in_vllm
from test_confusion import bursting, calm, each, interfering, slowed, starving
from test_rules_client import with_client
from test_rules_kv import TIGHT
from test_rules_order import refused
from test_rules_prompts import PROMPTS, SHARED, after_another
from test_rules_queue import poisson
from test_rules_stated import CHATS, pauses
from test_rules_stated import PROMPTS as LONGER
from ward import MS, Case, Ward, ids

from splittime.diagnose.books import books_from_file
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.sized import sized
from splittime.diagnose.words import ATTACHED, RESTART

PROGRAM = "splittime attach vllm -- serve MODEL "
EIGHT_BLOCKS = {"max_num_seqs": 8, "num_blocks": 40, "max_model_len": 512}


def slots():
    return in_vllm(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)))


def active_slots():
    """Two may run of the eight that it has room for."""
    return in_vllm(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)), max_num_seqs=8, max_num_active_seqs=2)


def waits_for_blocks(**settings):
    return in_vllm(Ward(settings=TIGHT).run(*poisson(20, 80, prompt=240, output=16)), **settings)


def thrown_out():
    return in_vllm(Ward(settings=TIGHT).run(*[Case(170 * i, ids(16, i), 200) for i in range(40)]))


def cache_off():
    ward = Ward(**PROMPTS, settings={"enable_prefix_caching": False})
    return in_vllm(ward.run(*after_another(*(SHARED + ids(32, i) for i in range(40)))))


def small_budget(**settings):
    ward = Ward(step_ms=4, token_ms=0.02, settings={"max_num_batched_tokens": 16, "max_num_seqs": 8})
    return in_vllm(ward.run(*poisson(5, 80, prompt=200)), **settings)


def interference():
    return in_vllm(interfering())


def many_prompts_at_once():
    """No prompt is long; together they fill steps."""
    shorts = [Case(200 + 700 * (i // 10) + i % 10 / 100, ids(200, 900 + i), 2) for i in range(200)]
    whole = {"max_prefill_tokens": 2048, "max_num_batched_tokens": 2048}
    return in_vllm(Ward(token_ms=0.3, settings=whole).run(*poisson(4, 60, output=100), *shorts))


def behind_long_prompts():
    shorts = [Case(35 * i, ids(16, i), 3) for i in range(120)]
    long = [Case(200 + 600 * i, ids(2000, 1000 + i), 1) for i in range(6)]
    settings = {"max_num_batched_tokens": 256, "max_prefill_tokens": 128}
    return in_vllm(Ward(token_ms=0.1, settings=settings).run(*shorts, *long))


def priority_starves():
    return in_vllm(starving(), policy="priority")


def overloaded():
    return in_vllm(Ward(step_ms=0.1, token_ms=2.0, settings={"max_num_seqs": 64}).run(*poisson(15, 150)))


def refuses():
    return in_vllm(refused(Ward().run(*poisson(10, 120)), 6, code="http_503", status=503))


def unread():
    return in_vllm(Ward().run(*slowed(client_wait_ms=200)))


def paused():
    return in_vllm(Ward(token_ms=0.1, knobs=pauses(100)).run(*CHATS, *LONGER))


CASES = {
    "slots": (slots, "slot_bound", ("--max-num-seqs", "16"), "at once"),
    "active slots": (active_slots, "slot_bound", ("--max-num-active-seqs", "16", "--max-num-seqs", "16"), "at once"),
    "blocks": (waits_for_blocks, "kv_bound", (), "VLLM_CPU_KVCACHE_SPACE"),
    "blocks of a card": (lambda: waits_for_blocks(device="cuda"), "kv_bound", (), "--gpu-memory-utilization"),
    "preemptions": (thrown_out, "preemption_thrash", (), "--max-num-seqs"),
    "cache off": (cache_off, "uncached_reuse", ("--enable-prefix-caching",), "prefix cache"),
    "small budget": (small_budget, "token_budget_bound", ("--max-num-batched-tokens", "256"), "prompt tokens"),
    "interference": (interference, "prefill_interference", ("--long-prefill-token-threshold", "96"), "long prompt"),
    "many prompts": (many_prompts_at_once, "prefill_interference", ("--max-num-batched-tokens", "256"), "in all"),
    "head of line": (behind_long_prompts, "head_of_line", ("--long-prefill-token-threshold", "64"), "priority"),
    "starvation": (priority_starves, "starvation", ("--scheduling-policy", "fcfs"), "order"),
    "overload": (overloaded, "overload", ("--max-num-queued-reqs", "76"), "those that run too"),
    "queue bound": (refuses, "queue_bound", ("--max-num-queued-reqs", "16"), "503"),
    "slow clients": (unread, "slow_client", (), "vLLM waits"),
    "a pause": (paused, "paused", (), "POST /resume"),
    "a burst": (lambda: in_vllm(bursting()), "burst", (), "--scheduling-policy priority"),
    "a slow tokenizer": (lambda: in_vllm(Ward().run(*slowed(tokenize_ms=60))), "slow_tokenizing", (), "token ids"),
}


def first_of(books) -> Finding:
    return diagnose(books).findings[0]


@pytest.mark.parametrize("case", CASES)
def test_each_in_its_words(case: str) -> None:
    books, name, flags, words = CASES[case]
    first = first_of(books())
    assert first.name == name
    assert first.cure.flags == flags
    assert words in first.cure.sentence
    assert first.cure.command == (PROGRAM + " ".join(flags) if flags else None)
    assert (RESTART in first.cost) is (bool(flags) or name in ("kv_bound", "preemption_thrash"))
