"""In which order they go, who is turned away, who comes at once, and what choosing tokens takes."""

import msgspec
import pytest
from test_rules_queue import names, poisson
from ward import MS, Case, Ward, ids

from splittime.core.errors import ErrorInfo
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.rules.order import overtaken_ns


def mixed(count: int = 80) -> list[Case]:
    """Short and long answers."""
    return [Case(case.at_ms, case.prompt, 10 if i % 2 else 120) for i, case in enumerate(poisson(16, count))]


def test_a_batch_that_nobody_joins():
    first = diagnose(Ward(settings={"batching": "static", "max_num_seqs": 16}).run(*mixed())).findings[0]
    assert first.name == "static_batching"
    assert first.cure.flags == ("--batching", "continuous")
    assert names(Ward(settings={"max_num_seqs": 16}).run(*mixed())) == []


def test_a_policy_that_starves_long_prompts():
    shorts = [Case(35 * i, ids(200, i), 2) for i in range(300)]
    long = [Case(100 + 700 * i, ids(1200, 1000 + i), 2) for i in range(8)]
    crowded = {"policy": "shortest_prefill", "max_prefill_tokens": 128, "max_num_batched_tokens": 256}
    settings = crowded | {"starvation_bound_ms": 60_000.0}
    books = Ward(step_ms=4, token_ms=0.14, settings=settings).run(*shorts, *long)
    diagnosis = diagnose(books)
    first = next(one for one in diagnosis.illnesses if one.name == "starvation")
    assert first.cure.flags[0] == "--starvation-bound-ms"
    assert float(first.cure.flags[1]) < 60_000
    assert set(first.request_ids) <= {a.request_id for a in books.accounts if a.prompt_tokens == 1200}


def test_the_largest_wait_is_told_though_few_had_it():
    """Few had it: another run may show less, and this one's time is told all the same."""
    shorts = [Case(33 * i, ids(200, i), 2) for i in range(300)]
    long = [Case(100 + 700 * i, ids(1200, 1000 + i), 2) for i in range(8)]
    crowded = {"policy": "shortest_prefill", "max_prefill_tokens": 128, "max_num_batched_tokens": 256}
    books = Ward(step_ms=4, token_ms=0.14, settings=crowded | {"starvation_bound_ms": 60_000.0}).run(*shorts, *long)
    diagnosis = diagnose(books)
    largest = diagnosis.spent[0]
    told = {finding.name for finding in diagnosis.findings}
    assert largest.owner == "token_budget"
    assert largest.share > 0.3
    assert largest.explained_by in told or "no_cure_known" in told
    assert diagnosis.illnesses[0].name == "starvation"


def test_nobody_is_overtaken_in_order():
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    assert overtaken_ns(books.accounts) == {}


def refused(books, every: int, code: str = "queued_requests", status: int = 429):
    """Every so-many-th request was turned away at the door."""
    error = ErrorInfo(kind="overloaded_error", message="no", code=code, status=status)

    def turned(account, i):
        if i % every:
            return account
        interval = msgspec.structs.replace(account.intervals[0], end_ns=account.start_ns + MS)
        return msgspec.structs.replace(
            account, finish_reason="refused", error=error, end_ns=account.start_ns + MS, intervals=(interval,)
        )

    accounts = tuple(turned(account, i) for i, account in enumerate(books.accounts))
    return msgspec.structs.replace(books, accounts=accounts)


def test_a_queue_that_is_too_short():
    books = refused(Ward(told={"max_queued_requests": 1}).run(*poisson(10, 120)), 6)
    first = diagnose(books).findings[0]
    assert first.name == "queue_bound"
    assert first.cure.flags == ("--max-queued-requests", "16")
    assert "overload" not in names(books)


def test_refusals_of_a_full_server_are_overload():
    books = refused(Ward(step_ms=0.1, token_ms=3.0, settings={"max_num_seqs": 8}).run(*poisson(20, 150)), 3)
    assert names(books)[0] == "overload"
    assert "queue_bound" not in names(books)


