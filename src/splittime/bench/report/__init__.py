"""A run for people and for other programs: `table` for a terminal, `csv` for a spreadsheet, `html` as one page.

All are made from a saved run, with the figures of `bench.book.figures`, and measure nothing themselves.
"""

from typing import Any

from splittime.bench.book.figures import DEFINITIONS, summary
from splittime.bench.book.records import Run
from splittime.bench.book.slo import check_slo


def as_json(run: Run) -> dict[str, Any]:
    """Returns the figures of each arm, the checks, the SLO's results and what the words mean."""
    arms = range(len(run.arms))
    return {
        "is_void": run.is_void,
        "checks": run.checks,
        "summaries": [summary(run, arm) for arm in arms],
        "slo": [check_slo(run, run.slo, arm) if run.slo else [] for arm in arms],
        "definitions": dict(DEFINITIONS),
    }
