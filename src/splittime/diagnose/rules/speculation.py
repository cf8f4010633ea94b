"""Guessing ahead (`--speculative-config`) that takes more than it saves, as `draft_balance` works it out."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.draft_balance import (
    CONTEXT,
    DRAFT,
    FIXED,
    GUESSING,
    ROW,
    GuessedRows,
    gain,
    gained_ns,
    guessed_rows,
    prices_of,
)
from splittime.diagnose.rules.evidence import LIKELY, ms, served, setting, slowest_steps, worst
from splittime.diagnose.rules.share import Share
from splittime.diagnose.rules.step_cost import MIN_STEPS_TO_FIT
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord

if TYPE_CHECKING:
    from splittime.simulate.regression import Line

FEWER = (1, 2, 4, 8)  # drafts a row, that are tried as a cure
BETTER = 0.03  # of the requests' time: what fewer drafts must save beyond none, to be prescribed instead
FLAG = "--speculative-config"
TOO_FEW = f"fewer than {MIN_STEPS_TO_FIT} steps are without prompts: what a guess costs is not known"


@rule("accounts", "steps", root_of=("overload", "slot_bound", "host_bound"))
def speculation_costs(books: Books) -> Answer:
    """Tokens are guessed ahead, and guessing and verifying them takes more time than the right ones save."""
    accounts = served(books.accounts)
    rows = guessed_rows(books.steps, accounts)
    if rows is None:
        return None
    prices = prices_of(books.steps)
    if prices is None:
        return Abstention(why=TOO_FEW)
    without = gain(rows, prices, accounts)
    if not without.is_worth_it:
        return without.unsure()
    return _costs(books, rows, prices, without, _fewer(rows, prices, accounts, without))


def _fewer(
    rows: GuessedRows, prices: "Line", accounts: Sequence[ClosedAccount], without: Share
) -> tuple[int, Share] | None:
    """Returns how many drafts a row at most would clearly save more than none, and how much; None if no number does."""
    tried = [(most, gain(rows, prices, accounts, most)) for most in FEWER]
    best = max(tried, key=lambda one: one[1].value)
    return best if best[1].value >= without.value + BETTER else None


def _costs(books: Books, rows: GuessedRows, prices: "Line", without: Share, fewer: tuple[int, Share] | None) -> Finding:
    lost = rows.gained(0)
    lost_ns = gained_ns(lost, prices)
    num_drafts, num_right = _counts(books.steps)
    by_request = {name: ns for name, ns in zip(rows.request_ids, lost_ns.tolist(), strict=True) if ns > 0}
    at_best, which = (without, "without guessing") if fewer is None else (fewer[1], f"with at most {fewer[0]} a row")
    mean_rows, a_draft_ns = rows.work[:, ROW].mean(), float(prices.coefficients[DRAFT])
    return Finding(
        claim=f"{num_drafts} tokens were guessed ahead, of which {num_right} were right "
        f"({percent(num_right, num_drafts)}): guessing and verifying took {without.value:.0%} of all requests' time "
        "more than the right ones saved.",
        evidence=(
            Fact("taken by verifying", ms(float(lost[:, DRAFT].sum()) * a_draft_ns), "ms over all requests"),
            Fact("taken by guessing", *_guessing(books, lost)),
            Fact("saved by right guesses", ms(_saved_ns(lost, prices)), "ms over all requests"),
            Fact("a guess costs a step, by the fitted line", ms(a_draft_ns), "ms"),
            Fact(f"a step of {mean_rows:.1f} rows takes without, by that line", ms(_plain_ns(rows, prices)), "ms"),
            Fact(f"the requests' time {which}, expected", less(at_best), "estimated from the same line"),
        ),
        request_ids=worst(by_request),
        step_ids=slowest_steps(step for step in books.steps if step.verified),
        share_of_time=without.value,
        share_interval=without.interval,
        confidence=LIKELY,
        confidence_from="the drafts of each row, and a line fitted to the steps' lengths: an estimate",
        cure=_guess_nothing() if fewer is None else _take_fewer(books, fewer[0]),
        cost=f"Tokens that were guessed right, {num_right} here, take a step each."
        if fewer is None
        else "Text that repeats itself for long is answered in more steps.",
        counter_check=f"The same load {which} takes as long, in the mean request.",
        regime=f"texts like these, in steps of about {mean_rows:.0f} rows",
    )


def _counts(steps: Sequence[StepRecord]) -> tuple[int, int]:
    """Returns how many drafts were verified, and right."""
    verified = [row for step in steps for row in step.verified]
    return sum(drafts for _, drafts, _ in verified), sum(accepted for _, _, accepted in verified)


def percent(part: int, whole: int) -> str:
    """Returns a share of a whole, in words."""
    return f"{part / max(1, whole):.0%}"


def _guessing(books: Books, lost: numpy.ndarray) -> tuple[float | str, str]:
    """The engine of another does not tell; there it is a part of each step, and counts as if none of it were saved."""
    if books.engine and not any(step.draft_ns for step in books.steps):
        return f"not told inside {books.engine}, and left out", ""
    return ms(float(lost[:, GUESSING].sum())), "ms over all requests"


def _saved_ns(lost: numpy.ndarray, prices: "Line") -> float:
    """Returns what the steps would have taken that right guesses have spared their requests."""
    return 0.0 - float(sum(lost[:, term].sum() * prices.coefficients[term] for term in (FIXED, ROW, CONTEXT)))


def _plain_ns(rows: GuessedRows, prices: "Line") -> float:
    """Returns how long the mean of these steps would be without drafts."""
    work = rows.work.mean(axis=0)
    return float(sum(work[term] * prices.coefficients[term] for term in (FIXED, ROW, CONTEXT)))


def less(share: Share) -> str:
    """Returns by how much the requests' time falls, with the interval, in words."""
    low, high = share.interval or (share.value, share.value)
    return f"{-share.value:+.0%} ({-high:+.0%} to {-low:+.0%})"


def _guess_nothing() -> Cure:
    theirs = OtherCure(sentence=f"Leave {FLAG} out.")
    return Cure(sentence="Guess nothing.", flags=(FLAG, typed({"method": "none"})), elsewhere={"vllm": theirs})


def _take_fewer(books: Books, most: int) -> Cure:
    words = f"Guess fewer tokens at once: {most} a row at most"
    theirs = OtherCure(sentence=f'{words} ("num_speculative_tokens": {most} in {FLAG}).')
    try:
        asked = msgspec.json.decode(setting(books, "speculative_config") or "", type=dict[str, Any])
    except (msgspec.DecodeError, TypeError):  # another's server, or a file of who knows whom
        return Cure(sentence=theirs.sentence)
    config = asked | {"num_speculative_tokens": most}
    return Cure(sentence=f"{words}.", flags=(FLAG, typed(config)), elsewhere={"vllm": theirs})


def typed(config: Mapping[str, Any]) -> str:
    """Returns the setting as it is typed in a shell."""
    return shlex.quote(msgspec.json.encode(config).decode())
