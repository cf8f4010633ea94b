"""What a plan rests on, in sentences below its worksheet: what is missing, what was assumed, how sure it is."""

from collections.abc import Iterator
from typing import Any

from splittime.plan.capacity import Capacity
from splittime.simulate.replica import AnyReplica


def notes_of(replica: AnyReplica, found: Capacity, has_peak: bool) -> Iterator[str]:
    """Yields a sentence each. has_peak: whether servers were counted."""
    if not has_peak:
        yield "how many servers: give the load's --rate"
    if found.likeliest.stopped is not None:
        yield f"no higher rate was simulated: {found.likeliest.stopped}"
    if not found.rate.middle:
        yield "most of the models that fit as well keep the SLO at no rate: nobody can tell what it costs"
    config = replica.config
    yield (
        f"the scheduler has max_num_seqs {config.max_num_seqs:,}, max_num_batched_tokens "
        f"{config.max_num_batched_tokens:,}, max_model_len {config.max_model_len:,}"
    )
    if replica.guesses_ahead:
        yield "the server guesses tokens ahead; nobody knows what it would guess of these requests, so here it does not"
    if is_from_outside(replica):
        yield from _notes_from_outside(replica.costs.about)
    others = f"{found.draws} others" if found.draws > 1 else "another"
    yield (
        "in brackets: nobody knows exactly what steps take, so the rate was looked for with the likeliest model of "
        f"them and with {others} that fit as well (--draws {found.draws}); yet another would lie within the brackets "
        f"with a probability of {found.share:.0%}, and more draws raise that"
    )
    error = replica.costs.errors.median_relative
    if error and replica.costs.num_steps:
        yield f"step times: the median error of held-out steps is {error:.1%}"
    elif error:
        yield f"step times: no device attains what its sheet says; as good kernels do, give or take {error:.0%}"
    if replica.costs.unsure:
        unsure = ", ".join(replica.costs.unsure)
        yield f"the recorded steps cannot separate the costs of {unsure}; the intervals are wider for that reason"
    yield "requests come when they come, whatever the answers before (an open loop), spread evenly over the servers"


def is_from_outside(replica: AnyReplica) -> bool:
    """Whether `plan.outside` made it, which says how far off its own runs are."""
    return "off" in replica.costs.about


def _notes_from_outside(about: dict[str, Any]) -> Iterator[str]:
    """about: as `plan.outside` tells it."""
    yield "the scheduler's settings are guesses, from what was in flight: give those that you know, as --max-num-seqs"
    off = ", ".join(f"{name.upper()} {share:+.0%}" for name, share in about["off"].items())
    yield f"a simulation of the runs themselves is off by {off} at the median"
    if about["void"]:
        yield f"{about['void']} of {about['runs']} runs VOID: the client was at fault (splittime bench report says why)"
