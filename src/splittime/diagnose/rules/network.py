"""The network path between server and client: a proxy that collects, small writes that wait for an acknowledgement, and
a path that makes each answer late by as much.

Read from the instants of writing and of reading, each by its own clock; without the server's book the pattern of the
chunks must do, with less confidence.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from splittime.bench.book.records import Outcome
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import client
from splittime.diagnose.rules.evidence import CERTAIN, LIKELY, MIN_SHARE, POSSIBLE, Share, median, ms, worst
from splittime.ledger.account import ClosedAccount

BUFFERED_SPREAD = 0.5  # the chunks come within half of the time in which the server wrote them
BUFFERED_GAP = 0.2  # or the usual gap is a fifth of the server's: they come in bursts
BURST_GAP_NS = 1_000_000  # chunks nearer than this came in one piece
BURST_SHARE = 0.8
LATE_END = 0.5  # of what the first chunk is late by: if the end is as late, more than buffering is at work (`slow_way`)
LATE_TTFT = 0.7  # of a request's time, before its first chunk: nearly all came at the end
ACK_NS = (36_000_000, 48_000_000)  # Linux's delayed acknowledgement: 40 ms, and a timer's and a scheduler's slack
ACK_SHARE = 0.4  # of the gaps that are felt
ACK_ELSEWHERE = 0.1  # of the server's own
FELT_GAP_NS = 5_000_000
PAST_END_NS = 2_000_000  # a proxy that passes all on at the end of the answer takes less
MIN_FLOW = 2  # gaps after the first burst that show how chunks come
MIN_SPREAD_NS, LATE_READER = 10_000_000, 5  # writes within this show nothing; or so many times it, to a late reader
MIN_PAIRS = 10  # requests with a pattern to look at


def _gaps(instants_ns: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(instants_ns)]


def _written_gaps(account: ClosedAccount) -> list[int]:
    """Between the server's writes; tokens of one write are one chunk."""
    return _gaps(sorted(set(account.token_written_ns)))


@rule("run")
def buffering_proxy(books: Books) -> Answer:
    """Something between the two collects chunks and passes them on in bursts: TTFT is up, and gaps are gone."""
    paired = client.pairs(books)
    if len(paired) >= len(client.streamed(books)) / 2 > 0:
        least_ns = MIN_SPREAD_NS * (LATE_READER if client.failed_checks(books) else 1)
        both = [pair for pair in paired if client.spread_ns(pair.account.token_written_ns) >= least_ns]
        return _buffered_by_both(both) if len(both) >= MIN_PAIRS else None
    outcomes = [o for o in client.streamed(books) if _first_share(o) >= LATE_TTFT and _burst_share(o) >= BURST_SHARE]
    if len(outcomes) < max(MIN_PAIRS, len(client.streamed(books)) / 2) or client.failed_checks(books):
        return None  # the client's clock alone is no witness where its own checks failed
    lost = {o.request_id: _first_share(o) * (o.end_ns - o.intended_ns) for o in outcomes if o.end_ns is not None}
    facts = (Fact("of a request's time before its first chunk", f"{_first_share(outcomes[0]):.0%}"),)
    share = client.of_outcomes(lost, client.streamed(books)).require()
    return _buffered(len(outcomes), len(client.streamed(books)), lost, share, facts, POSSIBLE)


def _buffered_by_both(both: Sequence[client.Pair]) -> Answer:
    late = [pair for pair in both if pair.late_ns >= MIN_LATE_NS and pair.between_ns < LATE_END * pair.late_ns]
    held = [pair for pair in late if is_buffered(pair)]
    if is_start_held(held):
        return None  # `slow_way`
    lost = {pair.outcome.request_id: float(pair.late_ns) for pair in held}
    share = client.of_outcomes(lost, [pair.outcome for pair in both])
    if len(held) < len(both) / 2 or not share.is_worth_it:
        return share.unsure() if len(held) >= len(both) / 2 else None
    spreads = [client.spread_ns(p.outcome.chunk_ns) / client.spread_ns(p.account.token_written_ns) for p in held]
    facts = (
        Fact("first chunk later than the server wrote it, median", ms(median(lost.values()) or 0), "ms"),
        Fact("first to last chunk at the client, of the server's", f"{median(spreads) or 0:.0%}"),
    )
    return _buffered(len(held), len(both), lost, share, facts, CERTAIN)


def is_buffered(pair: client.Pair) -> bool:
    """The chunks come closer together than they were written."""
    spread = client.spread_ns(pair.outcome.chunk_ns) / client.spread_ns(pair.account.token_written_ns)
    gap, server_gap = median(_gaps(pair.outcome.chunk_ns)), median(_written_gaps(pair.account))
    in_bursts = gap is not None and server_gap is not None and gap < BUFFERED_GAP * server_gap
    return spread < BUFFERED_SPREAD or in_bursts


