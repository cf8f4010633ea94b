"""A queue behind a long prompt: short ones wait while it has the step's tokens."""

from collections.abc import Mapping, Sequence

import msgspec

from splittime.diagnose.attribution import Computed
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    LIKELY,
    Span,
    median,
    ms,
    num_requests,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    union,
    worst,
)
from splittime.diagnose.rules.share import Share, of_requests
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

LONG_TIMES = 4.0  # a prompt so many times the median one is a long one
MIN_LONG_TOKENS = 64  # whatever the median is


class Line(msgspec.Struct, frozen=True):
    """How long each request waited behind long prompts, and how long each long prompt made others wait, in ns.

    usual, longest: the median prompt, and the longest of those that somebody waited behind, in tokens.
    """

    waits: dict[str, float]
    blamed: dict[str, float]
    usual: float
    longest: int


@rule("accounts", "steps", explains=(Cause.TOKEN_BUDGET, Cause.STEP_IN_FLIGHT, Computed.OTHERS_PROMPTS))
def head_of_line(books: Books) -> Answer:
    """Short prompts wait while a long one has the step's token budget."""
    accounts = served(books.accounts)
    line = _line(accounts, books.steps)
    share = of_requests(line.waits, accounts)
    return _finding(books, line, share) if share.is_worth_it else share.unsure("head_of_line")


def _line(accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> Line:
    usual = median(account.prompt_tokens for account in accounts) or 0
    long_ids = {a.request_id for a in accounts if a.prompt_tokens >= max(MIN_LONG_TOKENS, LONG_TIMES * usual)}
    spans = _prefill_spans(steps, long_ids)
    waits: dict[str, float] = {}
    blamed: dict[str, float] = {}
    for account in accounts:
        for blocker, waited_ns in _waits_behind(account, spans) if account.request_id not in long_ids else ():
            waits[account.request_id] = waits.get(account.request_id, 0) + waited_ns
            blamed[blocker] = blamed.get(blocker, 0) + waited_ns
    longest = max((a.prompt_tokens for a in accounts if a.request_id in blamed), default=0)
    return Line(waits, blamed, usual, longest)


def _waits_behind(account: ClosedAccount, spans: Mapping[str, Sequence[Span]]) -> list[tuple[str, int]]:
    waits = [interval for interval in account.intervals if _waits_for_budget(interval)]
    behind = [(name, sum(overlap_ns(i.begin_ns, i.end_ns, when) for i in waits)) for name, when in spans.items()]
    return [(name, waited_ns) for name, waited_ns in behind if waited_ns]


def _waits_for_budget(interval: StageInterval) -> bool:
    """Somebody else had the step's tokens, or the step itself was running when it came."""
    by_budget = interval.cause is Cause.TOKEN_BUDGET and interval.stage in (Stage.QUEUE, Stage.PREFILL_STALL)
    return by_budget or (interval.cause is Cause.STEP_IN_FLIGHT and interval.stage is Stage.QUEUE)


def _prefill_spans(steps: Sequence[StepRecord], wanted: set[str]) -> dict[str, list[Span]]:
    """For each wanted request, when steps that hold a chunk of its prompt ran."""
    spans: dict[str, list[Span]] = {}
    for step in steps:
        largest = max(step.rows, key=lambda row: row[2], default=None)
        if largest is not None and largest[2] > 1 and largest[0] in wanted:
            spans.setdefault(largest[0], []).append((step.begin_ns - step.host_gap_ns, step.end_ns))
    return {request_id: union(found) for request_id, found in spans.items()}


def _finding(books: Books, line: Line, share: Share) -> Finding:
    is_chunked = setting(books, "enable_chunked_prefill") is not False
    cure = Cure(
        sentence="Let short prompts go first; a request that has waited for starvation_bound_ms goes before all."
        if is_chunked
        else "Cut long prompts into chunks and let short prompts go first.",
        flags=("--policy", "shortest_prefill", *(() if is_chunked else ("--enable-chunked-prefill",))),
        elsewhere={"vllm": "--scheduling-policy priority", "sglang": "--schedule-policy", "tgi": "a second server"},
    )
    return Finding(
        name="head_of_line",
        claim=f"{num_requests(served(books.accounts), line.waits)} requests waited behind {len(line.blamed)} long "
        f"prompts (up to {line.longest} tokens, "
        f"the median is {line.usual:.0f}): {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("waiting while a long prompt had the step", ms(sum(line.waits.values())), "ms over all requests"),
            Fact("long prompts", ", ".join(worst(line.blamed))),
            Fact("median prompt", line.usual, "tokens"),
            Fact("most that one of them cost the others", ms(max(line.blamed.values())), "ms"),
        ),
        request_ids=worst(line.waits),
        step_ids=slowest_steps(s for s in books.steps if any(row[0] in line.blamed and row[2] > 1 for row in s.rows)),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="the scheduler stated that the token budget was spent; whose rows spent it is in the steps",
        cure=cure,
        cost="Long prompts wait longer, at most starvation_bound_ms; one that has begun is still computed to its end "
        "first.",
        counter_check="With the policy and the same load, TTFT p50 of short prompts stays.",
        regime="mixed prompt lengths; with prompts of one length the order changes nothing",
    )
