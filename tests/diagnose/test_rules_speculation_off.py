"""Guessing ahead that is off: found by hashes alone, where it would pay whatever else is guessed; else it says what is
not known."""

import random

import msgspec
import orjson
import pytest
from attached import in_vllm
from hypothesis import given
from hypothesis import strategies as st
from test_rules_queue import names, poisson
from ward import Case, Guessing, Ward, ids

from splittime.diagnose.books import Books
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.rules import speculation
from splittime.diagnose.rules.evidence import served, total_ns
from splittime.diagnose.rules.speculation import (
    HASHES,
    ROW,
    LeastGain,
    blocks_guessed,
    blocks_of,
    prices_of,
    reach,
    tokens_guessed,
)
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes

NAME = "speculation_would_pay"
ABLE = {"kernels": "native", "tensor_parallel_size": 1, "async_scheduling": False, "speculative_config": None}


class Text:
    """As much of an account as is asked for."""

    def __init__(self, prompt: list[int], answer: list[int], begin: int = 0, end: int = 1, salt: str = "") -> None:
        self.request_id, self.cache_salt, self.start_ns, self.end_ns = f"{begin}", salt, begin, end
        self.prompt_tokens = len(prompt)
        self.prefixes, self.answer_prefixes = prompt_hashes(prompt).prefixes, answer_hashes(prompt, answer)


def again(distinct: int = 6, output: int = 60, rate: float = 8) -> list[Case]:
    """A few prompts that come again and again; the fake model answers each the same."""
    return [Case(case.at_ms, ids(40, 900 + i % distinct), output) for i, case in enumerate(poisson(rate, 80))]


def books_of(cases: list[Case], token_ms: float = 0.05, told: dict | None = None, **more: object) -> Books:
    return Ward(token_ms=token_ms, told=ABLE if told is None else told, **more).run(*cases)


def found(books: Books) -> Finding:
    (finding,) = (one for one in diagnose(books).findings if one.name == NAME)
    return finding


def why(books: Books) -> str:
    diagnosis = diagnose(books)
    assert NAME not in [one.name for one in diagnosis.findings]
    return next(one.why for one in diagnosis.abstentions if one.name == NAME)


def is_silent(books: Books) -> bool:
    diagnosis = diagnose(books)
    return NAME not in [one.name for one in (*diagnosis.findings, *diagnosis.abstentions)]


# ---- the finding


def test_answers_that_come_again_would_be_guessed():
    books = books_of(again())
    diagnosis = diagnose(books)
    assert diagnosis.healthy, "nothing is wrong with a server that does not guess"
    assert [one.name for one in diagnosis.limits] == [NAME]
    finding = diagnosis.limits[0]
    assert finding.cure.command == """splittime serve --speculative-config '{"method":"suffix"}'"""
    assert finding.share_interval[0] >= 0.1
    assert "simulate" not in finding.cost, "which takes ledgers with guesses"
    assert "or more" in finding.claim
    assert orjson.loads(orjson.dumps(diagnosis.as_json()))["findings"][0]["name"] == NAME


def test_a_server_that_guesses_as_well_and_no_better_saves_at_least_as_much():
    """A real one looks for guesses in every row, and finds more than hashes show; what was promised is the least."""
    books = books_of(again())
    finding = found(books)
    quick = books_of(again(), guessing=Guessing(most=4, share=0.9, asked=0.8))
    saved = 1 - total_ns(served(quick.accounts)) / total_ns(served(books.accounts))
    assert finding.share_interval[0] <= saved


def test_a_guess_counts_for_as_dear_as_it_may_be():
    """Steps of a machine whose pace changes do not tell exactly what a row costs."""
    rng, slow_ns = random.Random(1), 0
    steps = []
    for number, step in enumerate(books_of(again()).steps):
        slow_ns = rng.randrange(10**6) if number % 20 == 0 else slow_ns
        steps.append(msgspec.structs.replace(step, host_gap_ns=step.host_gap_ns + slow_ns))
    finding = found(msgspec.structs.replace(books_of(again()), steps=tuple(steps)))
    prices = prices_of(steps)
    most_ns = prices.coefficients[ROW] + reach(prices.covariance[ROW, ROW] ** 0.5)
    assert most_ns > 1.1 * prices.coefficients[ROW]
    (told_ms,) = (fact.value for fact in finding.evidence if fact.what.startswith("a guess costs a step"))
    assert told_ms == round(most_ns / 1e6, 3)


