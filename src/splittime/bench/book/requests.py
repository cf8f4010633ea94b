"""What one request's outcome says in figures, by the client's clock. This file is their only definition.

Pure functions of an `Outcome`. With n output tokens, the first k of them in the first chunk:

    response TTFT = first chunk - intended start     what the user waited; includes the client's own lateness
    service TTFT  = first chunk - sent               what others publish; blind to a client that was made to wait
    response time = end - intended start
    service time  = end - sent
    TPOT          = (end - first chunk) / (n - k)    E2E - TTFT is the same by both clocks
    chunk gaps    = between chunks with content
    token gaps    = the same, and 0 between tokens that came in one chunk
    max stall     = the longest chunk gap
    schedule lag  = picked up - intended start - held on purpose      the client's own lateness

What did not happen, or was not told, is None. Where the server tells no tokens per chunk, k is 1 if there is a chunk
for (nearly) every token: with c chunks the true divisor lies in [c - 1, n - 1], so `MAX_UNSEEN_SHARE` bounds TPOT's
error. Otherwise TPOT is None.
"""

from collections.abc import Mapping
from itertools import pairwise

from splittime.bench.book.records import Ending, Outcome
from splittime.ledger.account import ClosedAccount

MAX_UNSEEN_SHARE = 0.05
ID_PREFIXES = ("chatcmpl-", "cmpl-")


def sent_as(account: ClosedAccount) -> str:
    """Returns the X-Request-Id that the account's request came with: the response's id without its prefix."""
    for prefix in ID_PREFIXES:
        if account.group_id.startswith(prefix):
            return account.group_id.removeprefix(prefix)
    return account.group_id


def response_ttft_ns(outcome: Outcome) -> int | None:
    return outcome.chunk_ns[0] - outcome.intended_ns if outcome.chunk_ns else None


def service_ttft_ns(outcome: Outcome) -> int | None:
    return outcome.chunk_ns[0] - outcome.sent_ns if outcome.chunk_ns and outcome.sent_ns is not None else None


def response_ns(outcome: Outcome) -> int | None:
    return outcome.end_ns - outcome.intended_ns if outcome.end_ns is not None else None


def service_ns(outcome: Outcome) -> int | None:
    return outcome.end_ns - outcome.sent_ns if outcome.end_ns is not None and outcome.sent_ns is not None else None


def schedule_lag_ns(outcome: Outcome) -> int | None:
    if outcome.picked_up_ns is None:
        return None
    return max(0, outcome.picked_up_ns - outcome.intended_ns - outcome.held_ns)


def output_tokens(outcome: Outcome) -> int | None:
    """As the usage says; else the sum of what the chunks said."""
    if outcome.output_tokens is not None:
        return outcome.output_tokens
    return sum(outcome.chunk_tokens) if outcome.chunk_tokens else None


def first_chunk_tokens(outcome: Outcome) -> int | None:
    tokens, chunks = output_tokens(outcome), len(outcome.chunk_ns)
    if not chunks or tokens is None:
        return None
    if outcome.chunk_tokens:
        return outcome.chunk_tokens[0]
    return 1 if tokens - chunks <= MAX_UNSEEN_SHARE * (tokens - 1) else None


def tpot_ns(outcome: Outcome) -> float | None:
    tokens, first = output_tokens(outcome), first_chunk_tokens(outcome)
    if tokens is None or first is None or outcome.end_ns is None or tokens <= first:
        return None
    return (outcome.end_ns - outcome.chunk_ns[0]) / (tokens - first)


def chunk_gaps_ns(outcome: Outcome) -> list[int]:
    return [after - before for before, after in pairwise(outcome.chunk_ns)]


def max_stall_ns(outcome: Outcome) -> int | None:
    return max(chunk_gaps_ns(outcome), default=None)


PER_REQUEST_LIMITS = {
    "ttft": response_ttft_ns,
    "service_ttft": service_ttft_ns,
    "tpot": tpot_ns,
    "e2e": response_ns,
    "service_e2e": service_ns,
    "max_stall": max_stall_ns,
}


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whole, and within each limit named in `PER_REQUEST_LIMITS`. What had no second token cannot break TPOT or stall.

    What cannot be judged, since the server did not tell its tokens, is not good.
    """
    return outcome.ending is Ending.COMPLETE and all(
        _is_within(outcome, name, limits[name]) for name in PER_REQUEST_LIMITS if name in limits
    )


def _is_within(outcome: Outcome, name: str, limit: float) -> bool:
    value = PER_REQUEST_LIMITS[name](outcome)
    if value is not None:
        return value <= limit
    if name == "max_stall":
        return bool(outcome.chunk_ns)
    return name == "tpot" and output_tokens(outcome) in (0, 1, first_chunk_tokens(outcome))
