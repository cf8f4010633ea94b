"""The client asks itself whether its figures are about the server.

`audit` makes the checks of a run. Those that void it are the client's own faults: its event loop was late, it sent
late, it ran out of sockets or CPU time, a worker died, or its prompts were found in a cache where they should not be. A
lag is allowed to be `ALLOWED_SHARE` of the median TTFT, and at least the floor beside it: what it adds is then small
against what is measured. What the server or the workload did is a note (`audit_answers`), and so is what the machine's
other tenants did (`audit_steal`, whose check is given here ready made).
"""

from collections.abc import Sequence

from splittime.ledger.client_book import Check, Outcome, Phase, Run
from splittime.ledger.derive import percentile
from splittime.loadgen import sockets
from splittime.loadgen.audit_answers import audit_answers
from splittime.loadgen.share import Vitals

ALLOWED_SHARE = 0.05
LOOP_LAG_FLOOR_MS = 2.0
START_LAG_FLOOR_MS = 5.0
CPU_SHARE_LIMIT = 0.9


def audit(run: Run, vitals: Sequence[Vitals], steal: Check | None = None) -> tuple[Check, ...]:
    """Every question, also those that are answered well."""
    measured = [outcome for outcome in run.outcomes if outcome.phase is Phase.MEASURED]
    allowed_ms = ALLOWED_SHARE * (median_ttft_ms(measured) or 0.0)
    checks = [
        _died(vitals),
        _loop_lag(vitals, max(LOOP_LAG_FLOOR_MS, allowed_ms)),
        _start_lag(measured, max(START_LAG_FLOOR_MS, allowed_ms)),
        _cpu(vitals),
        _sockets(vitals),
        _nodelay(vitals),
        steal,
        _held(measured),
    ]
    return tuple([check for check in checks if check is not None] + audit_answers(measured))


def median_ttft_ms(outcomes: Sequence[Outcome]) -> float | None:
    times_ns = [o.chunk_ns[0] - o.sent_ns for o in outcomes if o.chunk_ns and o.sent_ns is not None]
    median_ns = percentile(times_ns, 50)
    return None if median_ns is None else median_ns / 1e6


def start_lag_ns(outcome: Outcome) -> int | None:
    """How late the client itself sent: not what a cap, a session or connecting took."""
    if outcome.sent_ns is None:
        return None
    return max(0, outcome.sent_ns - outcome.intended_ns - outcome.held_ns - (outcome.connect_ns or 0))


def _died(vitals: Sequence[Vitals]) -> Check | None:
    died = [one.died for one in vitals if one.died is not None]
    if not died:
        return None
    return Check(name="workers", ok=False, value=len(died), limit=0, unit="workers", sentence="; ".join(died))


def _loop_lag(vitals: Sequence[Vitals], limit_ms: float) -> Check:
    """The worst process counts."""
    lags = [percentile(one.loop_lag_ns, 99) or 0.0 for one in vitals]
    value = max(lags, default=0.0) / 1e6
    longest = max((lag for one in vitals for lag in one.loop_lag_ns), default=0) / 1e6
    sentence = f"the client's event loop was at most {value:.2f} ms late in 99 % of the time, {longest:.1f} ms at worst"
    return Check(name="loop_lag", ok=value <= limit_ms, value=value, limit=limit_ms, unit="ms", sentence=sentence)


def _start_lag(measured: Sequence[Outcome], limit_ms: float) -> Check:
    lags = [lag for outcome in measured if (lag := start_lag_ns(outcome)) is not None]
    value = (percentile(lags, 99) or 0.0) / 1e6
    sentence = f"99 % of the requests were sent within {value:.2f} ms of their time"
    return Check(name="start_lag", ok=value <= limit_ms, value=value, limit=limit_ms, unit="ms", sentence=sentence)


def _cpu(vitals: Sequence[Vitals]) -> Check:
    value = max((one.cpu_share for one in vitals), default=0.0)
    sentence = f"the client used {value:.0%} of a core"
    if len(vitals) > 1:
        sentence = f"the busiest of {len(vitals)} client processes used {value:.0%} of a core"
    return Check(
        name="cpu", ok=value <= CPU_SHARE_LIMIT, value=value, limit=CPU_SHARE_LIMIT, unit="", sentence=sentence
    )


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
    return Check(name="sockets", ok=ok, value=most, limit=limit, unit="sockets", sentence=sentence)


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
