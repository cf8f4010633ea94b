"""The figures that sum up a ledger, real or simulated, in one pass and bounded memory.

Times are in ms: `ttft_ms_p99`, `itl_ms_p50`, `e2e_ms_mean`, ...
"""

from collections.abc import Iterable

from splittime.core.errors import ConfigError
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.sample import TimeSample

Figures = dict[str, float]
PERCENTS = (50, 90, 99)


class RunningFigures:
    """The figures of a run, from accounts and steps that are handed over one by one and not kept. Percentiles of up to
    `sample.EXACT` times of a kind are exact; those of more are within 0.5 %."""

    def __init__(self) -> None:
        self._times = {name: TimeSample() for name in ("ttft", "itl", "e2e", "queue")}
        self._begin_ns: int | None = None
        self._end_ns = self._output_tokens = self._preemptions = self._refused = 0
        self._served = self._e2e_ns = self._steps = self._rows = 0

    def add_account(self, account: ClosedAccount) -> None:
        self._refused += account.is_turned_away
        if account.is_refused or not account.prompt_tokens:
            return
        self._begin_ns = min(account.start_ns, account.start_ns if self._begin_ns is None else self._begin_ns)
        self._end_ns = max(account.end_ns, self._end_ns)
        self._served += 1
        self._e2e_ns += derive.e2e_ns(account)
        self._output_tokens += account.output_tokens
        self._preemptions += account.num_preemptions
        first_ns = derive.ttft_ns(account)
        self._times["ttft"].extend(() if first_ns is None else (first_ns,))
        self._times["itl"].extend(derive.itl_ns(account))
        self._times["e2e"].extend((derive.e2e_ns(account),))
        self._times["queue"].extend((derive.stage_ns(account).get(Stage.QUEUE, 0),))

    def add_step(self, step: StepRecord) -> None:
        self._steps += 1
        self._rows += len(step.rows)

    def figures(self) -> Figures:
        """Returns the figures, times in ms. Raises ConfigError for a run that served nobody."""
        if self._begin_ns is None or not self._steps:
            raise ConfigError("a run that served nobody has no figures", param="requests", value=0, limit=1)
        found = {
            f"{name}_ms_{percent}": value / 1e6
            for name, times in self._times.items()
            for percent, value in times.percentiles(PERCENTS).items()
        }
        return found | {
            "e2e_ms_mean": self._e2e_ns / self._served / 1e6,
            "output_tokens_per_s": self._output_tokens / ((self._end_ns - self._begin_ns) / 1e9),
            "refused": self._refused,
            "preemptions": self._preemptions,
            "mean_running": self._rows / self._steps,
            "steps": self._steps,
        }


def figures(accounts: Iterable[ClosedAccount], steps: Iterable[StepRecord]) -> Figures:
    """Returns the figures of a whole run, times in ms. Raises ConfigError for one that served nobody."""
    running = RunningFigures()
    for account in accounts:
        running.add_account(account)
    for step in steps:
        running.add_step(step)
    return running.figures()
