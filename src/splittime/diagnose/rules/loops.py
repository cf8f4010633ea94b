"""The two loops: what lay in the sockets while the server's event loop was busy, and what had reached the engine and
waited for its loop between two steps or while it woke."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from splittime.diagnose.attribution import attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    median,
    ms,
    num_requests,
    of_requests,
    overlap_ns,
    ratio,
    served,
    worst,
)
from splittime.ledger.account import StageInterval
from splittime.ledger.stages import Cause
from splittime.ledger.steps import StepRecord


@rule("accounts", reads=("unseen_ns",))
def loop_stalls(books: Books) -> Answer:
    """The server's event loop was busy for long at a time, and requests lay in their sockets meanwhile."""
    accounts = sorted(served(books.accounts), key=lambda account: account.start_ns)
    lost = {account.request_id: float(account.unseen_ns) for account in accounts if account.unseen_ns}
    felt = [account.end_ns - account.start_ns + account.unseen_ns for account in accounts]
    share = ratio([float(account.unseen_ns) for account in accounts], felt).require()
    return Finding(
        claim=f"{len(lost)} requests lay in their sockets while the server's event loop was busy with something else: "
        f"{share.value:.0%} of the requests' time, from when they had come.",
        evidence=(
            Fact("in the socket", ms(sum(lost.values())), "ms over all requests"),
            Fact("median of those that did", ms(median(lost.values()) or 0), "ms"),
            Fact("the longest", ms(max(lost.values())), "ms"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the kernel's own word on when a connection's latest bytes came",
        cure=Cure(
            sentence="Find what holds the loop: large bodies, slow tokenising, queries of the whole ledger, or another "
            "busy process on its core. Ask the ledger's file instead of the live server; give the server a core.",
            elsewhere={"vllm": "--api-server-count", "sglang": "--tokenizer-worker-num"},
        ),
        cost="None known.",
        counter_check="With a core of its own for the server process and no such bodies or queries, the wait stays.",
        regime="many requests at once; a request that is alone finds the loop free",
    )


USUAL_NS = 1_000_000  # a thread wakes and takes a request in within some tenths of a millisecond: no cure shortens that


class Waits(msgspec.Struct, frozen=True):
    """Waits for the loop beyond the usual, by request, and what it did meanwhile, in ns over all requests: it had no
    work and woke, or it was between two steps."""

    by_request: dict[str, float]
    waking_ns: int
    between_ns: int


@rule("accounts", "steps", explains=(Cause.ENGINE_LOOP,))
def engine_loop_late(books: Books) -> Answer:
    """Requests had reached the engine, no step ran, and its loop took long to take them in."""
    accounts = served(books.accounts)
    found = _waits(books)
    share = of_requests(found.by_request, accounts).require()
    is_waking = found.waking_ns > found.between_ns
    while_it = "it had no work and woke late" if is_waking else "it took in others or told news between two steps"
    return Finding(
        claim=f"{num_requests(accounts, found.by_request)} requests waited for the engine's loop while no step ran, "
        f"{share.value:.0%} of all requests' time, most of it while {while_it}.",
        evidence=(
            Fact("the engine had no work and woke", ms(found.waking_ns), "ms over all requests"),
            Fact("the engine was between two steps", ms(found.between_ns), "ms over all requests"),
            Fact("median of those that waited", ms(median(found.by_request.values()) or 0), "ms"),
            Fact("a wait that is usual, and not counted", ms(USUAL_NS), "ms"),
        ),
        request_ids=worst(found.by_request),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the scheduler stated the cause of each wait; what the loop did meanwhile is in the steps",
        cure=Cure(sentence=_WAKE if is_waking else _BETWEEN),
        cost="Other work runs slower, or elsewhere." if is_waking else "The sender's last answer comes no earlier.",
        counter_check="With a core of its own for the engine process the wait stays."
        if is_waking
        else "With the same requests spread evenly over the same time the wait stays.",
        regime="short requests that meet an idle engine" if is_waking else "many requests at one moment",
    )


_WAKE = (
    "Let the engine wake at once: nothing else busy on its processors (`top` names it), a higher priority (nice, "
    "cpu.weight), and, in a virtual machine, processors that its host does not share."
)
_BETWEEN = (
    "Send fewer requests at one moment, with fewer choices (`n`) and shorter prompts: each is taken in by itself, and "
    "each running one has its news told. A second server halves both."
)


def _waits(books: Books) -> Waits:
    """What keeps the thread from running is not the loop's own: the attribution leaves it out."""
    owned = attribution(books).of(Cause.ENGINE_LOOP)
    begins = [step.begin_ns for step in books.steps]
    by_request: dict[str, float] = {}
    waking_ns = between_ns = 0
    for account in served(books.accounts):
        waits = [i for i in account.intervals if i.cause is Cause.ENGINE_LOOP]
        late_ns = owned.get(account.request_id, 0.0) - USUAL_NS * len(waits)
        if late_ns <= 0:
            continue
        by_request[account.request_id] = late_ns
        slept_ns = sum(_idle_ns(wait, books.steps, begins) for wait in waits)
        waking_ns += slept_ns
        between_ns += sum(wait.duration_ns for wait in waits) - slept_ns
    return Waits(by_request, waking_ns, between_ns)


def _idle_ns(wait: StageInterval, steps: Sequence[StepRecord], begins: Sequence[int]) -> int:
    """How much of a wait lies in the time for which the engine had no work, before the step that ended it."""
    after = bisect_left(begins, wait.end_ns)
    if after == len(steps):
        return 0
    worked_ns = steps[after].begin_ns - steps[after].host_gap_ns
    return overlap_ns(wait.begin_ns, wait.end_ns, [(worked_ns - steps[after].idle_ns, worked_ns)])
