"""A way that makes each answer late by as much: a proxy, a gateway or a network that holds requests up."""

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.client import MIN_CHUNKS, Pair, joined, of_outcomes
from splittime.diagnose.rules.evidence import CERTAIN, median, ms, worst
from splittime.diagnose.rules.way import in_ack, is_start_held

MIN_PAIRS = 10
WHOLE = 0.5  # of what the first chunk is late by: so late is the end too
MIN_LATE_NS = 2_000_000  # a loopback, two clocks and a busy client explain less


@rule("run", "accounts")
def slow_way(books: Books) -> Answer:
    """Between client and server each request takes longer than both of them have it: something on the way holds it."""
    both = joined(books)
    late_ns = median(pair.late_ns for pair in both) or 0.0
    if len(both) < MIN_PAIRS or late_ns < MIN_LATE_NS or in_ack(int(late_ns)):
        return None
    is_held = is_start_held(_in_bursts(both))
    if not is_held and (median(pair.between_ns for pair in both) or 0.0) < WHOLE * late_ns:
        return None  # answers begin late and end in time: that is `buffering_proxy`
    trips = sorted(books.served.round_trip_ns) if books.served is not None else []
    trip_ns = trips[len(trips) // 2] if trips else 0
    lost = {pair.outcome.request_id: float(_held_ns(pair, is_held)) for pair in both}
    share = of_outcomes(lost, [pair.outcome for pair in both])
    if not share.is_worth_it:
        return share.unsure("slow_way")
    is_far = trip_ns >= late_ns / 4
    who = "the way itself is long" if is_far else "something on it holds each request up"
    return Finding(
        name="slow_way",
        claim=f"First chunks reach the client {ms(late_ns):.0f} ms (median) later than the server's own account "
        f"explains, "
        f"{share.value:.0%} of the time that was felt: {who}.",
        evidence=(
            Fact("later by the client's clock than by the server's, median", ms(late_ns), "ms"),
            Fact("a round trip to what the client is connected to, median", ms(trip_ns) if trips else "not told", "ms"),
            Fact("of it before the server saw the request", ms(median(p.account.unseen_ns for p in both) or 0), "ms"),
            Fact("time lost", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
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


def _in_bursts(both: list[Pair]) -> list[Pair]:
    return [pair for pair in both if len(pair.outcome.chunk_ns) >= MIN_CHUNKS and pair.late_ns >= MIN_LATE_NS]


def _held_ns(pair: Pair, is_start_held: bool) -> int:
    """What both the first chunk and the end were late by, less what lay in the server's socket; of a held start what
    the first chunk was late by, since later ones wait for nothing."""
    late_ns = pair.late_ns if is_start_held else min(pair.late_ns, pair.between_ns)
    return max(0, late_ns - pair.account.unseen_ns)
