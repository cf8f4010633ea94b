"""The client asks itself whether its figures are about the server.

`audit` makes the checks of a run. Lateness is judged against what was measured: up to `ALLOWED_SHARE` of the median
TTFT, and at least the floor beside it, it is small; up to `VOID_SHARE` it is a note that says by how much the figures
may be off; beyond that they cannot be used, and the run is void. So it is where it ran out of sockets, a worker died,
or its prompts were found in a cache where they should not be. A busy core is a note: what it cost stands in the lags.
What the server or the workload did is a note (`audit_answers`), and so are what a closed loop cannot see
(`audit_closed_loop`) and what the hypervisor took from this machine meanwhile, when its cores stood still
(`audit_steal`, whose check is given to `audit` ready made).

`stolen` reads the first line of Linux's /proc/stat: its eighth number is the time "stolen" from all cores since the
boot, in clock ticks (proc(5)). On a rented machine that is the most frequent reason for a doubtful tail: our golden
test has errors of 0.5 ms at p99 where 20 ms of 9 s were taken, and of 1.7 ms where 250 ms were. It voids nothing: it
may have hit the server as well as the client, and no more can be told here. Where it is not told there is no check.

`audit_answers` has what the answers themselves tell of faults: of the workload, of the server, of what lies between.
Only one of these voids a run: prompts that were found in the server's prefix cache beyond what was meant, because then
the figures are about the cache. The rest are notes: the figures stand, and mean what the sentence says.

`audit_closed_loop` says what a closed loop cannot see: the requests that it did not send while it waited for a server
that stood still. Its workers each wait for an answer before they ask again. A server that stands for 2 s so delays one
request of each worker, where users would have sent many more, and all of those would have waited: the tail that is
shown is too good ("coordinated omission"). What would have been seen is estimated as HdrHistogram does: a request that
waited so much longer than usual stands for others, each begun a usual answer's time later. Waits are those for chunks,
so that a long answer is none.
"""

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from splittime.bench import event_loop
from splittime.bench.book.metrics import start_lag_ns
from splittime.bench.book.records import Ending, Outcome, Phase, Run, RunCheck
from splittime.bench.book.requests import chunk_gaps_ns
from splittime.bench.share import Vitals
from splittime.ledger.derive import percentile

ALLOWED_SHARE = 0.05
VOID_SHARE = 0.25
LOOP_LAG_FLOOR_MS = 2.0
START_LAG_FLOOR_MS = 5.0
CPU_SHARE_LIMIT = 0.9
CONTAMINATION_LIMIT = 0.05
STEP_BAND_MS = (38.0, 44.5)  # Linux acknowledges after 40 ms when it has nothing to send
STEP_SHARE_LIMIT = 0.02
MIN_GAPS = 50
TOGETHER_SHARE = 0.1  # of the mean gap: chunks closer than that came together
TOGETHER_NS = 50_000  # and so did those closer than that, whatever the mean
CLUSTERED_LIMIT = 0.6
MIN_CHUNKS = 8


def audit(
    run: Run, vitals: Sequence[Vitals], steal: RunCheck | None = None, concurrency: int | None = None
) -> tuple[RunCheck, ...]:
    """Every question, also those that are answered well. concurrency: of a closed loop."""
    measured = [outcome for outcome in run.outcomes if outcome.phase is Phase.MEASURED]
    checks = [
        _died(vitals),
        _loop_lag(vitals, measured),
        _start_lag(measured),
        _cpu(vitals),
        _sockets(vitals),
        _nodelay(vitals),
        steal,
        _held(measured),
        _as_many_as_asked(run, measured),
        audit_closed_loop(run) if concurrency is not None else None,
    ]
    return tuple([check for check in checks if check is not None] + audit_answers(measured))


def median_ttft_ms(outcomes: Sequence[Outcome]) -> float | None:
    times_ns = [o.chunk_ns[0] - o.sent_ns for o in outcomes if o.chunk_ns and o.sent_ns is not None]
    median_ns = percentile(times_ns, 50)
    return None if median_ns is None else median_ns / 1e6


def _died(vitals: Sequence[Vitals]) -> RunCheck | None:
    died = [one.died for one in vitals if one.died is not None]
    if not died:
        return None
    return RunCheck(name="workers", ok=False, value=len(died), limit=0, unit="workers", sentence="; ".join(died))


def _loop_lag(vitals: Sequence[Vitals], measured: Sequence[Outcome]) -> RunCheck:
    """The worst process counts."""
    lags = max((one.loop_lag_ns for one in vitals), key=lambda its: percentile(its, 99) or 0.0, default=())
    longest_ms = max((lag for one in vitals for lag in one.loop_lag_ns), default=0) / 1e6
    value = (percentile(lags, 99) or 0.0) / 1e6
    text = f"the client's event loop was at most {value:.2f} ms late in 99 % of the time, {longest_ms:.1f} ms at worst"
    return _lateness("loop_lag", value, LOOP_LAG_FLOOR_MS, text, measured)


def _start_lag(measured: Sequence[Outcome]) -> RunCheck:
    lags = [lag for outcome in measured if (lag := start_lag_ns(outcome)) is not None]
    value = (percentile(lags, 99) or 0.0) / 1e6
    text = f"99 % of the requests were sent within {value:.2f} ms of their time"
    return _lateness("start_lag", value, START_LAG_FLOOR_MS, text, measured)


