"""The metrics of the cache, of versions and of the audit log; the cache's are left out without a cache."""

from typing import TYPE_CHECKING

from splittime.gateway.cache.kept import KINDS
from splittime.gateway.cache.verifier import VERDICTS
from splittime.ledger.export.metrics import MetricSpec

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache
    from splittime.gateway.service import GatewayService

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
VERSION_METRICS = (
    MetricSpec("splittime_gateway_config_version", "gauge", (), "Number of the config that serves, 1 at the start"),
    MetricSpec(
        "splittime_gateway_config_changes_total",
        "counter",
        ("result",),
        "Changes of the config: started, applied, canary, promoted, rolled_back, refused",
    ),
    MetricSpec(
        "splittime_gateway_canary_requests", "gauge", ("arm",), "Requests that count for a canary's decision, by arm"
    ),
    MetricSpec("splittime_gateway_audit_lines_total", "counter", (), "Lines written to the audit log"),
    MetricSpec("splittime_gateway_audit_drops_total", "counter", (), "Records that the audit log lacks"),
)


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
    from splittime.gateway.cache.service import wilson

    rates: Series = {}
    for kind in KINDS:
        false, trials = cache.false_hits(kind)
        rates[kind, "low"], rates[kind, "high"] = wilson(false, trials)
        if trials:
            rates[kind, "rate"] = false / trials
    return rates


def version_series(gateway: "GatewayService") -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the samples of `VERSION_METRICS` by name and labels."""
    versions, audit = gateway.versions, gateway.audit
    trial = None if versions is None else versions.trial
    arms: dict[tuple[str, ...], float] = {}
    if trial is not None:
        arms = {("canary",): trial.num_tried, ("others",): trial.num_control}
    number = float(gateway.version.partition(":")[0] or 0)
    changes: dict[tuple[str, ...], float] = (
        {} if versions is None else {(what,): float(count) for what, count in versions.counts.items()}
    )
    return {
        "splittime_gateway_config_version": {(): number},
        "splittime_gateway_config_changes_total": changes,
        "splittime_gateway_canary_requests": arms,
        "splittime_gateway_audit_lines_total": {(): 0 if audit is None else audit.num_lines},
        "splittime_gateway_audit_drops_total": {(): 0 if audit is None else audit.num_dropped},
    }
