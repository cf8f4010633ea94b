"""Prompts that wait to be computed: for the token budget of a step, or behind a long prompt that has it.

Steps can be too small for prompts: these wait, or are cut into so many chunks that what each step takes whatever is in
it is paid again and again.
"""

from collections.abc import Mapping, Sequence

import msgspec

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
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
from splittime.diagnose.rules.interference import longest_step
from splittime.diagnose.rules.share import Share, of_requests
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

MIN_GAIN = 1.2  # what a doubled budget must gain for a prompt; with less the order of prompts matters more
TIMES = (2, 4, 8, 16)  # by which the budget may grow


@rule("accounts", "steps", root_of=("overload", "deadlines_missed"), explains=(Cause.TOKEN_BUDGET,))
def token_budget_bound(books: Books) -> Answer:
    """Prompts wait for the step's token budget, or are computed in small pieces, though a larger one would be
    faster."""
    accounts = served(books.accounts)
    largest = max((step.prefill_tokens for step in books.steps), default=0)
    cost = step_cost.fit(books.steps)
    waits = attribution(books).of(Cause.TOKEN_BUDGET)
    if largest == 0 or (cost is None and not waits):
        return None
    if cost is None or cost.prefill_ns <= 0:
        share = of_requests(waits, accounts)
        why = "prompts wait for the token budget; steps are too much alike to say more"
        return Abstention(why=why) if share.is_worth_it else None
    chunks = _chunks(books.steps, largest)
    rows = median(step.decode_tokens for step in books.steps if step.prefill_tokens) or 0
    again_ns = cost.step_ns(rows, 0, 0)
    lost = _lost_to_budget(waits, chunks, again_ns, attribution(books).of(Stage.PREFILL))
    share = of_requests(lost, accounts)
    if not share.is_worth_it:
        return share.unsure()
    gain = (again_ns + largest * cost.prefill_ns) / (again_ns / 2 + largest * cost.prefill_ns)
    if gain < MIN_GAIN:
        why = f"prompts wait for the token budget, but twice as many tokens a step would be only {gain - 1:.0%} faster"
        return Abstention(why=why)
    return _budget_finding(books, waits, chunks, cost, largest, gain, share)


def _chunks(steps: Sequence[StepRecord], largest: int) -> dict[str, int]:
    """By request: in how many steps whose budget was spent its prompt was computed and went on in a later one."""
    last: dict[str, int] = {}
    found: dict[str, int] = {}
    for step in steps:
        for request_id, start, num_tokens in step.rows:
            if last.get(request_id) == start and num_tokens > 1:
                found[request_id] = found.get(request_id, 0) + 1
            if num_tokens > 1 and step.prefill_tokens >= largest / 2:
                last[request_id] = start + num_tokens
    return found


def _lost_to_budget(
    waits: Mapping[str, float], chunks: Mapping[str, int], again_ns: float, prefill_ns: Mapping[str, float]
) -> dict[str, float]:
    """Waiting for the budget, and what was paid again with each further chunk: at most what the prompt took."""
    again = {name: min(prefill_ns.get(name, 0.0), count * again_ns) for name, count in chunks.items()}
    return {name: waits.get(name, 0.0) + again.get(name, 0.0) for name in (*waits, *again)}


def _times(books: Books, cost: step_cost.StepCost, rows: float, largest: int) -> int:
    """By how much the budget may grow before a step is longer than any is made; at least twice."""
    longest_ns, _ = longest_step(books, cost.step_ns(rows, 0, 0))
    fitting = [t for t in TIMES if cost.step_ns(rows, t * largest, 0) <= longest_ns]
    return max(fitting, default=TIMES[0])


def _budget_finding(
    books: Books,
    waits: Mapping[str, float],
    chunks: Mapping[str, int],
    cost: step_cost.StepCost,
    largest: int,
    gain: float,
    share: Share,
) -> Finding:
    accounts = served(books.accounts)
    rows = median(step.decode_tokens for step in books.steps if step.prefill_tokens) or 0
    times = _times(books, cost, rows, largest)
    lost = {**chunks, **waits}
    return Finding(
        claim=f"Steps compute at most {largest} tokens of prompts: {num_requests(accounts, lost)} requests waited for "
        f"that budget or had their prompts cut into many chunks, {share.value:.0%} of all requests' time; twice as "
        f"many prompt tokens a step would be {gain:.2f} times as fast.",
        evidence=(
            Fact("waiting for the token budget", ms(sum(waits.values())), "ms over all requests"),
            Fact("prompt tokens in a step at most", largest),
            Fact("further chunks of a prompt, mean", round(sum(chunks.values()) / max(1, len(accounts)), 1)),
            Fact("a step without prompt tokens (fitted)", ms(cost.step_ns(rows, 0, 0)), "ms"),
            Fact("each prompt token (fitted)", ms(cost.prefill_ns), "ms"),
        ),
        request_ids=worst({name: waits.get(name, 0.0) for name in lost}),
        **share.as_fields,
        confidence=CERTAIN * 0.9,
        confidence_from="the scheduler stated the cause; the gain is from the fitted cost of steps",
        cure=Cure(
            sentence="Let a step compute more prompt tokens.",
            flags=_flags(books, times * largest),
            elsewhere={"vllm": _more_by_vllm(books, times * largest), "sglang": "--chunked-prefill-size"},
        ),
        cost=f"Requests that decode meanwhile stall for up to {ms(cost.step_ns(rows, times * largest, 0)):.0f} ms.",
        counter_check="With the larger budget and the same load the queue's token_budget time stays.",
        regime="steps whose fixed part is a third or more of them; large steps gain nothing",
    )


