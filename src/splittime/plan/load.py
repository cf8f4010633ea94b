"""A load of `bench` for a simulated server: the same schedule that would be sent to a real one.

Simulated requests come when they are meant to come, whatever the answers before (an open loop). A closed loop, and a
session's later turns, come when an answer has ended, and are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from splittime.bench.draw import draw
from splittime.bench.schedule import Planned, Schedule
from splittime.bench.spec import spec_of
from splittime.bench.traces import read_trace
from splittime.core.errors import ConfigError
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.replica import Replica
from splittime.simulate.trace import TracedRequest

DURATION_S = 60.0  # as of `bench run`
MIN_REQUESTS = 100
VOCAB_SIZE = 32_000  # nobody reads a simulated prompt: its tokens are equal or not


def requests_for(load: dict[str, Any], replica: Replica) -> list[TracedRequest]:
    """Returns the requests of a load, given by fields of `LoadSpec`, as this replica would meet them. Raises
    ConfigError for a load that cannot be drawn or simulated."""
    spec = spec_of({"prompt_form": "ids", **load})
    if spec.is_closed or spec.has_sessions:
        name = "concurrency" if spec.is_closed else "turns"
        hint = "Give --rate, or --trace with its own times."
        raise ConfigError(f"a load with --{name} waits for answers and cannot be simulated", param=name, hint=hint)
    config = replica.config
    schedule = draw(spec, vocab_size=VOCAB_SIZE, max_model_len=config.max_model_len, block_size=config.block_size)
    return requests_of_schedule(schedule, replica)


def requests_of_schedule(schedule: Schedule, replica: Replica) -> list[TracedRequest]:
    """Returns the requests of a schedule as this replica would meet them. Raises ConfigError as `asked_of` does."""
    return list(asked_requests(asked_of(schedule), replica.approach, replica.config.max_model_len))


def load_at(load: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Returns the load at so many requests a second in the mean; a trace with its own times is replayed so much
    faster. It lasts long enough for `MIN_REQUESTS`."""
    if not load.get("trace") or load.get("rate"):
        return {**load, "rate": rate, "duration_s": max(load.get("duration_s") or DURATION_S, MIN_REQUESTS / rate)}
    trace = read_trace(spec_of(dict(load)))
    if trace.at_s is None:
        raise ConfigError("the trace has no times", param="trace", hint="Give --rate.")
    return {**load, "speed_up": rate / trace.mean_rate}


def peak_of(load: Mapping[str, Any]) -> float | None:
    """Returns the requests a second that this load has in the mean; None if it does not say. Those of a trace with its
    own times are its mean: each trial replays its bursts."""
    if load.get("rate") or not load.get("trace"):
        return load.get("rate")
    trace = read_trace(spec_of(dict(load)))
    return None if trace.at_s is None else trace.mean_rate


def asked_of(schedule: Schedule) -> Iterator[Asked]:
    """Returns what an open loop asks, those that warm up among them. Raises ConfigError for prompts that are texts, and
    for a closed loop."""
    for planned in schedule.requests:
        if not isinstance(planned.prompt, tuple) or planned.at_ns is None:
            hint = "Draw it with --rate and --prompt-form ids."
            raise ConfigError("only an open loop of token ids can be simulated", param="schedule", hint=hint)
        yield _asked(planned, planned.prompt, planned.at_ns)


def _asked(planned: Planned, prompt: tuple[int, ...], at_ns: int) -> Asked:
    leaves_ns = None if planned.cancel_after_ns is None else at_ns + planned.cancel_after_ns
    return Asked(at_ns, prompt, planned.output_tokens, leaves_ns)