def is_start_held(late: Sequence[client.Pair]) -> bool:
    """Something lets the answers begin after a time, whatever was written by then. A buffer lets go when it is full or
    when the answer ends: it collects what comes later too, or is late by as much as the answer took to write."""
    if len(late) < MIN_PAIRS:
        return False
    if sum(map(_flows_after_the_first, late)) >= len(late) / 2:
        return True
    ends = [pair.between_ns for pair in late]
    is_past_the_end = (median(ends) or 0.0) > PAST_END_NS
    return is_past_the_end and _wander(pair.late_ns for pair in late) < _wander(ends)


def _flows_after_the_first(pair: client.Pair) -> bool:
    """The first chunks came in one burst, and later ones as they were written."""
    gaps, server_gap = _gaps(pair.outcome.chunk_ns), median(_written_gaps(pair.account))
    in_first = next((i for i, gap in enumerate(gaps) if gap >= BURST_GAP_NS), len(gaps))
    rest = gaps[in_first + 1 :]
    if in_first == 0 or len(rest) < MIN_FLOW or server_gap is None:
        return False
    return (median(rest) or 0.0) >= (1 - BUFFERED_GAP) * server_gap


def _wander(amounts_ns: Iterable[int]) -> float:
    """The median distance from their median."""
    known = list(amounts_ns)
    middle = median(known) or 0.0
    return median(abs(ns - middle) for ns in known) or 0.0