@pytest.mark.parametrize(("code", "found"), [("requests_per_minute", []), ("queued_requests", ["overload"])])
def test_a_key_over_its_own_limit_is_no_overload(code, found):
    """Thousands a second are refused, and nobody who is let in waits."""
    books = Ward(settings={"max_num_seqs": 4}).run(*poisson(8, 120))
    turned = refused(books, 1, code).accounts
    flood = [
        msgspec.structs.replace(a, request_id=f"{a.request_id}-{i}", group_id=f"{a.group_id}-{i}")
        for a in turned
        for i in range(25)
    ]
    books = msgspec.structs.replace(books, accounts=(*books.accounts, *flood))
    assert names(books) == found
    for one in diagnose(books).illnesses:
        assert "those that are let in wait 1 ms, and 3000 were refused" in one.claim


def test_refusals_are_counted_though_the_books_hold_the_latest_of_them():
    """A server that refuses a thousand a second forgets most of those accounts; the rate that arrives is told whole."""
    whole = refused(Ward(step_ms=0.1, token_ms=3.0, settings={"max_num_seqs": 8}).run(*poisson(20, 150)), 3)
    gone = [account for account in whole.accounts if account.finish_reason == "refused"][:40]
    kept = msgspec.structs.replace(whole, accounts=tuple(a for a in whole.accounts if a not in gone))
    turned_away = [account.end_ns for account in whole.accounts if account.error is not None]
    counted = tuple(
        msgspec.structs.replace(step, num_refused=sum(end_ns <= step.end_ns for end_ns in turned_away))
        for step in whole.steps
    )
    true, biased, told = map(arrival_rate, (whole, kept, msgspec.structs.replace(kept, steps=counted)))
    assert told == pytest.approx(true, rel=0.02)
    assert biased < 0.8 * true


def arrival_rate(books) -> float:
    (found,) = (one for one in diagnose(books).illnesses if one.name == "overload")
    return float(next(fact.value for fact in found.evidence if fact.what == "arrivals"))


def test_deadlines_that_are_shorter_than_the_work():
    cases = [Case(120 * i, ids(16, i), 80, deadline_ms=250 if i % 2 else None) for i in range(60)]
    diagnosis = diagnose(Ward().run(*cases))
    first = diagnosis.illnesses[0]
    assert first.name == "deadlines_missed"
    assert "too short" in first.claim
    assert "requests_fail" not in names(Ward().run(*cases))


def test_choices_are_counted_as_requests():
    cases = [Case(400 * i, ids(16, i), 40, n=16) for i in range(20)]
    diagnosis = diagnose(Ward(settings={"max_num_seqs": 4}).run(*cases))
    first = diagnosis.illnesses[0]
    assert diagnosis.num_requests == 20
    assert first.name == "slot_bound"
    assert "20 of 20 requests" in first.claim
    assert "n up to 16" in first.claim


def test_one_burst_among_steady_requests():
    steady = poisson(4, 80, output=10)
    burst = [Case(8000 + i * 0.1, ids(100, 500 + i), 30) for i in range(60)]
    diagnosis = diagnose(Ward(step_ms=1, token_ms=0.8).run(*steady, *burst))
    assert diagnosis.illnesses[0].name == "burst"
    assert "60" in diagnosis.illnesses[0].claim


@pytest.mark.parametrize(("by_one", "named"), [(1.0, True), (0.9, True), (0.5, False)])
def test_who_sent_the_burst_is_named_where_keys_are_asked_for(by_one, named):
    """Nobody is named where two keys sent it together."""
    steady = poisson(4, 80, output=10)
    burst = [Case(8000 + i * 0.1, ids(100, 500 + i), 30) for i in range(60)]
    books = Ward(step_ms=1, token_ms=0.8).run(*steady, *burst)
    instants = sorted(a.start_ns for a in books.accounts if a.prompt_tokens == 100)
    last_ns = instants[int(by_one * len(instants)) - 1]

    def of(account):
        is_bulk = account.prompt_tokens == 100 and account.start_ns <= last_ns
        return msgspec.structs.replace(account, tenant="bulk" if is_bulk else "steady")

    first = diagnose(msgspec.structs.replace(books, accounts=tuple(map(of, books.accounts)))).illnesses[0]
    assert first.name == "burst"
    assert ("(60 of them by the key 'bulk') came at 1 moment, up to 60" in first.claim) is (by_one == 1.0)
    assert ("'bulk'" in first.claim) is named
    assert ("max_open_requests" in first.cure.sentence) is named
    assert "steady" not in first.claim