def test_where_a_guess_is_dear_it_is_not_promised():
    """The worst is assumed of all that is not known: each row of each step with wrong guesses."""
    assert "could have been guessed, which alone would not surely pay" in why(books_of(again(), token_ms=3.0))


def test_answers_that_are_new_tell_nothing():
    books = books_of(poisson(8, 80, output=60))
    assert "0% of the answers' tokens" in why(books)
    assert """--speculative-config '{"method":"suffix"}'""" in why(books)
    assert diagnose(books).healthy


def test_who_guesses_or_cannot_is_not_asked():
    assert is_silent(books_of(again(), guessing=Guessing(most=1, share=1.0)))
    for name, value in (
        ("kernels", "torch"),
        ("tensor_parallel_size", 2),
        ("async_scheduling", True),
        ("speculative_config", '{"method": "suffix"}'),
    ):
        assert is_silent(books_of(again(), told=ABLE | {name: value})), name
    early = {name: value for name, value in ABLE.items() if name != "speculative_config"}
    assert is_silent(books_of(again(), told=early)), "an early version's books do not say"


def test_a_few_that_came_one_after_another_may_not_come_again():
    cases = poisson(8, 80, output=60)
    same = [Case(case.at_ms, ids(40, 900), 60) for case in cases[44:]]
    assert "another may show" in why(books_of([*cases[:44], *same], token_ms=0.02))


def test_steps_of_one_row_do_not_tell_what_a_guess_costs():
    alone = [Case(500 * i, ids(40, 900 + i % 6), 60) for i in range(40)]
    assert "would not surely pay" in why(books_of(alone))


def test_the_latest_requests_are_looked_at(monkeypatch):
    texts = [Text(ids(32, i), ids(32, 100 + i)) for i in range(5)]
    assert list(speculation._latest(texts)) == texts
    monkeypatch.setattr(speculation, "MOST_HASHES", 11)
    assert list(speculation._latest(texts)) == texts[3:]


def test_as_many_guesses_are_prescribed_as_were_counted_on():
    flags = speculation._cure(speculation.OURS, 2).elsewhere["vllm"].flags
    assert msgspec.json.decode(flags[1].strip("'"))["num_speculative_tokens"] == 2


class Counted(Text):
    token_steps = (1, 2, 3, 4, 5)
    output_tokens = 5


def test_what_each_request_would_save():
    """Four steps of 100 ns behind the first token, with two rows and two guesses each at 10 ns: 140 ns. Three of their
    four tokens are right, and come three a step instead of one."""
    books = books_of(again())
    shape = {"begin_ns": 0, "end_ns": 90, "host_gap_ns": 10, "decode_tokens": 2}
    steps = [msgspec.structs.replace(books.steps[0], step_id=number, **shape) for number in range(1, 6)]
    account = Counted([], [])
    least = LeastGain([account], {"0": 3}, most=2, row_ns=10.0)
    assert least.saved_ns(steps) == {"0": pytest.approx(400 - 560 * (1 - 3 / 4 * 2 / 3))}
    assert least.saved_ns(steps[:3]) == {"0": pytest.approx(200 - 280 * (1 - 3 / 4 * 2 / 3))}, "of steps that are known"
    assert (least.num_right, least.num_tokens) == (3, 5)


def quoting(books: Books) -> Books:
    """The same requests, whose answers are their prompts said again."""
    prompts = {account.request_id: ids(160, 100 + i) for i, account in enumerate(books.accounts)}
    accounts = tuple(
        msgspec.structs.replace(
            account,
            prompt_tokens=160,
            prefixes=prompt_hashes(prompts[account.request_id]).prefixes,
            answer_prefixes=answer_hashes(prompts[account.request_id], prompts[account.request_id]),
        )
        for account in books.accounts
    )
    return msgspec.structs.replace(books, accounts=accounts)