def _flags(books: Books, tokens: int) -> tuple[str, ...]:
    """What bounds it now is raised: the prompts' part, all of the step, or both."""
    of_prompts, of_all = setting(books, "max_prefill_tokens"), setting(books, "max_num_batched_tokens")
    flags: tuple[str, ...] = ("--max-prefill-tokens", str(tokens)) if of_prompts is not None else ()
    if of_all is None or of_all < 2 * tokens:
        flags += ("--max-num-batched-tokens", str(2 * tokens))
    return flags


def _more_by_vllm(books: Books, tokens: int) -> OtherCure:
    """vLLM's budget is of prompts and decodes together; a bound on each prompt's part may lie below it."""
    of_one, of_all = setting(books, "long_prefill_token_threshold"), setting(books, "max_num_batched_tokens")
    flags: tuple[str, ...] = ("--long-prefill-token-threshold", str(tokens)) if of_one and of_one < tokens else ()
    if of_all is None or of_all < tokens:
        flags += ("--max-num-batched-tokens", str(tokens))
    return OtherCure(sentence="Let a step compute more prompt tokens.", flags=flags)


LONG_TIMES = 4.0  # a prompt so many times the median one is a long one
MIN_LONG_TOKENS = 64  # whatever the median is


class Blocking(msgspec.Struct, frozen=True):
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
    blocking = _blocking(accounts, books.steps)
    share = of_requests(blocking.waits, accounts)
    return _blocking_finding(books, blocking, share) if share.is_worth_it else share.unsure()


def _blocking(accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> Blocking:
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
    return Blocking(waits, blamed, usual, longest)


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


PART_OF_STEP = 4  # a long prompt takes a fourth of a step's tokens, so that others' come beside it


def _beside_by_vllm(books: Books) -> OtherCure:
    """vLLM has no policy by length: a long prompt is bounded, and only clients can say what goes first."""
    budget = setting(books, "max_num_batched_tokens") or max((s.prefill_tokens for s in books.steps), default=0)
    tokens = max(MIN_LONG_TOKENS, int(budget) // PART_OF_STEP)
    chunked = ("--enable-chunked-prefill",) if setting(books, "enable_chunked_prefill") is False else ()
    return OtherCure(
        sentence=f"Let a step take at most {tokens} tokens of a long prompt while others wait, so that short ones are "
        "computed beside it; or send short ones with a lower `priority`, which --scheduling-policy priority heeds.",
        flags=(*chunked, "--long-prefill-token-threshold", str(tokens)),
        cost="Long prompts take longer until their first token.",
        counter_check="With the change and the same load, TTFT p50 of short prompts stays.",
    )


def _blocking_finding(books: Books, blocking: Blocking, share: Share) -> Finding:
    is_chunked = setting(books, "enable_chunked_prefill") is not False
    cure = Cure(
        sentence="Let short prompts go first; a request that has waited for starvation_bound_ms goes before all."
        if is_chunked
        else "Cut long prompts into chunks and let short prompts go first.",
        flags=("--policy", "shortest_prefill", *(() if is_chunked else ("--enable-chunked-prefill",))),
        elsewhere={"vllm": _beside_by_vllm(books), "sglang": "--schedule-policy", "tgi": "a second server"},
    )
    blamed = blocking.blamed
    return Finding(
        claim=f"{num_requests(served(books.accounts), blocking.waits)} requests waited behind {len(blamed)} long "
        f"prompts (up to {blocking.longest} tokens, the median is {blocking.usual:.0f}): {share.value:.0%} of all "
        "requests' time.",
        evidence=(
            Fact("waiting while a long prompt had the step", ms(sum(blocking.waits.values())), "ms over all requests"),
            Fact("long prompts", ", ".join(worst(blamed))),
            Fact("median prompt", blocking.usual, "tokens"),
            Fact("most that one of them cost the others", ms(max(blamed.values())), "ms"),
        ),
        request_ids=worst(blocking.waits),
        step_ids=slowest_steps(s for s in books.steps if any(row[0] in blamed and row[2] > 1 for row in s.rows)),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="the scheduler stated that the token budget was spent; whose rows spent it is in the steps",
        cure=cure,
        cost="Long prompts wait longer, at most starvation_bound_ms; one that has begun is still computed to its end "
        "first.",
        counter_check="With the policy and the same load, TTFT p50 of short prompts stays.",
        regime="mixed prompt lengths; with prompts of one length the order changes nothing",
    )
