"""Prompts in others' way: decoding that stands still for them, and queues behind them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    Span,
    median,
    ms,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    times_ns,
    total_ns,
    union,
    waits_for,
    worst,
)
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, Interval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

STALL_MATTERS_NS = 50_000_000  # a reader takes 20 tokens a second or more for a steady flow
STALL_TIMES = 4.0  # and it must stand out from the ordinary gap
LONG_TIMES = 4.0  # a prompt so many times the median one is a long one
MIN_LONG_TOKENS = 64  # whatever the median is
MIN_GAIN = 1.1
TARGET_STALL_NS = 40_000_000  # what a smaller budget should leave of the longest gap: below what matters


@rule("accounts", "steps")
def prefill_interference(books: Books) -> Answer:
    """Decoding requests stand still while a step computes others' prompts, long enough to be felt."""
    accounts = served(books.accounts)
    with_prompts = {step.step_id: step for step in books.steps if step.prefill_tokens > 0}
    gaps = list(_gaps(accounts))
    quiet_ns = median(gap_ns for _, step_id, gap_ns in gaps if step_id not in with_prompts)
    if quiet_ns is None:
        return None
    excess: dict[str, float] = {}
    stalls = [(r, s, g) for r, s, g in gaps if s in with_prompts and g > quiet_ns]
    for request_id, _, gap_ns in stalls:
        excess[request_id] = excess.get(request_id, 0) + gap_ns - quiet_ns
    share = sum(excess.values()) / total_ns(accounts)
    worst_ns = derive.percentile([gap_ns for _, _, gap_ns in stalls], 95) or 0
    if share < MIN_SHARE or worst_ns < max(STALL_MATTERS_NS, STALL_TIMES * quiet_ns):
        return None
    felt = [with_prompts[step_id] for _, step_id, gap_ns in stalls if gap_ns >= worst_ns]
    cure, cost = _smaller_chunks(books)
    return Finding(
        name="prefill_interference",
        claim=f"{len(excess)} decoding requests stood still while others' prompts were computed: gaps of "
        f"{ms(worst_ns):.0f} ms (p95) beside {ms(quiet_ns):.1f} ms without, {share:.0%} of all requests' time.",
        evidence=(
            Fact("gap between tokens, step without prompts, median", ms(quiet_ns), "ms"),
            Fact("gap, step with prompts, p95", ms(worst_ns), "ms"),
            Fact("time above the ordinary gap", ms(sum(excess.values())), "ms over all requests"),
            Fact("prompt tokens in the step, at most", max(step.prefill_tokens for step in felt)),
        ),
        request_ids=worst(excess),
        step_ids=slowest_steps({step.step_id: step for step in felt}.values()),
        share_of_time=share,
        confidence=LIKELY,
        confidence_from="gaps of the same requests with and without prompts in the step that made the token",
        cure=cure,
        cost=cost,
        counter_check="With the smaller chunks and the same load the p95 gap stays: then the steps are long for "
        "another reason.",
        regime="requests that decode while prompts arrive; alone in the batch a request loses nothing to it",
    )


def _gaps(accounts: Sequence[ClosedAccount]) -> Iterator[tuple[str, int, int]]:
    """(request, the step that made the later token, gap in ns), for each two tokens that consecutive steps made: in
    between, the request was in the batch all the time."""
    for account in accounts:
        timed = zip(account.token_steps, account.token_ready_ns, strict=False)
        for (before_id, before_ns), (step_id, after_ns) in pairwise(timed):
            if step_id == before_id + 1:
                yield account.request_id, step_id, after_ns - before_ns


