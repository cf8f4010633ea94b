"""The alerts: what is asked of Prometheus, who is called, which page says what to do, and what makes each fire.

`generate.py` writes them as Prometheus' rules, and the series under `fires` and `silent` as tests for promtool.
`tests/operations/test_alerts.py` holds that no expression names a metric or a label that nobody exports.
"""

from typing import NamedTuple

SERVER, GATEWAY = "splittime", "splittime-gateway"  # jobs of Prometheus
PAGE, TICKET = "page", "ticket"
SERVING, GATEWAYS = "serving", "gateway"  # owners: change them to your teams' names


class Alert(NamedTuple):
    """owner, severity: labels. runbook: a page of docs/runbooks. fires, silent: series with their values from minute 0
    on, in promtool's notation. at: when it fires. told: the labels that it then has, beside its own."""

    name: str
    expr: str
    wait: str
    severity: str
    owner: str
    runbook: str
    summary: str
    fires: dict[str, str]
    silent: dict[str, str]
    at: str
    told: dict[str, str]


_ON = f'job="{SERVER}",instance="a"'
_ON_GATEWAY = f'job="{GATEWAY}",instance="a"'
_AT = {"job": SERVER, "instance": "a"}
_AT_GATEWAY = {"job": GATEWAY, "instance": "a"}

SERVER_ALERTS = [
    Alert(
        "SplittimeDown",
        f'up{{job="{SERVER}"}} == 0',
        "2m",
        PAGE,
        SERVING,
        "down",
        "A server does not answer Prometheus.",
        {f"up{{{_ON}}}": "0x60"},
        {f"up{{{_ON}}}": "1x60"},
        "10m",
        _AT,
    ),
    Alert(
        "SplittimeGone",
        f'absent(up{{job="{SERVER}"}})',
        "5m",
        PAGE,
        SERVING,
        "down",
        "Prometheus knows of no server at all.",
        {f"up{{{_ON_GATEWAY}}}": "1x60"},
        {f"up{{{_ON}}}": "1x60"},
        "10m",
        {"job": SERVER},
    ),
    Alert(
        "SplittimeRefuses",
        "sum by (job, instance) (rate(splittime_refusals_total[5m])) > 0.05 * sum by (job, instance) "
        "(rate(splittime_requests_total[5m]))",
        "5m",
        TICKET,
        SERVING,
        "overload",
        "More than 5 % of the requests are refused before the engine.",
        {
            f'splittime_refusals_total{{{_ON},reason="queued_requests"}}': "0+10x60",
            f'splittime_requests_total{{{_ON},finish_reason="stop"}}': "0+90x60",
        },
        {
            f'splittime_refusals_total{{{_ON},reason="queued_requests"}}': "0+1x60",
            f'splittime_requests_total{{{_ON},finish_reason="stop"}}': "0+90x60",
        },
        "20m",
        _AT,
    ),
    Alert(
        "SplittimeQueueStands",
        "min_over_time(splittime_requests_waiting[10m]) > 0 and avg_over_time(splittime_requests_waiting[10m]) > "
        "avg_over_time(splittime_requests_running[10m])",
        "5m",
        TICKET,
        SERVING,
        "overload",
        "For ten minutes the queue was never empty, and longer than what runs.",
        {f"splittime_requests_waiting{{{_ON}}}": "90x60", f"splittime_requests_running{{{_ON}}}": "64x60"},
        {
            f"splittime_requests_waiting{{{_ON}}}": "90 0 90 0 90 0 90x54",
            f"splittime_requests_running{{{_ON}}}": "64x60",
        },
        "16m",
        _AT,
    ),
    Alert(
        "SplittimePreempts",
        "rate(splittime_preemptions_total[10m]) > 0.1 * sum by (job, instance) (rate(splittime_requests_total[10m]))",
        "10m",
        TICKET,
        SERVING,
        "preemptions",
        "One request in ten loses its blocks of KV cache and is computed again.",
        {
            f"splittime_preemptions_total{{{_ON}}}": "0+20x60",
            f'splittime_requests_total{{{_ON},finish_reason="stop"}}': "0+100x60",
        },
        {
            f"splittime_preemptions_total{{{_ON}}}": "0+5x60",
            f'splittime_requests_total{{{_ON},finish_reason="stop"}}': "0+100x60",
        },
        "30m",
        _AT,
    ),
    Alert(
        "SplittimeEventLoopBusy",
        "histogram_quantile(0.99, sum by (job, instance, le) (rate(splittime_unseen_seconds_bucket[10m]))) > 0.1",
        "10m",
        TICKET,
        SERVING,
        "event-loop",
        "One request in a hundred lies unread for more than 0.1 s, since the server's event loop is busy.",
        {
            f'splittime_unseen_seconds_bucket{{{_ON},le="0.1"}}': "0+90x60",
            f'splittime_unseen_seconds_bucket{{{_ON},le="1.0"}}': "0+100x60",
            f'splittime_unseen_seconds_bucket{{{_ON},le="+Inf"}}': "0+100x60",
        },
        {
            f'splittime_unseen_seconds_bucket{{{_ON},le="0.1"}}': "0+100x60",
            f'splittime_unseen_seconds_bucket{{{_ON},le="1.0"}}': "0+100x60",
            f'splittime_unseen_seconds_bucket{{{_ON},le="+Inf"}}': "0+100x60",
        },
        "30m",
        _AT,
    ),
    Alert(
        "SplittimePaused",
        "min_over_time(splittime_paused[15m]) == 1",
        "1m",
        TICKET,
        SERVING,
        "paused",
        "The engine has been paused for a quarter of an hour.",
        {f"splittime_paused{{{_ON}}}": "1x60"},
        {f"splittime_paused{{{_ON}}}": "1x12 0 1x30"},
        "20m",
        _AT,
    ),
    Alert(
        "SplittimeForecastIsOff",
        "splittime_step_prediction_error_ratio > 0.5",
        "30m",
        TICKET,
        SERVING,
        "forecast",
        "Steps take other times than the model predicts: what admission expects is wrong.",
        {f'splittime_step_prediction_error_ratio{{{_ON},kind="decode"}}': "0.8x60"},
        {f'splittime_step_prediction_error_ratio{{{_ON},kind="decode"}}': "0.2x60"},
        "40m",
        {**_AT, "kind": "decode"},
    ),
    Alert(
        "SplittimeLedgerLoses",
        "increase(splittime_ledger_drops_total[15m]) > 0",
        "1m",
        TICKET,
        SERVING,
        "ledger",
        "Records are missing in the ledger's file.",
        {f'splittime_ledger_drops_total{{{_ON},reason="disk"}}': "0x5 0+5x55"},
        {f'splittime_ledger_drops_total{{{_ON},reason="disk"}}': "7x60"},
        "15m",
        {**_AT, "reason": "disk"},
    ),
    Alert(
        "SplittimeAccountsInvalid",
        "increase(splittime_invalid_accounts_total[1h]) > 0",
        "0m",
        TICKET,
        SERVING,
        "ledger",
        "An account does not sum to its request's time: a defect of ours.",
        {f"splittime_invalid_accounts_total{{{_ON}}}": "0x5 1x55"},
        {f"splittime_invalid_accounts_total{{{_ON}}}": "1x60"},
        "15m",
        _AT,
    ),
]
