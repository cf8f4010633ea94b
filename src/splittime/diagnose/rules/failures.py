"""Requests that the server did not answer: an engine that died, errors inside, connections that broke. One that our
client had to send again is one of them, whatever became of it then: another client sees an error.

What such a request lost is all of its time, and more; so requests are counted here. Refusals for want of room are
`overload`'s, and those before the first readiness `cold_start`'s.
"""

from collections import Counter
from collections.abc import Sequence

from splittime.bench.book.records import Ending
from splittime.bench.book.requests import sent_as
from splittime.diagnose.books import Books
from splittime.diagnose.finding import OF_REQUESTS, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import CERTAIN, of_number

MIN_FAILED = 3  # fewer happen to anybody
FAILED_SHARE = 0.02
DIED = "engine_died"
NOT_READY = ("not_ready", "engine_not_ready")
TOO_LATE = "deadline_exceeded"  # what the client asked for: `deadlines_missed`
SERVER_ERROR, OVERLOADED = 500, 503
SHOWN = 160  # characters of an error
SENT_AGAIN = "its connection was closed before an answer, and the client sent it again"

Failure = tuple[str, str]  # request, why


@rule(root_of=("cold_start", "overload", "slot_bound", "kv_bound", "host_bound", "prefix_broken", "uncached_reuse"))
def requests_fail(books: Books) -> Answer:
    """Requests end with an error of the server, or without an answer."""
    failures, of = _by_server(books), max(len(books.accounts), sum(o.sent_ns is not None for o in sent(books)))
    failures += _by_client(books)
    has_died = any(a.error is not None and a.error.code == DIED for a in books.accounts)
    share = of_number(len(failures), of, FAILED_SHARE)
    if not failures or (not has_died and (len(failures) < MIN_FAILED or share.value < share.least)):
        return None
    return _finding(books, failures, of, has_died)


def _by_server(books: Books) -> list[Failure]:
    """After the engine died, who came before its successor was ready failed for that too."""
    errors = [(a, a.error) for a in books.accounts if a.error is not None]
    died_ns = min((a.end_ns for a, error in errors if error.code == DIED), default=None)
    return [
        (account.request_id, error.message)
        for account, error in errors
        if error.status >= SERVER_ERROR
        and error.code != TOO_LATE
        and (error.status != OVERLOADED or (died_ns is not None and error.code in NOT_READY))
        and (error.code not in NOT_READY or (died_ns is not None and account.end_ns >= died_ns))
    ]


def _by_client(books: Books) -> list[Failure]:
    """Returns those that did not reach the server, or not at once: of the others its own book tells."""
    reached = {sent_as(account) for account in books.accounts}
    outcomes = [o for o in sent(books) if o.sent_ns is not None and o.request_id not in reached]
    served_later = (Ending.COMPLETE, Ending.CANCELLED)
    again = [(o.request_id, SENT_AGAIN) for o in sent(books) if o.resent and o.ending in served_later]
    return again + [
        (o.request_id, o.error or (f"status {o.status}" if o.ending is Ending.REFUSED else f"{o.ending}"))
        for o in outcomes
        if o.ending in (Ending.FAILED, Ending.TIMED_OUT)
        or (o.ending is Ending.REFUSED and (o.status or 0) >= SERVER_ERROR and o.status != OVERLOADED)
    ]


def _finding(books: Books, failures: Sequence[Failure], of: int, has_died: bool) -> Finding:
    reasons = Counter(reason[:SHOWN] for _, reason in failures).most_common(3)
    engine = books.facts.process("engine") if books.facts is not None else None
    restarts = (Fact("restarts of the engine", engine.restarts),) if engine is not None else ()
    why = "The engine process died: " if has_died else ""
    what = "failed, or did at first" if any(reason == SENT_AGAIN for reason, _ in reasons) else "failed"
    return Finding(
        claim=f"{why}{len(failures)} of {of} requests {what}; most often: {reasons[0][0]}",
        evidence=(*(Fact(reason, num, "requests") for reason, num in reasons), *restarts),
        request_ids=tuple(name for name, _ in failures[:5]),
        share_of_time=len(failures) / max(1, of),
        share_of=OF_REQUESTS,
        confidence=CERTAIN,
        confidence_from="the errors themselves",
        cure=Cure(
            sentence="Read the server's log of that moment: for a process killed by a signal its memory and the "
            "kernel's log too; for connections that are closed the log of what stands between. Until it is found, "
            "everything else here is about the requests that were served."
        ),
        cost="None: without it nothing else is worth tuning.",
        counter_check="The same requests once more, to a server with nothing else on its machine, fail as often.",
        regime="what was sent here; a request that fails again and again may be the cause itself",
    )
