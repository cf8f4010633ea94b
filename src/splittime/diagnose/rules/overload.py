"""More arrivals than the machine can serve: a wait that grows for as long as they come."""

from collections.abc import Sequence
from math import sqrt

import msgspec

from splittime.bench.book.records import Outcome
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules.admission import has_room, num_turned_away
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import LIKELY, POSSIBLE, in_stages, median, ms, setting, time_ns, worst
from splittime.diagnose.rules.share import MIN_SHARE, Share, of_number, ratio
from splittime.ledger.stages import Cause, Stage

NUM_WINDOWS = 10  # enough for a rank test, few enough that each holds several requests
MIN_PER_WINDOW = 2
TREND_Z = 2.33  # one chance in a hundred that waits without a trend look like this (Mann-Kendall, one-sided)
MAX_ENDED = 0.93  # of the arrivals, ended while others still arrived; a steady server is nearer to 1
GROWTH = 2.0  # the last third waits at least so many times as long as the first


class Arrival(msgspec.Struct, frozen=True):
    """A request as the overload test sees it: when it came, how long it waited, when it had ended; and whether it was
    refused for want of room."""

    request_id: str
    at_ns: int
    wait_ns: int
    end_ns: int
    is_refused: bool = False


def _by_server(books: Books) -> list[Arrival]:
    """The wait is the time in the queue; of a request with several choices the longest, until the last one's end. What
    was refused for another reason than want of room asked nothing of the server."""
    found: dict[str, Arrival] = {}
    for account in books.accounts:
        is_refused = account.is_turned_away
        if account.is_refused and not is_refused:
            continue
        wait_ns = time_ns(account, in_stages(Stage.QUEUE))
        before = found.get(account.group_id)
        if before is not None:
            wait_ns, is_refused = max(wait_ns, before.wait_ns), is_refused or before.is_refused
        end_ns = max(account.end_ns, before.end_ns if before is not None else 0)
        found[account.group_id] = Arrival(account.request_id, account.start_ns, wait_ns, end_ns, is_refused)
    return sorted(found.values(), key=lambda arrival: arrival.at_ns)


def _by_client(books: Books) -> list[Arrival]:
    """From outside, the wait is what the first chunk took more than the quickest first chunk of all, since the client
    meant to send it and was not holding it back."""
    answered = [o for o in sent(books) if o.chunk_ns and o.end_ns is not None]
    waits_ns = [o.chunk_ns[0] - o.intended_ns - o.held_ns for o in answered]
    found = [_seen(o, wait_ns - min(waits_ns)) for o, wait_ns in zip(answered, waits_ns, strict=True)]
    refused = [o for o in sent(books) if o.status in (429, 503) and o.end_ns is not None]
    found += [_seen(outcome, 0, is_refused=True) for outcome in refused]
    return sorted(found, key=lambda arrival: arrival.at_ns)


def _seen(outcome: Outcome, wait_ns: int, is_refused: bool = False) -> Arrival:
    at_ns = outcome.intended_ns + outcome.held_ns
    return Arrival(outcome.request_id, at_ns, wait_ns, outcome.end_ns or 0, is_refused)


@rule(
    root_of=("head_of_line", "prefill_interference", "reported_queue", "deadlines_missed"),
    explains=(Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET, Cause.KV_BLOCKS, Cause.POLICY, Cause.STEP_IN_FLIGHT, Stage.QUEUE),
)
def overload(books: Books) -> Answer:
    """More requests arrive than are served: the wait grows for as long as they do.

    The trend is what is tested: where there is one, another run of the same length shows much the same share.
    """
    arrivals = _by_server(books) if books.accounts else _by_client(books)
    served_ones = [arrival for arrival in arrivals if not arrival.is_refused]
    if len(served_ones) < NUM_WINDOWS * MIN_PER_WINDOW:
        return Abstention(why=f"requests served: only {len(served_ones)}, too few to test a trend")
    num_refused = num_turned_away(books) if books.accounts else len(arrivals) - len(served_ones)
    refused = num_refused / (num_refused + len(served_ones))
    share = ratio([a.wait_ns for a in served_ones], [a.end_ns - a.at_ns for a in served_ones])
    if refused > share.value:
        share = of_number(num_refused, num_refused + len(served_ones))
    trend = growth([(arrival.at_ns, arrival.wait_ns) for arrival in served_ones])
    if share.value < MIN_SHARE or trend is None:
        is_small = share.value < MIN_SHARE
        return None if is_small else Abstention(why="all came at one instant: no trend can be tested")
    z, first_ns, last_ns = trend
    waits_grow = z >= TREND_Z and last_ns >= GROWTH * first_ns
    grows = waits_grow and _ended(served_ones) <= MAX_ENDED
    is_refusing = refused >= MIN_SHARE and not (books.accounts and has_room(books))
    if waits_grow and not _due(served_ones) and not is_refusing:
        why = (
            "waits grow, but all came within the time that one request takes: a burst and an overload look alike so far"
        )
        return Abstention(why=why)
    return _overload(arrivals, num_refused, trend, share, _slots(books)) if grows or is_refusing else None


def _slots(books: Books) -> int:
    """How many run at once, as far as is known."""
    told, seen = setting(books, "max_num_seqs"), max((step.num_running for step in books.steps), default=0)
    sampled = (sample.running or 0.0 for sample in books.run.samples) if books.run is not None else ()
    return int(told or seen or max(sampled, default=0.0))


