"""Requests that wait for a slot, and requests that are turned away; and overload, more arrivals than can be served,
where the wait grows for as long as they come.
"""

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import msgspec

from splittime.bench.book.records import Outcome
from splittime.diagnose.attribution import COMPUTING, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    POSSIBLE,
    Share,
    in_stages,
    is_whole,
    median,
    ms,
    num_requests,
    of_number,
    of_requests,
    ratio,
    served,
    setting,
    time_ns,
    worst,
)
from splittime.ledger import derive
from splittime.ledger.account import VLLM_IS_FULL, ClosedAccount
from splittime.ledger.stages import Cause, Stage

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
    share.require()
    cost = step_cost.fit(books.steps)
    wanted = _slots_wanted(books, slots)
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
    requests, most = num_requests(accounts), max(Counter(map(derive.request_of, accounts)).values())
    if most < MANY_CHOICES:
        return ""
    return f" Each choice takes one: {requests} requests asked for {len(accounts)} (n up to {most})."


def _kv_use(books: Books) -> float:
    num_blocks = setting(books, "num_blocks")
    return max((step.blocks_used for step in books.steps), default=0) / num_blocks if num_blocks else 0.0


def _slots_wanted(books: Books, slots: int) -> int:
    """Room for nearly all that ever wanted to run at once, as a power of two, at least double and at most eightfold."""
    wanted = sorted(step.num_running + step.num_waiting for step in books.steps)[int(0.95 * (len(books.steps) - 1))]
    power = 1 << max(0, wanted - 1).bit_length()
    return min(max(power, 2 * slots), max(slots + 1, int(min(8.0, books.most_times) * slots)))


def _cost_of_slots(cost: step_cost.StepCost | None, accounts: Sequence[ClosedAccount], slots: int, wanted: int) -> str:
    if cost is None:
        return "Each step takes longer with more rows in it, so TPOT rises; by how much, these steps do not tell."
    context = median([a.prompt_tokens + a.output_tokens / 2 for a in accounts]) or 0.0
    before, after = (cost.step_ns(batch, 0, batch * context) for batch in (slots, wanted))
    more = after / max(1.0, before) - 1
    return f"A decode step takes up to {more:.0%} longer with all {wanted} slots taken (fitted); prompts come between."


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


NUM_WINDOWS = 10  # enough for a rank test, few enough that each holds several requests
MIN_PER_WINDOW = 2
TREND_Z = 2.33  # one chance in a hundred that waits without a trend look like this (Mann-Kendall, one-sided)
MAX_ENDED = 0.93  # of the arrivals, ended while others still arrived; a steady server is nearer to 1
GROWTH = 2.0  # the last third waits at least so many times as long as the first


class Arrival(msgspec.Struct, frozen=True):
    """A request as the overload test sees it: when it came, how long it waited, when it had ended; and whether it was
    refused for want of room."""

    request_id: str
    at_ns: int
    wait_ns: int
    end_ns: int
    is_refused: bool = False


def _by_server(books: Books) -> list[Arrival]:
    """The wait is the time in the queue; of a request with several choices the longest, until the last one's end. What
    was refused for another reason than want of room asked nothing of the server."""
    found: dict[tuple[str, int], Arrival] = {}
    for account in books.accounts:
        is_refused = account.is_turned_away
        if account.is_refused and not is_refused:
            continue
        wait_ns = time_ns(account, in_stages(Stage.QUEUE))
        before = found.get(derive.request_of(account))
        if before is not None:
            wait_ns, is_refused = max(wait_ns, before.wait_ns), is_refused or before.is_refused
        end_ns = max(account.end_ns, before.end_ns if before is not None else 0)
        found[derive.request_of(account)] = Arrival(account.request_id, account.start_ns, wait_ns, end_ns, is_refused)
    return sorted(found.values(), key=lambda arrival: arrival.at_ns)


