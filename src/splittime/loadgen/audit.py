"""The client asks itself whether its figures are about the server.

`audit` makes the checks of a run. Lateness is judged against what was measured: up to `ALLOWED_SHARE` of the median
TTFT, and at least the floor beside it, it is small; up to `VOID_SHARE` it is a note that says by how much the figures
may be off; beyond that they cannot be used, and the run is void. So it is where it ran out of sockets, a worker died,
or its prompts were found in a cache where they should not be. A busy core is a note: what it cost stands in the lags.
What the server or the workload did is a note (`audit_answers`), and so are what a closed loop cannot see
(`audit_closed_loop`) and what the machine's other tenants did (`audit_steal`, whose check is given here ready made).
"""

from collections.abc import Sequence

from splittime.ledger.client_book import Check, Ending, Outcome, Phase, Run
from splittime.ledger.client_lateness import start_lag_ns
from splittime.ledger.derive import percentile
from splittime.loadgen import sockets
from splittime.loadgen.audit_answers import audit_answers
from splittime.loadgen.audit_closed_loop import audit_closed_loop
from splittime.loadgen.share import Vitals

ALLOWED_SHARE = 0.05
VOID_SHARE = 0.25
LOOP_LAG_FLOOR_MS = 2.0
START_LAG_FLOOR_MS = 5.0
CPU_SHARE_LIMIT = 0.9


def audit(
    run: Run, vitals: Sequence[Vitals], steal: Check | None = None, concurrency: int | None = None
) -> tuple[Check, ...]:
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


def _died(vitals: Sequence[Vitals]) -> Check | None:
    died = [one.died for one in vitals if one.died is not None]
    if not died:
        return None
    return Check(name="workers", ok=False, value=len(died), limit=0, unit="workers", sentence="; ".join(died))


def _loop_lag(vitals: Sequence[Vitals], measured: Sequence[Outcome]) -> Check:
    """The worst process counts."""
    lags = max((one.loop_lag_ns for one in vitals), key=lambda its: percentile(its, 99) or 0.0, default=())
    longest_ms = max((lag for one in vitals for lag in one.loop_lag_ns), default=0) / 1e6
    value = (percentile(lags, 99) or 0.0) / 1e6
    said = f"the client's event loop was at most {value:.2f} ms late in 99 % of the time, {longest_ms:.1f} ms at worst"
    return _lateness("loop_lag", value, LOOP_LAG_FLOOR_MS, said, measured)


def _start_lag(measured: Sequence[Outcome]) -> Check:
    lags = [lag for outcome in measured if (lag := start_lag_ns(outcome)) is not None]
    value = (percentile(lags, 99) or 0.0) / 1e6
    said = f"99 % of the requests were sent within {value:.2f} ms of their time"
    return _lateness("start_lag", value, START_LAG_FLOOR_MS, said, measured)


def _lateness(name: str, value: float, floor_ms: float, said: str, measured: Sequence[Outcome]) -> Check:
    ttft_ms = median_ttft_ms(measured)
    allowed, usable = (max(floor_ms, share * (ttft_ms or 0.0)) for share in (ALLOWED_SHARE, VOID_SHARE))
    is_void = value > usable
    if value > allowed and ttft_ms:
        said += f": up to so much of a TTFT or a gap may be the client's, {value / ttft_ms:.0%} of the median TTFT"
    limit = usable if is_void else allowed
    return Check(name=name, ok=value <= allowed, value=value, limit=limit, unit="ms", sentence=said, voids=is_void)


def _cpu(vitals: Sequence[Vitals]) -> Check:
    value = max((one.cpu_share for one in vitals), default=0.0)
    sentence = f"the client used {value:.0%} of a core"
    if len(vitals) > 1:
        sentence = f"the busiest of {len(vitals)} client processes used {value:.0%} of a core"
    ok = value <= CPU_SHARE_LIMIT
    if not ok:
        sentence += ": what that cost is in its lags; use more --workers, or a machine of its own"
    return Check(name="cpu", ok=ok, value=value, limit=CPU_SHARE_LIMIT, unit="", sentence=sentence, voids=False)


def _sockets(vitals: Sequence[Vitals]) -> Check:
    told = [one for one in vitals if one.sockets_limit > 0]
    tightest = min(told, key=lambda one: one.sockets_limit - one.most_sockets, default=None)
    most, limit = (tightest.most_sockets, tightest.sockets_limit - sockets.SPARE) if tightest else (0, 0)
    refused = sum(one.out_of_sockets for one in vitals)
    sentence = f"{most} sockets open at most, of {limit} allowed"
    if refused:
        sentence += (
            f"; {refused} could not be opened: allow more with `ulimit -n`, use more --workers, or hold back with "
            "--max-in-flight (or no local port was free)"
        )
    ok = refused == 0 and most <= limit
    return Check(name="sockets", ok=ok, value=most, limit=limit, unit="sockets", sentence=sentence, voids=refused > 0)


def _nodelay(vitals: Sequence[Vitals]) -> Check:
    count = sum(one.sockets_without_nodelay for one in vitals)
    sentence = "TCP_NODELAY is on for every connection" if not count else f"{count} connections without TCP_NODELAY"
    return Check(name="nodelay", ok=count == 0, value=count, limit=0, unit="sockets", sentence=sentence)


def _held(measured: Sequence[Outcome]) -> Check | None:
    """The cap that was asked for, or a session's slow answers: lateness, but not a fault."""
    held = [outcome.held_ns for outcome in measured if outcome.held_ns > 0]
    if not held:
        return None
    p99_ms = (percentile([outcome.held_ns for outcome in measured], 99) or 0.0) / 1e6
    sentence = (
        f"{len(held)} of {len(measured)} requests were held back, by the cap on requests in flight or by their "
        f"session's turn before: p99 {p99_ms:.0f} ms; it is in their response times"
    )
    return Check(name="held", ok=False, value=p99_ms, limit=0, unit="ms", sentence=sentence, voids=False)


def _as_many_as_asked(run: Run, measured: Sequence[Outcome]) -> Check | None:
    """Only where a number was asked for, and fewer were begun: the clock or somebody ended the run before."""
    asked = run.settings.get("num_requests")
    begun = sum(outcome.ending is not Ending.UNSENT for outcome in measured)
    if not isinstance(asked, int) or begun >= asked * len(run.arms):
        return None
    why = run.stopped or "--duration ended it before: leave it out, or make it longer"
    sentence = f"{begun} of {asked * len(run.arms)} requests were measured: {why}"
    wanted = asked * len(run.arms)
    return Check(
        name="num_requests", ok=False, value=begun, limit=wanted, unit="requests", sentence=sentence, voids=False
    )
