"""The server's own event loop: what lay in the sockets while it was busy."""

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import CERTAIN, median, ms, served, worst
from splittime.diagnose.rules.share import ratio


@rule("accounts")
def loop_stalls(books: Books) -> Answer:
    """The server's event loop was busy for long at a time, and requests lay in their sockets meanwhile."""
    accounts = sorted(served(books.accounts), key=lambda account: account.start_ns)
    lost = {account.request_id: float(account.unseen_ns) for account in accounts if account.unseen_ns}
    felt = [account.end_ns - account.start_ns + account.unseen_ns for account in accounts]
    share = ratio([float(account.unseen_ns) for account in accounts], felt)
    if not share.is_worth_it:
        return share.unsure("loop_stalls")
    return Finding(
        name="loop_stalls",
        claim=f"{len(lost)} requests lay in their sockets while the server's event loop was busy with something else: "
        f"{share.value:.0%} of the requests' time, from when they had come.",
        evidence=(
            Fact("in the socket", ms(sum(lost.values())), "ms over all requests"),
            Fact("median of those that did", ms(median(lost.values()) or 0), "ms"),
            Fact("the longest", ms(max(lost.values())), "ms"),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
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