def _by_client(books: Books) -> list[Arrival]:
    """From outside, the wait is what the first chunk took more than the quickest first chunk of all, since the client
    meant to send it and was not holding it back."""
    answered = [o for o in sent(books) if o.chunk_ns and o.end_ns is not None]
    waits_ns = [o.chunk_ns[0] - o.intended_ns - o.held_ns for o in answered]
    found = [_seen(o, wait_ns - min(waits_ns)) for o, wait_ns in zip(answered, waits_ns, strict=True)]
    refused = [o for o in sent(books) if o.status in (429, 503) and o.end_ns is not None]
    found += [_seen(outcome, 0, is_refused=True) for outcome in refused]
    return sorted(found, key=lambda arrival: arrival.at_ns)


def _seen(outcome: Outcome, wait_ns: int, is_refused: bool = False) -> Arrival:
    at_ns = outcome.intended_ns + outcome.held_ns
    return Arrival(outcome.request_id, at_ns, wait_ns, outcome.end_ns or 0, is_refused)


@rule(
    root_of=("head_of_line", "prefill_interference", "reported_queue", "deadlines_missed"),
    explains=(Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET, Cause.KV_BLOCKS, Cause.POLICY, Cause.STEP_IN_FLIGHT, Stage.QUEUE),
)
def overload(books: Books) -> Answer:
    """More requests arrive than are served: the wait grows for as long as they do.

    The trend is what is tested: where there is one, another run of the same length shows much the same share.
    """
    arrivals = _by_server(books) if books.accounts else _by_client(books)
    served_ones = [arrival for arrival in arrivals if not arrival.is_refused]
    if len(served_ones) < NUM_WINDOWS * MIN_PER_WINDOW:
        return Abstention(why=f"requests served: only {len(served_ones)}, too few to test a trend")
    num_refused = num_turned_away(books) if books.accounts else len(arrivals) - len(served_ones)
    refused = num_refused / (num_refused + len(served_ones))
    share = ratio([a.wait_ns for a in served_ones], [a.end_ns - a.at_ns for a in served_ones])
    if refused > share.value:
        share = of_number(num_refused, num_refused + len(served_ones))
    trend = growth([(arrival.at_ns, arrival.wait_ns) for arrival in served_ones])
    if share.value < MIN_SHARE or trend is None:
        is_small = share.value < MIN_SHARE
        return None if is_small else Abstention(why="all came at one instant: no trend can be tested")
    z, first_ns, last_ns = trend
    waits_grow = z >= TREND_Z and last_ns >= GROWTH * first_ns
    grows = waits_grow and _ended(served_ones) <= MAX_ENDED
    is_refusing = refused >= MIN_SHARE and not (books.accounts and has_room(books))
    if waits_grow and not _due(served_ones) and not is_refusing:
        why = (
            "waits grow, but all came within the time that one request takes: a burst and an overload look alike so far"
        )
        return Abstention(why=why)
    return _overload(arrivals, num_refused, trend, share, _slots(books)) if grows or is_refusing else None


def _slots(books: Books) -> int:
    """How many run at once, as far as is known."""
    told, seen = setting(books, "max_num_seqs"), max((step.num_running for step in books.steps), default=0)
    sampled = (sample.running or 0.0 for sample in books.run.samples) if books.run is not None else ()
    return int(told or seen or max(sampled, default=0.0))


