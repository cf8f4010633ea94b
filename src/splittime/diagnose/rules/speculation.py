"""Guessing ahead (`--speculative-config`): off where it would save time, or on where it takes more than it saves.

It is off and would save time, as far as the books show it.

In some requests it was counted how many tokens a lookup in their own text would have guessed, and how many of them
right (`ledger.prompt_parts`). Each right one is a draft, and each wrong one ends a row's drafts, of which there are as
many as may be. What past answers would add, and what books without such counts show, is a lower bound by hashes:
then the worst is assumed of all the rest, as many drafts in each row of every step as may be, and none of them right.
Either way a draft costs what a row costs at most.

    now   = sum of the lengths of the request's steps
    then  = (now + row * drafts of the steps) * (1 - right / tokens * most / (most + 1))        most: drafts a row

The books hold no text and no tokens, but a hash of each prompt and its answer up to every 16th token
(`ledger.prompt_parts`): a sum, so what two that follow each other differ by is a hash of the 16 tokens between them and
the 3 before. Such a *block* is guessed as a drafter by suffix guesses tokens (Oliaro et al. 2024, "SuffixDecoding"): by
what followed where the block before it stood the last time, in the request's own text, then in the answers to the same
`cache_salt` that had ended when it began. A drafter finds more: two tokens are enough for it, wherever they stood.

It takes more than it saves. What guessing ahead took and what it saved in these books, by a line fitted to their own
steps.

    length of a step without prompts = fixed + row * rows + draft * drafts + context * cached tokens read + draft_ns

No price is below 0. A step holds up everybody in it for its drafts and for the guessing, and each accepted draft spares
its own request a step:

    taken of a request by a step = draft * drafts of the step + draft_ns
    saved by it                  = accepted drafts of its row * (fixed + row * rows + context * cached tokens read)

With fewer drafts a row, the first of those that were accepted stay, and the others are guessed again in the steps that
follow, since the text before them is the same.

This is an estimate, and errs in favour of guessing: without it batches are taken to be as large as they were with it,
though requests that it slows down are in each other's way for longer; and guessing that the books do not time
(`draft_ns` is 0 inside another's engine) counts as a part of every step, guessed or not.

How sure the prices are the regression says (`simulate.regression`). Where steps do not tell what a draft costs from
what a row costs, as where each row always has as many, the interval is so wide that nothing is found.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import (
    CONFIDENCE,
    LIKELY,
    Share,
    ms,
    of_requests,
    served,
    setting,
    slowest_steps,
    total_ns,
    widened,
    worst,
)
from splittime.diagnose.rules.step_cost import MIN_STEPS_TO_FIT
from splittime.diagnose.words import RESTART
from splittime.ledger.account import ClosedAccount
from splittime.ledger.prompt_parts import PREFIX_BYTES, PREFIX_TOKENS, prefix_list
from splittime.ledger.steps import StepRecord
from splittime.stats.intervals import MIN_REQUESTS, t_quantile

if TYPE_CHECKING:
    from splittime.simulate.regression import Line


FIXED, ROW, DRAFT, CONTEXT = range(4)  # prices, in the order of the line's coefficients
GUESSING = 4  # ns of guessing, behind them
MOST_STEPS = 50_000  # the latest: a line is as sure with them

Array = NDArray[numpy.float64]


class GuessedRows(NamedTuple):
    """The rows of the steps that guessed or verified, as arrays. request_ids: of the requests that they belong to.

    step, request [rows]: indices. drafts, accepted [rows]: of each row; 0 of one without drafts.
    work [steps, 4]: of each step, what the prices multiply. guess_ns [steps]: what guessing took.
    """

    request_ids: tuple[str, ...]
    step: NDArray[numpy.int64]
    request: NDArray[numpy.int64]
    drafts: Array
    accepted: Array
    work: Array
    guess_ns: Array

    def gained(self, most: int) -> Array:
        """Returns [requests, 5]: how much less of each price every request would have paid with at most so many drafts
        a row, and how many ns less of guessing; 0 drafts are no guessing."""
        kept = numpy.bincount(self.step, numpy.minimum(self.drafts, most), len(self.work))
        guess_ns = self.guess_ns * (most > 0)
        spared = numpy.zeros((len(self.work), 5))
        spared[:, DRAFT], spared[:, GUESSING] = self.work[:, DRAFT] - kept, self.guess_ns - guess_ns
        another_step = numpy.column_stack([self.work, guess_ns])
        another_step[:, DRAFT] = kept
        num_more = numpy.ceil((1 + self.accepted) / (1 + most)) - 1
        by_row = spared[self.step] - num_more[:, None] * another_step[self.step]
        columns = [numpy.bincount(self.request, column, len(self.request_ids)) for column in by_row.T]
        return numpy.stack(columns, axis=1)


def guessed_rows(steps: Sequence[StepRecord], accounts: Sequence[ClosedAccount]) -> GuessedRows | None:
    """Returns the rows of these requests; None if nobody guessed."""
    guessing = [step for step in steps if step.verified or step.draft_ns]
    ids = dict.fromkeys(account.request_id for account in accounts)  # a client may use one again
    number = {request_id: index for index, request_id in enumerate(ids)}
    rows = [row for index, step in enumerate(guessing) for row in _rows_of(step, index, number)]
    if not rows:
        return None
    step, request, drafts, accepted = numpy.array(rows, dtype=float).T
    work = numpy.array([work_of(each) for each in guessing], dtype=float)
    guess_ns = numpy.array([each.draft_ns for each in guessing], dtype=float)
    return GuessedRows(tuple(number), step.astype(int), request.astype(int), drafts, accepted, work, guess_ns)


def _rows_of(step: StepRecord, index: int, number: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (step, request, drafts, accepted drafts) of its rows, those of unknown requests left out."""
    verified = {request_id: (drafts, accepted) for request_id, drafts, accepted in step.verified}
    for request_id, _, _ in step.rows:
        if request_id in number:
            yield index, number[request_id], *verified.get(request_id, (0, 0))


