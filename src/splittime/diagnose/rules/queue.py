"""Waiting to be admitted: too few slots, or more arrivals than the machine can serve."""

from collections.abc import Sequence
from math import sqrt

import msgspec

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    POSSIBLE,
    in_stages,
    median,
    ms,
    served,
    setting,
    time_ns,
    times_ns,
    total_ns,
    waits_for,
    worst,
)
from splittime.ledger.account import ClosedAccount
from splittime.ledger.client_book import Outcome
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

MIN_GAIN = 1.1  # a larger batch must serve a tenth more, else the wait only moves from the queue into decoding
KV_FULL = 0.95  # with fewer free blocks than this leaves, more slots would wait for blocks
NUM_WINDOWS = 10  # enough for a rank test, few enough that each holds several requests
MIN_PER_WINDOW = 2
TREND_Z = 2.33  # one chance in a hundred that waits without a trend look like this (Mann-Kendall, one-sided)
MAX_ENDED = 0.93  # of the arrivals, ended while others still arrived; a steady server is nearer to 1
GROWTH = 2.0  # the last third waits at least so many times as long as the first


@rule("accounts", "steps", root_of=("overload", "head_of_line", "token_budget_bound"))
def slot_bound(books: Books) -> Answer:
    """Requests wait for a slot (max_num_seqs) while KV blocks are free and a larger batch would serve more."""
    accounts = served(books.accounts)
    waits = times_ns(accounts, waits_for(Cause.BATCH_SLOTS))
    share = sum(waits.values()) / total_ns(accounts)
    slots = max((step.num_running for step in books.steps), default=0)
    if share < MIN_SHARE or not slots or _kv_use(books) > KV_FULL:
        return None
    cost = step_cost.fit(books.steps)
    wanted = _slots_wanted(books.steps, slots)
    gain = step_cost.batch_gain(cost, accounts, slots, wanted) if cost else None
    if gain is not None and gain < MIN_GAIN:
        why = f"requests wait for one of {slots} slots, but {wanted} would serve only {gain - 1:.0%} more: no cure"
        return Abstention("slot_bound", why)
    times = f"{gain:.2f} times as many" if gain is not None else "not known how many more"
    return Finding(
        name="slot_bound",
        claim=f"{len(waits)} of {len(accounts)} requests waited for one of {slots} slots, "
        f"{share:.0%} of all requests' time, while KV blocks were free.",
        evidence=(
            Fact("waiting for a slot", ms(sum(waits.values())), "ms over all requests"),
            Fact("slots (max_num_seqs)", setting(books, "max_num_seqs") or slots),
            Fact("KV blocks in use at most", f"{_kv_use(books):.0%}"),
            Fact(f"requests that {wanted} slots would serve, by the fitted cost of steps", times),
        ),
        request_ids=worst(waits),
        share_of_time=share,
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


class Arrival(msgspec.Struct, frozen=True):
    """A request as the overload test sees it: when it came, how long it waited, when it had ended; and whether it was
    refused for want of room."""

    request_id: str
    at_ns: int
    wait_ns: int
    end_ns: int
    is_refused: bool = False


def _by_server(books: Books) -> list[Arrival]:
    """The wait is the time in the queue."""
    found = []
    for account in books.accounts:
        wait_ns = time_ns(account, in_stages(Stage.QUEUE))
        is_refused = account.error is not None and account.error.status == 429
        found.append(Arrival(account.request_id, account.start_ns, wait_ns, account.end_ns, is_refused))
    return sorted(found, key=lambda arrival: arrival.at_ns)


def _by_client(books: Books) -> list[Arrival]:
    """From outside, the wait is what the first chunk took more than the quickest first chunk of all."""
    answered = [o for o in sent(books) if o.chunk_ns and o.end_ns is not None]
    least_ns = min((o.chunk_ns[0] - o.intended_ns for o in answered), default=0)
    found = [
        Arrival(o.request_id, o.intended_ns, o.chunk_ns[0] - o.intended_ns - least_ns, o.end_ns or 0) for o in answered
    ]
    refused = [o for o in sent(books) if o.status in (429, 503) and o.end_ns is not None]
    found += [_seen(outcome, 0, is_refused=True) for outcome in refused]
    return sorted(found, key=lambda arrival: arrival.at_ns)


def _seen(outcome: Outcome, wait_ns: int, is_refused: bool = False) -> Arrival:
    return Arrival(outcome.request_id, outcome.intended_ns, wait_ns, outcome.end_ns or 0, is_refused)


@rule(root_of=("head_of_line", "token_budget_bound", "prefill_interference"))
def overload(books: Books) -> Answer:
    """More requests arrive than are served: the wait grows for as long as they do."""
    arrivals = _by_server(books) if books.accounts else _by_client(books)
    served_ones = [arrival for arrival in arrivals if not arrival.is_refused]
    if len(served_ones) < NUM_WINDOWS * MIN_PER_WINDOW:
        return Abstention("overload", f"only {len(served_ones)} requests were served: no trend can be tested")
    refused = (len(arrivals) - len(served_ones)) / len(arrivals)
    felt_ns = max(1, sum(arrival.end_ns - arrival.at_ns for arrival in served_ones))
    share = max(sum(arrival.wait_ns for arrival in served_ones) / felt_ns, refused)
    trend = growth([(arrival.at_ns, arrival.wait_ns) for arrival in served_ones])
    if share < MIN_SHARE or trend is None:
        return None if share < MIN_SHARE else Abstention("overload", "all came at one instant: no trend can be tested")
    z, first_ns, last_ns = trend
    grows = z >= TREND_Z and last_ns >= GROWTH * first_ns and _ended(served_ones) <= MAX_ENDED
    return _overload(arrivals, served_ones, trend, share) if grows or refused >= MIN_SHARE else None


def _overload(
    arrivals: Sequence[Arrival], served_ones: Sequence[Arrival], trend: tuple[float, float, float], share: float
) -> Finding:
    z, first_ns, last_ns = trend
    span_s = (arrivals[-1].at_ns - arrivals[0].at_ns) / 1e9
    ended = _ended(served_ones)
    rate, serves = len(arrivals) / span_s, ended * len(served_ones) / span_s
    refused = len(arrivals) - len(served_ones)
    return Finding(
        name="overload",
        claim=f"{rate:.1f} requests/s arrive and {serves:.1f} are served: the wait grows from {ms(first_ns):.0f} to "
        f"{ms(last_ns):.0f} ms" + (f", and {refused} were refused." if refused else "."),
        evidence=(
            Fact("arrivals", round(rate, 2), "requests/s"),
            Fact("ended while others arrived", f"{ended:.0%}", "of those that could have"),
            Fact("wait, first third of arrivals", ms(first_ns), "ms"),
            Fact("wait, last third", ms(last_ns), "ms"),
            Fact("Mann-Kendall z of the wait over time", round(z, 2), f"(from {TREND_Z} on it grows)"),
            Fact("refused for want of room", refused, "requests"),
        ),
        request_ids=worst({arrival.request_id: arrival.wait_ns for arrival in served_ones}),
        share_of_time=min(1.0, share),
        confidence=LIKELY if z >= TREND_Z else POSSIBLE,
        confidence_from="a rank test over ten windows of arrivals, and the count of what ended meanwhile",
        cure=Cure(
            sentence=f"Send at most {0.8 * serves:.1f} requests/s to this server (or add a second one), and refuse "
            "early what cannot be served in time.",
            flags=("--max-queued-requests", str(max(1, int(2 * serves)))),
            elsewhere={"vllm": "more replicas", "sglang": "--max-queued-requests", "tgi": "--max-concurrent-requests"},
        ),
        cost="Refused requests get 429 with Retry-After and must come again; a second server costs a second server.",
        counter_check="At eight tenths of the rate served the wait still grows for ten minutes: then the server slows "
        "down by itself.",
        regime="the rate and mix of these requests, at these settings",
    )


def _ended(arrivals: Sequence[Arrival]) -> float:
    """Of those that came long enough before the last one to be served without a wait, how many had ended by then."""
    last_ns = arrivals[-1].at_ns
    in_service = median(a.end_ns - a.at_ns - a.wait_ns for a in arrivals) or 0
    due = [a for a in arrivals if a.at_ns <= last_ns - in_service]
    return sum(a.end_ns <= last_ns for a in due) / len(due) if due else 1.0


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