def test_a_vllm_guesses_from_the_request_alone():
    books = in_vllm(books_of(again(output=160, rate=4)), num_speculative_tokens=0)
    assert "ngram" in why(books), "past answers are nothing to it"
    finding = found(quoting(books))
    flag, typed = finding.cure.flags
    asked = msgspec.json.decode(typed.strip("'"))
    assert (flag, asked["method"]) == ("--speculative-config", "ngram")
    assert 1 <= asked["num_speculative_tokens"] <= 4
    assert "at the first of them: try it on a server beside" in finding.cost
    assert "past answers" not in finding.cure.sentence + finding.cost
    assert is_silent(in_vllm(books_of(again()), num_speculative_tokens=3))
    assert is_silent(in_vllm(books_of(again()))), "nobody knows"


def test_both_are_not_told_at_once():
    wrong = Guessing(most=6)
    ill = Ward(token_ms=0.4, told=ABLE, guessing=wrong).run(*again())
    assert names(ill) == ["speculation_costs"]
    assert is_silent(ill)


# ---- what was counted


def counted(books: Books, guesses: float, right: float, one_in: int = 1) -> Books:
    """The same requests, of which one in so many had lookups counted: these shares of the answer's tokens."""
    accounts = [
        msgspec.structs.replace(
            account,
            lookup_guesses=round(guesses * account.output_tokens) if number % one_in == 0 else None,
            lookup_right=round(right * account.output_tokens) if number % one_in == 0 else None,
        )
        for number, account in enumerate(books.accounts)
    ]
    return msgspec.structs.replace(books, accounts=tuple(accounts))


def test_lookups_that_were_counted_tell_what_hashes_do_not_show():
    books = books_of(poisson(8, 80, output=60))
    assert "0% of the answers' tokens" in why(books)
    finding = found(counted(books, 0.7, 0.6))
    assert finding.claim.startswith("60% of the answers' tokens would have been guessed right from each request's own")
    assert finding.share_interval[0] >= 0.1
    assert "one request of eight" in finding.confidence_from


def test_a_sample_of_requests_is_enough_and_a_few_are_not():
    books = books_of(poisson(8, 80, output=60))
    num_counted = {fact.what: fact.value for fact in found(counted(books, 0.7, 0.6, one_in=2)).evidence}
    assert num_counted["requests in which lookups were counted"] == 40
    assert "by their hashes" in why(counted(books, 0.7, 0.6, one_in=12)), "seven requests tell too little"


def test_wrong_guesses_that_were_counted_cost_what_a_row_of_them_costs():
    books = books_of(poisson(8, 80, output=60), token_ms=0.5)
    few, many = counted(books, 0.55, 0.5), counted(books, 1.0, 0.5)
    assert found(few).share_of_time > 0.2
    assert "counted in 80 requests, which alone would not surely pay" in why(many)


def test_what_past_answers_show_by_hashes_counts_beside():
    finding = found(counted(books_of(again()), 0.0, 0.0))
    assert "At least" in finding.claim


def test_drafts_that_were_counted_are_the_right_ones_and_a_row_for_each_wrong_one():
    books = counted(books_of(poisson(8, 80, output=60)), 0.5, 0.25)
    gain = speculation.counted_gain(books.accounts, 4)
    assert gain.drafts == pytest.approx(0.25 + 4 * 0.25)
    assert gain.num_right == 15 * 80
    assert speculation.counted_gain(books.accounts[:3], 4) is None


# ---- what hashes show


def guessed(*texts: Text, has_corpus: bool = True) -> list[int]:
    found = tokens_guessed(texts, has_corpus)  # type: ignore[arg-type]
    return [found[text.request_id] for text in texts]


