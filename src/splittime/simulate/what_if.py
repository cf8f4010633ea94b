"""What would a change do? The recorded requests again, on a server with other settings, and how sure the answer is.

    recorded = Recorded(accounts, steps, facts)
    prediction = predict(recorded, Change({"max_num_seqs": 32}))

The cost model is fitted on the recorded steps. A *draw* is another model that fits these steps as well (its
coefficients come from the posterior distribution). With each draw the requests are simulated three times: with the
recorded settings; with the changed ones, in the same hour with the same noise, so that most of what is not known of the
machine cancels; and with the changed ones once more, in another hour with another noise, as a later run would be
(`simulate.draws`). An interval is where such a run would lie nine times of ten, or less often after few draws
(`share`).

How well the simulator does is shown beside it: the recorded run, and its simulation with the settings that it had. By
what this misses, the expected figures are corrected, and their intervals are wider.

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

from splittime.ledger import derive
from splittime.ledger.facts import ServerFacts
from splittime.simulate.change import Change, PredictedFigure
from splittime.simulate.cost import CostModel
from splittime.simulate.draws import Draw, DrawFigures, figures_of_draws, hours, interval, share_within
from splittime.simulate.figures import Figures, figures
from splittime.simulate.recorded import Recorded, latest_run, written_ledger
from splittime.simulate.replica import AnyReplica, replica_of
from splittime.simulate.trace import TracedRequest, refused_requests, traced_requests, with_drafts, with_own_ids

OtherRequests = Callable[[AnyReplica], Sequence[TracedRequest]]
ReplicaOf = Callable[[Recorded], AnyReplica]

DRAWS = 20
JUDGED = tuple(f"{of}_ms_{percent}" for of in ("ttft", "itl", "e2e") for percent in ("p50", "p90"))  # p99s are few
PARTS_OF_DRIFT = 16  # of a run, between which `Errors.drift` is: their mean varies the less
FAR = 0.1  # a figure that is so far off is told


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
    num_same_hour: of the draws, those whose other hour was too slow to simulate: the slow ends lack them.
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
    num_same_hour: int
    share: float
    miss: Miss | None
    model: CostModel

    @property
    def interval_words(self) -> str:
        """Returns for people what an interval holds; nothing where there is none."""
        if not (str(self.change) and self.share):
            return ""
        within = f"{self.share:.0%}".replace("%", " %")
        words = f"In brackets: where {within} of runs with the change would lie, made in another hour."
        if not self.num_same_hour:
            return words
        few = f"Of {self.draws} draws, {self.num_same_hour} would meet an hour too slow to simulate, and stay in the"
        return f"{words} {few} recorded one: slow ends are nearer than they would be."

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
    to_replica: ReplicaOf = replica_of,
) -> Prediction:
    """Returns the figures of the recorded requests with and without the change. Raises as `recorded_load` and
    `predict_of` do, which have the arguments."""
    return predict_of(recorded_load(recorded, None, to_replica), change, draws, seed, on_draw, processes)


def predict_of(
    load: ServedLoad,
    change: Change,
    draws: int = DRAWS,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
    processes: int = 1,
) -> Prediction:
    """Returns the figures with and without the change. processes: at most so many simulate at a time. on_draw: called
    with how many draws are done. Raises ConfigError for a change that cannot be, and for steps far from any
    recorded."""
    load.replica.require(change)
    rng, costs = random.Random(seed), load.replica.costs
    here = [1.0] * draws if load.seen else hours(draws, costs.errors.drift, rng)
    later = hours(draws, costs.errors.drift / PARTS_OF_DRIFT**0.5 if load.seen else 0.0, rng)
    servers = [
        Draw(load.replica.drawn(factor, rng), next_hour, number)
        for number, (factor, next_hour) in enumerate(zip(here, later, strict=True))
    ]
    drawn = figures_of_draws(servers, load.requests, change, processes, on_draw)
    found = tuple(_predicted(name, load.seen.get(name), drawn) for name in load.seen or drawn[0].before)
    return Prediction(
        change=change,
        figures=found,
        num_requests=len({derive.request_of(one.account) for one in load.requests if not one.account.is_turned_away}),
        num_refused=sum(traced.account.is_turned_away for traced in load.requests),
        waits=any(traced.follows is not None for traced in load.requests),
        leaves_out_drafts=load.replica.guesses_ahead and not any(traced.drafts for traced in load.requests),
        num_steps=costs.num_steps,
        draws=draws,
        num_same_hour=sum(one.is_same_hour for one in drawn),
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


def _predicted(name: str, recorded: float | None, draws: Sequence[DrawFigures]) -> PredictedFigure:
    """Returns no ratio where some draw has nothing without the change."""
    known = [tuple(figures[name] for figures in of[:3]) for of in draws if all(name in one for one in of[:3])]
    if not known:
        return PredictedFigure(name, recorded, None, None, None)
    before, after, _ = (statistics.median(side) for side in zip(*known, strict=True))
    if any(one <= 0 for one, _, _ in known):
        ends = interval([again for _, _, again in known])
        return PredictedFigure(name, recorded, before, after, None, None, None, *ends)
    ratio, own = statistics.median(a / b for b, a, _ in known), interval([a / b for b, a, _ in known])
    low, high = _wider(ratio, interval([again / b for b, _, again in known]), before / recorded if recorded else 1.0)
    of = recorded or before
    return PredictedFigure(name, recorded, before, of * ratio, ratio, low, high, of * low, of * high, *own)


def _wider(ratio: float, ends: tuple[float, float], miss: float) -> tuple[float, float]:
    """Returns the interval with what the simulation misses of the recorded run, of which nobody knows how much stays
    with the change. miss: simulated over recorded. The ratio lies within."""
    low, high = min(ends[0], ratio), max(ends[1], ratio)
    if low <= 0:
        return low, high
    off = math.log(miss)
    below, above = (math.exp(math.hypot(math.log(side), off)) for side in (ratio / low, high / ratio))
    return ratio / below, ratio * above
