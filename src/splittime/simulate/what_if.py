"""What would a change do? The recorded requests again, on a server with other settings, and how sure the answer is.

    recorded = Recorded(accounts, steps, facts)
    prediction = predict(recorded, Change({"max_num_seqs": 32}))

The cost model is fitted on the recorded steps. From what it is sure of, models are drawn, each on a machine in another
hour; with each draw the requests are simulated twice, with the recorded settings and with the changed ones. The two
share the draw, so what is not known of the machine mostly cancels: the change has a narrower interval than either side.
An interval leaves out a twentieth of the draws at each end.

How well the simulator does is told beside it: the recorded run, and its simulation with the settings that it had.

What is assumed: requests come when they came, whatever the answers before (an open loop); prompts and answers keep
their lengths; those that the recorded server refused, whose lengths nobody knows, are as long as the next that was not.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.step import StepPlan
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.change import LIMITS, Change, changed
from splittime.simulate.cost import CostModel, Noise
from splittime.simulate.fit import Fit, fit
from splittime.simulate.recorded import Recorded, latest_run
from splittime.simulate.replay import scheduler_config
from splittime.simulate.run import Delivery, SimulatedBooks, simulate
from splittime.simulate.shape import StepTime, shape_of_plan
from splittime.simulate.trace import TracedRequest, at_speed, refused_requests, traced_requests, with_own_ids

DRAWS = 20
SHARE = 0.9  # of the draws, within an interval
UNBOUNDED = 2**40
MIN_REQUESTS = 20

Figures = dict[str, float]


class Predicted(msgspec.Struct, frozen=True):
    """A figure. recorded: of the real run. before, after: simulated, medians of the draws, with the recorded settings
    and with the changed ones. ratio: after over before. Each has its interval, if it exists itself."""

    name: str
    recorded: float | None
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    after_low: float | None = None
    after_high: float | None = None


class Prediction(msgspec.Struct, frozen=True):
    """errors: of the cost model, on steps that it was not fitted on."""

    change: Change
    figures: tuple[Predicted, ...]
    num_requests: int
    num_refused: int
    num_steps: int
    draws: int
    model: CostModel

    def figure(self, name: str) -> Predicted:
        return next(figure for figure in self.figures if figure.name == name)


class ModelCosts:
    """A cost model as the costs of a run, on the machine of the recorded time, with the noise that its steps had.
    speed: of the run's time against the recorded one."""

    def __init__(self, fitted: Fit, execution: str, seed: int, speed: float) -> None:
        self._model, self._pace = fitted
        self._execution, self._speed = execution, speed
        self._begin_ns = min(fitted.pace.decode.begins_ns[0], fitted.pace.prompts.begins_ns[0])
        self._noise = Noise(random.Random(seed), fitted.model.persistence)

    def of(self, plan: StepPlan, now_ns: int) -> StepTime:
        recorded_ns = self._begin_ns + round((now_ns - self._begin_ns) * self._speed)
        shape = shape_of_plan(plan, self._execution)
        return self._model.step_time(shape, self._pace.at(recorded_ns, shape), self._noise.next())


class RecordedServer(msgspec.Struct, frozen=True):
    """A recorded server, ready to be simulated."""

    requests: list[TracedRequest]
    config: SchedulerConfig
    limits: QueueLimits
    delivery: Delivery
    execution: str

    def run(self, fitted: Fit, change: Change, seed: int) -> SimulatedBooks:
        """Returns the ledger of a run. seed: of the steps' noise. Raises ConfigError for a change that cannot be."""
        config, limits = changed(self.config, self.limits, change)
        requests = at_speed(self.requests, change.speed)
        costs = ModelCosts(fitted, self.execution, seed, change.speed)
        return simulate(requests, config, costs, limits, self.delivery, self.execution)


def predict(
    recorded: Recorded,
    change: Change,
    draws: int = DRAWS,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
) -> Prediction:
    """Raises ConfigError for a change that cannot be, a ledger that says too little, or steps far from any recorded."""
    recorded = latest_run(recorded)
    server, fitted = server_of(recorded), fit(recorded.steps, recorded.facts)
    rng = random.Random(seed)
    pairs: list[tuple[Figures, ...]] = []
    for number, factor in enumerate(_hours(draws, fitted.model.errors.drift, rng)):
        drawn = Fit(fitted.model.sample(rng), fitted.pace.times(factor))
        pairs.append(tuple(figures(*server.run(drawn, each, number)) for each in (Change(), change)))
        on_draw(number + 1)
    seen = figures(list(recorded.accounts), list(recorded.steps))
    return Prediction(
        change=change,
        figures=tuple(_predicted(name, seen.get(name), pairs) for name in seen),
        num_requests=sum(not account.is_refused for account in recorded.accounts),
        num_refused=sum(account.is_turned_away for account in recorded.accounts),
        num_steps=len(recorded.steps),
        draws=draws,
        model=fitted.model,
    )


