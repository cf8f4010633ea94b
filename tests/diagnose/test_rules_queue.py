"""Waiting to be admitted: the illness made with the real scheduler is named, its healthy neighbour is not."""

import random

import msgspec
from ward import Case, Ward, ids

from splittime.diagnose.doctor import diagnose


def names(books) -> list[str]:
    return [finding.name for finding in diagnose(books).illnesses]


def poisson(rate: float, count: int, prompt: int = 32, output: int = 20, seed: int = 1) -> list[Case]:
    """Independent prompts at true Poisson instants."""
    rng = random.Random(seed)
    at_ms, cases = 0.0, []
    for i in range(count):
        at_ms += rng.expovariate(rate) * 1e3
        cases.append(Case(at_ms, ids(prompt, seed=i), output))
    return cases


def test_too_few_slots():
    ward = Ward(settings={"max_num_seqs": 2})
    diagnosis = diagnose(ward.run(*poisson(25, 100)))
    first = diagnosis.findings[0]
    assert first.name == "slot_bound"
    assert first.cure.flags == ("--max-num-seqs", "16")
    assert first.share_of_time > 0.5
    assert set(first.request_ids) <= {account.request_id for account in ward.closed}


def test_as_many_slots_as_the_finding_says_cure_it():
    assert names(Ward(settings={"max_num_seqs": 16}).run(*poisson(25, 100))) == []


def test_slots_are_no_cure_where_a_larger_batch_is_no_faster():
    ward = Ward(step_ms=0.01, token_ms=5.0, settings={"max_num_seqs": 4})
    diagnosis = diagnose(ward.run(*poisson(12, 100, prompt=2)))
    assert "slot_bound" not in [finding.name for finding in diagnosis.findings]
    assert "slot_bound" in [abstention.name for abstention in diagnosis.abstentions]


def test_overload_grows():
    ward = Ward(step_ms=0.1, token_ms=2.0, settings={"max_num_seqs": 64})
    diagnosis = diagnose(ward.run(*poisson(15, 150)))
    assert diagnosis.findings[0].name == "overload"


def test_an_overload_is_told_the_same_where_clients_use_an_id_again():
    """Two requests of one id were one arrival, whose wait lasted from the first to the second's end."""
    books = Ward(step_ms=0.1, token_ms=2.0, settings={"max_num_seqs": 64}).run(*poisson(15, 150))
    again = [msgspec.structs.replace(a, group_id=f"mine-{i % 50}") for i, a in enumerate(books.accounts)]
    told = [diagnose(msgspec.structs.replace(books, accounts=accounts)) for accounts in (books.accounts, tuple(again))]
    assert [one.findings[0].claim for one in told] == [told[0].findings[0].claim] * 2
    assert [one.num_requests for one in told] == [150, 150]


def test_an_overload_of_which_nothing_has_ended_says_what_is_served():
    """One of thirty has ended when the last one comes: how many are served is known from all their ends."""
    cases = [Case(350 * i, ids(8, i), 400) for i in range(30)]
    diagnosis = diagnose(Ward(step_ms=20, settings={"max_num_seqs": 1}).run(*cases))
    (found,) = (one for one in diagnosis.findings if one.name == "overload")
    assert "0.124 are served" in found.claim
    assert "at most 0.099 requests/s" in found.cure.sentence


def test_a_run_shorter_than_a_request_cannot_tell_a_burst_from_an_overload():
    diagnosis = diagnose(Ward(step_ms=0.1, token_ms=2.0).run(*poisson(50, 200)))
    assert "overload" not in [one.name for one in diagnosis.illnesses]
    (why,) = (one.why for one in diagnosis.abstentions if one.name == "overload")
    assert "look alike" in why


def test_a_burst_is_no_overload():
    burst = [Case(0, ids(32, i), 20) for i in range(12)]
    later = [Case(800 + 300 * i, ids(32, 100 + i), 20) for i in range(40)]
    assert "overload" not in names(Ward(settings={"max_num_seqs": 16}).run(*burst, *later))


def test_healthy_at_many_seeds():
    for seed in range(20):
        assert names(Ward().run(*poisson(10, 80, seed=seed))) == []


def test_few_requests_are_too_few():
    diagnosis = diagnose(Ward(settings={"max_num_seqs": 1}).run(*poisson(50, 10)))
    assert diagnosis.thin
    assert not diagnosis.healthy
    assert diagnosis.findings == ()
    assert "only 10" in diagnosis.abstentions[-1].why
