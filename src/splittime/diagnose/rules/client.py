"""What lies between the server's last byte and the user: the client, its network, its proxies, its reading.

Read from the client's book (a run of `splittime bench`), held against the server's where there is one: an outcome and
its account are the same request. Clocks are never subtracted across the two, only durations compared. Without the
server's book the pattern of the chunks must do, with less confidence.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    POSSIBLE,
    in_stages,
    median,
    ms,
    served,
    times_ns,
    total_ns,
    worst,
)
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.client_book import Outcome
from splittime.ledger.stages import Stage

MIN_CHUNKS = 8  # fewer make no pattern
MIN_PAIRS = 10  # requests with a pattern to look at
BUFFERED_SPREAD = 0.5  # the chunks come within half of the time in which the server wrote them
BUFFERED_GAP = 0.2  # or the usual gap is a fifth of the server's: they come in bursts
MIN_SPREAD_NS = 50_000_000  # a server that writes all within this leaves nothing to see
BURST_GAP_NS = 1_000_000  # chunks nearer than this came in one piece
BURST_SHARE = 0.8
LATE_TTFT = 0.7  # of a request's time, before its first chunk: nearly all came at the end
ACK_NS = (36_000_000, 48_000_000)  # Linux's delayed acknowledgement: 40 ms, and a timer's and a scheduler's slack
ACK_SHARE = 0.4  # of the gaps that are felt
ACK_ELSEWHERE = 0.1  # of the server's own
FELT_GAP_NS = 5_000_000
DRAGGED_SPREAD = 1.5  # a network's jitter does not stretch a stream by half
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
    by_name = {_sent_as(account): account for account in books.accounts if account.token_written_ns}
    return [Pair(o, by_name[o.request_id]) for o in streamed(books) if o.request_id in by_name]


def _sent_as(account: ClosedAccount) -> str:
    """The id that the client sent: the response's without its prefix."""
    return account.group_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def felt_ns(outcomes: Sequence[Outcome]) -> int:
    """The time from the intended start to the end, over all that ended."""
    return max(1, sum(o.end_ns - o.intended_ns for o in outcomes if o.end_ns is not None))


def _gaps(instants_ns: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(instants_ns)]


def _written_gaps(account: ClosedAccount) -> list[int]:
    """Between the server's writes; tokens of one write are one chunk."""
    return _gaps(sorted(set(account.token_written_ns)))


@rule("run", root_of=("buffering_proxy", "nagle", "slow_client"))
def client_bound(books: Books) -> Answer:
    """The load generator itself was late or busy: what it measured is about it."""
    assert books.run is not None
    failed = [check for check in books.run.checks if check.voids and not check.ok]
    lags = {o.request_id: float(_lag_ns(o)) for o in sent(books) if _lag_ns(o) > 0}
    share = sum(lags.values()) / felt_ns(sent(books))
    if not failed and share < MIN_SHARE:
        return None
    told = " ".join(_as_sentence(check.sentence) for check in failed)
    return Finding(
        name="client_bound",
        claim=f"The client itself was late, by {share:.1%} of the time that was felt. {told}".strip(),
        evidence=(
            Fact("intended start to picked up", ms(sum(lags.values())), "ms over all requests"),
            *(Fact(c.name, round(c.value or 0, 3), f"{c.unit} (allowed: {c.limit})") for c in failed),
        ),
        request_ids=worst(lags),
        share_of_time=share,
        confidence=CERTAIN,
        confidence_from="the client's own checks and its two clocks, intended and actual",
        cure=Cure(sentence="Use more client processes, a machine of its own, or a lower rate; then measure again."),
        cost="This run's client figures are to be thrown away; the server's own book stands.",
        counter_check="With twice the client processes TTFT from the actual send stays and the lag goes.",
        regime="this client at this rate; it says nothing about the server",
        is_limit=share < MIN_SHARE,  # what its checks found is too little to explain what was felt
    )


def _as_sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _lag_ns(outcome: Outcome) -> int:
    """Late by the client's own fault: what it held back on purpose is none."""
    picked_up_ns = outcome.picked_up_ns if outcome.picked_up_ns is not None else outcome.intended_ns
    return picked_up_ns - outcome.intended_ns - outcome.held_ns


@rule("run")
def buffering_proxy(books: Books) -> Answer:
    """Something between the two collects chunks and passes them on in bursts: TTFT is up, and gaps are gone."""
    both = [pair for pair in pairs(books) if _spread_ns(pair.account.token_written_ns) >= MIN_SPREAD_NS]
    if len(both) >= MIN_PAIRS:
        return _buffered_by_both(both)
    outcomes = [o for o in streamed(books) if _first_share(o) >= LATE_TTFT and _burst_share(o) >= BURST_SHARE]
    if both or len(outcomes) < max(MIN_PAIRS, len(streamed(books)) / 2):
        return None
    lost = {o.request_id: _first_share(o) * (o.end_ns - o.intended_ns) for o in outcomes if o.end_ns is not None}
    facts = (Fact("of a request's time before its first chunk", f"{_first_share(outcomes[0]):.0%}"),)
    share = sum(lost.values()) / felt_ns(streamed(books))
    return _buffered(len(outcomes), len(streamed(books)), lost, share, facts, POSSIBLE)


