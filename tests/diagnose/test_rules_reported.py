"""What other servers' metrics give away, from the recorded fixtures: named where it is there, and else said to be
unknown. The samples between the scrapes are made, as a fixture is one instant of them."""

from pathlib import Path

import msgspec
import pytest
from test_rules_client import with_client
from test_rules_queue import poisson
from ward import Ward

from splittime.bench.book.records import RunCheck, Sample
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.reported import MIN_STATES, grown, reported
from splittime.diagnose.words import WORDS, labels_of
from splittime.wire.dialects import DIALECTS, parse

FIXTURES = Path(__file__).parents[1] / "bench" / "fixtures"
FILES = {"vllm": "vllm", "sglang": "sglang", "tgi": "tgi", "llama.cpp": "llama_cpp"}


def scraped(kind: str, when: str) -> dict[str, float]:
    return parse((FIXTURES / f"{FILES[kind]}_{when}.txt").read_text())


@pytest.fixture(scope="module")
def answers():
    return with_client(Ward().run(*poisson(8, 80, output=40)), has_accounts=False)


def seen(answers, kind, states=(), added=None, expected=0):
    """The same answers from another server: states are (waiting, running, KV use), evenly over the run."""
    run = answers.run
    begin_ns, end_ns = run.outcomes[0].sent_ns, max(outcome.end_ns for outcome in run.outcomes)
    samples = tuple(
        Sample(
            at_ns=begin_ns + (end_ns - begin_ns) * (2 * i + 1) // (2 * len(states)),
            in_flight=1,
            waiting=w,
            running=r,
            kv_usage=kv,
        )
        for i, (w, r, kv) in enumerate(states)
    )
    after = scraped(kind, "after")
    for name, more in (added or {}).items():
        key = next(key for key in after if key.startswith(name))
        after[key] += more
    arm = msgspec.structs.replace(
        run.arms[0], kind=kind, metrics_before=scraped(kind, "before"), metrics_after=after, accounts=(), facts=None
    )
    outcomes = tuple(
        msgspec.structs.replace(o, expected_cached_tokens=expected or None, prompt_tokens=32) for o in run.outcomes
    )
    run = msgspec.structs.replace(run, arms=(arm,), samples=samples, outcomes=outcomes)
    return msgspec.structs.replace(answers, run=run)


def named(books) -> list[str]:
    return [finding.name for finding in diagnose(books).illnesses]


def why(books, name: str) -> str:
    return next(abstention.why for abstention in diagnose(books).abstentions if abstention.name == name)


QUIET = [(0.0, 2.0, 0.1)] * 30


COUNTERS = ("preemptions", "hits", "lookups", "prompts", "outputs", "requests", "refused", "kv_tokens")
HISTOGRAMS = ("queue_s", "ttft_s", "prefill_s", "decode_s", "e2e_s", "itl_s")


@pytest.mark.parametrize("kind", WORDS)
def test_every_name_is_one_that_the_server_has(kind):
    after, words = scraped(kind, "after"), WORDS[kind]
    names = [name for field in COUNTERS for name in getattr(words, field)[:1]]
    names += [name + end for field in HISTOGRAMS for name in getattr(words, field)[:1] for end in ("_sum", "_count")]
    for name in names:
        assert grown((name,), {}, after) is not None, name
        assert name.startswith(DIALECTS[kind].prefix)
    assert bool(words.config) == bool(labels_of(after, words.config))


@pytest.mark.parametrize("kind", WORDS)
def test_a_server_with_nothing_to_tell_of_is_healthy(answers, kind):
    assert named(seen(answers, kind, QUIET)) == []


@pytest.mark.parametrize("kind", WORDS)
def test_a_queue_with_slots_all_taken(answers, kind):
    books = seen(answers, kind, [(3.0, 4.0, 0.2)] * 30)
    first = diagnose(books).illnesses[0]
    assert first.name == "reported_slots"
    assert first.share_of_time == pytest.approx(3 / 7)
    assert first.cure.command == f"{WORDS[kind].program} {WORDS[kind].slots} 8"
    assert first.share_interval[0] <= 3 / 7 <= first.share_interval[1]


def test_a_queue_before_a_full_cache_wants_memory(answers):
    [first] = diagnose(seen(answers, "vllm", [(3.0, 4.0, 0.99)] * 30)).illnesses
    assert first.name == "reported_kv"
    assert "--gpu-memory-utilization" in first.cure.sentence


