"""The client: whether it was at fault itself, held back what it was to send, and reads. What lies between client and
server is in `network`.

Read from the client's book (a run of `splittime bench`), held against the server's where there is one: an outcome and
its account are the same request. Clocks are never subtracted across the two, only durations compared.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from splittime.bench.book.records import Ending, Outcome, RunCheck
from splittime.bench.book.requests import sent_as
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    Share,
    in_stages,
    median,
    ms,
    of_requests,
    ratio,
    served,
    setting,
    times_ns,
    worst,
)
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage

MIN_CHUNKS = 8  # fewer make no pattern
DRAGGED_NS = 50_000_000  # past the server's own end
DRAGGED_SPREAD = 1.5  # a network's jitter does not stretch a stream by half
SLOW_READER_S = 20.0  # after which the server drops a client that does not read, where it is not told otherwise
SLOW_CLIENT_SHARE = 0.05  # it is its own time that a slow reader loses: told earlier than what harms all


class Pair(msgspec.Struct, frozen=True):
    """One request in both books."""

    outcome: Outcome
    account: ClosedAccount

    @property
    def late_ns(self) -> int:
        """How much longer the first chunk took by the client's clock than by the server's."""
        assert self.outcome.sent_ns is not None
        account = self.account
        return self.outcome.chunk_ns[0] - self.outcome.sent_ns - (account.token_written_ns[0] - account.start_ns)

    @property
    def between_ns(self) -> int:
        """What of the client's time, from sent to end, the account does not cover."""
        assert self.outcome.sent_ns is not None
        assert self.outcome.end_ns is not None
        return self.outcome.end_ns - self.outcome.sent_ns - (self.account.end_ns - self.account.start_ns)


def streamed(books: Books) -> list[Outcome]:
    """The answers that came in several chunks."""
    outcomes = sent(books)
    return [o for o in outcomes if len(o.chunk_ns) >= MIN_CHUNKS and o.sent_ns is not None and o.end_ns is not None]


def sent(books: Books) -> list[Outcome]:
    """The client's requests to this server."""
    return [o for o in books.run.outcomes if o.arm == books.arm] if books.run is not None else []


def pairs(books: Books) -> list[Pair]:
    """The answers that came in several chunks, in both books."""
    return _paired(books, streamed(books))


def joined(books: Books) -> list[Pair]:
    """All that were answered, in both books."""
    answered = [o for o in sent(books) if o.chunk_ns and o.sent_ns is not None and o.end_ns is not None]
    return _paired(books, answered)


def _paired(books: Books, outcomes: Sequence[Outcome]) -> list[Pair]:
    """Leaves out those that the client gave up: what became of them after that, it did not see."""
    by_name = {sent_as(account): account for account in books.accounts if account.token_written_ns}
    seen = (outcome for outcome in outcomes if outcome.ending is not Ending.CANCELLED)
    return [Pair(o, by_name[o.request_id]) for o in seen if o.request_id in by_name]


def failed_checks(books: Books) -> list[RunCheck]:
    """The client's own checks of itself that make its run void."""
    return [check for check in books.run.checks if check.voids and not check.ok] if books.run is not None else []


def felt_ns(outcomes: Sequence[Outcome]) -> int:
    """The time from the intended start to the end, over all that ended."""
    return max(1, sum(o.end_ns - o.intended_ns for o in outcomes if o.end_ns is not None))


def of_outcomes(lost_ns: Mapping[str, float], outcomes: Sequence[Outcome], least: float = MIN_SHARE) -> Share:
    """By the id that the client sent, of the time that was felt."""
    ended = sorted((o for o in outcomes if o.end_ns is not None), key=lambda outcome: outcome.intended_ns)
    felt = [(o.end_ns or 0) - o.intended_ns for o in ended]
    return ratio([lost_ns.get(o.request_id, 0.0) for o in ended], felt, least)


@rule("run", root_of=("buffering_proxy", "nagle", "slow_client"))
def client_bound(books: Books) -> Answer:
    """The load generator itself was late or busy: what it measured is about it."""
    failed = failed_checks(books)
    lags = {o.request_id: float(_lag_ns(o)) for o in sent(books) if _lag_ns(o) > 0}
    share = of_outcomes(lags, sent(books))
    if not failed and not share.is_worth_it:
        return share.unsure()
    told = " ".join(f"{check.sentence[:1].upper()}{check.sentence[1:].rstrip('.')}." for check in failed)
    return Finding(
        claim=f"The client itself was late, by {share.value:.1%} of the time that was felt. {told}".strip(),
        evidence=(
            Fact("intended start to picked up", ms(sum(lags.values())), "ms over all requests"),
            *(Fact(c.name, round(c.value or 0, 3), f"{c.unit} (allowed: {round(c.limit or 0, 3)})") for c in failed),
        ),
        request_ids=worst(lags),
        **share.as_fields,
        share_of="the time that was felt",
        confidence=CERTAIN,
        confidence_from="the client's own checks and its two clocks, intended and actual",
        cure=Cure(sentence="Use more client processes, a machine of its own, or a lower rate; then measure again."),
        cost="This run's client figures are to be thrown away; the server's own book stands.",
        counter_check="With twice the client processes TTFT from the actual send stays and the lag goes.",
        regime="this client at this rate; it says nothing about the server",
        is_limit=not share.is_worth_it,  # what its checks found is too little to explain what was felt
    )


