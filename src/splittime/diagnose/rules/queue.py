"""Waiting to be admitted: too few slots."""

from collections import Counter
from collections.abc import Sequence

from splittime.diagnose.attribution import attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    median,
    ms,
    num_requests,
    served,
    setting,
    worst,
)
from splittime.diagnose.rules.share import of_requests
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause
from splittime.ledger.steps import StepRecord

MIN_GAIN = 1.1  # a larger batch must serve a tenth more, else the wait only moves from the queue into decoding
MANY_CHOICES = 4  # of one request: worth telling where slots are short
KV_FULL = 0.95  # with fewer free blocks than this leaves, more slots would wait for blocks


@rule(
    "accounts",
    "steps",
    root_of=("overload", "head_of_line", "token_budget_bound", "deadlines_missed"),
    explains=(Cause.BATCH_SLOTS,),
)
def slot_bound(books: Books) -> Answer:
    """Requests wait for a slot (max_num_seqs) while KV blocks are free and a larger batch would serve more."""
    accounts = served(books.accounts)
    waits = attribution(books).of(Cause.BATCH_SLOTS)
    share = of_requests(waits, accounts)
    slots = max((step.num_running for step in books.steps), default=0)
    if not slots or _kv_use(books) > KV_FULL:
        return None
    if not share.is_worth_it:
        return share.unsure("slot_bound")
    cost = step_cost.fit(books.steps)
    wanted = _slots_wanted(books.steps, slots)
    gain = step_cost.batch_gain(cost, accounts, slots, wanted) if cost else None
    if gain is not None and gain < MIN_GAIN:
        why = f"requests wait for one of {slots} slots, but {wanted} would serve only {gain - 1:.0%} more: no cure"
        return Abstention("slot_bound", why)
    times = f"{gain:.2f} times as many" if gain is not None else "not known how many more"
    return Finding(
        name="slot_bound",
        claim=f"{num_requests(accounts, waits)} of {num_requests(accounts)} requests waited for one of {slots} slots, "
        f"{share.value:.0%} of all requests' time, while KV blocks were free.{_choices(accounts)}",
        evidence=(
            Fact("waiting for a slot", ms(sum(waits.values())), "ms over all requests"),
            Fact("slots (max_num_seqs)", setting(books, "max_num_seqs") or slots),
            Fact("KV blocks in use at most", f"{_kv_use(books):.0%}"),
            Fact(f"requests that {wanted} slots would serve, by the fitted cost of steps", times),
        ),
        request_ids=worst(waits),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN if gain is not None else LIKELY,
        confidence_from="the scheduler stated the cause of each wait"
        + ("" if gain is not None else "; the steps are too much alike to say what a larger batch costs"),
        cure=Cure(
            sentence="Let more requests run at once.",
            flags=("--max-num-seqs", str(wanted)),
            elsewhere={"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "llama.cpp": "--parallel"},
        ),
        cost=_cost_of_slots(cost, accounts, slots, wanted),
        counter_check=f"With --max-num-seqs {wanted} and the same load the queue's batch_slots time stays, or TTFT "
        "p99 does not fall.",
        regime=f"batches of up to {slots}; a machine that is saturated at this batch gains nothing from more",
    )


def _choices(accounts: Sequence[ClosedAccount]) -> str:
    """A sentence on requests that ask for several answers, each of which takes a slot."""
    requests, most = num_requests(accounts), max(Counter(account.group_id for account in accounts).values())
    if most < MANY_CHOICES:
        return ""
    return f" Each choice takes one: {requests} requests asked for {len(accounts)} (n up to {most})."


def _kv_use(books: Books) -> float:
    num_blocks = setting(books, "num_blocks")
    return max((step.blocks_used for step in books.steps), default=0) / num_blocks if num_blocks else 0.0


def _slots_wanted(steps: Sequence[StepRecord], slots: int) -> int:
    """Room for nearly all that ever wanted to run at once, as a power of two, at least double and at most eightfold."""
    wanted = sorted(step.num_running + step.num_waiting for step in steps)[int(0.95 * (len(steps) - 1))]
    power = 1 << max(0, wanted - 1).bit_length()
    return min(max(power, 2 * slots), 8 * slots)


def _cost_of_slots(cost: step_cost.StepCost | None, accounts: Sequence[ClosedAccount], slots: int, wanted: int) -> str:
    if cost is None:
        return "Each step takes longer with more rows in it, so TPOT rises; by how much, these steps do not tell."
    context = median([a.prompt_tokens + a.output_tokens / 2 for a in accounts]) or 0.0
    before, after = (cost.step_ns(batch, 0, batch * context) for batch in (slots, wanted))
    return f"TPOT rises by up to {after / max(1.0, before) - 1:.0%} when all {wanted} slots are taken (fitted)."
