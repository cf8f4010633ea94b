"""How often an interval of 95 % holds the truth, and how often there is one: on queues whose truth is known.

For each queue, load and number of requests, `--runs` runs are drawn (`benchmarks.queues`) and their figures made as
`splittime bench run` makes them. Told of each figure: in how many runs it had an interval with both ends, and how many
of those held the truth; in how many it had a lower end alone, and how many of those lay below the truth; and in how
many of all runs something false was said. Then two runs of one queue are compared: any BETTER or WORSE is false.
"""

import argparse
from typing import Any

import numpy as np

from benchmarks import queues
from benchmarks.report import file_result
from splittime.bench.book.figures import Figure, figure
from splittime.diagnose.compare import ratio_interval
from splittime.stats.intervals import CONFIDENCE, Interval, Precision, one_each, spread_of, together

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SIZES = (400, 1500)
FIGURES = ("mean", "p50", "p90", "p99")


def interval_of(found: Figure, name: str) -> Interval | None:
    return (found.mean if name == "mean" else found.percentiles[name]).interval


def told(interval: Interval | None, value: float) -> dict[str, bool]:
    """What an interval says of the truth."""
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    is_false = (low is not None and low > value) or (high is not None and high < value)
    both = low is not None and high is not None
    return {"both": both, "low": low is not None and high is None, "false": is_false}


def cell(queue: str, rho: float, size: int, runs: int, seed: int) -> dict[str, Any]:
    """Of one queue at one load."""
    true, drawn = queues.truth(queue, rho), queues.draw(queue, rho, size, runs, seed)
    figures = [figure(one_each(values)) for values in drawn]
    made = {name: [told(interval_of(one, name), true[name]) for one in figures if one] for name in FIGURES}
    return {
        "queue": queue,
        "rho": rho,
        "requests": size,
        "runs": runs,
        "independent": float(np.median([one.independent for one in figures if one])),
        "figures": {name: _counted(its) for name, its in made.items()},
        "false_differences": _false_differences(drawn),
    }


def _counted(told_of: list[dict[str, bool]]) -> dict[str, float | None]:
    """given: with both ends; covered: of those. low_given, low_holds: of a lower end alone. false: of all runs."""
    both, low = ([one for one in told_of if one[kind]] for kind in ("both", "low"))
    return {
        "given": len(both) / len(told_of),
        "covered": 1 - float(np.mean([one["false"] for one in both])) if both else None,
        "low_given": len(low) / len(told_of),
        "low_holds": 1 - float(np.mean([one["false"] for one in low])) if low else None,
        "false": float(np.mean([one["false"] for one in told_of])),
    }


def _false_differences(drawn: np.ndarray) -> float:
    """Of neighbouring runs taken for two servers: the share whose interval of the ratio of means leaves out 1."""
    wrong = []
    for first, second in zip(drawn[::2], drawn[1::2], strict=False):
        spread = together(*(spread_of(Precision(one_each(one)).log_mean()) for one in (first, second)))
        found = ratio_interval(first.mean(), second.mean(), spread, CONFIDENCE)
        assert found.low is not None
        assert found.high is not None
        wrong.append(not found.low <= 1 <= found.high)
    return float(np.mean(wrong))


def lines(found: dict[str, Any]) -> str:
    cells = []
    for name, its in found["figures"].items():
        both = f"{100 * its['covered']:.0f}% of {100 * its['given']:.0f}%" if its["given"] else "-"
        cells.append(f"{name} {both:>12} (low alone {100 * its['low_given']:3.0f}%, false {100 * its['false']:4.1f}%)")
    head = f"{found['queue']:5} {found['rho']:4} {found['requests']:5} worth {found['independent']:6.1f}"
    return f"{head}  {'  '.join(cells)}  differs {100 * found['false_differences']:.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="two cells, to see that it works")
    options = parser.parse_args()
    every = [(queue, rho, size) for queue in queues.QUEUES for rho in LOADS for size in SIZES]
    wanted, runs = ([("mm1", 0.5, 400), ("gm1", 0.9, 400)], 20) if options.small else (every, options.runs)
    found = []
    for place, (queue, rho, size) in enumerate(wanted):
        found.append(cell(queue, rho, size, runs, options.seed + place))
        print(lines(found[-1]), flush=True)
    file_result("interval_coverage", {"cells": found}, vars(options), as_json=False)


if __name__ == "__main__":
    main()
