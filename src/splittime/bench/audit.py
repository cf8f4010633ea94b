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
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from splittime.bench import sockets
from splittime.bench.audit_answers import audit_answers, audit_closed_loop, note
from splittime.bench.book.lateness import start_lag_ns
from splittime.bench.book.records import Ending, Outcome, Phase, Run, RunCheck
from splittime.bench.share import Vitals
from splittime.ledger.derive import percentile

ALLOWED_SHARE = 0.05
VOID_SHARE = 0.25
LOOP_LAG_FLOOR_MS = 2.0
START_LAG_FLOOR_MS = 5.0
CPU_SHARE_LIMIT = 0.9


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
    most, limit = (tightest.most_sockets, tightest.sockets_limit - sockets.SPARE) if tightest else (0, 0)
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
