"""Draws: simulations that do not depend on each other, over the processor's cores, and the intervals they make.

    figures_of_draws(replicas, requests, changes, processes=2)      what each replica does with each change

The n-th replica runs with seed n in whichever process, so the answer does not depend on the number of processes. A
process takes half a second to start: small jobs stay in this one.
"""

import math
import random
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from splittime.simulate.change import Change
from splittime.simulate.figures import Figures
from splittime.simulate.replica import AnyReplica
from splittime.simulate.trace import TracedRequest

SHARE = 0.9  # of the draws, within an interval
ROUNDING = 1e-9  # (1 - 0.9) / 2 is a little less than 0.05
OTHER_HOUR = 0.08  # standard deviation of the logarithm of a machine's pace from one run to another, minutes later
TOKENS_OF_A_PROCESS = 500_000  # of prompts and answers: they take some seconds

Job = TypeVar("Job")
Found = TypeVar("Found")


def figures_of_draws(
    replicas: Sequence[AnyReplica],
    requests: Sequence[TracedRequest],
    changes: Sequence[Change],
    processes: int = 1,
    on_draw: Callable[[int], None] = lambda number: None,
) -> list[list[Figures]]:
    """Returns for each replica the figures with each change. on_draw: called with how many are done. Raises what a
    simulation raises."""
    tokens = sum(len(traced.request.prompt_token_ids) + traced.account.output_tokens for traced in requests)
    tokens *= len(replicas) * len(changes)
    found = []
    for figures in over_cores(_figures, list(enumerate(replicas)), (requests, changes), tokens, processes):
        found.append(figures)
        on_draw(len(found))
    return found


def _figures(
    job: tuple[int, AnyReplica], requests: Sequence[TracedRequest], changes: Sequence[Change]
) -> list[Figures]:
    seed, replica = job
    return [replica.figures(requests, change, seed) for change in changes]


def over_cores(
    work: Callable[..., Found], jobs: Sequence[Job], task: tuple[Any, ...], tokens: int, processes: int
) -> Iterator[Found]:
    """Yields what `work(job, *task)` returns for each job, in their order. work: a function of a module. tokens: of
    prompts and answers that all jobs simulate. processes: at most so many work at a time."""
    processes = min(processes, len(jobs), tokens // TOKENS_OF_A_PROCESS)
    if processes < 2:
        yield from (work(job, *task) for job in jobs)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_keep, initargs=(work, task))
    try:
        yield from pool.map(_run_kept, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


_kept: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []  # in a process of the pool: what all of its jobs need


def _keep(work: Callable[..., Any], task: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it, without words
    _kept.append((work, task))


def _run_kept(job: Any) -> Any:
    work, task = _kept[0]
    return work(job, *task)


def hours(draws: int, drift: float, rng: random.Random, other_hour: float = OTHER_HOUR) -> list[float]:
    """Returns how slow the machine is in each draw: evenly spread quantiles, whose median few draws have too. drift:
    standard deviation of its pace within the recorded time; another hour differs by `other_hour` besides."""
    drift = math.hypot(drift, other_hour)
    shares = [(number + 0.5) / draws for number in range(draws)]
    rng.shuffle(shares)
    return [math.exp(drift * statistics.NormalDist().inv_cdf(share)) for share in shares]


def share_within(count: int) -> float:
    """Returns the probability with which one more draw lies within the `interval` of so many that depend on each other
    in nothing: `SHARE`, and less for fewer than 19. Where hours are spread evenly, as those of `hours`, it is more."""
    return min(SHARE, (count - 1) / (count + 1))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns within what one more draw lies with the probability `share_within`: order statistics, of which one more
    value falls between any two neighbours, or beyond, with the same probability."""
    ordered = sorted(values)
    beyond = max(1, math.floor((len(values) + 1) * (1 - SHARE) / 2 + ROUNDING))
    return ordered[beyond - 1], ordered[-beyond]
