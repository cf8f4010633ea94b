"""A run whose records are handed over: they are those of the ledger, and memory does not grow with the requests."""

import itertools
import tracemalloc
from collections.abc import Iterator

import pytest
from test_skip_ahead import NoisyCosts, some_requests

from splittime.core.errors import ConfigError
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.figures import RunningFigures, figures
from splittime.simulate.run import simulate, simulate_each
from splittime.simulate.trace import TracedRequest

CONFIG = SchedulerConfig(max_model_len=192, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=300)
LIMITS = QueueLimits(10**9, 10**9)


def waves(count: int) -> Iterator[TracedRequest]:
    """Thirty requests after another, each time when the ones before have ended."""
    for wave in range(count):
        for traced in some_requests(wave):
            request = traced.request
            request_id = f"{wave}-{request.request_id}"
            own = TracedRequest(
                type(request)(
                    request_id=request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling=request.sampling,
                    submitted_ns=request.submitted_ns,
                ),
                *traced[1:],
            )
            yield own.moved(wave * 10**8)


def test_what_is_handed_over_is_the_ledger_and_its_figures() -> None:
    books, running = simulate(list(waves(3)), CONFIG, NoisyCosts(1), LIMITS), RunningFigures()
    accounts, steps = [], []
    simulate_each(waves(3), CONFIG, NoisyCosts(1), LIMITS, accounts.append, steps.append)
    assert (accounts, steps) == books
    simulate_each(waves(3), CONFIG, NoisyCosts(1), LIMITS, running.add_account, running.add_step)
    assert running.figures() == figures(*books)


def peak_bytes(count: int) -> int:
    running = RunningFigures()
    tracemalloc.start()
    try:
        simulate_each(waves(count), CONFIG, NoisyCosts(1), LIMITS, running.add_account, running.add_step)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_requests() -> None:
    """The figures keep 8 bytes for each token; a closed account has a hundred times as many, a step two hundred."""
    few, many = peak_bytes(3), peak_bytes(15)
    assert many - few < 12 * 30 * 1_500


def test_requests_are_asked_for_when_it_is_time_for_them() -> None:
    asked = itertools.count()
    num_asked = []
    requests = (traced for traced in waves(5) if next(asked) >= 0)
    simulate_each(
        requests, CONFIG, NoisyCosts(1), LIMITS, lambda account: num_asked.append(asked.__reduce__()[1][0]), len_of
    )
    assert num_asked[0] < 40
    assert num_asked == sorted(num_asked)
    assert num_asked[-1] == 150


def len_of(step: object) -> None:
    pass


def test_a_run_without_requests_has_no_figures() -> None:
    with pytest.raises(ConfigError, match="served nobody"):
        RunningFigures().figures()
