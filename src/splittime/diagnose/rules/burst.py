"""Many requests at one moment, and a queue behind them that a steady stream of as many would not have made."""

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import msgspec

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import LIKELY, Span, num_requests, overlap_ns, served, stated, union, worst
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage

AT_ONCE_NS = 100_000_000  # a client that sends all it has is done within this; a queue that is gone by then is no harm
MIN_AT_ONCE = 8
SIGMAS = 6.0  # beyond what chance brings together of the other arrivals (Poisson)
MOST_OF_WAITS = 0.8  # lie behind bursts; else the queue has other reasons too
MOST_OF_REQUESTS = 0.7  # come in bursts: then there is no ordinary time to compare with, and chance is that of all
MOST_OF_RUN = 0.6  # is behind bursts, where others come too: those who come one by one may be too many as well
MOST_BY_ONE = 0.8  # of what came at once has one key: then it is its burst
JOINED_NS = 20_000_000  # a queue that is empty for less goes on


class Burst(msgspec.Struct, frozen=True):
    """sent: who came at once. span: until the queue behind them was empty."""

    sent: tuple[ClosedAccount, ...]
    span: Span


@rule(
    "accounts",
    root_of=("overload", "token_budget_bound", "head_of_line", "deadlines_missed"),
    explains=(
        *(Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET, Cause.KV_BLOCKS, Cause.POLICY, Cause.STEP_IN_FLIGHT, Stage.QUEUE),
        Computed.OTHERS_PROMPTS,
    ),
)
def burst(books: Books) -> Answer:
    """Most of the waiting lies behind many requests that came at one moment; outside of that the server keeps up."""
    accounts = served(books.accounts)
    found = bursts(accounts)
    if not found:
        return None
    spans = union(one.span for one in found)
    waits = [(account.request_id, i) for account in accounts for i in account.intervals if i.stage is Stage.QUEUE]
    behind = dict.fromkeys((account.request_id for account in accounts), 0.0)
    for request_id, interval in waits:
        behind[request_id] += overlap_ns(interval.begin_ns, interval.end_ns, spans)
    sent = {account.request_id for one in found for account in one.sent}
    if not _is_all(accounts, waits, spans, behind, sent):
        return None
    for request_id, prompts_ns in attribution(books).of(Computed.OTHERS_PROMPTS).items():
        behind[request_id] += prompts_ns * (request_id in sent)
    share = stated(behind, accounts).require()  # it came, whether or not another run would have one
    return _finding(accounts, found, behind, sent, share.value, share.interval)


def bursts(accounts: Sequence[ClosedAccount]) -> list[Burst]:
    """The spans in which somebody waits, each with the most that came at once near its begin, where that is a burst."""
    queues = [i for account in accounts for i in account.intervals if i.stage is Stage.QUEUE and i.duration_ns > 0]
    spans = [(b, e - JOINED_NS) for b, e in union((i.begin_ns, i.end_ns + JOINED_NS) for i in queues)]
    if not spans:
        return []
    run_ns = max(a.end_ns for a in accounts) - min(a.start_ns for a in accounts)
    found = [Burst(_densest(accounts, span), span) for span in spans]
    found = [one for one in found if len(one.sent) >= MIN_AT_ONCE and one.span[1] - one.span[0] >= AT_ONCE_NS]
    others = len(accounts) - len({account.request_id for one in found for account in one.sent})
    if others <= (1 - MOST_OF_REQUESTS) * len(accounts):
        others = len(accounts)
    usual = others * AT_ONCE_NS / max(1, run_ns)
    return [one for one in found if len(one.sent) > usual + SIGMAS * sqrt(usual)]


def _densest(accounts: Sequence[ClosedAccount], span: Span) -> tuple[ClosedAccount, ...]:
    """The most that came within `AT_ONCE_NS`, of those that came in the span or just before it."""
    came = [a for a in accounts if span[0] - AT_ONCE_NS <= a.start_ns < span[1]]
    best: tuple[ClosedAccount, ...] = ()
    last = 0
    for first in range(len(came)):
        while last < len(came) and came[last].start_ns < came[first].start_ns + AT_ONCE_NS:
            last += 1
        if last - first > len(best):
            best = tuple(came[first:last])
    return best


