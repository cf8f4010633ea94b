"""The books of a vLLM that ours are kept in: each finding in its words, and silence about what it does not have."""

import msgspec
import pytest
from attached import OUR_WORDS, in_vllm
from kept import ledger_file
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
from splittime.diagnose.finding import Finding, one_direction
from splittime.diagnose.sized import sized
from splittime.diagnose.words import ATTACHED, RESTART, in_their_words

PROGRAM = "splittime attach vllm -- serve MODEL "


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
    "blocks": (waits_for_blocks, "kv_bound", ("--num-gpu-blocks-override", "171"), "VLLM_CPU_KVCACHE_SPACE"),
    "blocks of a card": (lambda: waits_for_blocks(device="cuda"), "kv_bound", (), "--gpu-memory-utilization"),
    "preemptions": (thrown_out, "preemption_thrash", ("--num-gpu-blocks-override", "69"), "--max-num-seqs"),
    "cache off": (cache_off, "uncached_reuse", ("--enable-prefix-caching",), "prefix cache"),
    "small budget": (small_budget, "token_budget_bound", ("--max-num-batched-tokens", "256"), "prompt tokens"),
    "interference": (interference, "prefill_interference", ("--long-prefill-token-threshold", "112"), "long prompt"),
    "many prompts": (many_prompts_at_once, "prefill_interference", ("--max-num-batched-tokens", "129"), "in all"),
    "head of line": (behind_long_prompts, "head_of_line", ("--long-prefill-token-threshold", "64"), "priority"),
    "starvation": (priority_starves, "starvation", ("--scheduling-policy", "fcfs"), "order"),
    "overload": (overloaded, "overload", ("--max-num-queued-reqs", "91"), "those that run too"),
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
    """And none is of ours, nor a command, in any of the findings."""
    books, name, flags, words = CASES[case]
    findings = diagnose(books()).findings
    first = findings[0]
    assert first.name == name
    assert first.cure.flags == flags
    assert words in first.cure.sentence
    assert first.cure.command == (PROGRAM + " ".join(flags) if flags else None)
    assert (RESTART in first.cost) is (bool(flags) or name in ("kv_bound", "preemption_thrash"))
    for finding in findings:
        told = f"{finding} {finding.cure.command} "
        assert not [word for word in OUR_WORDS if word in without_elsewhere(finding)], finding.name
        assert finding.cure.command is None or f" {PROGRAM}" in f" {told}"


def without_elsewhere(finding: Finding) -> str:
    return str(msgspec.structs.replace(finding, cure=msgspec.structs.replace(finding.cure, elsewhere={})))


