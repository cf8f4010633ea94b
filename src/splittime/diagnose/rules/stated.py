"""Waits whose cause the books state outright, and which somebody can end: a pause, a sleep, adapters, forms."""

from collections import Counter

from splittime.diagnose.attribution import attribution, in_stages
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    median,
    ms,
    num_requests,
    of_number,
    of_requests,
    served,
    setting,
    stated,
    worst,
)
from splittime.diagnose.rules.processor import SLOWED
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

MIN_REFUSED = 3  # fewer happen to anybody
REFUSED_SHARE = 0.02  # no answer is worse than a late one
ASLEEP = ("asleep", "falling_asleep")
MOST_ADAPTERS = 64  # that `max_loras` allows


@rule("accounts", root_of=SLOWED, explains=(Cause.PAUSED,))
def paused(books: Books) -> Answer:
    """The engine was paused while requests were in flight."""
    accounts = served(books.accounts)
    lost = attribution(books).of(Cause.PAUSED)
    share = stated(lost, accounts).require()
    longest = max((i.duration_ns for a in accounts for i in a.intervals if i.cause is Cause.PAUSED), default=0)
    return Finding(
        claim=f"The engine was paused while {num_requests(accounts, lost)} requests were in flight: {share.value:.0%} "
        "of all requests' time.",
        evidence=(
            Fact("in a pause", ms(sum(lost.values())), "ms over all requests"),
            Fact("the longest at a time", ms(longest), "ms"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
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
        **share.as_fields,
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


@rule("accounts", root_of=("overload", "head_of_line", "deadlines_missed"), explains=(Cause.LORA_SLOTS,))
def adapters_wait(books: Books) -> Answer:
    """Requests wait since as many other adapters are in use as may be at once (max_loras)."""
    accounts, lost = served(books.accounts), attribution(books).of(Cause.LORA_SLOTS)
    share = of_requests(lost, accounts).require()
    base = books.facts.model if books.facts is not None else ""
    names = {account.model for account in accounts} - {base}
    wanted, allowed = _most_at_once(accounts, base), setting(books, "max_loras")
    apart = " Beyond that, send each adapter's requests to one of several servers." if wanted > MOST_ADAPTERS else ""
    return Finding(
        claim=f"{num_requests(accounts, lost)} of {num_requests(accounts)} requests waited for an adapter's place, "
        f"{share.value:.0%} of all requests' time: up to {wanted} adapters were wanted at once, of {len(names)}.",
        evidence=(
            Fact("waiting for a place", ms(sum(lost.values())), "ms over all requests"),
            Fact("adapters wanted at once, most", wanted),
            Fact("max_loras", allowed or "not told"),
            Fact("the waiting's adapters", ", ".join(sorted({a.model for a in accounts if a.request_id in lost})[:5])),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the scheduler stated the cause of each wait",
        cure=Cure(
            sentence=f"Give more adapters a place at once.{apart}",
            flags=("--max-loras", str(min(wanted, MOST_ADAPTERS))) if wanted else (),
        ),
        cost="Memory for each adapter, and steps in which more of them are multiplied.",
        counter_check="With the change and the same load the queue's lora_slots time stays.",
        regime="more adapters in use at once than have a place",
    )


def _most_at_once(accounts: list[ClosedAccount], base: str) -> int:
    """Returns how many adapters had requests in flight at the same instant, at the most."""
    begins = [(account.start_ns, 1, account.model) for account in accounts if account.model != base]
    edges = sorted(begins + [(account.end_ns, -1, account.model) for account in accounts if account.model != base])
    open_requests, most = Counter[str](), 0
    for _, by, name in edges:
        open_requests[name] += by
        most = max(most, sum(count > 0 for count in open_requests.values()))
    return most


@rule("accounts", root_of=("deadlines_missed",), explains=(Cause.GRAMMAR,))
def forms_wait(books: Books) -> Answer:
    """Requests wait for the form that their answers are held to: to be compiled, or to say which token may come."""
    accounts, lost = served(books.accounts), attribution(books).of(Cause.GRAMMAR)
    share = of_requests(lost, accounts).require()
    all_ns = sum(lost.values())
    before_ns = sum(in_stages(books, Cause.GRAMMAR, (Stage.QUEUE,)).values())
    is_compiling = before_ns >= all_ns / 2
    done = "to be compiled" if is_compiling else "to say which token may come"
    return Finding(
        claim=f"{num_requests(accounts, lost)} of {num_requests(accounts)} requests waited for the form of their "
        f"answers {done}: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("compiling, before the first token", ms(before_ns), "ms over all requests"),
            Fact("finding what may come, between tokens", ms(all_ns - before_ns), "ms over all requests"),
            Fact("a request that waits for it, median", ms(median(lost.values()) or 0), "ms"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the cause stated for each wait",
        cure=Cure(
            sentence="Send the same form with the same text each time, its keys in one order and nothing in it that "
            "varies (ids, dates, a user's names): a form is compiled once, and kept. Send each one once before traffic "
            "comes. Make large ones smaller: fewer alternatives, no counts above 16 (minItems, maxLength)."
            if is_compiling
            else "Make the form smaller: at most 512 alternatives, no patterns that must hold together (allOf, "
            "overlapping regular expressions), no counts above 16 (maxItems, maxLength). Small forms are walked in the "
            "engine's own process, in some tenths of a millisecond a token.",
            elsewhere={"vllm": "another of --structured-outputs-config.backend"},
        ),
        cost="An answer that is held to less has to be checked by who reads it.",
        counter_check="With one form for all requests, sent once before, the queue's grammar time stays."
        if is_compiling
        else "With a smaller form and the same load the decode_stall time of cause grammar stays.",
        regime="answers held to a form; the first of each, if it is kept",
    )
