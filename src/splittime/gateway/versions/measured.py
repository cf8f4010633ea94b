"""What `/metrics` tells of versions and of the audit log."""

from typing import TYPE_CHECKING

from splittime.ledger.export.metrics import MetricSpec

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService

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
