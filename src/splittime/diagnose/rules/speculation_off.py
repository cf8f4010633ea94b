"""Guessing ahead (`--speculative-config`) that is off and would save time, as far as hashes of answers show it.

What they show of the answers is a lower bound (`answer_repeats`). Of all the rest the worst is assumed: in every step
each row has as many drafts as it may, and none of them is right; and a draft costs what a row costs at most.

    now   = sum of the lengths of the request's steps
    then  = (now + row * drafts of the steps) * (1 - right / tokens * most / (most + 1))        most: drafts a row
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any, NamedTuple

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.answer_repeats import tokens_guessed
from splittime.diagnose.rules.draft_balance import ROW, prices_of, reach
from splittime.diagnose.rules.evidence import LIKELY, ms, served, setting, total_ns, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.rules.speculation import FLAG, TOO_FEW, less, percent, typed
from splittime.diagnose.rules.step_cost import length_ns
from splittime.diagnose.words import RESTART
from splittime.ledger.account import ClosedAccount
from splittime.ledger.prompt_parts import PREFIX_BYTES, PREFIX_TOKENS
from splittime.ledger.steps import StepRecord

REACH = 2.0  # times the most rows recorded: how far a step with drafts may go, as in `simulate.cost`
MOST_HASHES = 100_000  # of the latest requests, that are looked at: a tenth of a second


class Guesser(NamedTuple):
    """What could be turned on. config: of `FLAG`. most: drafts of a row. has_corpus: past answers are guessed from."""

    config: Mapping[str, Any]
    most: int
    has_corpus: bool


OURS = Guesser({"method": "suffix"}, 16, has_corpus=True)
OF_VLLM = Guesser({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}, 4, has_corpus=False)


class LeastGain(NamedTuple):
    """What is counted on. accounts: the requests; right: how many tokens of each would have been guessed right. most:
    drafts of a row. row_ns: what a draft costs."""

    accounts: Sequence[ClosedAccount]
    right: Mapping[str, int]
    most: int
    row_ns: float

    @property
    def num_right(self) -> int:
        return sum(self.right.values())

    @property
    def num_tokens(self) -> int:
        return sum(account.output_tokens for account in self.accounts)

    def saved_ns(self, steps: Sequence[StepRecord]) -> dict[str, float]:
        """Returns by how much each request would be shorter; below 0 where it would be longer."""
        by_id = {step.step_id: step for step in steps}
        found: dict[str, float] = {}
        for account in self.accounts:
            own = [by_id[step_id] for step_id in account.token_steps[1:] if step_id in by_id]
            now_ns = sum(map(length_ns, own))
            wider_ns = now_ns + self.row_ns * self.most * sum(step.decode_tokens for step in own)
            part = min(1.0, self.right[account.request_id] / max(1, len(account.token_steps) - 1))
            found[account.request_id] = now_ns - wider_ns * (1 - part * self.most / (self.most + 1))
        return found


@rule("accounts", "steps", "facts")
def speculation_would_pay(books: Books) -> Answer:
    """Nothing is guessed ahead, and so much of the answers stood before that guessing it would save time."""
    guesser = _that_is_off(books)
    if guesser is None:
        return None
    accounts = _latest(served(books.accounts))
    right = tokens_guessed(accounts, guesser.has_corpus)
    least = LeastGain(accounts, right, _most_drafts(books.steps, guesser.most), 0.0)
    if not least.num_right:
        return _cannot_tell(least, guesser)
    prices = prices_of(books.steps)
    if prices is None:
        return Abstention(why=TOO_FEW)
    row_ns, variance = float(prices.coefficients[ROW]), float(prices.covariance[ROW, ROW])
    least = least._replace(row_ns=row_ns + reach(sqrt(max(0.0, variance))))
    saved_ns = least.saved_ns(books.steps)
    share = of_requests(saved_ns, accounts)
    if not share.is_worth_it:
        return share.unsure() or _cannot_tell(least, guesser)
    return _would_pay(books, guesser, least, saved_ns, share)


def _that_is_off(books: Books) -> Guesser | None:
    """Returns what this server could guess with; None where it guesses, where it cannot, and where nobody knows."""
    if any(step.verified for step in books.steps):
        return None
    if books.engine == "vllm":
        return OF_VLLM if setting(books, "num_speculative_tokens") == 0 else None
    is_able = setting(books, "kernels") == "native" and setting(books, "tensor_parallel_size") == 1
    assert books.facts is not None
    is_off = books.facts.settings.get("speculative_config", "") is None
    return OURS if is_able and is_off and not setting(books, "async_scheduling") and not books.engine else None


def _latest(accounts: Sequence[ClosedAccount]) -> Sequence[ClosedAccount]:
    num_bytes = accumulate(len(account.prefixes) + len(account.answer_prefixes) for account in reversed(accounts))
    count = sum(total <= MOST_HASHES * PREFIX_BYTES for total in num_bytes)
    return accounts[len(accounts) - count :]


def _most_drafts(steps: Sequence[StepRecord], most: int) -> int:
    """Returns how many drafts each row can have, so that the mean step stays within reach of the largest recorded."""
    num_rows = [step.decode_tokens for step in steps if step.decode_tokens]
    mean = sum(num_rows) / max(1, len(num_rows))
    return max(0, min(most, int(REACH * max(num_rows, default=0) / max(1.0, mean)) - 1))


def _cannot_tell(least: LeastGain, guesser: Guesser) -> Abstention:
    return Abstention(
        why=f"cannot tell: books keep no texts, and by their hashes of {PREFIX_TOKENS} tokens "
        f"{percent(least.num_right, least.num_tokens)} of the answers' tokens at the least could have been guessed, "
        f"which alone would not surely pay. Only a trial tells: the same load, on a server with "
        f"{FLAG} {typed(guesser.config)}"
    )


def _would_pay(
    books: Books, guesser: Guesser, least: LeastGain, saved_ns: Mapping[str, float], share: Share
) -> Finding:
    at_best_ns = sum(least._replace(row_ns=0.0).saved_ns(books.steps).values())
    return Finding(
        claim=f"At least {percent(least.num_right, least.num_tokens)} of the answers' tokens stood before, where a "
        f"guess would have found them: guessing ahead, which is off, would save {share.value:.0%} of all requests' "
        "time or more.",
        evidence=(
            Fact(f"tokens behind {PREFIX_TOKENS} others that they have followed before", least.num_right, "tokens"),
            Fact("tokens of all answers", least.num_tokens, "tokens"),
            Fact("guesses counted for each row of each step, wrong but for these", least.most),
            Fact("a guess costs a step, by the fitted line at the most", ms(least.row_ns), "ms"),
            Fact("the requests' time with it, expected at the most", less(share), "estimated from the same line"),
            Fact("the same if guesses cost nothing", f"{-at_best_ns / total_ns(least.accounts):+.0%}"),
        ),
        request_ids=worst({name: ns for name, ns in saved_ns.items() if ns > 0}),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="hashes of 48 bits, and a line fitted to the steps' lengths: an estimate",
        cure=_cure(guesser, least.most),
        cost=f"Memory for past answers, 208 MiB at most; `simulate` and `tune` refuse ledgers with guesses. {RESTART}",
        counter_check="With it, at the same load, the mean request takes as long.",
        regime="answers that repeat as these do; where more requests run at once, a guess is dearer",
        is_limit=True,
    )


def _cure(guesser: Guesser, most: int) -> Cure:
    of_vllm = OtherCure(
        sentence="Guess tokens ahead from each request's text, and verify several in a step.",
        flags=(FLAG, typed({**OF_VLLM.config, "num_speculative_tokens": most})),
        cost="A wrong guess takes its place in a step, however full that is. Drawn tokens (temperature above 0) are "
        "guessed right less often than these hashes show, and vLLM 0.31 on a CPU ended with an error at the first of "
        "them: try it on a server beside.",
    )
    return Cure(
        sentence="Guess tokens ahead, from each request's text and past answers, and verify several in a step.",
        flags=(FLAG, typed(guesser.config)),
        elsewhere={"vllm": of_vllm},
    )