def test_a_queue_with_room_is_given_no_flag(answers):
    states = [(2.0, float(r), 0.2) for r in (8, 2, 1, 3, 2, 1, 2, 3, 1, 2) * 3]
    assert "add a server" in diagnose(seen(answers, "vllm", states)).illnesses[0].cure.sentence


def test_one_burst_is_no_queue(answers):
    assert named(seen(answers, "vllm", [(12.0, 4.0, 0.2)] * 3 + QUIET)) == []
    assert "seen 3 times only" in why(seen(answers, "vllm", [(12.0, 4.0, 0.2)] * 3 + QUIET), "reported_slots")
    small = seen(answers, "vllm", [(2.0, 4.0, 0.2)] * 6 + QUIET)
    assert "another may show" in why(small, "reported_slots")


def test_a_full_cache_with_preemptions(answers):
    states, more = [(0.0, 4.0, 0.97)] * 30, {"vllm:num_preemptions_total": 20.0}
    first = diagnose(seen(answers, "vllm", states, more)).illnesses[0]
    assert first.name == "reported_preemptions"
    assert "20 times" in first.claim
    assert named(seen(answers, "vllm", states)) == [], "a full cache alone is a cache at work"
    assert named(seen(answers, "vllm", QUIET, more)) == [], "preemptions of another time"
    assert named(seen(answers, "sglang", states, {"sglang:num_retracted_requests_total": 20.0})) == [
        "reported_preemptions"
    ]


def test_preemptions_and_a_queue_are_one_story(answers):
    """A queue beside preemptions waits for memory, whatever the gauge reads at most instants: nothing else is named."""
    states, more = [(3.0, 4.0, 0.7), (3.0, 4.0, 0.97)] * 15, {"vllm:num_preemptions_total": 20.0}
    assert set(named(seen(answers, "vllm", states, more))) == {"reported_preemptions", "reported_kv"}


def test_a_plateau_reads_one_less_than_the_slots(answers):
    """The gauge is taken after finished requests have left: 27 of 31 samples of two slots read 1."""
    states = [(4.0, 1.0 + (i % 2), 0.01) for i in range(30)]
    assert diagnose(seen(answers, "vllm", states)).illnesses[0].name == "reported_slots"
    states = [(4.0, 14.0 + (i % 3 > 0), 0.01) for i in range(30)]
    assert diagnose(seen(answers, "vllm", states)).illnesses[0].name == "reported_slots"


def test_a_cache_is_full_when_the_next_prompt_does_not_fit(answers):
    """79 % used of 2,560 tokens; a prompt of 1,800 needs 1,920."""
    books = seen(answers, "vllm", [(3.0, 1.0, 0.79)] * 30)
    run = books.run
    arm = msgspec.structs.replace(run.arms[0], metrics_after=with_config(run, kv_cache_size_tokens="2560"))
    outcomes = tuple(msgspec.structs.replace(o, prompt_tokens=1800) for o in run.outcomes)
    small = msgspec.structs.replace(books, run=msgspec.structs.replace(run, arms=(arm,), outcomes=outcomes))
    assert [finding.name for finding in diagnose(small).illnesses] == ["reported_kv"]
    assert named(books) == ["reported_slots"], "in a large cache the same use is room"


def test_what_waits_for_something_of_its_own_wants_no_slots(answers):
    books = seen(answers, "vllm", [(3.0, 4.0, 0.2)] * 30)
    samples = tuple(msgspec.structs.replace(sample, deferred=3.0) for sample in books.run.samples)
    [found] = diagnose(
        msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, samples=samples))
    ).illnesses
    assert found.name == "reported_queue"
    assert "grammar" in found.claim
    assert found.cure.command is None


def with_config(run, **labels) -> dict[str, float]:
    after = dict(run.arms[0].metrics_after)
    key = next(key for key in after if key.startswith("vllm:cache_config_info"))
    told_labels = {**labels_of(after, "vllm:cache_config_info"), **labels}
    after.pop(key)
    return {**after, "vllm:cache_config_info{" + ",".join(f'{k}="{v}"' for k, v in told_labels.items()) + "}": 1.0}