def test_the_limit_for_a_key_is_below_the_requests_that_it_sent_at_once():
    """Each has sixteen choices, and the limit is of requests."""
    burst = [Case(8000 + i * 0.1, ids(100, 500 + i), 30, n=16) for i in range(4)]
    books = Ward(step_ms=1, token_ms=0.8).run(*poisson(4, 120, output=10), *burst)
    accounts = tuple(msgspec.structs.replace(a, tenant="bulk" * (a.prompt_tokens == 100)) for a in books.accounts)
    (found,) = (one for one in diagnose(msgspec.structs.replace(books, accounts=accounts)).illnesses)
    assert "4 of 124 requests (4 of them by the key 'bulk')" in found.claim
    assert "below 4)" in found.cure.sentence


ALL_AT_ONCE = [Case(i * 0.5, ids(60, i), 30) for i in range(70)]


@pytest.mark.parametrize(("slots", "token_ms"), [(8, 0.05), (8, 1.0), (16, 1.0), (64, 0.05), (64, 1.0)])
def test_one_burst_and_nothing_else(slots, token_ms):
    """Whatever they wait for: slots, the budget of a step, or that the machine gets to them."""
    diagnosis = diagnose(Ward(token_ms=token_ms, settings={"max_num_seqs": slots}).run(*ALL_AT_ONCE))
    first = diagnosis.findings[0]
    assert first.name == "burst"
    assert "70 of 70 requests came at 1 moment, up to 70 within 100 ms" in first.claim
    assert first.cure.flags == ()


def test_bursts_and_nothing_else():
    cases = [Case(4000 * (i // 40) + i * 0.5, ids(60, i), 30) for i in range(120)]
    assert names(Ward(settings={"max_num_seqs": 16}).run(*cases))[0] == "burst"


def test_a_client_that_keeps_many_in_flight_is_no_burst():
    """64 come at once, and one more whenever one has ended."""
    cases = [Case(i * 0.5 if i < 64 else 200 + (i - 63) * 12, ids(60, i), 30) for i in range(300)]
    assert names(Ward(settings={"max_num_seqs": 16}).run(*cases)) == ["slot_bound"]


def test_groups_that_follow_each_other_closely_are_no_bursts():
    """Twelve within 100 ms, and twelve more 60 ms later: that is the rate."""
    cases = [Case(160 * (i // 12) + 8 * (i % 12), ids(16, i), 4) for i in range(240)]
    assert "burst" not in names(Ward(settings={"max_num_seqs": 2}).run(*cases))


def test_many_a_second_are_no_burst():
    """Eight come within 100 ms wherever one looks."""
    cases = poisson(120, 400, prompt=16, output=4)
    assert "burst" not in names(Ward(step_ms=12, settings={"max_num_seqs": 8}).run(*cases))
    assert "burst" not in names(Ward(step_ms=6, settings={"max_num_seqs": 8}).run(*cases))


def test_an_even_load_is_no_burst():
    assert "burst" not in names(Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100)))
    assert "burst" not in names(Ward(settings={"max_num_seqs": 1}).run(*poisson(13, 120)))


def test_choosing_tokens_that_takes_as_long_as_computing_them():
    first = diagnose(Ward(sample_share=0.75).run(*poisson(10, 80, output=40))).findings[0]
    assert first.name == "sampling_bound"
    assert names(Ward(sample_share=0.1).run(*poisson(10, 80, output=40))) == []


def test_a_budget_of_16_that_nobody_waits_for():
    """One prompt at a time: all of the loss is in its own prefill, cut into 19 chunks."""
    cases = [Case(400 * i, ids(300, i), 6) for i in range(40)]
    first = diagnose(Ward(step_ms=4, token_ms=0.05, settings={"max_prefill_tokens": 16}).run(*cases)).findings[0]
    assert first.name == "token_budget_bound"
    assert first.cure.flags[0] == "--max-prefill-tokens"
    assert int(first.cure.flags[1]) >= 128
