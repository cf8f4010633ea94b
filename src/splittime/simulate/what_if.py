"""What would a change do? The recorded requests again, on a server with other settings, and how sure the answer is.

    recorded = Recorded(accounts, steps, facts)
    prediction = predict(recorded, Change({"max_num_seqs": 32}))

The cost model is fitted on the recorded steps. A *draw* is another model that fits these steps as well (its
coefficients come from the posterior distribution), on a machine that is a little slower or faster, as in another hour.
With each draw the requests are simulated twice, with the recorded settings and with the changed ones. Both share the
draw, so most of what is not known of the machine cancels: the change has a narrower interval than either side. An
interval is where one more draw would lie nine times of ten.

How well the simulator does is shown beside it: the recorded run, and its simulation with the settings that it had.

What is assumed: requests come when they came, whatever the answers before (an open loop); prompts and answers keep
their lengths; those that the recorded server refused, whose lengths nobody knows, are as long as the next that was not.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from splittime.simulate.change import Change
from splittime.simulate.cost import CostModel
from splittime.simulate.draws import figures_of_draws
from splittime.simulate.figures import Figures, figures
from splittime.simulate.recorded import Recorded, latest_run, written_ledger
from splittime.simulate.replica import Replica, replica_of
from splittime.simulate.trace import TracedRequest, refused_requests, traced_requests, with_own_ids

OtherRequests = Callable[[Replica], Sequence[TracedRequest]]

DRAWS = 20
SHARE = 0.9  # of the draws, within an interval
OTHER_HOUR = 0.08  # standard deviation of the logarithm of a machine's pace from one run to another, minutes later


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


def predict(
    recorded: Recorded,
    change: Change,
    draws: int = DRAWS,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
    processes: int = 1,
    other_requests: OtherRequests | None = None,
    other_hour: float = OTHER_HOUR,
) -> Prediction:
    """Returns the figures with and without the change. processes: at most so many simulate at a time. on_draw: called
    with how many draws are done. other_requests: makes the requests, where the recorded ones are not wanted.
    other_hour: as of `hours`. Raises ConfigError for a change that cannot be, a ledger that says too little, or steps
    far from any recorded."""
    recorded = latest_run(recorded)
    replica, requests = _server_and_requests(recorded, other_requests)
    rng = random.Random(seed)
    replicas = [replica.drawn(factor, rng) for factor in hours(draws, replica.costs.errors.drift, rng, other_hour)]
    changes = (Change(),) if change == Change() else (Change(), change)
    pairs = figures_of_draws(replicas, requests, changes, processes, on_draw)
    seen = figures(recorded.accounts, recorded.steps) if other_requests is None else {}
    return Prediction(
        change=change,
        figures=tuple(_predicted(name, seen.get(name), pairs) for name in seen or pairs[0][0]),
        num_requests=sum(not traced.account.is_turned_away for traced in requests),
        num_refused=sum(traced.account.is_turned_away for traced in requests),
        num_steps=len(recorded.steps),
        draws=draws,
        model=replica.costs,
    )


def hours(draws: int, drift: float, rng: random.Random, other_hour: float = OTHER_HOUR) -> list[float]:
    """Returns how slow the machine is in each draw: evenly spread quantiles, whose median few draws have too. drift:
    standard deviation of its pace within the recorded time; another hour differs by `other_hour` besides."""
    drift = math.hypot(drift, other_hour)
    shares = [(number + 0.5) / draws for number in range(draws)]
    rng.shuffle(shares)
    return [math.exp(drift * statistics.NormalDist().inv_cdf(share)) for share in shares]


def write_simulated(
    recorded: Recorded, change: Change, path: Path, other_requests: OtherRequests | None = None
) -> None:
    """Writes the ledger that the changed server would have written, by the likeliest model; its facts say that it was
    simulated. Raises as `predict` does, and ConfigError for a file that is there already, or cannot be written."""
    recorded = latest_run(recorded)
    replica, requests = _server_and_requests(recorded, other_requests)
    facts = msgspec.structs.replace(
        recorded.facts,
        settings=recorded.facts.settings | change.settings,
        processes=(),
        simulated=str(change) or "the settings as they were",
    )
    with written_ledger(facts, path) as ledger:
        replica.run_each(requests, change, 0, ledger.add_account, ledger.add_step)


def _server_and_requests(
    recorded: Recorded, other_requests: OtherRequests | None
) -> tuple[Replica, Sequence[TracedRequest]]:
    """Returns the recorded server, and the requests that it is to meet: those of its time at its pace, others at its
    mean pace."""
    replica = replica_of(recorded)
    if other_requests is None:
        return replica, requests_of(recorded, replica.config.max_model_len)
    return replica.steady(), other_requests(replica)


def requests_of(recorded: Recorded, max_model_len: int) -> list[TracedRequest]:
    """Returns the recorded requests, those that were refused among them, in the order in which they came."""
    traced = traced_requests(recorded.accounts, max_model_len)
    return with_own_ids([*traced, *refused_requests(recorded.accounts, traced)])


def _predicted(name: str, recorded: float | None, draws: Sequence[Sequence[Figures]]) -> Predicted:
    """draws: each without the change, and with it if there is one."""
    both = [(draw[0][name], draw[-1][name]) for draw in draws if name in draw[0] and name in draw[-1]]
    if not both:
        return Predicted(name, recorded, None, None, None)
    before, after = (statistics.median(side) for side in zip(*both, strict=True))
    ratios = [after / before for before, after in both if before > 0]
    after_low, after_high = interval([after for _, after in both])
    if not ratios:
        return Predicted(name, recorded, before, after, None, None, None, after_low, after_high)
    return Predicted(name, recorded, before, after, statistics.median(ratios), *interval(ratios), after_low, after_high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns within what one more draw lies with a probability of `SHARE`, or more where so few draws cannot tell:
    order statistics, of which one more value falls between any two neighbours, or beyond, with the same probability."""
    ordered = sorted(values)
    beyond = max(1, int((len(values) + 1) * (1 - SHARE) / 2))
    return ordered[beyond - 1], ordered[-beyond]
