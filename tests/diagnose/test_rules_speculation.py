"""Guessing ahead: named where it takes more than it saves, with a size that a run without it bears out."""

import msgspec
import orjson
import pytest
from attached import in_vllm
from test_rules_queue import names, poisson
from ward import Case, Guessing, Ward

from splittime.diagnose.books import Books, make_books
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.rules.evidence import served, total_ns
from splittime.diagnose.rules.speculation import (
    CONTEXT,
    DRAFT,
    FIXED,
    GUESSING,
    ROW,
    gain,
    guessed_rows,
    prices_of,
    work_of,
)
from splittime.ledger.steps import StepRecord, verify_steps

NAME = "speculation_costs"
OFF = ("--speculative-config", """'{"method":"none"}'""")
DEAR_MS = 0.4  # of a row, in a step of 4 ms
CASES = poisson(8, 80, output=60)


def books_of(guessing: Guessing | None, token_ms: float = DEAR_MS, cases: list[Case] = CASES, **told: object) -> Books:
    books = Ward(token_ms=token_ms, guessing=guessing, told=told).run(*cases)
    verify_steps(books.steps)
    return books


def found(books: Books) -> Finding:
    diagnosis = diagnose(books)
    assert diagnosis.illnesses, diagnosis.abstentions
    assert diagnosis.illnesses[0].name == NAME
    return diagnosis.illnesses[0]


def why(books: Books) -> str:
    return next(one.why for one in diagnose(books).abstentions if one.name == NAME)


def fact(finding: Finding, begin: str) -> object:
    return next(one.value for one in finding.evidence if one.what.startswith(begin))


def shorter(books: Books, than: Books) -> float:
    """By which share of their time the same requests are shorter in these books."""
    return 1 - total_ns(served(books.accounts)) / total_ns(served(than.accounts))


# ---- the finding


def test_wrong_guesses_that_are_dear_are_named_and_sized():
    ill = books_of(Guessing(most=6))
    finding = found(ill)
    low, high = finding.share_interval
    assert low <= shorter(books_of(None), than=ill) <= high
    assert finding.share_of_time - low < 0.1
    assert finding.cure.flags == OFF
    assert " 0 were right (0%)" in finding.claim
    assert fact(finding, "a guess costs") == pytest.approx(DEAR_MS, rel=0.05)
    assert str(fact(finding, "saved by right guesses")) == "0.0"
    assert set(finding.step_ids) <= {step.step_id for step in ill.steps if step.verified}
    assert orjson.loads(orjson.dumps(diagnose(ill).as_json()))["findings"][0]["name"] == NAME


def test_guesses_that_are_right_are_no_illness():
    quick = books_of(Guessing(share=0.95))
    assert shorter(quick, than=books_of(None)) > 0.1
    assert NAME not in names(quick)


def test_wrong_guesses_that_cost_little_are_no_illness():
    assert names(books_of(Guessing(most=6), token_ms=0.01)) == []


def test_guesses_that_are_right_often_enough_are_no_illness():
    """They cost what they save, about: it may not be told in either direction."""
    even = books_of(Guessing(most=4, share=0.6))
    assert abs(shorter(even, than=books_of(None))) < 0.2
    assert NAME not in names(even)


def test_guessing_itself_may_be_what_takes_the_time():
    ill = books_of(Guessing(most=1, take_ms=3.0), token_ms=0.02)
    finding = found(ill)
    low, high = finding.share_interval
    assert low <= shorter(books_of(None, token_ms=0.02), than=ill) <= high
    assert fact(finding, "taken by guessing") > 20 * fact(finding, "taken by verifying")
    assert prices_of(ill.steps).coefficients[FIXED] == pytest.approx(4.05e6, rel=0.01), "and no part of a step without"


def test_fewer_guesses_are_prescribed_where_the_first_ones_are_right():
    """One in two is right: the first pays, the sixteenth hardly ever. The size is that of a run with fewer."""
    config = '{"method": "suffix", "prompt_lookup_min": 3}'
    ill = books_of(Guessing(most=16, share=0.7), speculative_config=config)
    finding = found(ill)
    flag, typed = finding.cure.flags
    asked = msgspec.json.decode(typed.strip("'"))
    most = asked.pop("num_speculative_tokens")
    assert (flag, asked) == ("--speculative-config", {"method": "suffix", "prompt_lookup_min": 3})
    assert 1 <= most <= 4
    assert finding.cure.command.endswith(typed)
    told = str(fact(finding, f"the requests' time with at most {most} a row"))
    assert 0 < fact(finding, "saved by right guesses") < fact(finding, "taken by verifying")
    best, low, high = (float(part.strip("()%").rstrip("%")) for part in told.replace("to ", "").split())
    truth = -100 * shorter(books_of(Guessing(most=most, share=0.7)), than=ill)
    assert low - 3 <= truth <= high + 3
    assert best < -100 * finding.share_of_time


def test_a_clients_id_that_comes_again_does_not_end_the_doctor():
    """It did, where rows were numbered by account and told by id."""
    ill = books_of(Guessing(most=6))
    ids = [account.request_id for account in ill.accounts]
    accounts = [msgspec.structs.replace(a, request_id=ids[i - i % 2]) for i, a in enumerate(ill.accounts)]
    again = make_books(ill.facts, accounts, ill.steps, "a test")
    assert NAME in [finding.name for finding in diagnose(again).findings]
    rows = guessed_rows(ill.steps, accounts)
    assert len(rows.request_ids) == len(rows.gained(0)) == len(ids) / 2