def _overload(
    arrivals: Sequence[Arrival], refused: int, trend: tuple[float, float, float], share: Share, slots: int
) -> Finding:
    """refused: by count, of which `arrivals` may hold the latest only."""
    z, first_ns, last_ns = trend
    served_ones = [arrival for arrival in arrivals if not arrival.is_refused]
    span_s = (arrivals[-1].at_ns - arrivals[0].at_ns) / 1e9
    ended = _ended(served_ones)
    rate, serves = (len(served_ones) + refused) / span_s, _serves(arrivals, served_ones, span_s)
    grows = z >= TREND_Z and last_ns > first_ns
    wait = f"the wait grows from {ms(first_ns):.0f} to" if grows else "those that are let in wait"
    return Finding(
        claim=f"{rate:.3g} requests/s arrive and {serves:.3g} are served: {wait} {ms(last_ns):.0f} ms"
        + (f", and {refused} were refused." if refused else "."),
        evidence=(
            Fact("arrivals", round(rate, 2), "requests/s"),
            Fact("ended while others arrived", f"{ended:.0%}", "of those that could have"),
            Fact("wait, first third of arrivals", ms(first_ns), "ms"),
            Fact("wait, last third", ms(last_ns), "ms"),
            Fact("Mann-Kendall z of the wait over time", round(z, 2), f"(from {TREND_Z} on it grows)"),
            Fact("refused for want of room", refused, "requests"),
        ),
        request_ids=worst({arrival.request_id: arrival.wait_ns for arrival in served_ones}),
        **share.as_fields,
        share_of=share.of,
        confidence=LIKELY if z >= TREND_Z else POSSIBLE,
        confidence_from="a rank test over ten windows of arrivals, and the count of what ended meanwhile",
        cure=Cure(
            sentence=f"Send at most {0.8 * serves:.2g} requests/s to this server (or add a second one), and refuse "
            "early what cannot be served in time.",
            flags=("--max-queued-requests", str(max(1, int(2 * serves)))),
            elsewhere={
                "vllm": _refuse_by_vllm(serves, slots),
                "sglang": "--max-queued-requests",
                "tgi": "--max-concurrent-requests",
            },
        ),
        cost="Refused requests get 429 with Retry-After and must come again; a second server costs a second server.",
        counter_check="At eight tenths of the rate served the wait still grows for ten minutes: then the server slows "
        "down by itself.",
        regime="the rate and mix of these requests, at these settings",
    )


def _refuse_by_vllm(serves: float, slots: int) -> OtherCure:
    return OtherCure(
        sentence=f"Send at most {0.8 * serves:.2g} requests/s to this server (or add a second one), and refuse early "
        "what cannot be served in time: --max-num-queued-reqs, which counts those that run too.",
        flags=("--max-num-queued-reqs", str(max(1, slots + int(2 * serves)))),
        cost="Refused requests get 503 and must come again; a second server costs a second server.",
    )


def _serves(arrivals: Sequence[Arrival], served_ones: Sequence[Arrival], span_s: float) -> float:
    """Requests a second; where hardly one had ended when the last one came, of the whole time until the last end."""
    num_ended = sum(arrival.end_ns <= arrivals[-1].at_ns for arrival in served_ones)
    if num_ended >= NUM_WINDOWS:
        return _ended(served_ones) * len(served_ones) / span_s
    return len(served_ones) / max(1e-9, (max(a.end_ns for a in served_ones) - arrivals[0].at_ns) / 1e9)


def _ended(arrivals: Sequence[Arrival]) -> float:
    """Returns how many had ended by then, of those that came early enough to be served without a wait."""
    due = _due(arrivals)
    return sum(a.end_ns <= arrivals[-1].at_ns for a in due) / len(due) if due else 1.0


def _due(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The arrivals that would have ended by the last one if they had not waited."""
    in_service = median(a.end_ns - a.at_ns - a.wait_ns for a in arrivals) or 0
    return [a for a in arrivals if a.at_ns <= arrivals[-1].at_ns - in_service]


def growth(waits: Sequence[tuple[int, float]]) -> tuple[float, float, float] | None:
    """Mann-Kendall's z of the mean wait in windows of arrival time (Mann 1945, Kendall 1975; ties lower the variance
    and are left out of it, which only makes z smaller), and the mean waits of the first and the last third."""
    begin_ns, end_ns = waits[0][0], waits[-1][0]
    if end_ns <= begin_ns or len(waits) < NUM_WINDOWS * MIN_PER_WINDOW:
        return None
    windows: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
    for at_ns, wait_ns in waits:
        windows[min(NUM_WINDOWS - 1, (at_ns - begin_ns) * NUM_WINDOWS // (end_ns - begin_ns))].append(wait_ns)
    means = [sum(window) / len(window) for window in windows if window]
    n, third = len(means), max(1, len(waits) // 3)
    score = sum((later > earlier) - (later < earlier) for i, earlier in enumerate(means) for later in means[i + 1 :])
    z = (score - (score > 0)) / sqrt(max(1.0, n * (n - 1) * (2 * n + 5) / 18))
    first, last = ([wait for _, wait in part] for part in (waits[:third], waits[-third:]))
    return z, sum(first) / len(first), sum(last) / len(last)