@given(st.integers(1, 6), st.integers(0, 5), st.integers(3, 8), st.integers(0, 10**6))
def test_what_an_answer_quotes_in_the_same_places_is_guessed(before, between, size, seed):
    """All but its first 32 tokens: other ones stand before the first 16, and these find the place of the second."""
    rng = random.Random(seed)
    new = lambda count: [rng.randrange(1, 10**5) for _ in range(16 * count)]  # noqa: E731
    quoted = new(size)
    answer = new(between) + quoted + new(1)
    assert guessed(Text(new(before) + quoted, answer)) == [16 * (size - 2)]


def test_a_quote_in_other_places_is_not_seen():
    quoted = ids(128, 1)
    assert guessed(Text(ids(16, 2) + quoted, ids(8, 3) + quoted)) == [0]


def test_what_follows_otherwise_is_not_guessed():
    quoted = ids(96, 1)
    other = [*quoted[:60], 0, *quoted[61:]]
    assert guessed(Text(quoted, quoted)) == [16 * 4]
    assert guessed(Text(quoted, other)) == [16 * 2 + 16 * 0], "up to the other token; behind it the place is found anew"


def test_the_last_place_is_the_one_that_is_believed():
    a, b, c = ids(48, 1), ids(16, 2), ids(16, 3)
    assert guessed(Text([*a, *b, *a, *c], [*a, *c])) == [32]
    assert guessed(Text([*a, *c, *a, *b], [*a, *c])) == [16], "b followed the last time"


@given(st.lists(st.integers(1, 3), min_size=4, max_size=12))
def test_the_last_place_is_believed_however_sums_were_cut(places):
    """Two of the hashes of equal tokens may differ by 1; they are one block all the same."""
    blocks = [hash_of for place in places for hash_of in (100 + place % 2, 200 * place)]
    later = [*blocks, 100, 200 * places[-1]]
    assert blocks_guessed(later, len(blocks) + 1, {}) == 1


def test_past_answers_count_once_they_have_ended_and_for_their_own_salt():
    said = ids(80, 1)
    first = Text(ids(16, 2), said, begin=0, end=10)
    assert guessed(first, Text(ids(32, 3), said, begin=10, end=20)) == [0, 48]
    assert guessed(first, Text(ids(32, 3), said, begin=9, end=20)) == [0, 0]
    assert guessed(first, Text(ids(32, 3), said, begin=10, end=20, salt="b")) == [0, 0]
    assert guessed(first, Text(ids(32, 3), said, begin=10, end=20), has_corpus=False) == [0, 0]
    assert guessed(Text(said, ids(32, 2), end=10), Text(ids(32, 3), said, begin=10, end=20)) == [0, 0], (
        "of answers only"
    )


def test_what_begins_in_the_prompt_is_no_answer():
    """The prompt ends in the middle of 16 tokens: these are not counted, and what follows them is."""
    text = ids(64, 1)
    assert guessed(Text([*text, *text[:40]], text[40:])) == [16]


def test_the_text_itself_is_believed_before_other_answers():
    a, b, c = ids(32, 1), ids(16, 2), ids(16, 3)
    other = Text(ids(16, 4), [*a, *c], begin=0, end=10)
    assert guessed(other, Text([*ids(16, 5), *a, *b], [*a, *b], begin=10, end=20)) == [0, 16]


def test_sums_that_were_cut_differ_by_one_at_most():
    assert blocks_guessed([5, 9, 5, 10], 2, {}) == 1
    assert blocks_guessed([5, 9, 6, 8], 2, {}) == 1
    assert blocks_guessed([5, 9, 7, 9], 2, {}) == 0
    assert blocks_guessed([5, 9, 5, 11], 2, {}) == 0
    assert blocks_guessed([5, 11, 5, 9], 2, {}) == 0
    assert blocks_guessed([HASHES - 1, 9, 0, 9], 2, {}) == 1
    assert blocks_guessed([5, 0, 5, HASHES - 1], 2, {}) == 1


def test_an_account_without_hashes_has_no_blocks():
    assert blocks_of(Text([1, 2, 3], [4])) == []  # type: ignore[arg-type]
