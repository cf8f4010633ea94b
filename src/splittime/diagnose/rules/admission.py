"""Requests that wait for a slot, and requests that are turned away."""

from collections import Counter
from collections.abc import Sequence

from splittime.diagnose.attribution import COMPUTING, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    in_stages,
    is_whole,
    median,
    ms,
    num_requests,
    served,
    setting,
    time_ns,
    worst,
)
from splittime.diagnose.rules.share import Share, of_number, of_requests
from splittime.ledger import derive
from splittime.ledger.account import VLLM_IS_FULL, ClosedAccount
from splittime.ledger.stages import Cause, Stage
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
        return share.unsure()
    cost = step_cost.fit(books.steps)
    wanted = _slots_wanted(books.steps, slots)
    gain = step_cost.batch_gain(cost, accounts, slots, wanted) if cost else None
    if gain is not None and gain < MIN_GAIN:
        why = f"requests wait for one of {slots} slots, and {wanted} would serve only {gain - 1:.0%} more a second"
        why += f"; splittime simulate LEDGER --max-num-seqs {wanted} says what they do to the waits"
        return Abstention(why=why)
    times = f"{gain:.2f} times as many" if gain is not None else "not known how many more"
    return Finding(
        claim=f"{num_requests(accounts, waits)} of {num_requests(accounts)} requests waited for one of {slots} slots, "
        f"{share.value:.0%} of all requests' time, while KV blocks were free.{_choices(accounts)}",
        evidence=(
            Fact("waiting for a slot", ms(sum(waits.values())), "ms over all requests"),
            Fact("slots (max_num_seqs)", setting(books, "max_num_seqs") or slots),
            Fact("KV blocks in use at most", f"{_kv_use(books):.0%}"),
            Fact(f"requests that {wanted} slots would serve, by the fitted cost of steps", times),
        ),
        request_ids=worst(waits),
        **share.as_fields,
        confidence=CERTAIN if gain is not None else LIKELY,
        confidence_from="the scheduler stated the cause of each wait"
        + ("" if gain is not None else "; the steps are too much alike to say what a larger batch costs"),
        cure=Cure(
            sentence="Let more requests run at once.",
            flags=("--max-num-seqs", str(wanted), *_tokens_for(books, wanted)),
            elsewhere={
                "vllm": _more_slots_by_vllm(books, wanted),
                "sglang": "--max-running-requests",
                "llama.cpp": "--parallel",
            },
        ),
        cost=_cost_of_slots(cost, accounts, slots, wanted),
        counter_check=f"With --max-num-seqs {wanted} and the same load the queue's batch_slots time stays, or TTFT "
        "p99 does not fall.",
        regime=f"batches of up to {slots}; a machine that is saturated at this batch gains nothing from more",
    )


def _tokens_for(books: Books, slots: int) -> tuple[str, ...]:
    """A step has a token for each slot at the least, or the settings are refused."""
    budget = setting(books, "max_num_batched_tokens")
    return ("--max-num-batched-tokens", str(slots)) if budget and budget < slots else ()


def _more_slots_by_vllm(books: Books, wanted: int) -> OtherCure:
    """--max-num-active-seqs, where it is set, bounds what runs below --max-num-seqs."""
    active, slots = setting(books, "max_num_active_seqs"), setting(books, "max_num_seqs")
    flags: tuple[str, ...] = ("--max-num-active-seqs", str(wanted)) if active else ()
    if not active or (slots or 0) < wanted:
        flags += ("--max-num-seqs", str(wanted))
    return OtherCure(sentence="Let more requests run at once.", flags=flags)


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


FLAGS = {
    "queued_requests": "--max-queued-requests",
    "queued_prompt_tokens": "--max-queued-prompt-tokens",
    VLLM_IS_FULL: "--max-queued-requests",
}
MIN_TURNED_AWAY, TURNED_AWAY_SHARE = 3, 0.02  # fewer happen to anybody; no answer is worse than a late one
TIMES = 16  # by which the bound is raised: a queue costs nothing while it is empty
ROOM = 0.9  # of what the machine serves at its full batch: beyond, a queue only grows
TOO_LATE = "deadline_exceeded"
IN_VAIN = "deadline"  # refused, since the predicted wait is longer


@rule("accounts", root_of=("overload",))
def queue_bound(books: Books) -> Answer:
    """Requests are refused for a queue that is full, though those before them hardly wait."""
    refused = [a for a in books.accounts if a.error is not None and a.error.code in FLAGS]
    share = of_number(len(refused), len(books.accounts), TURNED_AWAY_SHARE)
    if len(refused) < MIN_TURNED_AWAY or share.value < share.least:
        return None
    return _queue_bound(books, refused, share) if has_room(books) else None


def has_room(books: Books) -> bool:
    """Who is let in waits less for a turn than being served takes, and the machine would serve all that come."""
    accounts = served(books.accounts)
    waits = [time_ns(account, in_stages(Stage.QUEUE)) for account in accounts]
    in_service = median(a.end_ns - a.start_ns - wait_ns for a, wait_ns in zip(accounts, waits, strict=True)) or 0
    if (derive.percentile(waits, 90) or 0) > in_service:
        return False
    capacity = _capacity(books, accounts)
    return capacity is None or _rate(books) <= ROOM * capacity


def num_turned_away(books: Books) -> int:
    """Requests that were refused for want of room in the time of these books, by the server's own count: of many
    refusals the books hold the latest accounts only."""
    counts = [step.num_refused for step in books.steps]
    return max(sum(a.is_turned_away for a in books.accounts), counts[-1] - counts[0] if counts else 0)


