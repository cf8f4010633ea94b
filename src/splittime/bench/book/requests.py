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

The client's figures of many requests at once, as arrays in time order: what summaries and comparisons are made from.

Each figure means what `client_request` says of one request; `tests/bench/test_client_figures.py` checks it.
Latencies are those of complete requests only: a request that the schedule cut short, or that failed, has no end to
measure. They are counted elsewhere, never left out of goodput.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from splittime.bench.book.records import Ending, Outcome
from splittime.ledger.account import ClosedAccount
from splittime.stats.intervals import Pooled

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


PER_REQUEST: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": response_ttft_ns,
    "service_ttft": service_ttft_ns,
    "tpot": tpot_ns,
    "e2e": response_ns,
    "service_e2e": service_ns,
    "schedule_lag": schedule_lag_ns,
}
SERIES = ("ttft", "service_ttft", "tpot", "chunk_gap", "token_gap", "max_stall", "e2e", "service_e2e", "schedule_lag")


def in_time_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: (outcome.intended_ns, outcome.index))


def complete(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.ending is Ending.COMPLETE]


def per_request(outcomes: Sequence[Outcome], name: str) -> NDArray[np.float64]:
    """One value for each, nan where there is none."""
    if name == "max_stall":
        return _longest(chunk_gaps(outcomes))
    values = (PER_REQUEST[name](outcome) for outcome in outcomes)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def series(outcomes: Sequence[Outcome], name: str) -> Pooled:
    """The values of one of `SERIES`, with what has none left out. `outcomes` must be complete and in time order."""
    if name == "chunk_gap":
        return chunk_gaps(outcomes)
    if name == "token_gap":
        return token_gaps(outcomes)
    return _there(per_request(outcomes, name))


def all_series(outcomes: Sequence[Outcome]) -> dict[str, Pooled]:
    """Each of `SERIES` as `series` has it, the chunks read but once. Token gaps are the chunk gaps themselves where
    every chunk is one token."""
    gaps = chunk_gaps(outcomes)
    found = {name: _there(per_request(outcomes, name)) for name in PER_REQUEST}
    found |= {"chunk_gap": gaps, "max_stall": _there(_longest(gaps))}
    is_token_a_chunk = all(o.chunk_tokens == (1,) * len(o.chunk_ns) for o in outcomes)
    return found | {"token_gap": gaps if is_token_a_chunk else token_gaps(outcomes)}


def _there(values: NDArray[np.float64]) -> Pooled:
    known = values[~np.isnan(values)]
    return Pooled(known, np.arange(len(known)), len(known))


def arrivals(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each chunk came, request after request, and how many each request had."""
    counts = np.array([len(outcome.chunk_ns) for outcome in outcomes], dtype=np.int64)
    flat = chain.from_iterable(outcome.chunk_ns for outcome in outcomes)
    return np.fromiter(flat, np.int64, int(counts.sum())), counts


def chunk_gaps(outcomes: Sequence[Outcome]) -> Pooled:
    at_ns, counts = arrivals(outcomes)
    owner = np.repeat(np.arange(len(outcomes)), counts)
    within = owner[1:] == owner[:-1]
    return Pooled(np.diff(at_ns)[within].astype(np.float64), owner[1:][within], len(outcomes))


def token_gaps(outcomes: Sequence[Outcome]) -> Pooled:
    """Chunk gaps, and a gap of 0 for each further token of a chunk; only of requests whose chunks told their tokens."""
    known = [o for o in outcomes if o.chunk_tokens is not None and len(o.chunk_tokens) == len(o.chunk_ns)]
    gaps = chunk_gaps(known)
    further = np.array([max(0, sum(o.chunk_tokens or ()) - len(o.chunk_ns)) for o in known], dtype=np.int64)
    owner = np.concatenate([gaps.request, np.repeat(np.arange(len(known)), further)])
    return Pooled(np.concatenate([gaps.values, np.zeros(further.sum())]), owner, len(known))


def _longest(gaps: Pooled) -> NDArray[np.float64]:
    """Returns the longest of each request's gaps, nan where there is none."""
    longest = np.full(gaps.num_requests, np.nan)
    if len(gaps.values):
        begins = np.flatnonzero(np.diff(gaps.request, prepend=-1))
        longest[gaps.request[begins]] = np.maximum.reduceat(gaps.values, begins)
    return longest


def token_arrivals(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """When each chunk came and how many tokens it brought: as told, else the request's tokens spread evenly, else 1."""
    at_ns, _ = arrivals(outcomes)
    tokens = np.fromiter(chain.from_iterable(_tokens_by_chunk(o) for o in outcomes), np.float64, len(at_ns))
    return at_ns, tokens


def _tokens_by_chunk(outcome: Outcome) -> Sequence[float]:
    chunks, total = len(outcome.chunk_ns), output_tokens(outcome)
    if outcome.chunk_tokens is not None and len(outcome.chunk_tokens) == chunks:
        return outcome.chunk_tokens
    return [total / chunks if total else 1.0] * chunks if chunks else ()