def _buffered_by_both(both: Sequence[Pair]) -> Finding | None:
    held = [pair for pair in both if _is_buffered(pair)]
    late = {pair.account.request_id: float(max(0, pair.late_ns)) for pair in held}
    share = sum(late.values()) / felt_ns([pair.outcome for pair in both])
    if len(held) < len(both) / 2 or share < MIN_SHARE:
        return None
    spreads = [_spread_ns(p.outcome.chunk_ns) / _spread_ns(p.account.token_written_ns) for p in held]
    facts = (
        Fact("first chunk later than the server wrote it, median", ms(median(late.values()) or 0), "ms"),
        Fact("first to last chunk at the client, of the server's", f"{median(spreads) or 0:.0%}"),
    )
    return _buffered(len(held), len(both), late, share, facts, CERTAIN)


def _is_buffered(pair: Pair) -> bool:
    """The chunks come closer together than they were written."""
    spread = _spread_ns(pair.outcome.chunk_ns) / _spread_ns(pair.account.token_written_ns)
    gap, server_gap = median(_gaps(pair.outcome.chunk_ns)), median(_written_gaps(pair.account))
    in_bursts = gap is not None and server_gap is not None and gap < BUFFERED_GAP * server_gap
    return spread < BUFFERED_SPREAD or in_bursts


def _buffered(
    num: int, of: int, lost: dict[str, float], share: float, facts: tuple[Fact, ...], confidence: float
) -> Finding:
    return Finding(
        name="buffering_proxy",
        claim=f"The chunks of {num} of {of} answers came in bursts: something between server and client collects "
        f"them, for {share:.0%} of the time that was felt.",
        evidence=(*facts, Fact("time until the first burst", ms(sum(lost.values())), "ms over all requests")),
        request_ids=worst(lost),
        share_of_time=min(1.0, share),
        confidence=confidence,
        confidence_from="the instants of writing and of reading, each by its own clock"
        if confidence == CERTAIN
        else "the client's clock alone: a server that answers all at once looks the same",
        cure=Cure(
            sentence="Turn off buffering and compression for text/event-stream in the proxy (nginx: proxy_buffering "
            "off; gzip off; or answer with X-Accel-Buffering: no), or ask the server directly."
        ),
        cost="More, smaller packets through the proxy.",
        counter_check="Asked directly, past the proxy, the chunks still come in bursts.",
        regime="streamed answers; without streaming nothing changes",
    )


def _spread_ns(instants_ns: Sequence[int]) -> int:
    return max(1, instants_ns[-1] - instants_ns[0])


def _first_share(outcome: Outcome) -> float:
    assert outcome.sent_ns is not None
    assert outcome.end_ns is not None
    return (outcome.chunk_ns[0] - outcome.sent_ns) / max(1, outcome.end_ns - outcome.sent_ns)


def _burst_share(outcome: Outcome) -> float:
    gaps = _gaps(outcome.chunk_ns)
    return sum(gap < BURST_GAP_NS for gap in gaps) / len(gaps)


def _in_ack(duration_ns: int) -> bool:
    return ACK_NS[0] <= duration_ns <= ACK_NS[1]


