"""Draws: simulations that do not depend on each other, over the processor's cores, and the intervals they make.

    figures_of_draws(draws, requests, change, processes=2)      what each replica does, without and with the change

The change is simulated twice: in the hour and with the noise of the run without it, and in another hour with a noise of
its own, as a run would be that somebody makes later. A draw has its seed in whichever process it runs, so the answer
does not depend on the number of processes. A process takes half a second to start: small jobs stay in this one.
"""

import math
import random
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.figures import Figures
from splittime.simulate.replica import AnyReplica
from splittime.simulate.trace import TracedRequest

SHARE = 0.9  # of the draws, within an interval
ROUNDING = 1e-9  # (1 - 0.9) / 2 is a little less than 0.05
OTHER_HOUR = 0.16  # of the logarithm of a machine's pace, standard deviation from one run to one minutes later (log.md)
LATER = 1_000_000  # between the seeds of a run and of one in another hour: more than there are draws
TOKENS_OF_A_PROCESS = 500_000  # of prompts and answers: they take some seconds

Job = TypeVar("Job")
Found = TypeVar("Found")


class Draw(NamedTuple):
    """A server that fits as well. later: how slow its machine is in another hour, over this one. seed: of its noise;
    no other draw has it."""

    replica: AnyReplica
    later: float
    seed: int


class DrawFigures(NamedTuple):
    """before: without the change. after: with it, in the same hour with the same noise. again: in another hour, with
    another noise. Without a change all three are the same. is_same_hour: that hour is so slow that no recorded step is
    like its own, and the noise alone is another."""

    before: Figures
    after: Figures
    again: Figures
    is_same_hour: bool = False


def figures_of_draws(
    draws: Sequence[Draw],
    requests: Sequence[TracedRequest],
    change: Change,
    processes: int = 1,
    on_draw: Callable[[int], None] = lambda number: None,
) -> list[DrawFigures]:
    """Returns the figures of each draw. on_draw: called with how many are done. Raises what a simulation raises."""
    tokens = sum(len(traced.request.prompt_token_ids) + traced.account.output_tokens for traced in requests)
    tokens *= len(draws) * (1 if change == Change() else 3)
    found = []
    for figures in over_cores(_figures, draws, (requests, change), tokens, processes):
        found.append(figures)
        on_draw(len(found))
    return found


def _figures(draw: Draw, requests: Sequence[TracedRequest], change: Change) -> DrawFigures:
    replica, later, seed = draw
    before = replica.figures(requests, Change(), seed)
    if change == Change():
        return DrawFigures(before, before, before)
    after = replica.figures(requests, change, seed)
    try:
        return DrawFigures(before, after, replica.slower(later).figures(requests, change, seed + LATER))
    except OutOfRange:  # a slow hour gathers requests that the recorded hour did not
        return DrawFigures(before, after, replica.figures(requests, change, seed + LATER), is_same_hour=True)


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
