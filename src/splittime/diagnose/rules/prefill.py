"""Prompts in others' way: decoding that stands still for them, and steps too small for them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    median,
    ms,
    served,
    setting,
    slowest_steps,
    times_ns,
    waits_for,
    worst,
)
from splittime.diagnose.rules.share import Share, of_requests
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause

STALL_MATTERS_NS = 50_000_000  # a reader takes 20 tokens a second or more for a steady flow
STALL_TIMES = 4.0  # and it must stand out from the ordinary gap
MIN_STALLED_STEPS = 5  # fewer are a few odd moments, however many requests were held in them
MIN_GAIN = 1.1
TARGET_STALL_NS = 40_000_000  # what a smaller budget should leave of the longest gap: below what matters


class Gap(NamedTuple):
    """Between two tokens of a request that followed each other in consecutive steps; the second is of `step_id`."""

    request_id: str
    step_id: int
    ns: int


class Stalls(NamedTuple):
    """Gaps that are felt, in steps with prompts, beside the gaps without.

    quiet_ns: the median gap without prompts. felt: the gaps of `bar_ns` or more in steps with prompts. lost_ns: what
    each request lost by them, less what it would have lost without prompts, as gaps without them are long at times too.
    """

    quiet_ns: float
    bar_ns: float
    felt: list[Gap]
    lost_ns: dict[str, float]

    @property
    def step_ids(self) -> set[int]:
        return {gap.step_id for gap in self.felt}


@rule("accounts", "steps")
def prefill_interference(books: Books) -> Answer:
    """Decoding requests stand still while a step computes others' prompts, long enough to be felt."""
    accounts = served(books.accounts)
    stalls = _stalls(accounts, {step.step_id for step in books.steps if step.prefill_tokens > 0})
    if stalls is None or len(stalls.step_ids) < MIN_STALLED_STEPS:
        return None
    share = of_requests(stalls.lost_ns, accounts)
    return _interference(books, stalls, share) if share.is_worth_it else share.unsure("prefill_interference")


def _stalls(accounts: Sequence[ClosedAccount], with_prompts: set[int]) -> Stalls | None:
    """None without gaps to compare with."""
    gaps = list(_gaps(accounts))
    quiet = [gap.ns for gap in gaps if gap.step_id not in with_prompts]
    quiet_ns = median(quiet)
    if quiet_ns is None:
        return None
    bar_ns = max(STALL_MATTERS_NS, STALL_TIMES * quiet_ns)
    usual_ns = sum(gap_ns - quiet_ns for gap_ns in quiet if gap_ns >= bar_ns) / len(quiet)
    lost_ns: dict[str, float] = {}
    busy = [gap for gap in gaps if gap.step_id in with_prompts]
    for gap in busy:
        over_ns = gap.ns - quiet_ns if gap.ns >= bar_ns else 0.0
        lost_ns[gap.request_id] = lost_ns.get(gap.request_id, 0.0) + over_ns - usual_ns
    return Stalls(quiet_ns, bar_ns, [gap for gap in busy if gap.ns >= bar_ns], lost_ns)


def behind_prompts_ns(books: Books) -> dict[str, float]:
    """By request: what its gaps between tokens took longer in steps with prompts than the median gap without."""
    accounts = served(books.accounts)
    with_prompts = {step.step_id for step in books.steps if step.prefill_tokens > 0}
    gaps = list(_gaps(accounts))
    quiet_ns = median(gap.ns for gap in gaps if gap.step_id not in with_prompts)
    lost_ns: dict[str, float] = {}
    for gap in gaps:
        if quiet_ns is not None and gap.step_id in with_prompts and gap.ns > quiet_ns:
            lost_ns[gap.request_id] = lost_ns.get(gap.request_id, 0.0) + gap.ns - quiet_ns
    return lost_ns


def _interference(books: Books, stalls: Stalls, share: Share) -> Finding:
    worst_ns = derive.percentile([gap.ns for gap in stalls.felt], 95) or 0
    felt = [step for step in books.steps if step.step_id in stalls.step_ids]
    cure, cost = _smaller_chunks(books)
    return Finding(
        name="prefill_interference",
        claim=f"{len({gap.request_id for gap in stalls.felt})} decoding requests stood still while others' prompts "
        f"were computed: gaps of {ms(worst_ns):.0f} ms (p95) beside {ms(stalls.quiet_ns):.1f} ms without, "
        f"{share.value:.0%} of all requests' time.",
        evidence=(
            Fact("gap between tokens, step without prompts, median", ms(stalls.quiet_ns), "ms"),
            Fact(f"gaps of {ms(stalls.bar_ns):.0f} ms or more in steps with prompts", len(stalls.felt)),
            Fact("in so many steps", len(felt)),
            Fact("the 95th percentile of them", ms(worst_ns), "ms"),
            Fact("time above the ordinary gap", ms(sum(stalls.lost_ns.values())), "ms over all requests"),
            Fact("prompt tokens in the step, at most", max(step.prefill_tokens for step in felt)),
        ),
        request_ids=worst(stalls.lost_ns),
        step_ids=slowest_steps(felt),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="gaps of the same requests with and without prompts in the step that made the token",
        cure=cure,
        cost=cost,
        counter_check="With the smaller chunks and the same load the p95 gap stays: then the steps are long for "
        "another reason.",
        regime="requests that decode while prompts arrive; alone in the batch a request loses nothing to it",
    )


def _gaps(accounts: Sequence[ClosedAccount]) -> Iterator[Gap]:
    for account in accounts:
        timed = zip(account.token_steps, account.token_ready_ns, strict=False)
        for (before_id, before_ns), (step_id, after_ns) in pairwise(timed):
            if step_id == before_id + 1:
                yield Gap(account.request_id, step_id, after_ns - before_ns)


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


@rule("accounts", "steps")
def token_budget_bound(books: Books) -> Answer:
    """Prompts wait for the step's token budget though a larger one would compute them faster."""
    accounts = served(books.accounts)
    waits = times_ns(accounts, waits_for(Cause.TOKEN_BUDGET))
    share = of_requests(waits, accounts)
    largest = max((step.prefill_tokens for step in books.steps), default=0)
    if not share.is_worth_it or largest == 0:
        return share.unsure("token_budget_bound") if largest else None
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
        claim=f"{len(waits)} requests waited for the step's token budget of {largest}, {share.value:.0%} of all "
        f"requests' time; twice as many prompt tokens a step would be {gain:.2f} times as fast.",
        evidence=(
            Fact("waiting for the token budget", ms(sum(waits.values())), "ms over all requests"),
            Fact("prompt tokens in a step at most", largest),
            Fact("fixed part of a step (fitted)", ms(cost.fixed_ns), "ms"),
            Fact("each prompt token (fitted)", ms(cost.prefill_ns), "ms"),
        ),
        request_ids=worst(waits),
        share_of_time=share.value,
        share_interval=share.interval,
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
