"""Runs for the tests of the client's figures: hand-made outcomes, drawn ones, and Hypothesis strategies for any."""

import numpy as np
from hypothesis import strategies as st

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run

MS = 1_000_000
S = 1000 * MS


def outcome(index: int = 0, **changes) -> Outcome:
    """Intended at 0, sent 10 ms later, first chunk of 2 tokens at 60 ms, 3 more at 80, 1 at 130, end at 140 ms."""
    plain = {
        "index": index,
        "request_id": f"r-{index}",
        "phase": Phase.MEASURED,
        "ending": Ending.COMPLETE,
        "intended_ns": 0,
        "picked_up_ns": 4 * MS,
        "connect_ns": 0,
        "sent_ns": 10 * MS,
        "headers_ns": 50 * MS,
        "chunk_ns": (60 * MS, 80 * MS, 130 * MS),
        "chunk_tokens": (2, 3, 1),
        "end_ns": 140 * MS,
        "status": 200,
        "prompt_tokens": 40,
        "output_tokens": 6,
    }
    return Outcome(**{**plain, **changes})


def run(outcomes, **changes) -> Run:
    plain = {
        "begin_ns": 0,
        "begin_unix_ns": 1_700_000_000 * 10**9,
        "measured_from_ns": 0,
        "measured_until_ns": S,
        "arms": (Arm(url="http://127.0.0.1:8000", kind="mock"),),
        "outcomes": tuple(outcomes),
    }
    return Run(**{**plain, **changes})


def ar1(rng: np.random.Generator, size: int, dependence: float) -> np.ndarray:
    """Of mean 0 and variance 1, each value `dependence` times the one before and something new."""
    values = np.empty(size)
    values[0] = rng.normal()
    fresh = rng.normal(size=size) * np.sqrt(1 - dependence**2)
    for i in range(1, size):
        values[i] = dependence * values[i - 1] + fresh[i]
    return values


def drawn_run(
    seed: int, size: int = 400, slower: float = 1.0, dependence: float = 0.5, *, arm: int = 0, noise=None, **changes
) -> Run:
    """A run whose TTFT is log-normal about 50 ms, dependent in time; each `slower` times slower. 20 requests a second,
    6 chunks of a token each. `noise`: the seed of what two runs of one schedule do not share."""
    rng = np.random.default_rng(seed)
    at_ns = np.cumsum(rng.exponential(S / 20, size)).astype(int)
    ttft_ns = 50 * MS * slower * np.exp(0.4 * ar1(rng, size, dependence))
    gaps_ns = rng.gamma(20, MS, (size, 5)) * slower
    if noise is not None:
        other = np.random.default_rng(noise)
        ttft_ns, gaps_ns = ttft_ns * np.exp(0.1 * other.normal(size=size)), gaps_ns * other.gamma(50, 0.02, (size, 5))
    first = at_ns + MS + ttft_ns.astype(int)
    chunks = np.concatenate([first[:, None], first[:, None] + np.cumsum(gaps_ns.astype(int), axis=1)], axis=1)
    outcomes = [
        outcome(
            i,
            arm=arm,
            intended_ns=int(at_ns[i]),
            picked_up_ns=int(at_ns[i]),
            sent_ns=int(at_ns[i]) + MS,
            chunk_ns=tuple(chunks[i].tolist()),
            chunk_tokens=(1,) * 6,
            end_ns=int(chunks[i, -1]) + MS,
            prompt_tokens=int(rng.integers(1, 400)),
        )
        for i in range(size)
    ]
    window = {"measured_from_ns": int(at_ns[0]), "measured_until_ns": int(at_ns[-1]) + 1}
    return run(outcomes, **{**window, "seed": seed, **changes})


@st.composite
def outcomes(draw) -> Outcome:
    """Any outcome: of any ending, with or without chunks, tokens told or not."""
    at = draw(st.integers(0, 10**9))
    instants = [at + sum(gaps) for gaps in _prefixes(draw(st.lists(st.integers(0, 10**8), min_size=4, max_size=12)))]
    picked, sent, headers, *chunks = instants
    ending = draw(st.sampled_from(Ending))
    tokens = draw(st.lists(st.integers(0, 5), min_size=len(chunks), max_size=len(chunks)))
    return outcome(
        draw(st.integers(0, 10**6)),
        ending=ending,
        phase=draw(st.sampled_from(Phase)),
        intended_ns=at,
        picked_up_ns=draw(st.none() | st.just(picked)),
        sent_ns=draw(st.none() | st.just(sent)),
        headers_ns=headers,
        chunk_ns=draw(st.just(()) | st.just(tuple(chunks))),
        chunk_tokens=draw(st.none() | st.just(tuple(tokens))),
        end_ns=draw(st.none() | st.just(instants[-1])),
        output_tokens=draw(st.none() | st.integers(0, 60)),
        prompt_tokens=draw(st.none() | st.integers(1, 5000)),
    )


def _prefixes(gaps):
    return [gaps[: i + 1] for i in range(len(gaps))]
