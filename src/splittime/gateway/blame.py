"""What a failure says of the upstream that it happened at."""

import time

from splittime.gateway.breaker import Breaker
from splittime.gateway.failures import BrokenStream, LacksEndpoint, UpstreamFailure
from splittime.web import http


def blame(breaker: Breaker, failure: UpstreamFailure | BrokenStream, *, is_own: bool) -> None:
    """Tell the breaker. is_own: the failure may be this process's own."""
    if failure.is_fault and not is_own:
        breaker.note_failure(time.monotonic_ns())
    elif isinstance(failure, LacksEndpoint):
        breaker.note_success()
    elif isinstance(failure, UpstreamFailure) and failure.answer is not None:
        breaker.note_busy(time.monotonic_ns(), _retry_after_s(failure.answer.headers))
    else:
        breaker.note_nothing()


def _retry_after_s(headers: http.Headers) -> float | None:
    """Returns `Retry-After` in seconds; None for a date, or if there is none."""
    value = dict(headers).get(b"retry-after", b"")
    return float(value) if value.isdigit() else None
