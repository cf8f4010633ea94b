"""Grafana dashboards made of the table of metrics: a panel for each metric, under the heading that `ROWS` puts it.

A histogram is shown as its p50, p95 and p99, a counter as its rate, a gauge as it is.
`tests/operations/test_dashboards.py` holds that each metric has one panel, and that no query names another.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any

from splittime.gateway.metrics import GATEWAY_METRICS
from splittime.ledger.export.metrics import METRICS, MetricSpec

SCHEMA_VERSION = 39  # Grafana 11 and later read it
COLUMNS, WIDTH, HEIGHT = 24, 8, 7
SELECTED = 'job=~"$job", instance=~"$instance"'
QUANTILES = (0.5, 0.95, 0.99)
OTHER = "More"

Rows = dict[str, tuple[str, ...]]

SERVER_ROWS: Rows = {
    "What users feel": (
        "splittime_time_to_first_token_seconds",
        "splittime_inter_token_latency_seconds",
        "splittime_e2e_seconds",
        "splittime_time_per_output_token_seconds",
        "splittime_max_stall_seconds",
        "splittime_requests_total",
        "splittime_refusals_total",
        "splittime_tokens_total",
    ),
    "Where the time goes": (
        "splittime_stage_seconds",
        "splittime_requests_waiting",
        "splittime_requests_running",
        "splittime_adapters",
        "splittime_waiting_prompt_tokens",
        "splittime_step_seconds",
        "splittime_steps_total",
        "splittime_send_lag_seconds",
        "splittime_unseen_seconds",
        "splittime_cancel_to_freed_seconds",
    ),
    "KV cache": (
        "splittime_blocks_used",
        "splittime_blocks_cached",
        "splittime_blocks_total",
        "splittime_prefix_query_tokens_total",
        "splittime_prefix_hit_tokens_total",
        "splittime_prefix_host_hit_tokens_total",
        "splittime_preemptions_total",
        "splittime_host_blocks_used",
        "splittime_host_blocks_total",
        "splittime_offloaded_tokens_total",
        "splittime_restored_tokens_total",
    ),
    "Guessing ahead": (
        "splittime_draft_tokens_total",
        "splittime_accepted_draft_tokens_total",
        "splittime_drafted_rows_total",
        "splittime_accepted_drafts_by_position_total",
    ),
}
GATEWAY_ROWS: Rows = {
    "What users feel": (
        "splittime_gateway_requests_total",
        "splittime_gateway_refusals_total",
        "splittime_gateway_first_byte_seconds",
        "splittime_stage_seconds",
    ),
    "Upstreams": (
        "splittime_gateway_attempts_total",
        "splittime_gateway_retries_total",
        "splittime_gateway_breaker_open",
        "splittime_gateway_requests_in_flight",
        "splittime_gateway_in_flight_limit",
        "splittime_gateway_tokens_in_flight",
        "splittime_gateway_round_trip_seconds",
        "splittime_gateway_expected_wait_seconds",
        "splittime_gateway_affinity_total",
    ),
    "Queue and lesser answers": (
        "splittime_gateway_queued_requests",
        "splittime_gateway_queued_tokens",
        "splittime_gateway_degradation_level",
        "splittime_gateway_degraded_total",
        "splittime_gateway_budget_used_tokens",
        "splittime_gateway_loop_lag_seconds",
    ),
}


def dashboards() -> dict[str, dict[str, Any]]:
    """Returns each dashboard by its file's name."""
    return {
        "server.json": _dashboard("splittime: servers", "splittime-server", "splittime", METRICS, SERVER_ROWS),
        "gateway.json": _dashboard(
            "splittime: gateways", "splittime-gateway", "splittime-gateway", GATEWAY_METRICS, GATEWAY_ROWS
        ),
    }


def _dashboard(title: str, uid: str, job: str, specs: Iterable[MetricSpec], rows: Rows) -> dict[str, Any]:
    by_name = {spec.name: spec for spec in specs}
    placed = {name for names in rows.values() for name in names}
    sections = {**rows, OTHER: tuple(name for name in by_name if name not in placed)}
    return {
        "uid": uid,
        "title": title,
        "tags": ["splittime"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(job, next(iter(by_name)))},
        "panels": _panels({heading: [by_name[name] for name in names] for heading, names in sections.items()}),
    }


def _variables(job: str, metric: str) -> list[dict[str, Any]]:
    """metric: one that each of them exports."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    chosen = {"type": "query", "datasource": source, "refresh": 2, "includeAll": True, "multi": True}
    jobs, instances = f"label_values({metric}_count, job)", f'label_values({metric}_count{{job=~"$job"}}, instance)'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {**chosen, "name": "job", "query": jobs, "current": {"text": [job], "value": [job]}},
        {**chosen, "name": "instance", "query": instances, "current": {"text": ["All"], "value": ["$__all"]}},
    ]


def _panels(sections: dict[str, list[MetricSpec]]) -> list[dict[str, Any]]:
    """Returns a heading for each section, and its panels in rows of three below it."""
    ids, panels, y = count(1), [], 0
    for heading, specs in sections.items():
        panels.append(
            {
                "id": next(ids),
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for place, spec in enumerate(specs):
            column, line = place % (COLUMNS // WIDTH), place // (COLUMNS // WIDTH)
            at = {"x": column * WIDTH, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": next(ids), "gridPos": at, **_panel(spec)})
        y += -(-len(specs) // (COLUMNS // WIDTH)) * HEIGHT
    return panels


def _panel(spec: MetricSpec) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": spec.name.removeprefix("splittime_"),
        "description": f"{spec.help}. `{spec.name}`",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": _unit(spec), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expr, "legendFormat": legend}
            for place, (expr, legend) in enumerate(_queries(spec))
        ],
    }


def _queries(spec: MetricSpec) -> list[tuple[str, str]]:
    """Returns what is asked, and how the answers are called. Of a histogram with labels, p95 by its first one."""
    if spec.kind == "counter":
        by = f"sum by ({', '.join(spec.labels)}) " if spec.labels else "sum by (instance) "
        return [(f"{by}(rate({spec.name}{{{SELECTED}}}[$__rate_interval]))", _legend(spec.labels or ("instance",)))]
    if spec.kind == "gauge":
        return [(f"{spec.name}{{{SELECTED}}}", _legend((*spec.labels, "instance")))]
    by = [name for name in spec.labels if name not in ("prompt_tokens", "cause")]
    quantiles = (0.95,) if by else QUANTILES
    rate = f"sum by ({', '.join((*by, 'le'))}) (rate({spec.name}_bucket{{{SELECTED}}}[$__rate_interval]))"
    return [(f"histogram_quantile({at}, {rate})", f"p{at * 100:g} {_legend(by)}".rstrip()) for at in quantiles]


def _legend(labels: Iterable[str]) -> str:
    return " ".join(f"{{{{{name}}}}}" for name in labels)


def _unit(spec: MetricSpec) -> str:
    """Returns Grafana's name of it. A rate of seconds a second is a share of the time."""
    if "seconds" in spec.name:
        return "percentunit" if spec.kind == "counter" else "s"
    if spec.name.endswith(("_ratio", "_rate")):
        return "percentunit"
    if spec.name.endswith("_bytes"):
        return "bytes"
    return "cps" if spec.kind == "counter" else "short"