def _is_all(
    accounts: Sequence[ClosedAccount],
    waits: Sequence[tuple[str, StageInterval]],
    spans: Sequence[Span],
    behind: dict[str, float],
    sent: set[str],
) -> bool:
    """The waits lie behind bursts, and nearly all came in these, or there is an ordinary time beside them."""
    waited_ns = sum(interval.duration_ns for _, interval in waits)
    run_ns = max(a.end_ns for a in accounts) - min(a.start_ns for a in accounts)
    is_short = sum(end_ns - begin_ns for begin_ns, end_ns in spans) <= MOST_OF_RUN * run_ns
    is_behind = sum(behind.values()) >= MOST_OF_WAITS * waited_ns
    return is_behind and (is_short or len(sent) >= MOST_OF_REQUESTS * len(accounts))


def _finding(
    accounts: Sequence[ClosedAccount],
    found: Sequence[Burst],
    behind: dict[str, float],
    sent: set[str],
    share: float,
    interval: tuple[float, float] | None,
) -> Finding:
    largest = max(found, key=lambda one: len(one.sent))
    sender = _sender(accounts, sent)
    own = {a.request_id for a in accounts if a.tenant == sender} if sender else sent
    others_ns = sum(ns for request_id, ns in behind.items() if request_id not in own)
    longest_ns = max(end_ns - begin_ns for begin_ns, end_ns in (one.span for one in found))
    moments = f"{len(found)} moment{'s' * (len(found) != 1)}"
    return Finding(
        claim=f"{num_requests(accounts, sent)} of {num_requests(accounts)} requests{_by_whom(accounts, sent, sender)} "
        f"came at {moments}, up to {num_requests(largest.sent)} within {AT_ONCE_NS / 1e6:.0f} ms; what was waited "
        f"behind them, and for each other's prompts, is {share:.0%} of all requests' time.",
        evidence=(
            Fact("bursts", f"{len(found)} time{'s' * (len(found) != 1)}"),
            Fact("the queue behind the longest one", round(longest_ns / 1e9, 2), "s"),
            Fact("waits of those who had sent them", round((sum(behind.values()) - others_ns) / 1e9, 2), "s in all"),
            Fact("waits of the others behind them", round(others_ns / 1e9, 2), "s in all"),
        ),
        request_ids=worst(behind),
        share_of_time=share,
        share_interval=interval,
        confidence=LIKELY,
        confidence_from="the instants of arrival, and the spans in which somebody waited",
        cure=Cure(
            sentence=_cure_of(sender, num_requests(largest.sent, own)),
            elsewhere={"vllm": OtherCure(sentence=_SPREAD.format("--scheduling-policy priority"))},
        ),
        cost="The sender of the burst has its last answer as late as now; the others no longer wait for it.",
        counter_check="With the same requests spread evenly over the same time the waits stay.",
        regime="a rate that the server can serve, if it comes evenly",
    )


def _sender(accounts: Sequence[ClosedAccount], sent: set[str]) -> str:
    """The key that most of what came at once was asked with; empty where no keys are asked for, or several sent it."""
    count = Counter(account.tenant for account in accounts if account.request_id in sent)
    name, most = count.most_common(1)[0]
    return name if most >= MOST_BY_ONE * len(sent) else ""


def _by_whom(accounts: Sequence[ClosedAccount], sent: set[str], sender: str) -> str:
    if not sender:
        return ""
    by_it = num_requests(accounts, {a.request_id for a in accounts if a.request_id in sent and a.tenant == sender})
    return f" ({by_it} of them by the key {sender!r})"


_SPREAD = (
    "Have whoever sends them at once spread them or keep fewer in flight, limit each client before the server, or let "
    "the others go first (`priority` in the requests and {})."
)


def _cure_of(sender: str, at_once: int) -> str:
    if not sender:
        return _SPREAD.format("--policy priority")
    return (
        f"Have the holder of {sender!r} spread its requests or keep fewer in flight, bound what it has open at once "
        f"(max_open_requests in --api-keys-file, below {at_once}), or let the others go first (`priority` in the "
        "requests and --policy priority)."
    )