def _capacity(books: Books, accounts: Sequence[ClosedAccount]) -> float | None:
    """Requests a second at a full batch, by the fitted cost of steps."""
    cost = step_cost.fit(books.steps)
    slots = setting(books, "max_num_seqs")
    return step_cost.requests_per_s(cost, accounts, slots) if cost is not None and slots else None


def _rate(books: Books) -> float:
    """Arrivals a second."""
    begins = [account.start_ns for account in books.accounts]
    return (len(served(books.accounts)) + num_turned_away(books) - 1) / max(1e-9, (max(begins) - min(begins)) / 1e9)


def _queue_bound(books: Books, refused: Sequence[ClosedAccount], share: Share) -> Finding:
    codes = [a.error.code for a in refused if a.error is not None]
    code = max(FLAGS, key=codes.count)
    bound = setting(books, f"max_{code}")
    waits = [time_ns(account, in_stages(Stage.QUEUE)) for account in served(books.accounts)]
    wanted = TIMES * int(bound or 1)
    return Finding(
        claim=f"{len(refused)} of {len(books.accounts)} requests were refused because the queue was full at "
        f"{bound or 'its bound'}, while those that were let in waited {ms(median(waits) or 0):.0f} ms (median).",
        evidence=(
            Fact("refused", len(refused), "requests"),
            *((Fact(f"max_{code}", bound or "not told"),) if code != VLLM_IS_FULL else ()),
            Fact("wait in the queue, median and p90", f"{ms(median(waits) or 0)} and {ms(_p90(waits))}", "ms"),
            Fact("arrivals", round(_rate(books), 2), "requests/s"),
        ),
        request_ids=tuple(account.request_id for account in refused[:5]),
        **share.as_fields,
        share_of=share.of,
        confidence=LIKELY,
        confidence_from="the refusals and the waits are stated; that there is room for all, by the fitted cost of "
        "steps",
        cure=Cure(
            sentence="Let more requests wait.",
            flags=(FLAGS[code], str(wanted)),
            elsewhere={"vllm": _let_in_by_vllm(books), "sglang": "--max-queued-requests"},
        ),
        cost="Those that would have been refused wait their turn.",
        counter_check="With the longer queue and the same load the wait grows without end: then it is overload.",
        regime="arrivals that come together, at a rate that the server can serve",
    )


MORE_IN_FLIGHT = 4  # times as many as were ever let in


def _let_in_by_vllm(books: Books) -> OtherCure:
    """vLLM's bound counts those that run too, and its books do not say what it is."""
    most = max((step.num_running + step.num_waiting for step in books.steps), default=0)
    return OtherCure(
        sentence="Let more requests wait: --max-num-queued-reqs, which counts those that run too (or "
        "--max-num-queued-tokens, where that is set: vLLM answers 503 at either).",
        flags=("--max-num-queued-reqs", str(max(TIMES, MORE_IN_FLIGHT * most))),
    )


def _p90(waits: Sequence[int]) -> float:
    return derive.percentile(waits, 90) or 0.0


@rule(explains=())
def deadlines_missed(books: Books) -> Answer:
    """Requests are given up at their own deadlines."""
    late = [a for a in books.accounts if a.error is not None and a.error.code in (TOO_LATE, IN_VAIN)]
    share = of_number(len(late), len(books.accounts), TURNED_AWAY_SHARE)
    if len(late) < MIN_TURNED_AWAY or share.value < share.least:
        return None
    begun = [account for account in late if account.finish_reason != "refused"]
    if not begun:
        return Abstention(why=f"{len(late)} requests were refused, as their deadlines cannot be met")
    return _deadlines(books, late, begun, share)


def _deadlines(books: Books, late: Sequence[ClosedAccount], begun: Sequence[ClosedAccount], share: Share) -> Finding:
    worked = attribution(books).of(*COMPUTING)
    of_work = median(worked.get(a.request_id, 0.0) / max(1, a.end_ns - a.start_ns) for a in begun) or 0.0
    allowed_ns = median(account.end_ns - account.start_ns for account in begun) or 0.0
    whole = [account.end_ns - account.start_ns for account in books.accounts if is_whole(account)]
    needed_ns = derive.percentile(whole, 90) or 0.0
    is_short = of_work >= 0.5
    needs = f"{needed_ns / 1e9:.2g} s (p90 of {len(whole)} that came to their end)" if whole else "more than that"
    why = (
        f"they were being computed for {of_work:.0%} of that time, so the deadlines are too short for what is asked"
        if is_short
        else f"they waited for {1 - of_work:.0%} of that time, so what made them wait is to be cured"
    )
    sentence = (
        f"Allow more time (X-Request-Deadline-Ms: whole requests take {needs}), or ask for fewer tokens (max_tokens)."
        if is_short
        else "Cure what they wait for; until then refuse early, or allow more time (X-Request-Deadline-Ms)."
    )
    return Finding(
        claim=f"{len(late)} of {len(books.accounts)} requests were given up at their deadlines, after "
        f"{ms(allowed_ns):.0f} ms (median): {why}.",
        evidence=(
            Fact("given up", len(begun), "requests"),
            Fact("refused, since they could not be in time", len(late) - len(begun), "requests"),
            Fact("time until then, median", ms(allowed_ns), "ms"),
            Fact("of it computing, median", f"{of_work:.0%}"),
            Fact("whole requests, p90", ms(needed_ns) if whole else "none came to its end", "ms" if whole else ""),
        ),
        request_ids=tuple(account.request_id for account in begun[:5]),
        **share.as_fields,
        share_of=share.of,
        confidence=CERTAIN,
        confidence_from="the errors themselves",
        cure=Cure(sentence=sentence),
        cost="Clients wait longer for an answer that they would not have had.",
        counter_check="With twice the time as many are given up.",
        regime="requests that carry a deadline",
    )