def _smaller_chunks(books: Books) -> tuple[Cure, str]:
    elsewhere = {
        "vllm": "--enable-chunked-prefill, --max-num-batched-tokens",
        "sglang": "--chunked-prefill-size",
        "tgi": "--max-batch-prefill-tokens",
        "llama.cpp": "--ubatch-size",
    }
    largest = max(step.prefill_tokens for step in books.steps)
    tokens = max(1, min(_tokens_within(books, TARGET_STALL_NS), largest // 2))
    if setting(books, "enable_chunked_prefill") is False:
        flags: tuple[str, ...] = ("--enable-chunked-prefill",)
        sentence = f"Cut prompts into chunks, of at most {tokens} tokens beside decoding requests."
    else:
        flags = ()
        sentence = f"Let a step compute at most {tokens} prompt tokens."
    cost = "TTFT of long prompts rises: each of their chunks repeats the step's fixed part"
    cost += _chunk_cost(books, tokens)
    return Cure(sentence=sentence, flags=(*flags, "--max-prefill-tokens", str(tokens)), elsewhere=elsewhere), cost


def _tokens_within(books: Books, limit_ns: int) -> int:
    """Prompt tokens that a step can compute in so long, beside its decodes; at least 16, the server's own minimum."""
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return 64
    rows = median(step.decode_tokens for step in books.steps) or 0
    left_ns = limit_ns - cost.step_ns(rows, 0, 0)
    return max(16, int(left_ns / cost.prefill_ns) // 16 * 16)


def _chunk_cost(books: Books, tokens: int) -> str:
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return "."
    return f", here {cost.fixed_ns / (tokens * cost.prefill_ns):.0%} more time for each."


def _waits_for_budget(interval: Interval) -> bool:
    """Somebody else had the step's tokens, or the step itself was running when it came."""
    by_budget = interval.cause is Cause.TOKEN_BUDGET and interval.stage in (Stage.QUEUE, Stage.PREFILL_STALL)
    return by_budget or (interval.cause is Cause.STEP_IN_FLIGHT and interval.stage is Stage.QUEUE)


@rule("accounts", "steps")
def head_of_line(books: Books) -> Answer:
    """Short prompts wait while a long one has the step's token budget."""
    accounts = served(books.accounts)
    usual = median(account.prompt_tokens for account in accounts) or 0
    long_ids = {a.request_id for a in accounts if a.prompt_tokens >= max(MIN_LONG_TOKENS, LONG_TIMES * usual)}
    blockers = _prefill_spans(books.steps, long_ids)
    waits: dict[str, float] = {}
    blamed: dict[str, float] = {}
    for account in accounts:
        if account.request_id in long_ids:
            continue
        for interval in account.intervals:
            if _waits_for_budget(interval):
                for request_id, spans in blockers.items():
                    waited_ns = overlap_ns(interval.begin_ns, interval.end_ns, spans)
                    if waited_ns:
                        waits[account.request_id] = waits.get(account.request_id, 0) + waited_ns
                        blamed[request_id] = blamed.get(request_id, 0) + waited_ns
    share = sum(waits.values()) / total_ns(accounts)
    if share < MIN_SHARE:
        return None
    longest = max(a.prompt_tokens for a in accounts if a.request_id in blamed)
    is_chunked = setting(books, "enable_chunked_prefill") is not False
    return Finding(
        name="head_of_line",
        claim=f"{len(waits)} requests waited behind {len(blamed)} long prompts (up to {longest} tokens, the median "
        f"is {usual:.0f}): {share:.0%} of all requests' time.",
        evidence=(
            Fact("waiting while a long prompt had the step", ms(sum(waits.values())), "ms over all requests"),
            Fact("long prompts", ", ".join(worst(blamed))),
            Fact("median prompt", usual, "tokens"),
            Fact("most that one of them cost the others", ms(max(blamed.values())), "ms"),
        ),
        request_ids=worst(waits),
        step_ids=slowest_steps(s for s in books.steps if any(row[0] in blamed and row[2] > 1 for row in s.rows)),
        share_of_time=share,
        confidence=LIKELY,
        confidence_from="the scheduler stated that the token budget was spent; whose rows spent it is in the steps",
        cure=Cure(
            sentence="Let short prompts go first; a request that has waited for starvation_bound_ms goes before all."
            if is_chunked
            else "Cut long prompts into chunks and let short prompts go first.",
            flags=("--policy", "shortest_prefill", *(() if is_chunked else ("--enable-chunked-prefill",))),
            elsewhere={"vllm": "--scheduling-policy priority", "sglang": "--schedule-policy", "tgi": "a second server"},
        ),
        cost="Long prompts wait longer, at most starvation_bound_ms; one that has begun is still computed to its end "
        "first.",
        counter_check="With the policy and the same load, TTFT p50 of short prompts stays.",
        regime="mixed prompt lengths; with prompts of one length the order changes nothing",
    )


def _prefill_spans(steps: Sequence[StepRecord], wanted: set[str]) -> dict[str, list[Span]]:
    """For each wanted request, when steps that hold a chunk of its prompt ran."""
    spans: dict[str, list[Span]] = {}
    for step in steps:
        largest = max(step.rows, key=lambda row: row[2], default=None)
        if largest is not None and largest[2] > 1 and largest[0] in wanted:
            spans.setdefault(largest[0], []).append((step.begin_ns - step.host_gap_ns, step.end_ns))
    return {request_id: union(found) for request_id, found in spans.items()}


@rule("accounts", "steps")
def token_budget_bound(books: Books) -> Answer:
    """Prompts wait for the step's token budget though a larger one would compute them faster."""
    accounts = served(books.accounts)
    waits = times_ns(accounts, waits_for(Cause.TOKEN_BUDGET))
    share = sum(waits.values()) / total_ns(accounts)
    largest = max((step.prefill_tokens for step in books.steps), default=0)
    if share < MIN_SHARE or largest == 0:
        return None
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return Abstention(
            "token_budget_bound", "prompts wait for the token budget; steps are too much alike to say more"
        )
    gain = (cost.fixed_ns + largest * cost.prefill_ns) / (cost.fixed_ns / 2 + largest * cost.prefill_ns)
    if gain < MIN_GAIN:
        return None
    budget = setting(books, "max_num_batched_tokens") or largest
    flags = ("--max-prefill-tokens", str(2 * largest), "--max-num-batched-tokens", str(max(budget, 4 * largest)))
    return Finding(
        name="token_budget_bound",
        claim=f"{len(waits)} requests waited for the step's token budget of {largest}, {share:.0%} of all requests' "
        f"time; twice as many prompt tokens a step would be {gain:.2f} times as fast.",
        evidence=(
            Fact("waiting for the token budget", ms(sum(waits.values())), "ms over all requests"),
            Fact("prompt tokens in a step at most", largest),
            Fact("fixed part of a step (fitted)", ms(cost.fixed_ns), "ms"),
            Fact("each prompt token (fitted)", ms(cost.prefill_ns), "ms"),
        ),
        request_ids=worst(waits),
        share_of_time=share,
        confidence=CERTAIN * 0.9,
        confidence_from="the scheduler stated the cause; the gain is from the fitted cost of steps",
        cure=Cure(
            sentence="Let a step compute more prompt tokens.",
            flags=flags,
            elsewhere={"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"},
        ),
        cost=f"Requests that decode meanwhile stall for up to {ms(cost.step_ns(0, 2 * largest, 0)):.0f} ms.",
        counter_check="With the larger budget and the same load the queue's token_budget time stays.",
        regime="steps whose fixed part is a tenth or more of them; large steps gain nothing",
    )