def _buffered(
    num: int, of: int, lost: dict[str, float], share: Share, facts: tuple[Fact, ...], confidence: float
) -> Finding:
    return Finding(
        claim=f"The chunks of {num} of {of} answers came in bursts: something between server and client collects "
        f"them, for {share.value:.0%} of the time that was felt.",
        evidence=(*facts, Fact("time until the first burst", ms(sum(lost.values())), "ms over all requests")),
        request_ids=worst(lost),
        **share.as_fields,
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


def _first_share(outcome: Outcome) -> float:
    assert outcome.sent_ns is not None
    assert outcome.end_ns is not None
    return (outcome.chunk_ns[0] - outcome.sent_ns) / max(1, outcome.end_ns - outcome.sent_ns)


def _burst_share(outcome: Outcome) -> float:
    gaps = _gaps(outcome.chunk_ns)
    return sum(gap < BURST_GAP_NS for gap in gaps) / len(gaps)


def in_ack(duration_ns: int) -> bool:
    return ACK_NS[0] <= duration_ns <= ACK_NS[1]


@rule("run", root_of=("buffering_proxy",))
def nagle(books: Books) -> Answer:
    """Small writes wait about 40 ms for an acknowledgement: Nagle's algorithm against delayed ACK."""
    both = client.pairs(books)
    outcomes = [pair.outcome for pair in both] or client.streamed(books)
    if len(outcomes) < MIN_PAIRS:
        return None
    late = [pair.late_ns for pair in both]
    first = sum(map(in_ack, late)) / len(late) if late and not _all_at_the_end(both) else 0.0
    felt = [gap for o in outcomes for gap in _gaps(o.chunk_ns) if gap >= FELT_GAP_NS]
    held = [gap for gap in felt if in_ack(gap)]
    of_gaps = len(held) / len(felt) if felt else 0.0
    if max(first, of_gaps) < ACK_SHARE or _server_has_it(both) or (not both and not _some_in_bursts(outcomes)):
        return None
    lost = dict(_acknowledged_ns(outcomes, both if first >= ACK_SHARE else ()))
    share = client.of_outcomes(lost, outcomes, MIN_SHARE / 2)  # 40 ms, where felt at all, are felt in every answer
    share.require()
    return Finding(
        claim=f"Chunks wait about 40 ms on their way: {first:.0%} of the first chunks and {of_gaps:.0%} of the gaps "
        "that are felt, as when small writes wait for a delayed acknowledgement.",
        evidence=(
            Fact("first chunks 36 to 48 ms later than written", f"{first:.0%}"),
            Fact("gaps of 36 to 48 ms, of those above 5 ms", f"{of_gaps:.0%}"),
            Fact("the same in the server's own gaps", f"{_server_share(both):.0%}" if both else "not told"),
            Fact("time lost", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
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


def _all_at_the_end(both: Sequence[client.Pair]) -> bool:
    """The first chunks came when the last ones had been written: a buffer's doing, however long that took."""
    after_last = [abs(pair.late_ns - client.spread_ns(pair.account.token_written_ns)) for pair in both]
    return (median(after_last) or 0.0) <= PAST_END_NS


def _server_share(both: Sequence[client.Pair]) -> float:
    gaps = [gap for pair in both for gap in _written_gaps(pair.account) if gap >= FELT_GAP_NS]
    return sum(map(in_ack, gaps)) / len(gaps) if gaps else 0.0


def _server_has_it(both: Sequence[client.Pair]) -> bool:
    """The server itself makes a token every 40 ms or so."""
    return _server_share(both) > ACK_ELSEWHERE


def _some_in_bursts(outcomes: Sequence[Outcome]) -> bool:
    gaps = [gap for outcome in outcomes for gap in _gaps(outcome.chunk_ns)]
    return sum(gap < BURST_GAP_NS for gap in gaps) >= len(gaps) / 3


def _acknowledged_ns(outcomes: Sequence[Outcome], both: Sequence[client.Pair]) -> Iterator[tuple[str, float]]:
    """What each request lost: its first chunk's 40 ms, and half of each held gap (a chunk comes at any time in it)."""
    first = {pair.outcome.request_id: pair.late_ns for pair in both if in_ack(pair.late_ns)}
    for outcome in outcomes:
        held = sum(gap for gap in _gaps(outcome.chunk_ns) if in_ack(gap)) / 2
        yield outcome.request_id, first.get(outcome.request_id, 0) + held


WHOLE = 0.5  # of what the first chunk is late by: so late is the end too
MIN_LATE_NS = 2_000_000  # a loopback, two clocks and a busy client explain less


@rule("run", "accounts")
def slow_way(books: Books) -> Answer:
    """Between client and server each request takes longer than both of them have it: something on the way holds it."""
    both = client.joined(books)
    late_ns = median(pair.late_ns for pair in both) or 0.0
    if len(both) < MIN_PAIRS or late_ns < MIN_LATE_NS or in_ack(int(late_ns)):
        return None
    is_held = is_start_held(_in_bursts(both))
    if not is_held and (median(pair.between_ns for pair in both) or 0.0) < WHOLE * late_ns:
        return None  # answers begin late and end in time: that is `buffering_proxy`
    trips = sorted(books.served.round_trip_ns) if books.served is not None else []
    trip_ns = trips[len(trips) // 2] if trips else 0
    lost = {pair.outcome.request_id: float(_late_both_ns(pair, is_held)) for pair in both}
    share = client.of_outcomes(lost, [pair.outcome for pair in both]).require()
    is_far = trip_ns >= late_ns / 4
    if not is_far and books.facts is not None and "unseen_ns" in books.facts.unknown:
        why = f"first chunks are {ms(late_ns):.0f} ms late, on the way or in the server's socket: its books do not"
        return Abstention(why=f"{why} know how long a request lay there (unseen_ns)")
    who = "the way itself is long" if is_far else "something on it holds each request up"
    return Finding(
        claim=f"First chunks reach the client {ms(late_ns):.0f} ms (median) later than the server's own account "
        f"explains, {share.value:.0%} of the time that was felt: {who}.",
        evidence=(
            Fact("later by the client's clock than by the server's, median", ms(late_ns), "ms"),
            Fact("a round trip to what the client is connected to, median", ms(trip_ns) if trips else "not told", "ms"),
            Fact("of it before the server saw the request", ms(median(p.account.unseen_ns for p in both) or 0), "ms"),
            Fact("time lost", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="durations of the same requests by both clocks, none subtracted from the other",
        cure=Cure(
            sentence="Ask from nearer, or over fewer hops; a kept connection saves the handshakes."
            if is_far
            else "Ask the server directly, past the proxies between; if that is quick, look at what each of them does "
            "with a request (checks, filters, a connection made anew for each, limits that delay)."
        ),
        cost="None for this server: no setting of it changes the way.",
        counter_check="Asked directly from the server's own machine first chunks are as late.",
        regime="any load; the shorter the answers, the larger its share",
    )


def _in_bursts(both: list[client.Pair]) -> list[client.Pair]:
    return [pair for pair in both if len(pair.outcome.chunk_ns) >= client.MIN_CHUNKS and pair.late_ns >= MIN_LATE_NS]


def _late_both_ns(pair: client.Pair, is_start_held: bool) -> int:
    """What both the first chunk and the end were late by, less what lay in the server's socket; of a held start what
    the first chunk was late by, since later ones wait for nothing."""
    late_ns = pair.late_ns if is_start_held else min(pair.late_ns, pair.between_ns)
    return max(0, late_ns - pair.account.unseen_ns)
