"""What would a change do? The recorded requests again, on a server with other settings, and how sure the answer is.

    recorded = Recorded(accounts, steps, facts)
    prediction = predict(recorded, Change({"max_num_seqs": 32}))

The cost model is fitted on the recorded steps. A *draw* is another model that fits these steps as well (its
coefficients come from the posterior distribution), on a machine that is a little slower or faster, as in another hour.
With each draw the requests are simulated twice, with the recorded settings and with the changed ones. Both share the
draw, so most of what is not known of the machine cancels: the change has a narrower interval than either side. An
interval is where one more draw would lie nine times of ten, or less often after few draws (`share`).

How well the simulator does is shown beside it: the recorded run, and its simulation with the settings that it had.

What is assumed: requests come when they came, whatever the answers before (an open loop); prompts and answers keep
their lengths; those that the recorded server refused, whose lengths nobody knows, are as long as the next that was not;
drafts are told where they were, and what is not known of them is drawn (`simulate.drafts`).
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from splittime.ledger.facts import ServerFacts
from splittime.simulate.change import Change, PredictedFigure
from splittime.simulate.cost import CostModel
from splittime.simulate.draws import OTHER_HOUR, figures_of_draws, hours, interval, share_within
from splittime.simulate.figures import Figures, figures
from splittime.simulate.recorded import Recorded, latest_run, written_ledger
from splittime.simulate.replica import AnyReplica, replica_of
from splittime.simulate.trace import TracedRequest, refused_requests, traced_requests, with_drafts, with_own_ids

OtherRequests = Callable[[AnyReplica], Sequence[TracedRequest]]
ReplicaOf = Callable[[Recorded], AnyReplica]

DRAWS = 20
JUDGED = tuple(f"{of}_ms_{percent}" for of in ("ttft", "itl", "e2e") for percent in ("p50", "p90"))  # p99s are few
FAR = 0.3  # a figure that is so far off is told


class Miss(msgspec.Struct, frozen=True):
    """The figure that a simulation misses most of a recorded run. ratio: simulated over recorded."""

    name: str
    ratio: float

    @property
    def is_far(self) -> bool:
        return abs(self.ratio - 1) > FAR


class Prediction(msgspec.Struct, frozen=True):
    """num_requests: of recorded or drawn ones; of those that wait for an answer (`waits`) not all come if a run has an
    end. leaves_out_drafts: the server guesses tokens ahead, and nobody knows what it would guess of these requests.
    share: the probability with which one more draw lies within an interval. miss: by how much the simulation of the
    settings as they were misses the recorded run."""

    change: Change
    figures: tuple[PredictedFigure, ...]
    num_requests: int
    num_refused: int
    waits: bool
    leaves_out_drafts: bool
    num_steps: int
    draws: int
    share: float
    miss: Miss | None
    model: CostModel

    def figure(self, name: str) -> PredictedFigure:
        return next(figure for figure in self.figures if figure.name == name)


class ServedLoad(NamedTuple):
    """A server and the requests that it is to meet. facts: of the server. seen: figures of the real run, if there was
    one."""

    replica: AnyReplica
    requests: Sequence[TracedRequest]
    facts: ServerFacts
    seen: Figures


def recorded_load(
    recorded: Recorded, other_requests: OtherRequests | None = None, to_replica: ReplicaOf = replica_of
) -> ServedLoad:
    """Returns the recorded server with the requests of its time at its pace, or with others at its mean pace.
    to_replica: knows the engine of the ledger. Raises ConfigError for a ledger that says too little."""
    recorded = latest_run(recorded)
    replica = to_replica(recorded)
    if other_requests is not None:
        replica = replica.steady()
        return ServedLoad(replica, other_requests(replica), recorded.facts, {})
    seen = figures(recorded.accounts, recorded.steps)
    return ServedLoad(replica, requests_of(recorded, replica.config.max_model_len), recorded.facts, seen)


def predict(
    recorded: Recorded,
    change: Change,
    draws: int = DRAWS,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
    processes: int = 1,
    other_hour: float = OTHER_HOUR,
    to_replica: ReplicaOf = replica_of,
) -> Prediction:
    """Returns the figures of the recorded requests with and without the change. Raises as `recorded_load` and
    `predict_of` do, which have the arguments."""
    return predict_of(recorded_load(recorded, None, to_replica), change, draws, seed, on_draw, processes, other_hour)


def predict_of(
    load: ServedLoad,
    change: Change,
    draws: int = DRAWS,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
    processes: int = 1,
    other_hour: float = OTHER_HOUR,
) -> Prediction:
    """Returns the figures with and without the change. processes: at most so many simulate at a time. on_draw: called
    with how many draws are done. other_hour: as of `hours`. Raises ConfigError for a change that cannot be, and for
    steps far from any recorded."""
    load.replica.require(change)
    rng, costs = random.Random(seed), load.replica.costs
    replicas = [load.replica.drawn(factor, rng) for factor in hours(draws, costs.errors.drift, rng, other_hour)]
    changes = (Change(),) if change == Change() else (Change(), change)
    pairs = figures_of_draws(replicas, load.requests, changes, processes, on_draw)
    found = tuple(_predicted(name, load.seen.get(name), pairs) for name in load.seen or pairs[0][0])
    return Prediction(
        change=change,
        figures=found,
        num_requests=sum(not traced.account.is_turned_away for traced in load.requests),
        num_refused=sum(traced.account.is_turned_away for traced in load.requests),
        waits=any(traced.follows is not None for traced in load.requests),
        leaves_out_drafts=load.replica.guesses_ahead and not any(traced.drafts for traced in load.requests),
        num_steps=costs.num_steps,
        draws=draws,
        share=share_within(draws),
        miss=_miss(found),
        model=costs,
    )


def _miss(found: Sequence[PredictedFigure]) -> Miss | None:
    """Returns the largest of the judged figures; None where nothing was recorded."""
    judged = [one for one in found if one.name in JUDGED and one.recorded and one.before]
    misses = [Miss(one.name, one.before / one.recorded) for one in judged]  # type: ignore[operator]
    return max(misses, key=lambda miss: abs(math.log(miss.ratio)), default=None)


def write_simulated(load: ServedLoad, change: Change, path: Path) -> None:
    """Writes the ledger that the changed server would have written, by the likeliest model; its facts say that it was
    simulated. Raises as `predict_of` does, and ConfigError for a file that is there already, or cannot be written."""
    facts = msgspec.structs.replace(
        load.facts,
        settings=load.facts.settings | change.settings,
        processes=(),
        simulated=str(change) or "the settings as they were",
    )
    with written_ledger(facts, path) as ledger:
        load.replica.run_each(load.requests, change, 0, ledger.add_account, ledger.add_step)


def requests_of(recorded: Recorded, max_model_len: int) -> list[TracedRequest]:
    """Returns the recorded requests, those that were refused among them, in the order in which they came."""
    traced = with_drafts(traced_requests(recorded.accounts, max_model_len), recorded.steps)
    return with_own_ids([*traced, *refused_requests(recorded.accounts, traced)])


def _predicted(name: str, recorded: float | None, draws: Sequence[Sequence[Figures]]) -> PredictedFigure:
    """Returns no ratio where some draw has nothing without the change. draws: each without it, and with it if there is
    one."""
    both = [(draw[0][name], draw[-1][name]) for draw in draws if name in draw[0] and name in draw[-1]]
    if not both:
        return PredictedFigure(name, recorded, None, None, None)
    before, after = (statistics.median(side) for side in zip(*both, strict=True))
    after_low, after_high = interval([after for _, after in both])
    if any(before <= 0 for before, _ in both):
        return PredictedFigure(name, recorded, before, after, None, None, None, after_low, after_high)
    ratios = [after / before for before, after in both]
    return PredictedFigure(
        name, recorded, before, after, statistics.median(ratios), *interval(ratios), after_low, after_high
    )