HEALTHY = {
    "calm": calm,
    "busy": lambda: Ward().run(*poisson(20, 200, output=40)),
    "long prompts alone": lambda: Ward(token_ms=0.1).run(*each(40, 900, 800, 20)),
    "shared prompts": lambda: Ward(**PROMPTS).run(*after_another(*(SHARED + ids(32, i) for i in range(40)))),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_one_has_no_illness(case: str) -> None:
    diagnosis = diagnose(in_vllm(HEALTHY[case]()))
    assert [finding.name for finding in diagnosis.illnesses] == []
    assert diagnosis.could_tell


UNKNOWN_TO = {
    "host_bound": ("launch_ns", "sample_ns"),
    "sampling_bound": ("sample_ns",),
    "engine_stopped": ("off_cpu_ns",),
    "cpu_starved": ("cpu_wait_ns",),
    "loop_stalls": ("unseen_ns",),
    "gc_pauses": ("garbage",),
    "too_few_threads": ("cores",),
    "too_many_threads": ("cores",),
    "weight_bandwidth_bound": ("ceilings",),
    "kv_bandwidth_bound": ("ceilings",),
    "compute_bound": ("ceilings",),
}
SICK_ELSEWHERE = {
    "a slow host": lambda: calm(step_ms=1, gap_ms=2),
    "sampling": lambda: calm(sample_share=0.75),
    "no processor": lambda: calm(wait_share=0.8),
    "stopped": lambda: Ward(stops_ms=[(t, 120) for t in range(0, 10_000, 400)]).run(*poisson(6, 60, output=80)),
}


@pytest.mark.parametrize("case", SICK_ELSEWHERE)
def test_what_nobody_measured_is_not_taken_for_nothing(case: str) -> None:
    """Ours speak of the same; these books cannot tell, and say what is missing."""
    books = SICK_ELSEWHERE[case]()
    ours = {finding.name for finding in diagnose(books).illnesses}
    diagnosis = diagnose(in_vllm(books))
    why = {one.name: one.why for one in diagnosis.abstentions}
    assert ours & set(UNKNOWN_TO)
    assert not {finding.name for finding in diagnosis.findings} & set(UNKNOWN_TO)
    for name, missing in UNKNOWN_TO.items():
        assert all(word in why[name] for word in missing), (name, why[name])


def test_what_it_does_not_have_is_not_spoken_of():
    """No text workers of ours, no static batches, no sleep, no start that measures, no deadlines."""
    told = diagnose(in_vllm(calm()))
    ours = {"static_batching", "sleeping", "start_measurement_is_off", "deadlines_missed", "device_idle"}
    assert not ours & {one.name for one in (*told.findings, *told.abstentions)}


def of_a_run(books):
    run = with_client(books).run
    return msgspec.structs.replace(
        books, run=msgspec.structs.replace(run, arms=(msgspec.structs.replace(run.arms[0], kind="vllm"),))
    )


@pytest.mark.parametrize("case", ["slots", "preemptions", "cache off", "small budget"])
def test_what_the_books_state_is_not_inferred_again(case: str) -> None:
    books = CASES[case][0]()
    with_run, alone = diagnose(of_a_run(books)), diagnose(books)
    assert [finding.name for finding in with_run.findings] == [finding.name for finding in alone.findings]
    assert with_run.findings[0].cure.command == alone.findings[0].cure.command
    assert not [one for one in (*with_run.findings, *with_run.abstentions) if one.name.startswith("reported")]


def test_a_late_answer_may_have_lain_in_its_socket():
    def late(written_ns):
        return [at_ns + 300 * MS for at_ns in written_ns]

    books = with_client(in_vllm(calm()), late)
    assert "slow_way" in [finding.name for finding in diagnose(with_client(calm(), late)).findings]
    told = diagnose(books)
    assert "slow_way" not in [finding.name for finding in told.findings]
    assert "unseen_ns" in next(one.why for one in told.abstentions if one.name == "slow_way")


def test_a_ledger_file_tells_the_same(tmp_path):
    books = slots()
    read = books_from_file(ledger_file(books, tmp_path / "vllm.sqlite"))
    assert read.engine == "vllm"
    assert [finding.cure.command for finding in diagnose(read).findings] == [PROGRAM + "--max-num-seqs 16"]


def test_no_replay_by_our_scheduler():
    """It would be of another engine."""
    books = slots()
    first = sized(books, diagnose(books)).findings[0]
    assert first.predicted is None
    assert "vllm 0.32.0" in first.not_predicted
    assert first.cure.flags == ("--max-num-seqs", "16")


def test_prompts_parts_are_not_wanted_larger_and_smaller():
    """Its bound on one prompt's part and its budget bound the same."""
    larger, smaller = first_of(small_budget()), first_of(interference())
    wanted = msgspec.structs.replace(larger.cure, flags=("--max-num-batched-tokens", "4096"))
    larger = msgspec.structs.replace(larger, cure=wanted)
    (_, second) = one_direction((smaller, larger), {"max_num_batched_tokens": 2048})
    assert second.cure.flags == ()
    assert "would help here, and harm where prefill_interference does" in second.cure.sentence


def test_books_that_ended_say_so():
    books = in_vllm(calm(), books_stopped="KeyError: 'x'", lost_messages=3)
    told = [one.why for one in diagnose(books).abstentions if one.name == "books"]
    assert len(told) == 2
    assert "KeyError" in told[0]
    assert "3 messages" in told[1]


def test_the_program_is_the_one_that_was_asked():
    assert first_of(slots()).cure.program == ATTACHED["vllm"] == PROGRAM.strip()


def test_what_another_server_calls_it_is_told_where_no_flag_of_ours_is_its_own():
    finding = first_of(Ward().run(*slowed(tokenize_ms=60)))
    told = in_their_words(finding, "sglang")
    assert told.cure.flags == ()
    assert told.cure.sentence == f"{finding.cure.sentence} For sglang: --tokenizer-worker-num."
    assert in_their_words(finding, "unknown").cure.sentence == finding.cure.sentence


def test_a_flag_that_is_its_own_keeps_its_value():
    finding = first_of(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)))
    told = in_their_words(finding, "llama.cpp")
    assert told.cure.command == "llama-server -m MODEL --parallel 16"
    assert told.cost.endswith(RESTART)