def test_no_command_of_ours_is_printed_for_anothers_server(answers):
    """Whatever is found, overload from outside too."""
    late = tuple(
        msgspec.structs.replace(o, chunk_ns=tuple(c + i * 10**9 for c in o.chunk_ns), end_ns=o.end_ns + i * 10**9)
        for i, o in enumerate(answers.run.outcomes)
    )
    books = msgspec.structs.replace(answers, run=msgspec.structs.replace(answers.run, outcomes=late))
    for kind, words in WORDS.items():
        overloaded = seen(books, kind, QUIET)
        finding = next(f for f in diagnose(overloaded).illnesses if f.name == "overload")
        assert "splittime" not in (finding.cure.command or "")
        assert (finding.cure.command or "").startswith(words.program if words.queue_bound else "")
        assert bool(finding.cure.command) == bool(words.queue_bound)


def test_a_void_run_does_not_hide_what_the_server_says_of_itself(answers):
    failed = RunCheck(name="loop_lag", ok=False, value=9.0, limit=2.0, unit="ms", sentence="late")

    def void(books):
        return msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, checks=(failed,)))

    assert diagnose(void(seen(answers, "vllm", [(3.0, 4.0, 0.2)] * 30))).illnesses[0].name == "reported_slots"
    assert diagnose(void(seen(answers, "vllm", QUIET))).healthy
    assert not diagnose(void(seen(answers, "vllm"))).could_tell, "without its gauges nothing is left"


def test_a_cache_that_is_off_is_said_to_be_off(answers):
    books = seen(answers, "vllm", QUIET)
    outcomes = tuple(msgspec.structs.replace(o, expected_cached_tokens=None) for o in books.run.outcomes)
    run = msgspec.structs.replace(books.run, outcomes=outcomes)
    arm = msgspec.structs.replace(run.arms[0], metrics_after=with_config(run, enable_prefix_caching="False"))
    off = msgspec.structs.replace(books, run=msgspec.structs.replace(run, arms=(arm,)))
    [limit] = [finding for finding in diagnose(off).limits if finding.name == "reported_prefix_misses"]
    assert limit.cure.command == "vllm serve MODEL --enable-prefix-caching"
    assert named(off) == []


def test_prefixes_that_are_not_found():
    """The fixture's hits are 0, with 24 of each prompt's 32 tokens shared."""
    answers = with_client(Ward(token_ms=0.2).run(*poisson(8, 80, prompt=200, output=8)), has_accounts=False)
    books = seen(answers, "llama.cpp", QUIET, expected=24)
    hits = grown(WORDS["llama.cpp"].hits, scraped("llama.cpp", "before"), scraped("llama.cpp", "after"))
    assert hits < 0.2 * 24 * 80
    finding = next(f for f in diagnose(books).illnesses if f.name == "reported_prefix_misses")
    assert "at most" in finding.claim
    assert finding.share_of_time < 0.5
    found = {"llamacpp:prompt_tokens_cached_total": 24.0 * 80}
    assert named(seen(answers, "llama.cpp", QUIET, found, expected=24)) == []
    assert named(seen(answers, "llama.cpp", QUIET)) == [], "nothing shared, nothing to find"


def test_the_share_is_of_what_prefills_took_where_that_is_told(answers):
    """vLLM's prefills took next to nothing of the time: no cache would have helped."""
    assert named(seen(answers, "vllm", QUIET, expected=24)) == []


def test_what_cannot_be_known_is_said(answers):
    assert "tgi does not publish how many requests it throws out" in why(
        seen(answers, "tgi", QUIET), "reported_preemptions"
    )
    assert "tgi does not publish how many prompt tokens" in why(
        seen(answers, "tgi", QUIET, expected=24), "reported_prefix_misses"
    )
    assert "--enable-metrics" in why(seen(answers, "sglang"), "reported_queue")
    few = seen(answers, "vllm", QUIET[: MIN_STATES - 1])
    assert f"only {MIN_STATES - 1} samples" in why(few, "reported_queue")
    unknown = msgspec.structs.replace(
        few,
        run=msgspec.structs.replace(
            few.run, arms=(msgspec.structs.replace(few.run.arms[0], kind="unknown"),), samples=()
        ),
    )
    assert "words that are known" in why(unknown, "reported_queue")


def test_a_restart_in_between_is_noticed(answers):
    books = seen(answers, "vllm", [(0.0, 4.0, 0.97)] * 30, {"vllm:prefix_cache_hits_total": -1e9})
    assert reported(books).is_restarted
    assert "was restarted" in why(books, "reported_preemptions")


def test_a_server_with_accounts_is_diagnosed_by_them():
    books = with_client(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)))
    assert reported(books) is None
    assert not any(abstention.name.startswith("reported_") for abstention in diagnose(books).abstentions)