def test_a_config_that_nobody_can_read_gets_a_sentence():
    for config in ("not json", 7, None):
        finding = found(books_of(Guessing(most=16, share=0.7), speculative_config=config))
        assert finding.cure.flags == ()
        assert "num_speculative_tokens" in finding.cure.sentence


def test_a_vllm_that_keeps_our_books():
    books = in_vllm(books_of(Guessing(most=6, take_ms=0.5)), num_speculative_tokens=6)
    finding = found(books)
    assert finding.cure.flags == ()
    assert "Leave --speculative-config out" in finding.cure.sentence
    assert "not told inside vllm" in str(fact(finding, "taken by guessing"))


# ---- where it cannot tell


def test_books_in_which_each_row_has_as_many_guesses_do_not_tell_what_one_costs():
    """So many ns for a row with its guesses: it may all be the row's, and then guessing costs nothing."""
    books = books_of(Guessing(most=2, asked=1.0))  # so few that the scheduler's bound of a step cuts none
    works = [(step, work_of(step)) for step in books.steps]
    alike = msgspec.structs.replace(books, steps=tuple(s for s, work in works if work[DRAFT] == 2 * work[ROW]))
    assert len(alike.steps) > 0.5 * len(books.steps)
    assert "another may show 0% to 100%" in why(alike)
    assert found(books).cure.flags == OFF, "while a few others are enough"


def test_a_share_is_as_sure_as_the_price_of_a_guess():
    ill = books_of(Guessing(most=6))
    accounts = served(ill.accounts)
    rows, prices = guessed_rows(ill.steps, accounts), prices_of(ill.steps)
    sure = gain(rows, prices, accounts)
    dear_ns = prices.coefficients[DRAFT] / 2  # of error, half of the price
    prices.covariance[DRAFT, DRAFT] += dear_ns**2
    unsure = gain(rows, prices, accounts)
    assert unsure.value == sure.value
    assert sure.value - unsure.interval[0] == pytest.approx(1.34 * sure.value / 2, rel=0.05), "Student's t, one in ten"


def test_few_steps_without_prompts_are_too_few():
    books = books_of(Guessing(most=6))
    prompts = [msgspec.structs.replace(s, prefill_tokens=1) for s in books.steps[: len(books.steps) - 20]]
    late = [msgspec.structs.replace(s, prefill_tokens=0) for s in books.steps[len(books.steps) - 20 :]]
    assert "what a guess costs is not known" in why(msgspec.structs.replace(books, steps=(*prompts, *late)))


def test_nobody_who_does_not_guess_is_asked():
    diagnosis = diagnose(books_of(None))
    assert NAME not in [one.name for one in (*diagnosis.findings, *diagnosis.abstentions)]


# ---- the arithmetic


def step_of(verified: tuple[tuple[str, int, int], ...], draft_ns: int = 0) -> StepRecord:
    """Rows a and b at position 10, and c with a prompt's chunk of 5."""
    drafts = {name: count for name, count, _ in verified}
    rows = (*((name, 10, 1 + drafts.get(name, 0)) for name in "ab"), ("c", 0, 5))
    times = {"plan_ns": 0, "launch_ns": draft_ns, "device_ns": 100, "sample_ns": 0, "commit_ns": 0}
    counts = {"prefill_tokens": 5, "decode_tokens": 2 + sum(drafts.values()), "kv_tokens_read": 0, "blocks_used": 0}
    idle = {"host_gap_ns": 0, "idle_ns": 0, "num_running": 3, "num_waiting": 0, "draft_ns": draft_ns}
    step = StepRecord(
        step_id=1, begin_ns=0, end_ns=100 + draft_ns, rows=rows, verified=verified, **times, **counts, **idle
    )
    verify_steps([step])
    return step


class Of:
    """As much of an account as is asked for."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


@pytest.fixture
def rows():
    return guessed_rows([step_of((("a", 6, 4),), 7)], [Of(name) for name in "abc"])


def test_without_guesses_each_right_one_takes_a_step(rows):
    a, b, c = rows.gained(0)
    assert a[[FIXED, ROW, DRAFT, CONTEXT, GUESSING]].tolist() == [-4, -4 * 2, 6, -4 * 22, 7]
    assert b.tolist() == c.tolist() == [0, 0, 6, 0, 7]


def test_with_as_many_guesses_nothing_changes(rows):
    assert not rows.gained(6).any()
    assert not rows.gained(99).any()


def test_with_fewer_guesses_the_right_ones_come_in_more_steps(rows):
    """Five tokens, two a step at most: three steps, each with its guesses and the time to make them."""
    a, b, _ = rows.gained(1)
    assert a[[FIXED, ROW, DRAFT, CONTEXT, GUESSING]].tolist() == [-2, -2 * 2, 6 - 3 * 1, -2 * 22, -2 * 7]
    assert b.tolist() == [0, 0, 5, 0, 0]
    a, _, _ = rows.gained(4)
    assert a.tolist() == [0, 0, 2, 0, 0]


def test_rows_of_others_count_for_the_step_alone():
    rows = guessed_rows([step_of((("a", 6, 4),)), step_of(())], [Of("b")])
    assert rows.gained(0).tolist() == [[0, 0, 6, 0, 0]]
    assert guessed_rows([step_of((("a", 6, 4),))], [Of("x")]) is None
    assert guessed_rows([step_of(())], [Of("a")]) is None


def test_looking_in_vain_takes_time_too():
    assert guessed_rows([step_of((), 7)], [Of("b")]).gained(0).tolist() == [[0, 0, 0, 0, 7]]
