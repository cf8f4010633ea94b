"""Guessing ahead (`--speculative-config`) that is off and would save time, as far as the books show it.

In some requests it was counted how many tokens a lookup in their own text would have guessed, and how many of them
right (`ledger.lookup`). Each right one is a draft, and each wrong one ends a row's drafts, of which there are as many
as may be. What past answers would add, and what books without such counts show, is a lower bound by hashes:
then the worst is assumed of all the rest, as many drafts in each row of every step as may be, and none of them right.
Either way a draft costs what a row costs at most.

    now   = sum of the lengths of the request's steps
    then  = (now + row * drafts of the steps) * (1 - right / tokens * most / (most + 1))        most: drafts a row

The books hold no text and no tokens, but a hash of each prompt and its answer up to every 16th token
(`ledger.prompt_parts`): a sum, so what two that follow each other differ by is a hash of the 16 tokens between them and
the 3 before. Such a *block* is guessed as a drafter by suffix guesses tokens (Oliaro et al. 2024, "SuffixDecoding"): by
what followed where the block before it stood the last time, in the request's own text, then in the answers to the same
`cache_salt` that had ended when it began. A drafter finds more: two tokens are enough for it, wherever they stood.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any, NamedTuple

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.draft_balance import ROW, prices_of, reach
from splittime.diagnose.rules.evidence import LIKELY, ms, served, setting, total_ns, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.rules.speculation import FLAG, TOO_FEW, less, percent, typed
from splittime.diagnose.words import RESTART
from splittime.ledger.account import ClosedAccount
from splittime.ledger.prompt_parts import PREFIX_BYTES, PREFIX_TOKENS, prefix_list
from splittime.ledger.steps import StepRecord
from splittime.stats.intervals import MIN_REQUESTS

HASHES = 1 << 8 * PREFIX_BYTES

Followers = dict[int, int]  # by block, the one that followed it the last time


def tokens_guessed(accounts: Sequence[ClosedAccount], has_corpus: bool) -> dict[str, int]:
    """Returns for each request how many tokens of its answer were in blocks that are guessed right. has_corpus: past
    answers count too."""
    found: dict[str, int] = {}
    corpora: dict[str, Followers] = {}
    ended: list[ClosedAccount] = sorted(accounts, key=lambda account: -account.end_ns)  # the next to end is the last
    for account in sorted(accounts, key=lambda account: account.start_ns):
        while has_corpus and ended and ended[-1].end_ns <= account.start_ns:
            _add_answer(ended.pop(), corpora)
        corpus = corpora.get(account.cache_salt, {})
        num_right = blocks_guessed(blocks_of(account), first_of_answer(account), corpus)
        found[account.request_id] = PREFIX_TOKENS * num_right
    return found


def blocks_of(account: ClosedAccount) -> list[int]:
    """Returns the hashes of the 16s of tokens of prompt and answer. Those of equal tokens differ by 1 at most: the
    sums' lower bits are not kept."""
    sums = [int.from_bytes(mark, "big") for mark in prefix_list(account.prefixes + account.answer_prefixes)]
    return [(after - before) % HASHES for before, after in pairwise([0, *sums])]


