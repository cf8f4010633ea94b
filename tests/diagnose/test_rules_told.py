"""What other servers' metrics give away, from the recorded fixtures: named where it is there, and else said to be
unknown. The samples between the scrapes are made, as a fixture is one instant of them."""

from pathlib import Path

import msgspec
import pytest
from test_rules_client import with_client
from test_rules_queue import poisson
from ward import Ward

from splittime.diagnose.doctor import diagnose
from splittime.diagnose.rules.told import MIN_STATES
from splittime.diagnose.told import WORDS, grown, told
from splittime.ledger.client_book import Sample
from splittime.loadgen.dialects import DIALECTS
from splittime.loadgen.scrape import parse

FIXTURES = Path(__file__).parents[1] / "loadgen" / "fixtures"
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


@pytest.mark.parametrize("kind", WORDS)
def test_every_counter_is_one_that_the_server_has(kind):
    after, names = scraped(kind, "after"), DIALECTS[kind]
    words = WORDS[kind]
    for counter in words.preemptions + words.hits + words.prefill_s:
        assert grown((counter,), {}, after) is not None, counter
        assert counter.startswith(names.prefix)


@pytest.mark.parametrize("kind", WORDS)
def test_a_server_with_nothing_to_tell_of_is_healthy(answers, kind):
    assert named(seen(answers, kind, QUIET)) == []


@pytest.mark.parametrize("kind", WORDS)
def test_a_queue_with_slots_all_taken(answers, kind):
    books = seen(answers, kind, [(3.0, 4.0, 0.2)] * 30)
    first = diagnose(books).illnesses[0]
    assert first.name == "told_queue"
    assert first.share_of_time == pytest.approx(3 / 7)
    assert WORDS[kind].flag_slots in first.cure.sentence
    assert first.share_interval[0] <= 3 / 7 <= first.share_interval[1]


def test_a_queue_before_a_full_cache_wants_memory(answers):
    first = diagnose(seen(answers, "vllm", [(3.0, 4.0, 0.99)] * 30)).illnesses[0]
    assert "--gpu-memory-utilization" in first.cure.sentence


def test_a_queue_with_room_is_given_no_flag(answers):
    states = [(2.0, float(r), 0.2) for r in (8, 2, 1, 3, 2, 1, 2, 3, 1, 2) * 3]
    assert "add a server" in diagnose(seen(answers, "vllm", states)).illnesses[0].cure.sentence


def test_one_burst_is_no_queue(answers):
    assert named(seen(answers, "vllm", [(12.0, 4.0, 0.2)] * 3 + QUIET)) == []
    assert "seen 3 times only" in why(seen(answers, "vllm", [(12.0, 4.0, 0.2)] * 3 + QUIET), "told_queue")
    small = seen(answers, "vllm", [(2.0, 4.0, 0.2)] * 6 + QUIET)
    assert "another may show" in why(small, "told_queue")


def test_a_full_cache_with_preemptions(answers):
    states, more = [(0.0, 4.0, 0.97)] * 30, {"vllm:num_preemptions_total": 20.0}
    first = diagnose(seen(answers, "vllm", states, more)).illnesses[0]
    assert first.name == "told_preemptions"
    assert "20 times" in first.claim
    assert named(seen(answers, "vllm", states)) == [], "a full cache alone is a cache at work"
    assert named(seen(answers, "vllm", QUIET, more)) == [], "preemptions of another time"
    assert named(seen(answers, "sglang", states, {"sglang:num_retracted_requests_total": 20.0})) == ["told_preemptions"]


def test_prefixes_that_are_not_found():
    """The fixture's hits are 0, with 24 of each prompt's 32 tokens shared."""
    answers = with_client(Ward(token_ms=0.2).run(*poisson(8, 80, prompt=200, output=8)), has_accounts=False)
    books = seen(answers, "llama.cpp", QUIET, expected=24)
    hits = grown(WORDS["llama.cpp"].hits, scraped("llama.cpp", "before"), scraped("llama.cpp", "after"))
    assert hits < 0.2 * 24 * 80
    finding = next(f for f in diagnose(books).illnesses if f.name == "told_prefix_misses")
    assert "at most" in finding.claim
    assert finding.share_of_time < 0.5
    found = {"llamacpp:prompt_tokens_cached_total": 24.0 * 80}
    assert named(seen(answers, "llama.cpp", QUIET, found, expected=24)) == []
    assert named(seen(answers, "llama.cpp", QUIET)) == [], "nothing shared, nothing to find"


def test_the_share_is_of_what_prefills_took_where_that_is_told(answers):
    """vLLM's prefills took next to nothing of the time: no cache would have helped."""
    assert named(seen(answers, "vllm", QUIET, expected=24)) == []


def test_what_cannot_be_known_is_said(answers):
    assert "tells no number of preemptions" in why(seen(answers, "tgi", QUIET), "told_preemptions")
    assert "tells no prefix hits" in why(seen(answers, "tgi", QUIET, expected=24), "told_prefix_misses")
    assert "--enable-metrics" in why(seen(answers, "sglang"), "told_queue")
    few = seen(answers, "vllm", QUIET[: MIN_STATES - 1])
    assert f"only {MIN_STATES - 1} samples" in why(few, "told_queue")
    unknown = msgspec.structs.replace(
        few,
        run=msgspec.structs.replace(
            few.run, arms=(msgspec.structs.replace(few.run.arms[0], kind="unknown"),), samples=()
        ),
    )
    assert "words that are known" in why(unknown, "told_queue")


def test_a_restart_in_between_is_noticed(answers):
    books = seen(answers, "vllm", [(0.0, 4.0, 0.97)] * 30, {"vllm:prefix_cache_hits_total": -1e9})
    assert told(books).is_restarted
    assert "was restarted" in why(books, "told_preemptions")


def test_a_server_with_accounts_is_diagnosed_by_them():
    books = with_client(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)))
    assert told(books) is None
    assert not any(abstention.name.startswith("told_") for abstention in diagnose(books).abstentions)
