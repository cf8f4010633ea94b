"""The client's figures of many requests at once, as arrays in time order: what summaries and comparisons are made from.

Each figure means what `client_request` says of one request; `tests/bench/test_client_figures.py` checks it.
Latencies are those of complete requests only: a request that the schedule cut short, or that failed, has no end to
measure. They are counted elsewhere, never left out of goodput.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from splittime.bench.book import requests as one
from splittime.bench.book.records import Ending, Outcome
from splittime.stats.intervals import Pooled

PER_REQUEST: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": one.response_ttft_ns,
    "service_ttft": one.service_ttft_ns,
    "tpot": one.tpot_ns,
    "e2e": one.response_ns,
    "service_e2e": one.service_ns,
    "schedule_lag": one.schedule_lag_ns,
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
    chunks, total = len(outcome.chunk_ns), one.output_tokens(outcome)
    if outcome.chunk_tokens is not None and len(outcome.chunk_tokens) == chunks:
        return outcome.chunk_tokens
    return [total / chunks if total else 1.0] * chunks if chunks else ()
