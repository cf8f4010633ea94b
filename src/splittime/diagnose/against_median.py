"""Why this request was slow: against the usual request of its prompt-length bucket, and who caused the difference.

What is usual is the median of the others, stage by stage and cause by cause, one that did not occur counting as 0.
What kept the engine's thread from running counts by itself, not to the stage it fell into (`attribution`). (Medians of
stages need not sum to the median of the whole.) The three largest differences are told, longest first, each with the
requests that had what it waited for meanwhile (`bill`).

Longer answers take longer: what more tokens account for is told apart from what each token took more.
"""

from collections.abc import Sequence

import msgspec
from rich.text import Text

from splittime.diagnose.attribution import DEPRIVED, Told, meaning, stages_and_stops
from splittime.diagnose.bill import BY_TOKENS, HELD, Charge, bill
from splittime.diagnose.books import Books
from splittime.diagnose.explain_trace import wrapped
from splittime.diagnose.rules.evidence import is_whole, median, ms
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import CAUSE_MEANING, Cause, Stage

MIN_OTHERS = 8  # of one bucket: a median of fewer is anybody's
MOST = 3
MAX_BLAMED = 3
WORTH_TELLING_NS = 1_000_000


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """stage: or what kept the engine's thread from running, as `engine_stopped`. blamed: who had what it waited for
    there, and for how long (`bill`); the longest of them."""

    stage: str
    cause: Cause | None
    own_ns: int
    usual_ns: float
    blamed: tuple[Charge, ...]
    sentence: str


class MedianComparison(msgspec.Struct, frozen=True, kw_only=True):
    """thin: why nothing can be said; then there are no differences."""

    request_id: str
    bucket: str
    num_others: int
    own_ns: int
    usual_ns: float | None
    differences: tuple[Difference, ...]
    thin: str | None = None


def compare(account: ClosedAccount, books: Books) -> MedianComparison:
    """books: of its server. Its accounts may hold this one and those of other buckets; they are left out."""
    bucket = derive.prompt_bucket(account.prompt_tokens)
    others = [a for a in books.accounts if a.request_id != account.request_id and is_whole(a)]
    others = [a for a in others if derive.prompt_bucket(a.prompt_tokens) == bucket]
    enough = len(others) >= MIN_OTHERS
    thin = None if enough else f"{len(others)} other requests of {bucket} prompt tokens; {MIN_OTHERS} are the least"
    return MedianComparison(
        request_id=account.request_id,
        bucket=bucket,
        num_others=len(others),
        own_ns=derive.e2e_ns(account),
        usual_ns=median(derive.e2e_ns(other) for other in others) if enough else None,
        differences=_differences(account, others, books) if enough else (),
        thin=thin,
    )


def _differences(account: ClosedAccount, others: Sequence[ClosedAccount], books: Books) -> tuple[Difference, ...]:
    own, *theirs = stages_and_stops(books, [account, *others])
    usual = {key: median(totals.get(key, 0) for totals in theirs) or 0 for key in own}
    largest = sorted(own, key=lambda key: usual[key] - own[key])[:MOST]
    told = [key for key in largest if own[key] - usual[key] >= WORTH_TELLING_NS]
    return tuple(_difference(account, others, books, key, own[key], usual[key]) for key in told)


def _difference(
    account: ClosedAccount,
    others: Sequence[ClosedAccount],
    books: Books,
    key: Told,
    own_ns: int,
    usual_ns: float,
) -> Difference:
    named = [charge for charge in bill(account, books, key) if charge.request_id and charge.ns >= WORTH_TELLING_NS]
    blamed = tuple(named[:MAX_BLAMED])
    stage, cause = key
    extra = f"{_shown(own_ns - usual_ns)} longer in {stage}"
    extra += f" ({cause})" if cause is not None else ""
    why = _why(account, others, key, blamed)
    sentence = f"{extra} than usual ({_shown(own_ns)} against {_shown(usual_ns)})"
    sentence += f": {why}." if why else "."
    return Difference(stage=stage, cause=cause, own_ns=own_ns, usual_ns=usual_ns, blamed=blamed, sentence=sentence)


def _why(account: ClosedAccount, others: Sequence[ClosedAccount], key: Told, blamed: Sequence[Charge]) -> str:
    stage, cause = key
    if stage in DEPRIVED:
        return meaning(stage)
    if stage is Stage.DECODE:
        return _and(_longer_answer(account, others), _shared_with(blamed))
    if stage is Stage.PREFILL:
        return _and(_less_cached(account, others), _shared_with(blamed))
    if stage in (Stage.TOKENIZE_QUEUE, *HELD) and cause is not None:
        return _and(CAUSE_MEANING[cause], _who_had_it(cause, blamed))
    return _shared_with(blamed) if stage is Stage.RECOMPUTE else ""


def _and(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _longer_answer(account: ClosedAccount, others: Sequence[ClosedAccount]) -> str:
    usual = median(other.output_tokens for other in others) or 0
    usual_tpot = median(tpot for other in others if (tpot := derive.tpot_ns(other)) is not None)
    more = account.output_tokens - usual
    own_tpot = derive.tpot_ns(account)
    if usual_tpot is None or own_tpot is None:
        return ""
    parts = [f"{more:.0f} more tokens of output account for {_shown(more * usual_tpot)}"] if more > 0 else []
    if own_tpot > usual_tpot:
        parts.append(f"each token took {_shown(own_tpot)} against {_shown(usual_tpot)}")
    return ", ".join(parts)


def _less_cached(account: ClosedAccount, others: Sequence[ClosedAccount]) -> str:
    computed = account.prompt_tokens - account.cached_tokens
    usual = median(other.prompt_tokens - other.cached_tokens for other in others) or 0
    if computed <= usual:
        return ""
    return f"{computed} prompt tokens to compute against {usual:.0f}, {account.cached_tokens} came from the cache"


def _who_had_it(cause: Cause, blamed: Sequence[Charge]) -> str:
    went = "the steps' tokens went to" if cause in BY_TOKENS else "what it waited for was held by"
    return f"{went} {_listed(blamed)}" if blamed else ""


def _shared_with(blamed: Sequence[Charge]) -> str:
    return f"its steps also computed prompts of {_listed(blamed)}" if blamed else ""


def _listed(blamed: Sequence[Charge]) -> str:
    *words, last = [f"{charge.request_id} (for {_shown(charge.ns)})" for charge in blamed]
    return f"{', '.join(words)} and {last}" if words else last


def comparison_text(comparison: MedianComparison) -> Text:
    """For people, in 80 columns."""
    if comparison.thin is not None:
        return Text(wrapped(f"Not compared: {comparison.thin}."))
    assert comparison.usual_ns is not None
    heading = f"Against the median of {comparison.num_others} others with {comparison.bucket} prompt tokens: "
    heading += f"{_shown(comparison.own_ns)} against {_shown(comparison.usual_ns)}."
    text = Text(wrapped(heading), style="bold")
    for difference in comparison.differences:
        text.append(wrapped("- " + difference.sentence), style="not bold")
    if not comparison.differences:
        text.append("Nothing took a millisecond longer than usual.\n", style="not bold")
    return text


def _shown(duration_ns: float) -> str:
    return f"{ms(duration_ns):,.1f} ms" if abs(duration_ns) < 1e10 else f"{duration_ns / 1e9:,.1f} s"
