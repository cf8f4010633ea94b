"""Service level objectives as text, as figures and as a verdict: `ttft_p99=300ms,tpot_p99=40ms,error_rate=1%`.

Two kinds of terms, which may stand together:
    of each request   ttft, tpot, e2e, max_stall, service_ttft, service_e2e = a time, at most: makes a request *good*
    of the run        the metrics of `client_metrics`: a time with _p50 _p90 _p95 _p99 _mean, at most; goodput at least
                      and error_rate at most, as shares; throughput (output tokens/s) and request_rate at least

TTFT and E2E are *response* times, from the intended start: an SLO is about users. Percentiles are of complete requests,
so the error rate is always looked at with them: where it is not named, it may be at most `DEFAULT_ERROR_RATE`. Limits
of each request without a `goodput` must hold for all.

`parse_slo` gives base units (ns, shares of 1, per second): what `Run.slo` holds.
"""

import math
import re
from collections.abc import Mapping

import msgspec

from splittime.bench.book import metrics
from splittime.bench.book.figures import Summary, summary
from splittime.bench.book.metrics import off_ns
from splittime.bench.book.records import Ending, Run
from splittime.bench.book.requests import PER_REQUEST_LIMITS
from splittime.core.errors import ConfigError

DEFAULT_ERROR_RATE = 0.01
EXAMPLE = "ttft_p99=300ms,tpot_p99=40ms,error_rate=1%,ttft=300ms,goodput=95%,throughput=100"
_VALUE = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Zµ%/]*)")


class SloResult(msgspec.Struct, frozen=True, kw_only=True):
    """One term. `limit` and `value` are in base units; `value` is None if the run cannot tell: then it is not ok."""

    name: str
    limit: float
    value: float | None
    ok: bool
    sentence: str


def parse_slo(text: str) -> dict[str, float]:
    """`name=value` terms with commas between. Raises `ConfigError` that names the term and what is known."""
    slo: dict[str, float] = {}
    for term in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in term.partition("="))
        if not equals:
            raise _refused(f"{term!r} is no term of an SLO: write name=value", term, f"for example {EXAMPLE}")
        _check_name(name)
        if name in slo:
            raise _refused(f"{name} is named twice", term, "keep one of them")
        slo[name] = _parse_value(name, value)
    if not slo:
        raise _refused("an empty SLO", text, f"for example {EXAMPLE}")
    return slo


def check_terms(slo: Mapping[str, float], run_slo: Mapping[str, float] | None = None) -> None:
    """Raises `ConfigError` for terms that nobody knows, or a goodput without a limit here or in the run's own SLO."""
    for name in slo:
        _check_name(name)
    if "goodput" in slo and not limits_of(slo, run_slo or {}):
        hint = "add what makes a request good, for example ttft=300ms,tpot=40ms"
        raise _refused("goodput needs a limit for each request", "goodput", hint)


def limits_of(slo: Mapping[str, float], run_slo: Mapping[str, float]) -> dict[str, float]:
    """Returns what makes a request good: the limits of each request in this SLO, or else those in the run's own."""
    own = {name: limit for name, limit in slo.items() if name in PER_REQUEST_LIMITS}
    return own or {name: limit for name, limit in run_slo.items() if name in PER_REQUEST_LIMITS}


def _check_name(name: str) -> None:
    if name not in PER_REQUEST_LIMITS and name not in metrics.known_metrics():
        raise metrics.unknown_metric(name, "slo", tuple(PER_REQUEST_LIMITS))


def _parse_value(name: str, text: str) -> float:
    match = _VALUE.fullmatch(text)
    if not match:
        raise _refused(f"{name}: {text!r} is no number with a unit", text, f"for example {EXAMPLE}")
    number, unit = float(match[1]), match[2]
    if not math.isfinite(number):
        raise _refused(f"{name}: {text} is too large a number", text, f"for example {EXAMPLE}")
    if name in metrics.SHARES:
        return _share(name, number, unit)
    if name in metrics.RATES:
        if unit not in ("", "/s"):
            raise _refused(f"{name}: {unit!r} is no unit of a rate", text, f"a number per second: {name}=100")
        return number
    if unit not in metrics.NS_PER_UNIT:
        what = f"{unit!r} is no unit of time" if unit else f"{text!r} has no unit"
        raise _refused(f"{name}: {what}", text, f"units are {', '.join(metrics.NS_PER_UNIT)}: {name}=300ms")
    return number * metrics.NS_PER_UNIT[unit]