def work_of(step: StepRecord) -> tuple[float, float, float, float]:
    """Returns what the prices multiply: 1, decode rows, drafts, and the cached tokens that decode rows read."""
    drafts = {request_id: count for request_id, count, _ in step.verified}
    num_drafts = sum(drafts.values())
    context = sum(start + 1 for request_id, start, count in step.rows if count == 1 + drafts.get(request_id, 0))
    return 1.0, float(step.decode_tokens - num_drafts), float(num_drafts), float(context)


def prices_of(steps: Sequence[StepRecord]) -> "Line | None":
    """Returns the prices in ns, of a step, a row, a draft and a cached token read, and how sure they are; None where
    fewer than `MIN_STEPS_TO_FIT` steps have no prompt."""
    from splittime.simulate.regression import line_of  # scipy: half a second

    plain = [step for step in steps if step.decode_tokens and not step.prefill_tokens][-MOST_STEPS:]
    if len(plain) < MIN_STEPS_TO_FIT:
        return None
    columns = numpy.array([work_of(step) for step in plain], dtype=float)
    return line_of(columns, numpy.array([step.length_ns - step.draft_ns for step in plain], dtype=float))


def gain(rows: GuessedRows, prices: "Line", accounts: Sequence[ClosedAccount], most: int = 0) -> Share:
    """Returns the share of the requests' time that at most so many drafts a row would save; its interval is of these
    requests and of the prices together."""
    gained = rows.gained(most)
    by_request = dict(zip(rows.request_ids, gained_ns(gained, prices).tolist(), strict=True))
    felt_ns = sum(account.end_ns - account.start_ns for account in accounts)
    all_of_them = gained.sum(axis=0)[:GUESSING]
    error_ns = sqrt(max(0.0, float(all_of_them @ prices.covariance @ all_of_them)))
    return widened(of_requests(by_request, accounts), reach(error_ns) / max(1, felt_ns))


def gained_ns(gained: Array, prices: "Line") -> Array:
    """Returns [requests]: ns."""
    found: Array = gained[:, :GUESSING] @ prices.coefficients + gained[:, GUESSING]
    return found


def reach(error: float) -> float:
    """Returns how far what was estimated with this standard error may be off, either way."""
    from splittime.simulate.regression import NUM_CLUSTERS

    return t_quantile((1 + CONFIDENCE) / 2, NUM_CLUSTERS - 1) * error


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
    without.require()
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
    num_drafts, num_right = _verified_counts(books.steps)
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


def _verified_counts(steps: Sequence[StepRecord]) -> tuple[int, int]:
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