def _hours(draws: int, drift: float, rng: random.Random) -> list[float]:
    """Returns how slow the machine is in each draw: evenly spread quantiles, whose median few draws have too."""
    shares = [(number + 0.5) / draws for number in range(draws)]
    rng.shuffle(shares)
    return [math.exp(drift * statistics.NormalDist().inv_cdf(share)) for share in shares]


def simulated(recorded: Recorded, change: Change) -> Recorded:
    """Returns the ledger that the changed server would have written, by the likeliest model; its facts say that it was
    simulated. Raises as `predict` does."""
    recorded = latest_run(recorded)
    books = server_of(recorded).run(fit(recorded.steps, recorded.facts), change, seed=0)
    facts = msgspec.structs.replace(
        recorded.facts,
        settings=recorded.facts.settings | change.settings,
        processes=(),
        simulated=str(change) or "the settings as they were",
    )
    return Recorded(books.accounts, books.steps, facts)


def server_of(recorded: Recorded) -> RecordedServer:
    """Raises ConfigError for a ledger that says too little, and for an engine that cannot be simulated."""
    if recorded.facts.settings.get("async_scheduling"):
        raise ConfigError("an engine that plans ahead cannot be simulated", param="ledger", value="async_scheduling")
    if any(step.verified for step in recorded.steps):
        raise ConfigError("an engine that speculates cannot be simulated", param="ledger")
    served = [account for account in recorded.accounts if not account.is_refused]
    if len(served) < MIN_REQUESTS:
        hint = "Record more: splittime serve --ledger-file FILE."
        raise ConfigError(f"{len(served)} requests are too few to go by", param="ledger", limit=MIN_REQUESTS, hint=hint)
    settings = recorded.facts.settings
    limits = QueueLimits(*(settings.get(name, UNBOUNDED) for name in LIMITS))
    execution = statistics.mode(step.execution for step in recorded.steps)
    config = scheduler_config(recorded.facts)
    traced = traced_requests(recorded.accounts, config.max_model_len)
    requests = with_own_ids([*traced, *refused_requests(recorded.accounts, traced)])
    return RecordedServer(requests, config, limits, _delivery(served, recorded.steps), execution)


def _delivery(served: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> Delivery:
    """Medians of what the server took to send, to end an answer, and its engine to wake up."""
    lags = [lag for account in served for lag in derive.send_lag_ns(account)]
    ends = [derive.stage_ns(account).get(Stage.DELIVER, 0) for account in served]
    wakes = [step.host_gap_ns for step in steps if step.idle_ns]
    return Delivery(*(int(statistics.median(values)) if values else 0 for values in (lags, ends, wakes)))


def figures(accounts: list[ClosedAccount], steps: list[StepRecord]) -> Figures:
    """Returns what a run is told by, times in ms."""
    return dict(_figures(accounts, steps))


def _figures(accounts: list[ClosedAccount], steps: list[StepRecord]) -> Iterator[tuple[str, float]]:
    served = [account for account in accounts if not account.is_refused and account.prompt_tokens]
    for name, values in _samples(served).items():
        for percent, value in derive.percentiles([value / 1e6 for value in values], (50, 90, 99)).items():
            yield f"{name}_ms_{percent}", value
    span_s = (max(a.end_ns for a in served) - min(a.start_ns for a in served)) / 1e9
    yield "output_tokens_per_s", sum(account.output_tokens for account in served) / span_s
    yield "refused", sum(account.is_turned_away for account in accounts)
    yield "preemptions", sum(account.num_preemptions for account in served)
    yield "mean_running", sum(len(step.rows) for step in steps) / len(steps)
    yield "steps", len(steps)


def _samples(served: Sequence[ClosedAccount]) -> dict[str, list[float]]:
    """Returns times in ns, those that exist."""
    queued = [derive.stage_ns(account).get(Stage.QUEUE, 0) for account in served]
    return {
        "ttft": [ns for account in served if (ns := derive.ttft_ns(account)) is not None],
        "itl": [ns for account in served for ns in derive.itl_ns(account)],
        "e2e": [derive.e2e_ns(account) for account in served],
        "queue": list(queued),
    }


def _predicted(name: str, recorded: float | None, pairs: Sequence[tuple[Figures, ...]]) -> Predicted:
    both = [(before[name], after[name]) for before, after in pairs if name in before and name in after]
    if not both:
        return Predicted(name, recorded, None, None, None)
    before, after = (statistics.median(side) for side in zip(*both, strict=True))
    ratios = [after / before for before, after in both if before > 0]
    after_low, after_high = _interval([after for _, after in both])
    if not ratios:
        return Predicted(name, recorded, before, after, None, None, None, after_low, after_high)
    return Predicted(
        name, recorded, before, after, statistics.median(ratios), *_interval(ratios), after_low, after_high
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    ordered, cut = sorted(values), int(len(values) * (1 - SHARE) / 2)
    return ordered[cut], ordered[-1 - cut]