def _share(name: str, number: float, unit: str) -> float:
    text = f"{number:g}{unit}"
    if unit not in ("", "%"):
        raise _refused(f"{name}: {unit!r} is no unit of a share", text, f"{name}=1% or {name}=0.01")
    share = number / 100 if unit else number
    if share > 1:
        hint = "a share is at most 100%" if unit else f"a share is at most 1; as a percentage: {name}={text}%"
        raise _refused(f"{name}: {text} is too much", text, hint)
    return share


def _refused(message: str, value: str, hint: str) -> ConfigError:
    return ConfigError(message, param="slo", value=value, hint=hint)


def check_slo(run: Run, slo: Mapping[str, float], arm: int = 0) -> list[SloResult]:
    """A result for each term of the run, in their order, and for the error rate and goodput if they are implied."""
    check_terms(slo, run.slo)
    return judge(summary(run, arm, limits=limits_of(slo, run.slo)), slo)


def judge(found: Summary, slo: Mapping[str, float]) -> list[SloResult]:
    """As `check_slo`, of a summary that was made with the same limits of each request."""
    terms = {name: limit for name, limit in slo.items() if name not in PER_REQUEST_LIMITS}
    if len(terms) < len(slo):
        terms.setdefault("goodput", 1.0)
    terms.setdefault("error_rate", DEFAULT_ERROR_RATE)
    return [_result(found, name, limit, name in slo) for name, limit in terms.items()]


def still_missed(run: Run, result: SloResult) -> bool:
    """Returns whether a term is missed also with all of the client's own lateness taken off. Of goodput and rates
    nobody can tell."""
    if result.ok or result.value is None or result.name in metrics.HIGHER_IS_BETTER:
        return False
    return result.value - off_ns(run, 0, metrics.parse_metric(result.name)) > result.limit


def _result(found: Summary, name: str, limit: float, is_named: bool) -> SloResult:
    value = metrics.value_of(found, name)
    ok = value is not None and (value >= limit if name in metrics.HIGHER_IS_BETTER else value <= limit)
    sentence = _sentence(found, name, limit, value, ok)
    if not is_named:
        sentence += f" (The limit where none is named; {name}=... sets another.)"
    return SloResult(name=name, limit=limit, value=value, ok=ok, sentence=sentence)


def _sentence(found: Summary, name: str, limit: float, value: float | None, ok: bool) -> str:
    if value is None:
        return f"{name} is not known: no request that could tell it was answered whole."
    relation = ("at least" if ok else "below") if name in metrics.HIGHER_IS_BETTER else ("at most" if ok else "above")
    clock = " from the intended start" if name.startswith(("ttft", "e2e")) else ""
    of = ""
    if name == "error_rate":
        of = f" ({found.errors} of {found.counted} intended)"
    elif name == "goodput" and found.goodput:
        of = f" ({found.goodput.good} of {found.goodput.intended} intended with {_limits_words(found.goodput.limits)})"
    return f"{name}{clock} is {metrics.shown(name, value)}, {relation} {metrics.shown(name, limit)}{of}."


def _limits_words(limits: Mapping[str, float]) -> str:
    """`ttft at most 300ms, tpot at most 40ms`."""
    return ", ".join(f"{name} at most {metrics.shown_ns(limit)}" for name, limit in limits.items())


def falls_short(run: Run, slo: Mapping[str, float]) -> bool:
    """Returns whether a server of the run answered nobody, or missed a term of the SLO."""
    return any(
        unanswered(run, arm) or any(not result.ok for result in (check_slo(run, slo, arm) if slo else ()))
        for arm in range(len(run.arms))
    )


def unanswered(run: Run, arm: int = 0) -> int:
    """Returns how many requests were meant to be answered, if none was; else 0."""
    endings = [outcome.ending for outcome in run.measured(arm) if outcome.ending is not Ending.CANCELLED]
    return 0 if Ending.COMPLETE in endings else len(endings)


def with_slo(run: Run, text: str) -> Run:
    """Returns the run with this SLO instead of its own. What makes a request good stays where the text does not say."""
    terms = parse_slo(text)
    check_terms(terms, run.slo)
    return msgspec.structs.replace(run, slo={**limits_of(terms, run.slo), **terms})
