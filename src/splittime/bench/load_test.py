"""What is sent to a server, from what somebody asked: the schedule of `splittime bench run`, saved or drawn.

`run.run_schedule` carries it out. Whoever says nothing of how much load to make gets a first look: a closed loop of
four for 20 s; where a number of requests says how long, the four only.
"""

from pathlib import Path
from typing import Any

import msgspec

from splittime.bench.draw import draw_for
from splittime.bench.schedule import Schedule, load_schedule, save
from splittime.bench.spec import spec_of
from splittime.core.errors import ConfigError
from splittime.wire.limits import server_limits
from splittime.wire.target import Target

FIRST_LOOK = {"concurrency": 4, "duration_s": 20.0, "warm_up_requests": 8}
FIRST_LOOK_BY_NUMBER = {"concurrency": 4, "warm_up_requests": 8}
SAYS_HOW_MUCH = {"rate", "concurrency", "trace", "arrivals", "cv", "rate_end", "ramp_s", "warm_up_s", "cool_down_s"}


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. load: the fields of `LoadSpec` that were given, or schedule: the file of a saved one. keep_as:
    where the schedule is saved. vocab_size, max_model_len: of the server's model, where the server does not say. salt:
    before all prompts; None: by chance."""

    load: dict[str, Any] = {}
    schedule: Path | None = None
    keep_as: Path | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    salt: str | None = None


async def planned(asked: LoadRequest, target: Target) -> Schedule:
    """Returns the schedule, and saves it if asked. Raises `ConfigError`, and `EngineError` for a server that is not
    there to say its limits."""
    if asked.schedule is not None and asked.load:
        name = next(iter(asked.load)).replace("_", "-")
        what = f"--schedule says everything, also what --{name} would"
        raise ConfigError(what, param="schedule", value=str(asked.schedule), hint=f"leave out --{name}")
    schedule = load_schedule(asked.schedule) if asked.schedule is not None else await _drawn(asked, target)
    if asked.keep_as is not None:
        save(schedule, asked.keep_as)
    return schedule


async def _drawn(asked: LoadRequest, target: Target) -> Schedule:
    load = asked.load
    if not SAYS_HOW_MUCH & set(load):
        load = {**(FIRST_LOOK_BY_NUMBER if "num_requests" in load else FIRST_LOOK), **load}
    spec_of(load).validate()  # before anything is asked of the server
    limits = await server_limits(target)
    return draw_for(load, limits.corrected(asked.vocab_size, asked.max_model_len), asked.salt)
