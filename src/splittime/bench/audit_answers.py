"""What the answers themselves tell of faults: of the workload, of the server, of what lies between.

Only one of these voids a run: prompts that were found in the server's prefix cache beyond what was meant, because then
the figures are about the cache. The rest are notes: the figures stand, and mean what the sentence says.

`audit_closed_loop` says what a closed loop cannot see: the requests that it did not send while it waited for a server
that stood still. Its workers each wait for an answer before they ask again. A server that stands for 2 s so delays one
request of each worker, where users would have sent many more, and all of those would have waited: the tail that is
shown is too good ("coordinated omission"). What would have been seen is estimated as HdrHistogram does: a request that
waited so much longer than usual stands for others, each begun a usual answer's time later. Waits are those for chunks,
so that a long answer is none.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from splittime.bench.book.records import Ending, Outcome, Run, RunCheck
from splittime.bench.book.requests import chunk_gaps_ns
from splittime.ledger.derive import percentile

CONTAMINATION_LIMIT = 0.05
STEP_BAND_MS = (38.0, 44.5)  # Linux acknowledges after 40 ms when it has nothing to send
STEP_SHARE_LIMIT = 0.02
MIN_GAPS = 50
TOGETHER_SHARE = 0.1  # of the mean gap: chunks closer than that came together
TOGETHER_NS = 50_000  # and so did those closer than that, whatever the mean
CLUSTERED_LIMIT = 0.6
MIN_CHUNKS = 8


def note(
    name: str, ok: bool, value: float | None, limit: float | None, sentence: str, fault: str = "", unit: str = ""
) -> RunCheck:
    """Returns a check that voids nothing: if it fails, the figures stand, and `fault` says what to mind in them."""
    sentence += "" if ok else fault
    return RunCheck(name=name, ok=ok, value=value, limit=limit, unit=unit, sentence=sentence, voids=False)


def audit_answers(measured: Sequence[Outcome]) -> list[RunCheck]:
    """The checks that have something to go by."""
    whole = [outcome for outcome in measured if outcome.ending is Ending.COMPLETE]
    found = [_cached(whole), _lengths(whole), _prompts(whole), _steps(whole), _buffered(whole)]
    return [check for check in found if check is not None]


def _lengths(whole: Sequence[Outcome]) -> RunCheck | None:
    return _as_expected(
        "output_length", "answers", "asked", whole, lambda o: (o.expected_output_tokens, o.output_tokens)
    )


def _prompts(whole: Sequence[Outcome]) -> RunCheck | None:
    return _as_expected(
        "prompt_length", "prompts", "expected", whole, lambda o: (o.expected_prompt_tokens, o.prompt_tokens)
    )


def _as_expected(
    name: str,
    things: str,
    verb: str,
    whole: Sequence[Outcome],
    lengths: Callable[[Outcome], tuple[int | None, int | None]],
) -> RunCheck | None:
    """Returns whether a length that the server told is the one that was meant."""
    pairs = [(meant, known) for meant, known in map(lengths, whole) if meant is not None]
    known = [(meant, known) for meant, known in pairs if known is not None]
    if not pairs:
        return None
    if not known:
        sentence = f"the server does not tell its token counts: whether {things} were as long as {verb} is not known"
        return note(name, False, None, None, sentence)
    wrong = [(meant, found) for meant, found in known if meant != found]
    sentence = f"all {len(known)} {things} had as many tokens as {verb}"
    if wrong:
        mean = sum(found - meant for meant, found in wrong) / len(wrong)
        sentence = f"{len(wrong)} of {len(known)} {things} were not as long as {verb}: {mean:+.1f} tokens on average"
    return note(name, not wrong, len(wrong) / len(known), 0, sentence)


def _cached(whole: Sequence[Outcome]) -> RunCheck | None:
    """Prefix hits beyond the expected ones, as a share of all prompt tokens."""
    known = [o for o in whole if o.cached_tokens is not None and o.expected_cached_tokens is not None]
    prompt_tokens = sum(o.prompt_tokens or o.expected_prompt_tokens or 0 for o in known)
    if not prompt_tokens:
        return None
    cached = sum(o.cached_tokens or 0 for o in known) / prompt_tokens
    expected = sum(o.expected_cached_tokens or 0 for o in known) / prompt_tokens
    sentence = f"{cached:.1%} of the prompt tokens were cached, {expected:.1%} expected"
    ok = cached <= expected + CONTAMINATION_LIMIT
    if not ok:
        sentence += ": prompts were seen before, use another --seed or restart the server"
    return RunCheck(name="cached", ok=ok, value=cached, limit=expected + CONTAMINATION_LIMIT, sentence=sentence)


def _steps(whole: Sequence[Outcome]) -> RunCheck | None:
    """Gaps of about 40 ms among shorter ones: a server that waits for an acknowledgement (Nagle) before it sends."""
    gaps = [gap / 1e6 for outcome in whole for gap in chunk_gaps_ns(outcome)]
    low, high = STEP_BAND_MS
    if len(gaps) < MIN_GAPS or (percentile(gaps, 50) or 0.0) > low / 2:
        return None
    width = high - low
    inside = sum(low <= gap < high for gap in gaps)
    beside = sum(low - width <= gap < low or high <= gap < high + width for gap in gaps) / 2
    share = inside / len(gaps)
    ok = share <= STEP_SHARE_LIMIT or inside <= 4 * beside
    sentence = f"{share:.1%} of the gaps between chunks are steps of 40 ms"
    fault = ": the server, or a proxy, sends with Nagle's algorithm (set TCP_NODELAY there)"
    return note("steps_40ms", ok, share, STEP_SHARE_LIMIT, sentence, fault)


def clustered_share(outcome: Outcome) -> float | None:
    """The share of gaps far shorter than the mean gap: near 0 for a stream, near 1 for one that was buffered."""
    gaps = chunk_gaps_ns(outcome)
    if len(gaps) < MIN_CHUNKS - 1:
        return None
    together_ns = max(TOGETHER_NS, TOGETHER_SHARE * sum(gaps) / len(gaps))
    return sum(gap < together_ns for gap in gaps) / len(gaps)


def _buffered(whole: Sequence[Outcome]) -> RunCheck | None:
    shares = [share for outcome in whole if (share := clustered_share(outcome)) is not None]
    value = percentile(shares, 50)
    if value is None:
        return None
    sentence = f"{value:.0%} of the chunks came together with the one before"
    fault = (
        ": something buffers the stream, or this client was kept from reading it; TTFT is too long and gaps are too "
        "short"
    )
    return note("buffered", value <= CLUSTERED_LIMIT, value, CLUSTERED_LIMIT, sentence, fault)


STALL = 10.0  # times the usual wait
TOO_GOOD = 1.5  # the tail that users would have felt, over the one that is shown
MIN_ANSWERS = 20
MOST_MISSED = 100_000  # of one request


def audit_closed_loop(run: Run) -> RunCheck | None:
    """Checks the worst of the run's servers. Returns None where there is too little to go by."""
    found = [check for arm in range(len(run.arms)) if (check := _check_one_server(run.measured(arm))) is not None]
    return max(found, key=lambda check: check.value or 0.0, default=None)


