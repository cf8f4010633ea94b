"""What a reader of a comparison must know beside the figures: why it may say nothing, and what else differs."""

from collections.abc import Iterator, Sequence

import numpy as np

from splittime.bench.book.lateness import failed_by_lateness, void_for_more
from splittime.bench.book.rates import Trend, drift
from splittime.bench.book.records import Ending
from splittime.bench.book.requests import output_tokens
from splittime.bench.book.series import complete, series
from splittime.diagnose.compare_sample import Side

NOTED_DIFFERENCE = 0.01


def reasons_to_doubt(a: Sequence[Side], b: Sequence[Side]) -> list[str]:
    """Says which runs are void, since their figures are about the client. Each verdict reckons with lateness itself."""
    return [
        f"{name} is void: {'; '.join(check.sentence for check in void_for_more(run))}"
        for name, sides in (("A", a), ("B", b))
        for run, _ in sides
        if void_for_more(run)
    ]


def notes_of(a: Sequence[Side], b: Sequence[Side], *, is_paired: bool) -> Iterator[str]:
    if len(a) == 1 and a[0].run is not b[0].run:
        yield "One run a side: what changes from one start of a server to the next is not in the intervals."
    if not is_paired and len({run.schedule_digest for run, _ in (*a, *b)}) > 1:
        yield "The runs did not send the same requests: differences of the load are in the figures."
    for name, sides in (("A", a), ("B", b)):
        yield from _notes_of_side(name, sides)
    for what, means in (("prompt", _mean_prompts(a, b)), ("output", _mean_outputs(a, b))):
        if None not in means and abs(means[1] / means[0] - 1) > NOTED_DIFFERENCE:  # type: ignore[operator]
            yield f"Mean {what} tokens differ: {means[0]:.1f} in A, {means[1]:.1f} in B."


def _notes_of_side(name: str, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        for check in failed_by_lateness(side.run):
            yield f"{name}'s client was late: {check.sentence}. Verdicts hold even if {name} were better by all of it."
        if side.run.stopped:
            yield f"{name} was stopped: {side.run.stopped}"
        trend = drift(series(complete(side.measured), "ttft").values).trend
        if trend in (Trend.RISING, Trend.FALLING):
            yield f"TTFT was {trend.value} during {name}: it was not in a steady state."
        counted = [outcome for outcome in side.measured if outcome.ending is not Ending.CANCELLED]
        if missing := len(counted) - len(complete(counted)):
            yield f"{missing} of {len(counted)} requests of {name} were not answered: they are in no latency."


Means = tuple[float | None, float | None]


def _mean_prompts(a: Sequence[Side], b: Sequence[Side]) -> Means:
    return _mean([o.prompt_tokens for s in a for o in s.measured]), _mean(
        [o.prompt_tokens for s in b for o in s.measured]
    )


def _mean_outputs(a: Sequence[Side], b: Sequence[Side]) -> Means:
    first, second = ([output_tokens(o) for s in sides for o in complete(s.measured)] for sides in (a, b))
    return _mean(first), _mean(second)


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value]
    return float(np.mean(known)) if known else None