@rule("run")
def client_backlog(books: Books) -> Answer:
    """Requests wait in the client, which has as many in flight as it may: the server has not been asked yet."""
    outcomes = [o for o in sent(books) if o.turn == 0 and o.sent_ns is not None]  # a later turn waits for an answer
    held = {outcome.request_id: float(outcome.held_ns) for outcome in outcomes if outcome.held_ns > 0}
    share = of_outcomes(held, outcomes).require()
    flights = [(o.sent_ns, o.end_ns) for o in sent(books) if o.sent_ns is not None and o.end_ns is not None]
    served_ns = median(end_ns - sent_ns for sent_ns, end_ns in flights) or 0.0
    edges = sorted(edge for begin_ns, end_ns in flights for edge in ((begin_ns, 1), (end_ns, -1)))
    most = max(accumulate(by for _, by in edges))
    waiting = max((step.num_waiting for step in books.steps), default=None)
    return Finding(
        claim=f"{len(held)} of {len(outcomes)} requests waited in the client for their turn, {share.value:.0%} of the "
        f"time from their intended start, {ms(median(held.values()) or 0):.0f} ms of each (median): it has {most} in "
        f"flight at most, and each takes {ms(served_ns):.0f} ms from the send.",
        evidence=(
            Fact("held back in the client", ms(sum(held.values())), "ms over all requests"),
            Fact("in flight at once, most", most, "requests"),
            Fact("from the send to the end, median", ms(served_ns), "ms"),
            *((Fact("waiting in the server meanwhile, most", waiting, "requests"),) if waiting is not None else ()),
        ),
        request_ids=worst(held),
        share_of_time=share.value,
        share_of="the time that was felt",
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="the client's own note of what it held back; the server's books begin with the send",
        cure=Cure(
            sentence=f"Let the client have more than {most} in flight (`bench --max-in-flight`, a pool of connections, "
            "workers), up to what the server takes without a queue; or ask less: this many in flight are "
            f"{most / max(1e-9, served_ns / 1e9):.3g} requests a second."
        ),
        cost="More at once in the server: each may take longer from the send.",
        counter_check=f"With twice {most} in flight and the same load the time from the intended start does not fall.",
        regime=f"more arrivals than {most} in flight can serve",
    )


def _lag_ns(outcome: Outcome) -> int:
    """Late by the client's own fault: what it held back on purpose is none."""
    picked_up_ns = outcome.picked_up_ns if outcome.picked_up_ns is not None else outcome.intended_ns
    return picked_up_ns - outcome.intended_ns - outcome.held_ns


def spread_ns(instants_ns: Sequence[int]) -> int:
    return max(1, instants_ns[-1] - instants_ns[0])


def _drags(pair: Pair) -> bool:
    """The chunks came over a longer time than the server took to write them, and late by what is felt."""
    read_ns, written_ns = spread_ns(pair.outcome.chunk_ns), spread_ns(pair.account.token_written_ns)
    return read_ns > DRAGGED_SPREAD * written_ns and pair.between_ns > DRAGGED_NS


_READ_AT_ONCE = OtherCure(
    sentence="Read each chunk as it comes: no work between reads, no pause in the event loop; where the reader is a "
    "proxy, let it read ahead. vLLM waits for such clients, and has no setting that drops them.",
    cost="None for the server.",
)


@rule("accounts", explains=(Stage.CLIENT_WAIT,))
def slow_client(books: Books) -> Answer:
    """All tokens are ready, and the client does not read them, or takes far longer to read than they took to write."""
    accounts = served(books.accounts)
    waits = times_ns(accounts, in_stages(Stage.CLIENT_WAIT))
    dropped = [a.request_id for a in accounts if a.error is not None and a.error.code == "slow_reader"]
    share = of_requests(waits, accounts, SLOW_CLIENT_SHARE)
    both = pairs(books)
    dragged = {p.outcome.request_id: p.between_ns for p in both if _drags(p)}
    in_kernels = of_outcomes(dragged, [pair.outcome for pair in both], SLOW_CLIENT_SHARE)
    if in_kernels.value > share.value:
        waits, share = dragged, in_kernels
    if not share.is_worth_it and not dropped:
        return share.unsure()
    lag = derive.percentiles([ns for a in accounts for ns in derive.send_lag_ns(a)], (50, 99))
    return Finding(
        claim=f"{len(waits)} clients did not read what was ready, {share.value:.0%} of all requests' time"
        + (f", and {len(dropped)} were dropped for it." if dropped else "."),
        evidence=(
            Fact("waiting for the client", ms(sum(waits.values())), "ms over all requests"),
            Fact("of it written by the server, and kept by the kernels", ms(sum(dragged.values())), "ms"),
            Fact("token ready to written, p99", ms(lag.get("p99", 0)), "ms"),
            Fact("dropped as slow readers", len(dropped), "requests"),
        ),
        request_ids=(*dropped[:5], *worst(waits)[: 5 - len(dropped[:5])]),
        **share.as_fields,
        confidence=LIKELY if waits is dragged else CERTAIN,
        confidence_from="chunks reached the client's program over a longer time than they were written in: it reads "
        "slowly, or the line is thin"
        if waits is dragged
        else "the socket did not take the bytes: a stage of the accounts",
        cure=Cure(
            sentence="Read each chunk as it comes: no work between reads, no pause in the event loop; where the "
            "reader is a proxy, let it read ahead. Such clients are dropped after slow_reader_s.",
            flags=("--slow-reader-s", "5") if (setting(books, "slow_reader_s") or SLOW_READER_S) > 5 else (),
            elsewhere={"vllm": _READ_AT_ONCE},
        ),
        cost="Clients that are slow for good reasons lose their answer earlier.",
        counter_check="With a client that reads at once the stage stays: then the server's own writing is slow.",
        regime="any load: it harms the slow reader, whose blocks are free by then, and nobody else",
    )
