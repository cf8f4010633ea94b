"""What a simulated fleet is asked: a trace, compressed in time, as often over as there are users like its own.

    load = load_of_trace(read_trace(spec), FleetLoadSpec(speed_up=20, copies=10), regions=("eu", "us"), limit=32_768)

Each request of the trace comes once in each copy, within `jitter_s` of its time, so the curve of the day stays what it
was. A copy's prompts share their blocks among each other, and its first block with all others: the same application,
other users. Everything is drawn by the seed.
"""

import random
from typing import NamedTuple

import msgspec

from splittime.bench.traces import Trace
from splittime.core.errors import ConfigError
from splittime.simulate.coarse import PREFIX_TOKENS

MAX_FLEET_REQUESTS = 5_000_000
BLOCK_REPEATS = PREFIX_TOKENS * 4 // 8  # of an id's 8 bytes: 4 bytes a token


class FleetLoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """speed_up: how many times as fast its requests come. copies: of each request. length_scale: of prompts and
    answers. jitter_s: within which the copies of a request come. surge_at_s, surge_times, surge_s: from when on so many
    times as many come, and for how long."""

    speed_up: float = 1.0
    copies: int = 1
    length_scale: float = 1.0
    jitter_s: float = 2.0
    surge_at_s: float | None = None
    surge_times: float = 3.0
    surge_s: float = 60.0


class FleetRequest:
    """prompt, output: tokens. blocks: ids of the prompt's blocks. home: the number of its region. generated: tokens
    that it has. first_ns, end_ns: when the client has the first and the last byte. ending: "" until it has ended."""

    __slots__ = (
        *("at_ns", "prompt", "output", "blocks", "home", "tried", "generated", "first_ns", "end_ns", "ending"),
        *("attempts", "cached", "is_resumed"),
    )

    def __init__(self, at_ns: int, prompt: int, output: int, blocks: tuple[int, ...], home: int) -> None:
        self.at_ns, self.prompt, self.output, self.blocks, self.home = at_ns, prompt, output, blocks, home
        self.tried: list[str] = []
        self.first_ns: int | None = None
        self.end_ns, self.ending = 0, ""
        self.generated = self.attempts = self.cached = 0
        self.is_resumed = False

    @property
    def text(self) -> bytes:
        """Returns what stands for its prompt where the gateway compares prompts: 4 bytes a token."""
        return b"".join(block.to_bytes(8, "big", signed=True) * BLOCK_REPEATS for block in self.blocks)


class FleetLoad(NamedTuple):
    """requests: in the order in which they come. num_too_long: of the trace, left out."""

    requests: list[FleetRequest]
    num_too_long: int


def load_of_trace(trace: Trace, spec: FleetLoadSpec, num_regions: int, limit: int, seed: int = 0) -> FleetLoad:
    """Returns what a fleet of so many regions is asked. limit: tokens of the longest request that a server takes.
    Raises ConfigError for a trace without times, and for more requests than anybody waits for."""
    if trace.at_s is None:
        raise ConfigError("the trace has no times", param="trace", hint="Name their column with --time-column.")
    expected = len(trace) * spec.copies
    if expected > MAX_FLEET_REQUESTS:
        raise ConfigError(f"{expected:,} requests are too many", param="copies", limit=MAX_FLEET_REQUESTS)
    rng, found, num_too_long = random.Random(seed), [], 0
    rows = zip(trace.at_s.tolist(), trace.rows.inputs.tolist(), trace.rows.outputs.tolist(), strict=True)
    for index, (at_s, prompt, output) in enumerate(rows):
        lengths = [max(1, round(tokens * spec.length_scale)) for tokens in (prompt, output)]
        if sum(lengths) > limit:
            num_too_long += 1
            continue
        blocks = trace.blocks[index] if trace.blocks is not None else ()
        blocks = blocks[: lengths[0] // PREFIX_TOKENS]
        found += _copies(at_s / spec.speed_up, (lengths[0], lengths[1]), blocks, spec, num_regions, rng)
    found.sort(key=lambda request: request.at_ns)
    return FleetLoad(found, num_too_long)


def _copies(
    at_s: float,
    lengths: tuple[int, int],
    blocks: tuple[int, ...],
    spec: FleetLoadSpec,
    regions: int,
    rng: random.Random,
) -> list[FleetRequest]:
    """Returns the copies of one request; in a surge, more of them."""
    count: float = spec.copies
    if spec.surge_at_s is not None and spec.surge_at_s <= at_s < spec.surge_at_s + spec.surge_s:
        count *= spec.surge_times
    whole = int(count) + (rng.random() < count % 1)
    made = []
    for number in range(whole):
        own = tuple(block + number * 2**32 if block else 0 for block in blocks)
        at_ns = round((at_s + rng.uniform(0, spec.jitter_s)) * 1e9)
        made.append(FleetRequest(at_ns, *lengths, own, number % regions))
    return made