def _overload(
    arrivals: Sequence[Arrival], refused: int, trend: tuple[float, float, float], share: Share, slots: int
) -> Finding:
    """refused: by count, of which `arrivals` may hold the latest only."""
    z, first_ns, last_ns = trend
    served_ones = [arrival for arrival in arrivals if not arrival.is_refused]
    span_s = (arrivals[-1].at_ns - arrivals[0].at_ns) / 1e9
    ended = _ended(served_ones)
    rate, serves = (len(served_ones) + refused) / span_s, _serves(arrivals, served_ones, span_s)
    grows = z >= TREND_Z and last_ns > first_ns
    wait = f"the wait grows from {ms(first_ns):.0f} to" if grows else "those that are let in wait"
    return Finding(
        claim=f"{rate:.3g} requests/s arrive and {serves:.3g} are served: {wait} {ms(last_ns):.0f} ms"
        + (f", and {refused} were refused." if refused else "."),
        evidence=(
            Fact("arrivals", round(rate, 2), "requests/s"),
            Fact("ended while others arrived", f"{ended:.0%}", "of those that could have"),
            Fact("wait, first third of arrivals", ms(first_ns), "ms"),
            Fact("wait, last third", ms(last_ns), "ms"),
            Fact("Mann-Kendall z of the wait over time", round(z, 2), f"(from {TREND_Z} on it grows)"),
            Fact("refused for want of room", refused, "requests"),
        ),
        request_ids=worst({arrival.request_id: arrival.wait_ns for arrival in served_ones}),
        **share.as_fields,
        share_of=share.of,
        confidence=LIKELY if z >= TREND_Z else POSSIBLE,
        confidence_from="a rank test over ten windows of arrivals, and the count of what ended meanwhile",
        cure=Cure(
            sentence=f"Send at most {0.8 * serves:.2g} requests/s to this server (or add a second one), and refuse "
            "early what cannot be served in time.",
            flags=("--max-queued-requests", str(max(1, int(2 * serves)))),
            elsewhere={
                "vllm": _refuse_by_vllm(serves, slots),
                "sglang": "--max-queued-requests",
                "tgi": "--max-concurrent-requests",
            },
        ),
        cost="Refused requests get 429 with Retry-After and must come again; a second server costs a second server.",
        counter_check="At eight tenths of the rate served the wait still grows for ten minutes: then the server slows "
        "down by itself.",
        regime="the rate and mix of these requests, at these settings",
    )


def _refuse_by_vllm(serves: float, slots: int) -> OtherCure:
    return OtherCure(
        sentence=f"Send at most {0.8 * serves:.2g} requests/s to this server (or add a second one), and refuse early "
        "what cannot be served in time: --max-num-queued-reqs, which counts those that run too.",
        flags=("--max-num-queued-reqs", str(max(1, slots + int(2 * serves)))),
        cost="Refused requests get 503 and must come again; a second server costs a second server.",
    )


def _serves(arrivals: Sequence[Arrival], served_ones: Sequence[Arrival], span_s: float) -> float:
    """Requests a second; where hardly one had ended when the last one came, of the whole time until the last end."""
    num_ended = sum(arrival.end_ns <= arrivals[-1].at_ns for arrival in served_ones)
    if num_ended >= NUM_WINDOWS:
        return _ended(served_ones) * len(served_ones) / span_s
    return len(served_ones) / max(1e-9, (max(a.end_ns for a in served_ones) - arrivals[0].at_ns) / 1e9)


def _ended(arrivals: Sequence[Arrival]) -> float:
    """Returns how many had ended by then, of those that came early enough to be served without a wait."""
    due = _due(arrivals)
    return sum(a.end_ns <= arrivals[-1].at_ns for a in due) / len(due) if due else 1.0


def _due(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The arrivals that would have ended by the last one if they had not waited."""
    in_service = median(a.end_ns - a.at_ns - a.wait_ns for a in arrivals) or 0
    return [a for a in arrivals if a.at_ns <= arrivals[-1].at_ns - in_service]


def growth(waits: Sequence[tuple[int, float]]) -> tuple[float, float, float] | None:
    """Mann-Kendall's z of the mean wait in windows of arrival time (Mann 1945, Kendall 1975; ties lower the variance
    and are left out of it, which only makes z smaller), and the mean waits of the first and the last third."""
    begin_ns, end_ns = waits[0][0], waits[-1][0]
    if end_ns <= begin_ns or len(waits) < NUM_WINDOWS * MIN_PER_WINDOW:
        return None
    windows: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
    for at_ns, wait_ns in waits:
        windows[min(NUM_WINDOWS - 1, (at_ns - begin_ns) * NUM_WINDOWS // (end_ns - begin_ns))].append(wait_ns)
    means = [sum(window) / len(window) for window in windows if window]
    n, third = len(means), max(1, len(waits) // 3)
    score = sum((later > earlier) - (later < earlier) for i, earlier in enumerate(means) for later in means[i + 1 :])
    z = (score - (score > 0)) / sqrt(max(1.0, n * (n - 1) * (2 * n + 5) / 18))
    first, last = ([wait for _, wait in part] for part in (waits[:third], waits[-third:]))
    return z, sum(first) / len(first), sum(last) / len(last)