def first_of_answer(account: ClosedAccount) -> int:
    """Returns the number of the first block that has nothing of the prompt."""
    return -(-account.prompt_tokens // PREFIX_TOKENS)


def blocks_guessed(blocks: Sequence[int], first: int, corpus: Mapping[int, int]) -> int:
    """Returns how many blocks from the first one on were what had followed the block before them the last time that it
    stood in the text, or else in the corpus."""
    followers: Followers = {}
    num_right = 0
    for place, (before, block) in enumerate(pairwise(blocks), 1):
        if place >= first:
            guess = followers.get(_key(followers, before), corpus.get(_key(corpus, before)))
            num_right += guess is not None and _is_same(guess, block)
        followers[_key(followers, before)] = block
    return num_right


def _add_answer(account: ClosedAccount, corpora: dict[str, Followers]) -> None:
    corpus = corpora.setdefault(account.cache_salt, {})
    for before, block in pairwise(blocks_of(account)[first_of_answer(account) :]):
        corpus[_key(corpus, before)] = block


def _key(followers: Mapping[int, int], block: int) -> int:
    """Returns the hash under which such a block is known; its own where it is new."""
    near = (block, (block + 1) % HASHES, (block - 1) % HASHES)
    return next((one for one in near if one in followers), block)


def _is_same(one: int, other: int) -> bool:
    return (one - other + 1) % HASHES <= 2


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
    drafts of a row. row_ns: what a draft costs. drafts: of a row, in the mean, where lookups were counted; else each
    has as many as may be."""

    accounts: Sequence[ClosedAccount]
    right: Mapping[str, int]
    most: int
    row_ns: float
    drafts: float | None = None

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
            now_ns = sum(step.length_ns for step in own)
            drafts = self.most if self.drafts is None else self.drafts
            wider_ns = now_ns + self.row_ns * drafts * sum(step.decode_tokens for step in own)
            part = min(1.0, self.right[account.request_id] / max(1, len(account.token_steps) - 1))
            found[account.request_id] = now_ns - wider_ns * (1 - part * self.most / (self.most + 1))
        return found


@rule("accounts", "steps", "facts")
def speculation_would_pay(books: Books) -> Answer:
    """Nothing is guessed ahead, and so much of the answers stood before that guessing it would save time."""
    guesser = _that_is_off(books)
    if guesser is None:
        return None
    accounts, most = _latest(served(books.accounts)), _most_drafts(books.steps, guesser.most)
    by_hashes = LeastGain(accounts, tokens_guessed(accounts, guesser.has_corpus), most, 0.0)
    gains = [gain for gain in (counted_gain(accounts, most), by_hashes) if gain is not None and gain.num_right]
    if not gains:
        return _cannot_tell(counted_gain(accounts, most) or by_hashes, guesser)
    row_ns = _dearest_row_ns(books.steps)
    if row_ns is None:
        return Abstention(why=TOO_FEW)
    answers = [_answer(books, guesser, gain._replace(row_ns=row_ns)) for gain in gains]
    return next((answer for answer in answers if isinstance(answer, Finding)), answers[0])


def counted_gain(accounts: Sequence[ClosedAccount], most: int) -> LeastGain | None:
    """Returns what lookups would have gained the requests in which they were counted; None where these are too few."""
    counted = [account for account in accounts if account.lookup_guesses is not None]
    if len(counted) < MIN_REQUESTS:
        return None
    right = {account.request_id: account.lookup_right or 0 for account in counted}
    num_right, num_tokens = sum(right.values()), sum(account.output_tokens for account in counted)
    num_wrong = sum(account.lookup_guesses or 0 for account in counted) - num_right
    return LeastGain(counted, right, most, 0.0, drafts=(num_right + most * num_wrong) / max(1, num_tokens))


def _answer(books: Books, guesser: Guesser, least: LeastGain) -> Answer:
    saved_ns = least.saved_ns(books.steps)
    share = of_requests(saved_ns, least.accounts)
    if not share.is_worth_it:
        return share.unsure() or _cannot_tell(least, guesser)
    return _would_pay(books, guesser, least, saved_ns, share)


def _dearest_row_ns(steps: Sequence[StepRecord]) -> float | None:
    """Returns what a row costs a step at the most; None where too few steps tell."""
    prices = prices_of(steps)
    if prices is None:
        return None
    return float(prices.coefficients[ROW]) + reach(sqrt(max(0.0, float(prices.covariance[ROW, ROW]))))


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
    part, trial = percent(least.num_right, least.num_tokens), f"with {FLAG} {typed(guesser.config)}"
    by_hashes = (
        f"books keep no texts, and by their hashes of {PREFIX_TOKENS} tokens {part} of the answers' tokens at the "
        "least could have been guessed, which alone would not surely pay"
    )
    counted = (
        f"{part} of the answers' tokens could have been guessed from each request's own text, counted in "
        f"{len(least.accounts)} requests, which alone would not surely pay; what past answers would add is not counted"
    )
    known = by_hashes if least.drafts is None else counted
    return Abstention(why=f"cannot tell: {known}. Only a trial tells: the same load, on a server {trial}")


def _would_pay(
    books: Books, guesser: Guesser, least: LeastGain, saved_ns: Mapping[str, float], share: Share
) -> Finding:
    at_best_ns = sum(least._replace(row_ns=0.0).saved_ns(books.steps).values())
    return Finding(
        claim=f"{_part_right(least)}: guessing ahead, which is off, would save {share.value:.0%} of all requests' "
        "time or more.",
        evidence=(
            *_counts(least),
            Fact("tokens of all answers", least.num_tokens, "tokens"),
            Fact("a guess costs a step, by the fitted line at the most", ms(least.row_ns), "ms"),
            Fact("the requests' time with it, expected at the most", less(share), "estimated from the same line"),
            Fact("the same if guesses cost nothing", f"{-at_best_ns / total_ns(least.accounts):+.0%}"),
        ),
        request_ids=worst({name: ns for name, ns in saved_ns.items() if ns > 0}),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from=_where_from(least),
        cure=_cure(guesser, least.most),
        cost=f"Memory for past answers, 208 MiB at most. {RESTART}",
        counter_check="With it, at the same load, the mean request takes as long.",
        regime="answers that repeat as these do; where more requests run at once, a guess is dearer",
        is_limit=True,
    )


def _part_right(least: LeastGain) -> str:
    part = percent(least.num_right, least.num_tokens)
    if least.drafts is None:
        return f"At least {part} of the answers' tokens stood before, where a guess would have found them"
    return f"{part} of the answers' tokens would have been guessed right from each request's own text"


def _counts(least: LeastGain) -> tuple[Fact, ...]:
    if least.drafts is None:
        return (
            Fact(f"tokens behind {PREFIX_TOKENS} others that they have followed before", least.num_right, "tokens"),
            Fact("guesses counted for each row of each step, wrong but for these", least.most),
        )
    return (
        Fact("requests in which lookups were counted", len(least.accounts)),
        Fact("tokens that a lookup in the request's own text would have guessed right", least.num_right, "tokens"),
        Fact("guesses counted for each row of each step, in the mean", round(least.drafts, 2)),
    )


def _where_from(least: LeastGain) -> str:
    source = "hashes of 48 bits" if least.drafts is None else "lookups counted in one request of eight"
    return f"{source}, and a line fitted to the steps' lengths: an estimate"


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
