"""The alerts of the SLOs, as in `alerts.py`, and the ratios that they watch.

SLOs burn in several windows at once (Google's SRE workbook, chapter 5): a page when 2 % of a month's budget went in an
hour or 5 % in six, a ticket when 10 % went in three days. The short window beside each ends the alert soon after.
"""

from typing import NamedTuple

from deploy.alerts import _ON, _ON_GATEWAY, GATEWAY, GATEWAYS, PAGE, SERVER, SERVING, TICKET, Alert
from splittime.gateway.budgets import DAY, MONTH
from splittime.ledger.account import LIMITS_OF_A_KEY

AVAILABLE = 0.999  # of requests, over 30 days
FAST = 0.99  # of first tokens, within:
FIRST_TOKEN_S = 1.0  # an edge of the histograms
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
OF_ONE_KEY = "|".join((*LIMITS_OF_A_KEY, DAY, MONTH))  # reasons of refusals that are no failure: a key is over its own


class Recording(NamedTuple):
    """A rule that keeps a ratio under a name, for one window."""

    name: str
    expr: str


def _rate(metric: str, window: str) -> str:
    return f"sum by (job) (rate({metric}[{window}]))"


def _failed(requests: str, refusals: str, window: str) -> str:
    """Returns the share of requests that ended in an error, missed their deadline, or were refused for want of room or
    of a key that the upstream knows; a key that is over a limit of its own is refused however much room there is."""
    every = _rate(requests, window)
    ended = _rate(f'{requests}{{finish_reason=~"error|deadline"}}', window)
    refused = _rate(f'{refusals}{{reason!~"{OF_ONE_KEY}"}}', window)
    return f"(({ended} or {every} * 0) + ({refused} or {every} * 0)) / {every}"


def _slow(histogram: str, window: str) -> str:
    quick = _rate(f'{histogram}_bucket{{le="{FIRST_TOKEN_S}"}}', window)
    return f"1 - {quick} / {_rate(f'{histogram}_count', window)}"


RATIOS = {
    "splittime:requests_failed": ("splittime_requests_total", "splittime_refusals_total"),
    "splittime:gateway_requests_failed": ("splittime_gateway_requests_total", "splittime_gateway_refusals_total"),
    "splittime:first_tokens_slow": ("splittime_time_to_first_token_seconds",),
    "splittime:gateway_first_bytes_slow": ("splittime_gateway_first_byte_seconds",),
}


def recordings() -> list[Recording]:
    """Returns each ratio in each window."""
    return [
        Recording(f"{name}:ratio_rate{window}", (_failed if len(of) > 1 else _slow)(*of, window))
        for name, of in RATIOS.items()
        for window in WINDOWS
    ]


def _burns(ratio: str, slo: float, *pairs: tuple[str, str, float]) -> str:
    """pairs: a long window, a short one, and how many times faster than allowed the budget goes."""
    budget = round(1 - slo, 6)
    terms = (
        f"({ratio}:ratio_rate{long} > {factor * budget:.6g} and {ratio}:ratio_rate{short} > {factor * budget:.6g})"
        for long, short, factor in pairs
    )
    return " or ".join(terms)


QUICKLY = (("1h", "5m", 14.4), ("6h", "30m", 6.0))
SLOWLY = (("3d", "6h", 1.0),)


def _slo(
    name: str, ratio: str, slo: float, what: str, whose: tuple[str, str, str], series: tuple[str, ...]
) -> list[Alert]:
    """Returns the page and the ticket of one ratio. whose: owner, job, runbook. series: one that grows by 30 a minute
    while it burns and not else, one that always grows by 70, and any that grow by 30 and are nothing to it; `le` in the
    first: it is of what was quick."""
    owner, job, runbook = whose
    first, second, *others = series
    is_quick = "le=" in first
    burning = {first: "0+70x500", second: "0+100x500"} if is_quick else {first: "0+30x500", second: "0+70x500"}
    calm = {first: "0+100x500", second: "0+100x500"} if is_quick else {first: "0+0x500", second: "0+70x500"}
    calm |= dict.fromkeys(others, "0+30x500")
    speeds = (
        ("BurnsFast", QUICKLY, PAGE, "2m", "70m", "within days"),
        ("BurnsSlowly", SLOWLY, TICKET, "1h", "8h", "before it ends"),
    )
    return [
        Alert(
            f"{name}{speed}",
            _burns(ratio, slo, *pairs),
            wait,
            severity,
            owner,
            runbook,
            f"{what}: the month's budget of {slo:.1%} is used up {how}.",
            burning,
            calm,
            at,
            {"job": job},
        )
        for speed, pairs, severity, wait, at, how in speeds
    ]


SLO_ALERTS = [
    *_slo(
        "SplittimeErrorBudget",
        "splittime:requests_failed",
        AVAILABLE,
        "Requests fail or are refused",
        (SERVING, SERVER, "requests-fail"),
        (
            f'splittime_requests_total{{{_ON},finish_reason="error"}}',
            f'splittime_requests_total{{{_ON},finish_reason="stop"}}',
            f'splittime_refusals_total{{{_ON},reason="max_open_requests"}}',
        ),
    ),
    *_slo(
        "SplittimeFirstTokenBudget",
        "splittime:first_tokens_slow",
        FAST,
        f"First tokens take more than {FIRST_TOKEN_S:g} s",
        (SERVING, SERVER, "slow-first-token"),
        (
            f'splittime_time_to_first_token_seconds_bucket{{{_ON},prompt_tokens="1-16",le="{FIRST_TOKEN_S}"}}',
            f'splittime_time_to_first_token_seconds_count{{{_ON},prompt_tokens="1-16"}}',
        ),
    ),
    *_slo(
        "SplittimeGatewayErrorBudget",
        "splittime:gateway_requests_failed",
        AVAILABLE,
        "Requests of the gateway fail or are refused",
        (GATEWAYS, GATEWAY, "requests-fail"),
        (
            f'splittime_gateway_refusals_total{{{_ON_GATEWAY},reason="draining",upstream=""}}',
            f'splittime_gateway_requests_total{{{_ON_GATEWAY},finish_reason="stop"}}',
            f'splittime_gateway_refusals_total{{{_ON_GATEWAY},reason="tokens_per_minute",upstream=""}}',
            f'splittime_gateway_refusals_total{{{_ON_GATEWAY},reason="tokens_per_day",upstream=""}}',
        ),
    ),
    *_slo(
        "SplittimeGatewayFirstByteBudget",
        "splittime:gateway_first_bytes_slow",
        FAST,
        f"First bytes of upstreams' streams take more than {FIRST_TOKEN_S:g} s",
        (GATEWAYS, GATEWAY, "slow-first-token"),
        (
            f'splittime_gateway_first_byte_seconds_bucket{{{_ON_GATEWAY},upstream="u",le="{FIRST_TOKEN_S}"}}',
            f'splittime_gateway_first_byte_seconds_count{{{_ON_GATEWAY},upstream="u"}}',
        ),
    ),
]