def _check_one_server(measured: Sequence[Outcome]) -> RunCheck | None:
    whole = [o for o in measured if o.ending is Ending.COMPLETE and o.sent_ns is not None and o.end_ns is not None]
    if len(whole) < MIN_ANSWERS:
        return None
    waits = [longest_wait_ns(outcome) for outcome in whole]
    usual_ns = max(1.0, percentile(waits, 50) or 0.0)
    each_ns = max(1.0, percentile([(o.end_ns or 0) - (o.sent_ns or 0) for o in whole], 50) or 0.0)
    missed = [felt for wait in waits if wait > STALL * usual_ns for felt in _not_sent(wait, each_ns)]
    known = [(percent, _ms(waits, percent), _ms([*waits, *missed], percent)) for percent in (90, 99)]
    percent, shown_ms, felt_ms = max(known, key=lambda one: one[2] / max(1e-6, one[1]))
    ratio = felt_ms / max(1e-6, shown_ms)
    ok = ratio <= TOO_GOOD
    sentence = "nothing points to requests that a stall kept from being sent"
    if not ok:
        sentence = (
            f"the server stood for up to {max(waits) / 1e6:,.0f} ms, and a closed loop sends nothing meanwhile: about "
            f"{len(missed):,} requests that users would have sent are missing, and the longest wait for a chunk would "
            f"be about {felt_ms:,.0f} ms at p{percent} instead of {shown_ms:,.0f} ms. Measure with --rate"
        )
    return note("closed_loop", ok, ratio, TOO_GOOD, sentence, unit="times")


def _ms(waits: Sequence[float], percent: int) -> float:
    return (percentile(waits, percent) or 0.0) / 1e6


def longest_wait_ns(outcome: Outcome) -> int:
    """For the first chunk or for a next one; without chunks, for the end."""
    sent_ns = outcome.sent_ns or 0
    instants = (sent_ns, *outcome.chunk_ns) if outcome.chunk_ns else (sent_ns, outcome.end_ns or sent_ns)
    return max(later - earlier for earlier, later in pairwise(instants))


def _not_sent(wait_ns: int, each_ns: float) -> list[float]:
    count = min(MOST_MISSED, int(wait_ns / each_ns))
    return [wait_ns - place * each_ns for place in range(1, count + 1)]
