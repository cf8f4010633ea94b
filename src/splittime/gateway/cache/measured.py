"""What the cache exports on `/metrics`: `splittime_gateway_cache_*`, nothing of them without a cache."""

from typing import TYPE_CHECKING

from splittime.gateway.cache.kept import KINDS
from splittime.gateway.cache.verifier import VERDICTS
from splittime.ledger.export.metrics import MetricSpec

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache

PREFIX = "splittime_gateway_cache_"
CACHE_METRICS = (
    MetricSpec(
        f"{PREFIX}requests_total",
        "counter",
        ("result", "why"),
        "Requests of models whose answers are kept: hit (equal or like), miss, shared, bypass (and why)",
    ),
    MetricSpec(f"{PREFIX}wrong_total", "counter", ("kind",), "Hits that were said to be wrong"),
    MetricSpec(
        f"{PREFIX}shadowed_total", "counter", ("kind", "outcome"), "Hits for which the model ran too, by what it said"
    ),
    MetricSpec(
        f"{PREFIX}verdicts_total",
        "counter",
        ("verdict",),
        "What the verifier was asked and said: yes, no, late, failed, not_asked (no room, or it is left alone)",
    ),
    MetricSpec(f"{PREFIX}errors_total", "counter", (), "Times that the store of answers failed"),
    MetricSpec(f"{PREFIX}answers", "gauge", (), "Answers kept"),
    MetricSpec(f"{PREFIX}bytes", "gauge", (), "Their bytes"),
    MetricSpec(f"{PREFIX}questions", "gauge", (), "Questions whose vectors are held"),
    MetricSpec(
        f"{PREFIX}false_hit_rate",
        "gauge",
        ("kind", "bound"),
        "Share of shadowed hits for which the model said something else, and the ends of its 95 % interval",
    ),
)

Series = dict[tuple[str, ...], float]


def cache_series(cache: "ResponseCache | None") -> dict[str, Series]:
    """Returns the values of each of `CACHE_METRICS`, by labels."""
    if cache is None:
        return {spec.name: {} for spec in CACHE_METRICS}
    values: list[Series] = [
        {(result, why): count for (result, why), count in cache.results.items()},
        {(kind,): cache.wrong[kind] for kind in KINDS},
        {(kind, found): count for (kind, found), count in cache.shadowed.items()},
        {} if cache.verifier is None else {(verdict,): cache.verifier.counts[verdict] for verdict in VERDICTS},
        {(): cache.num_errors},
        {(): cache.store.num_answers},
        {(): cache.store.num_bytes},
        {(): cache.num_questions},
        _rates(cache),
    ]
    return {spec.name: series for spec, series in zip(CACHE_METRICS, values, strict=True)}


def _rates(cache: "ResponseCache") -> Series:
    """The rate itself is absent while nothing was compared: it is not known to be 0."""
    from splittime.gateway.cache.shadow import wilson

    rates: Series = {}
    for kind in KINDS:
        false, trials = cache.false_hits(kind)
        rates[kind, "low"], rates[kind, "high"] = wilson(false, trials)
        if trials:
            rates[kind, "rate"] = false / trials
    return rates
