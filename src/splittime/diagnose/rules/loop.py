"""The server's own event loop: what lay in the sockets while it was busy."""

from collections.abc import Mapping

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.client import of_outcomes, pairs
from splittime.diagnose.rules.evidence import LIKELY, POSSIBLE, ms, served, worst
from splittime.diagnose.rules.share import Share, ratio


@rule("accounts")
def loop_stalls(books: Books) -> Answer:
    """The server's event loop was busy for long at a time, and requests lay in their sockets meanwhile."""
    lost, share = _lost(books)
    if not share.is_worth_it:
        return share.unsure("loop_stalls")
    server = books.facts.process("server") if books.facts is not None else None
    stalls = [duration_ns for _, duration_ns in server.stalls] if server is not None else []
    return Finding(
        name="loop_stalls",
        claim=f"{sum(ns > 0 for ns in lost.values())} requests lay in their sockets while the server's event loop was "
        f"busy with something else: {share.value:.0%} of the requests' time, from when they were sent.",
        evidence=(
            Fact("in the socket", ms(sum(lost.values())), "ms over all requests"),
            Fact("the longest", ms(max(lost.values())), "ms"),
            Fact("the longest stall of the loop", ms(max(stalls)), "ms") if stalls else Fact("stalls", "not told"),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY if pairs(books) else POSSIBLE,
        confidence_from="the client's clock, and how long the loop had not looked at its sockets"
        if pairs(books)
        else "half of how long the loop had not looked at its sockets: no client's book says when they were sent",
        cure=Cure(
            sentence="Find what holds the loop: large bodies, slow tokenising, queries of the whole ledger, or another "
            "busy process on its core; `/ledger/facts` has its latest stalls with their times.",
            elsewhere={"vllm": "--api-server-count", "sglang": "--tokenizer-worker-num"},
        ),
        cost="None known.",
        counter_check="With a core of its own for the server process and no such bodies or queries, its stalls stay.",
        regime="many requests at once; a request that is alone finds the loop free",
    )


def _lost(books: Books) -> tuple[Mapping[str, float], Share]:
    """By request: what the client waited in it, at the most; without a client's book half of the bound, the mean of an
    arrival at any time in the stall."""
    both = pairs(books)
    if both:
        lost = {p.outcome.request_id: float(min(p.account.unseen_ns, max(0, p.between_ns))) for p in both}
        return lost, of_outcomes(lost, [pair.outcome for pair in both])
    accounts = sorted(served(books.accounts), key=lambda account: account.start_ns)
    halves = [account.unseen_ns / 2 for account in accounts]
    felt = [a.end_ns - a.start_ns + half for a, half in zip(accounts, halves, strict=True)]
    return {a.request_id: half for a, half in zip(accounts, halves, strict=True)}, ratio(halves, felt)