def _lateness(name: str, value: float, floor_ms: float, text: str, measured: Sequence[Outcome]) -> RunCheck:
    ttft_ms = median_ttft_ms(measured)
    allowed, usable = (max(floor_ms, share * (ttft_ms or 0.0)) for share in (ALLOWED_SHARE, VOID_SHARE))
    is_void = value > usable
    if value > allowed and ttft_ms:
        text += f": up to so much of a TTFT or a gap may be the client's, {value / ttft_ms:.0%} of the median TTFT"
    limit = usable if is_void else allowed
    return RunCheck(name=name, ok=value <= allowed, value=value, limit=limit, unit="ms", sentence=text, voids=is_void)


def _cpu(vitals: Sequence[Vitals]) -> RunCheck:
    value = max((one.cpu_share for one in vitals), default=0.0)
    sentence = f"the client used {value:.0%} of a core"
    if len(vitals) > 1:
        sentence = f"the busiest of {len(vitals)} client processes used {value:.0%} of a core"
    fault = ": what that cost is in its lags; use more --workers, or a machine of its own"
    return note("cpu", value <= CPU_SHARE_LIMIT, value, CPU_SHARE_LIMIT, sentence, fault)


def _sockets(vitals: Sequence[Vitals]) -> RunCheck:
    known = [one for one in vitals if one.sockets_limit > 0]
    tightest = min(known, key=lambda one: one.sockets_limit - one.most_sockets, default=None)
    most, limit = (tightest.most_sockets, tightest.sockets_limit - event_loop.SPARE) if tightest else (0, 0)
    refused = sum(one.out_of_sockets for one in vitals)
    sentence = f"{most} sockets open at most, of {limit} allowed"
    if refused:
        sentence += (
            f"; {refused} could not be opened: allow more with `ulimit -n`, use more --workers, or hold back with "
            "--max-in-flight (or no local port was free)"
        )
    ok, is_void = refused == 0 and most <= limit, refused > 0
    return RunCheck(name="sockets", ok=ok, value=most, limit=limit, unit="sockets", sentence=sentence, voids=is_void)


def _nodelay(vitals: Sequence[Vitals]) -> RunCheck:
    count = sum(one.sockets_without_nodelay for one in vitals)
    sentence = "TCP_NODELAY is on for every connection" if not count else f"{count} connections without TCP_NODELAY"
    return RunCheck(name="nodelay", ok=count == 0, value=count, limit=0, unit="sockets", sentence=sentence)


def _held(measured: Sequence[Outcome]) -> RunCheck | None:
    """The cap that was asked for, or a session's slow answers: lateness, but not a fault."""
    held = [outcome.held_ns for outcome in measured if outcome.held_ns > 0]
    if not held:
        return None
    p99_ms = (percentile([outcome.held_ns for outcome in measured], 99) or 0.0) / 1e6
    sentence = (
        f"{len(held)} of {len(measured)} requests were held back, by the cap on requests in flight or by their "
        f"session's turn before: p99 {p99_ms:.0f} ms; it is in their response times"
    )
    return note("held", False, p99_ms, 0, sentence, unit="ms")


def _as_many_as_asked(run: Run, measured: Sequence[Outcome]) -> RunCheck | None:
    """Only where a number was asked for, and fewer were begun: the clock or somebody ended the run before."""
    asked = run.settings.get("num_requests")
    begun = sum(outcome.ending is not Ending.UNSENT for outcome in measured)
    if not isinstance(asked, int) or begun >= asked * len(run.arms):
        return None
    why = run.stopped or "--duration ended it before: leave it out, or make it longer"
    wanted = asked * len(run.arms)
    sentence = f"{begun} of {wanted} requests were measured: {why}"
    return note("num_requests", False, begun, wanted, sentence, unit="requests")


STAT = Path("/proc/stat")
STEAL_FIELD = 8  # after the word "cpu"
ALLOWED_STEAL = 0.005


class Stolen(msgspec.Struct, frozen=True):
    """From all cores since the machine began, as told at an instant of the monotonic clock."""

    taken_s: float
    cores: int
    at_s: float


def stolen(at_s: float | None = None, path: Path = STAT) -> Stolen | None:
    """None where the system does not tell."""
    at_s = time.monotonic() if at_s is None else at_s
    try:
        words = [line.split() for line in path.read_text().splitlines() if line.startswith("cpu")]
        taken_s = int(words[0][STEAL_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return Stolen(taken_s, max(1, len(words) - 1), at_s)


def audit_steal(before: Stolen | None, after: Stolen | None) -> RunCheck | None:
    """Returns how much was taken between the two, as a share of the time of all cores."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    taken_s, took_s = max(0.0, after.taken_s - before.taken_s), after.at_s - before.at_s
    share = taken_s / (took_s * after.cores)
    cores = f"{after.cores} core{'s' * (after.cores > 1)}"
    sentence = (
        f"the hypervisor took {1000 * taken_s:.0f} ms of {took_s:.1f} s from this machine's {cores} ({share:.1%})"
    )
    fault = (
        ": what was in flight then waited for it, so p99 and above may be the neighbours' doing; repeat the run "
        "and believe the tails that come back, or take a machine of its own"
    )
    return note("steal", share <= ALLOWED_STEAL, share, ALLOWED_STEAL, sentence, fault)


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
