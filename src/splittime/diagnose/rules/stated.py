"""Waits whose cause the books state outright, and which somebody can end: a pause, a sleep."""

from splittime.diagnose.attribution import attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import CERTAIN, ms, num_requests, served, worst
from splittime.diagnose.rules.processor import SLOWED
from splittime.diagnose.rules.share import of_number, stated
from splittime.ledger.stages import Cause

MIN_REFUSED = 3  # fewer happen to anybody
REFUSED_SHARE = 0.02  # no answer is worse than a late one
ASLEEP = ("asleep", "falling_asleep")


@rule("accounts", root_of=SLOWED, explains=(Cause.PAUSED,))
def paused(books: Books) -> Answer:
    """The engine was paused while requests were in flight."""
    accounts = served(books.accounts)
    lost = attribution(books).of(Cause.PAUSED)
    share = stated(lost, accounts)
    if not share.is_worth_it:
        return share.unsure()
    longest = max((i.duration_ns for a in accounts for i in a.intervals if i.cause is Cause.PAUSED), default=0)
    return Finding(
        claim=f"The engine was paused while {num_requests(accounts, lost)} requests were in flight: {share.value:.0%} "
        "of all requests' time.",
        evidence=(
            Fact("in a pause", ms(sum(lost.values())), "ms over all requests"),
            Fact("the longest at a time", ms(longest), "ms"),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="the scheduler stated the cause of each wait",
        cure=Cure(
            sentence='Find who pauses it (PATCH /knobs with "paused": true) and have it do so when nothing is in '
            "flight; "
            'PATCH /knobs with "paused": false ends a pause.',
            elsewhere={
                "vllm": OtherCure(
                    sentence="Find who pauses it (POST /pause, as training beside it does before it changes weights) "
                    "and have it do so when nothing is in flight; POST /resume ends a pause."
                )
            },
        ),
        cost="None: nothing is computed in a pause.",
        counter_check="Without pauses, at the same load, these requests take as long.",
        regime="any load",
    )


@rule(root_of=("requests_fail", "cold_start"))
def sleeping(books: Books) -> Answer:
    """Requests came while the server slept, and were turned away."""
    refused = [a for a in books.accounts if a.error is not None and a.error.code in ASLEEP]
    share = of_number(len(refused), len(books.accounts), REFUSED_SHARE)
    if len(refused) < MIN_REFUSED or share.value < share.least:
        return None
    sleeps = [s for p in (books.facts.processes if books.facts is not None else ()) for s in p.sleeps]
    return Finding(
        claim=f"{len(refused)} of {len(books.accounts)} requests came while the server was asleep or falling asleep, "
        "and got 503.",
        evidence=(Fact("turned away", len(refused), "requests"), Fact("sleeps and wakings known", len(sleeps))),
        request_ids=tuple(account.request_id for account in refused[:5]),
        share_of_time=share.value,
        share_interval=share.interval,
        share_of=share.of,
        confidence=CERTAIN,
        confidence_from="the errors themselves",
        cure=Cure(
            sentence="Wake it before traffic comes (POST /wake, then GET /ready until 200), or do not put it to sleep "
            "while clients are about."
        ),
        cost="An awake server keeps its memory.",
        counter_check="With the server awake the same requests are turned away.",
        regime="requests that come while it sleeps",
    )