@rule("run", root_of=("buffering_proxy",))
def nagle(books: Books) -> Answer:
    """Small writes wait about 40 ms for an acknowledgement: Nagle's algorithm against delayed ACK."""
    both = pairs(books)
    outcomes = [pair.outcome for pair in both] or streamed(books)
    if len(outcomes) < MIN_PAIRS:
        return None
    late = [pair.late_ns for pair in both]
    first = sum(map(_in_ack, late)) / len(late) if late else 0.0
    felt = [gap for o in outcomes for gap in _gaps(o.chunk_ns) if gap >= FELT_GAP_NS]
    held = [gap for gap in felt if _in_ack(gap)]
    of_gaps = len(held) / len(felt) if felt else 0.0
    if max(first, of_gaps) < ACK_SHARE or _server_has_it(both) or (not both and not _some_in_bursts(outcomes)):
        return None
    lost = dict(_held_ns(outcomes, both if first >= ACK_SHARE else ()))
    share = sum(lost.values()) / felt_ns(outcomes)
    if share < MIN_SHARE / 2:  # 40 ms, where they are felt at all, are felt in every answer
        return None
    return Finding(
        name="nagle",
        claim=f"Chunks wait about 40 ms on their way: {first:.0%} of the first chunks and {of_gaps:.0%} of the gaps "
        "that are felt, as when small writes wait for a delayed acknowledgement.",
        evidence=(
            Fact("first chunks 36 to 48 ms later than written", f"{first:.0%}"),
            Fact("gaps of 36 to 48 ms, of those above 5 ms", f"{of_gaps:.0%}"),
            Fact("the same in the server's own gaps", f"{_server_share(both):.0%}" if both else "not told"),
            Fact("time lost", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        share_of_time=min(1.0, share),
        confidence=LIKELY if both else POSSIBLE,
        confidence_from="the length of the steps, which the server's own writes do not have"
        if both
        else "the length of the steps and the bursts between them, by the client's clock alone",
        cure=Cure(
            sentence="Set TCP_NODELAY on both sides of every hop (splittime does on its own; nginx: tcp_nodelay on; "
            "Go and aiohttp do; Python's http.server and plain sockets do not), and write each event in one piece."
        ),
        cost="More, smaller packets.",
        counter_check="With TCP_NODELAY on every hop the 40 ms stay; or asked directly, past the proxy, they stay.",
        regime="streams whose tokens come faster than every 40 ms, and first chunks written in two pieces",
    )


def _server_share(both: Sequence[Pair]) -> float:
    gaps = [gap for pair in both for gap in _written_gaps(pair.account) if gap >= FELT_GAP_NS]
    return sum(map(_in_ack, gaps)) / len(gaps) if gaps else 0.0


def _server_has_it(both: Sequence[Pair]) -> bool:
    """The server itself makes a token every 40 ms or so."""
    return _server_share(both) > ACK_ELSEWHERE


def _some_in_bursts(outcomes: Sequence[Outcome]) -> bool:
    gaps = [gap for outcome in outcomes for gap in _gaps(outcome.chunk_ns)]
    return sum(gap < BURST_GAP_NS for gap in gaps) >= len(gaps) / 3


def _held_ns(outcomes: Sequence[Outcome], both: Sequence[Pair]) -> Iterator[tuple[str, float]]:
    """What each request lost: its first chunk's 40 ms, and half of each held gap (a chunk comes at any time in it)."""
    first = {pair.outcome.request_id: pair.late_ns for pair in both if _in_ack(pair.late_ns)}
    for outcome in outcomes:
        held = sum(gap for gap in _gaps(outcome.chunk_ns) if _in_ack(gap)) / 2
        yield outcome.request_id, first.get(outcome.request_id, 0) + held


def _drags(pair: Pair) -> bool:
    """The chunks came over a longer time than the server took to write them, and late by what is felt."""
    spread_ns, written_ns = _spread_ns(pair.outcome.chunk_ns), _spread_ns(pair.account.token_written_ns)
    return spread_ns > DRAGGED_SPREAD * written_ns and pair.between_ns > MIN_SPREAD_NS


@rule("accounts")
def slow_client(books: Books) -> Answer:
    """All tokens are ready, and the client does not read them, or takes far longer to read than they took to write."""
    accounts = served(books.accounts)
    waits = times_ns(accounts, in_stages(Stage.CLIENT_WAIT))
    dropped = [a.request_id for a in accounts if a.error is not None and a.error.code == "slow_reader"]
    share = sum(waits.values()) / total_ns(accounts)
    dragged = {p.account.request_id: p.between_ns for p in pairs(books) if _drags(p)}
    in_kernels = sum(dragged.values()) / felt_ns([pair.outcome for pair in pairs(books)])
    if in_kernels > share:
        waits, share = dragged, in_kernels
    if share < SLOW_CLIENT_SHARE and not dropped:
        return None
    lag = derive.percentiles([ns for a in accounts for ns in derive.send_lag_ns(a)], (50, 99))
    return Finding(
        name="slow_client",
        claim=f"{len(waits)} clients did not read what was ready, {share:.0%} of all requests' time"
        + (f", and {len(dropped)} were dropped for it." if dropped else "."),
        evidence=(
            Fact("waiting for the client", ms(sum(waits.values())), "ms over all requests"),
            Fact("of it written by the server, and kept by the kernels", ms(sum(dragged.values())), "ms"),
            Fact("token ready to written, p99", ms(lag.get("p99", 0)), "ms"),
            Fact("dropped as slow readers", len(dropped), "requests"),
        ),
        request_ids=(*dropped[:5], *worst(waits)[: 5 - len(dropped[:5])]),
        share_of_time=share,
        confidence=LIKELY if waits is dragged else CERTAIN,
        confidence_from="chunks reached the client's program over a longer time than they were written in: it reads "
        "slowly, or the line is thin"
        if waits is dragged
        else "the socket did not take the bytes: a stage of the accounts",
        cure=Cure(
            sentence="Read each chunk as it comes: no work between reads, no pause in the event loop; where the "
            "reader is a proxy, let it read ahead. Such clients are dropped after slow_reader_s.",
            flags=("--slow-reader-s", "5"),
        ),
        cost="Clients that are slow for good reasons lose their answer earlier.",
        counter_check="With a client that reads at once the stage stays: then the server's own writing is slow.",
        regime="any load: it harms the slow reader, whose blocks are free by then, and nobody else",
    )
