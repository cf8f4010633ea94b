"""What a step takes, from what it computes: a model fitted on the steps of any ledger (`simulate.fit`).

    device_ns = c0 + c1 [has prompts] + c2 decode rows + c3 prompt tokens + c4 KV positions + c5 pairs of prompts
    plan_ns, launch_ns, sample_ns, commit_ns, host_gap_ns: each c0 + c1 rows + c2 tokens
    moves_ns  = c x blocks moved

A mixture of experts has one more term, and a device that runs some steps captured and others not (`Basis`). No
coefficient is negative. A step whose rows all decode may take another way (a captured graph) than one with prompts,
so these have a constant of their own. What is not linear (tiles of rows, caches) is in a factor for each bucket of
tokens, drawn towards 1 where a bucket has few steps.

Drafts count as tokens of a prompt: more tokens of a row, computed in the same step. The time of guessing is in
`launch_ns`.

A second line, `compute`, of the same features, is the time that the arithmetic takes, where the first is what the
memory takes, or what was recorded. A step takes the larger of the two (Williams, Waterman and Patterson's roofline,
2009): recorded steps bound by memory do not tell what larger ones take that are not.

Within minutes a virtual machine may take a third more or less time for the same work. `Pace` says how fast it was at
each time, so that a simulation of the recorded time has the machine of that time. What is not known exactly is drawn:
the coefficients (`sample`), and by how much a single step differs from steps that are alike (`Noise`).

Refused are steps with more than `REACH` times the most that was recorded of anything; of pairs of prompt positions,
with more than its square times: they grow with the square of the prompt. Of KV positions a quarter more is taken: twice
the rows may happen to have longer contexts.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.ledger.steps import StepRecord
from splittime.simulate.regression import drawn_above_zero
from splittime.simulate.shape import StepShape, StepTime, features_of

FEATURES = ("step", "step with prompts", "decode row", "prompt token", "KV position", "pair of prompt positions")
IN_PIECES, EXPERTS = "step in pieces", "other experts"


class Basis(msgspec.Struct, frozen=True):
    """What a step's time is made of: the terms of all servers (`features_of`), and those that some have: a step that a
    device runs kernel by kernel, where it runs others captured; and the experts that one token leaves alone and the
    step's others are expected to choose, 1 - (1 - k / E)^(tokens - 1), if each of them chose k of E by lot.
    captured_rows: steps of one token a row and at most so many rows are captured, others are not; None: all are run
    alike. idle_share: 1 - k / E; 0 for a model that is no mixture."""

    captured_rows: int | None = None
    idle_share: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        in_pieces = () if self.captured_rows is None else (IN_PIECES,)
        return (*FEATURES, *in_pieces, *((EXPERTS,) if self.idle_share else ()))

    def features(self, shape: StepShape) -> tuple[float, ...]:
        """Returns the values of `names`."""
        return (*features_of(shape), *self.more(shape))

    def more(self, shape: StepShape) -> tuple[float, ...]:
        """Returns the values that not every server has."""
        in_pieces = () if self.captured_rows is None else (float(self.is_in_pieces(shape)),)
        return (*in_pieces, 1 - self.idle_share ** (shape.tokens - 1)) if self.idle_share else in_pieces

    def host_features(self, shape: StepShape) -> tuple[float, ...]:
        in_pieces = () if self.captured_rows is None else (float(self.is_in_pieces(shape)),)
        return (1.0, shape.rows, shape.tokens, *in_pieces)

    def is_in_pieces(self, shape: StepShape) -> bool:
        return self.captured_rows is not None and (shape.tokens > shape.rows or shape.rows > self.captured_rows)


def basis_of(records: Sequence[StepRecord], cost: TokenCost | None) -> Basis:
    """Returns the terms of the steps of a ledger. cost: of the model, None: it is not known to be a mixture."""
    captured = [len(record.rows) for record in records if record.execution == "captured"]
    has_both = 0 < len(captured) < len(records)
    idle_share = 1 - cost.chosen_experts / cost.num_experts if cost is not None and cost.num_experts else 0.0
    return Basis(max(captured) if has_both else None, idle_share)


def operations_of(cost: TokenCost) -> NDArray[np.float64]:
    """Returns the operations of each term of `Basis`, of steps that are all run alike. A step with prompts samples for
    one of them."""
    token, sample, pair = cost.operations_per_token, cost.operations_per_sample, cost.operations_per_context_token
    experts = [0] if cost.num_experts else []
    return np.array([0, sample, token + sample, token, pair, pair, *experts], float)


REACH = 2.0
MOST_NS = 1e11  # that a coefficient can be
MOST_TIMES = 1e6  # as long as usual that a step can take
MOST_DRIFT = 10.0
ROUNDING_NS2 = 1.0  # by so much a variance may be below 0
HOST_PARTS = ("plan_ns", "launch_ns", "sample_ns", "commit_ns", "host_gap_ns")
BUCKET_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens of a step, upper ends
LIMITED = ("rows", "tokens", "decode_rows", "kv_tokens", "prompt_pairs", "moved_blocks")
_REACHES = {"prompt_pairs": REACH**2, "kv_tokens": 1.25 * REACH}
REACHES = tuple(_REACHES.get(name, REACH) for name in LIMITED)


class Law(NamedTuple):
    """What must hold of a field that was read from a file. must_be: for people."""

    field: str
    must_be: str
    holds: bool


class ShapeBucket(msgspec.Struct, frozen=True):
    """Steps that are alike, and how their times compare with what the lines and the machine's pace say. factor: of
    their mean to that. noise: evenly spaced quantiles of a step's time over this mean, of mean 1; pauses: of what it
    is longer, where it was so long that the machine had stopped. One pause tells nothing of the next step."""

    num_steps: int
    factor: float
    noise: tuple[float, ...]
    pauses: tuple[float, ...] = ()

    def times(self, noise: float, apart: float) -> float:
        """Returns how many times the mean a step takes. noise, apart: as of `CostModel.step_time`."""
        return quantile(self.noise, noise) + (quantile(self.pauses, apart) if self.pauses else 0.0)

    @property
    def is_sound(self) -> bool:
        return self.num_steps >= 0 and (
            len(self.noise) > 0
            and min(*self.noise, *self.pauses) >= 0 < self.factor
            and max(self.factor, *self.noise, *self.pauses) <= MOST_TIMES
        )


class Errors(msgspec.Struct, frozen=True):
    """How far off the model is on steps that it was not fitted on (every other stretch of time, whatever the machine's
    pace was). median_relative: the middle of |predicted / taken - 1|. mean_relative: of the sum of all. drift: standard
    deviation of the logarithm of the machine's pace from one sixteenth of the steps to another."""

    median_relative: float
    mean_relative: float
    drift: float

    @property
    def is_sound(self) -> bool:
        is_finite = math.isfinite(self.median_relative + self.mean_relative)
        return is_finite and self.median_relative >= 0 and self.mean_relative >= -1 and 0 <= self.drift <= MOST_DRIFT


class OutOfRange(ConfigError):
    """A step is far from all that the model was fitted on."""


class CostModel(msgspec.Struct, frozen=True):
    """device: coefficients of `basis.names`, in ns. compute: those of the second line, if there is one. covariance: of
    both lines, one behind the other. host: coefficients of each of `HOST_PARTS`. most: of each quantity of `LIMITED`,
    in the recorded steps. persistence: of the noise, from a step to the next. about: what it was fitted on. unsure: the
    names of what the recorded steps do not tell apart from the rest; it is drawn from far and wide. gap_noise: evenly
    spaced quantiles of the gap behind a step over what its line says, of mean 1; none: it has the step's noise."""

    device: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    host: tuple[tuple[float, ...], ...]
    move_ns: float
    buckets: dict[str, ShapeBucket]
    most: tuple[int, ...]
    persistence: float
    errors: Errors
    num_steps: int
    about: dict[str, Any] = {}
    compute: tuple[float, ...] = ()
    basis: Basis = Basis()
    unsure: tuple[str, ...] = ()
    gap_noise: tuple[float, ...] = ()

    @property
    def is_sound(self) -> bool:
        return all(law.holds for law in self.laws())

    def laws(self) -> Iterator[Law]:
        """Yields what must hold of each field, one at a time: a file may hold anything, and a law counts on those
        before it."""
        num_terms, times = len(self.device) + len(self.compute), f"times from 0 to {MOST_NS:g} ns"
        num_host = 3 + (self.basis.captured_rows is not None)
        is_basis = 0 <= self.basis.idle_share < 1 and (self.basis.captured_rows or 0) >= 0
        yield Law("basis", "of an idle_share from 0 to below 1, and captured_rows of 0 or more", is_basis)
        yield Law("device", times, len(self.device) == len(self.basis.names) and are_times(self.device))
        yield Law("compute", times, len(self.compute) in (0, len(self.device)) and are_times(self.compute))
        yield Law("host", times, [len(part) for part in self.host] == [num_host] * len(HOST_PARTS))
        yield Law("host", times, all(map(are_times, self.host)))
        yield Law("move_ns", times, are_times((self.move_ns,)))
        yield Law("covariance", f"{num_terms} rows of as many", _is_square(self.covariance, num_terms))
        yield Law("covariance", "variances of 0 or more on its diagonal", _is_spread(self.covariance))
        yield Law("most", "counts of 0 or more", len(self.most) == len(LIMITED) and min(self.most) >= 0)
        yield Law("buckets", "of factors above 0, and noise", all(each.is_sound for each in self.buckets.values()))
        yield Law("gap_noise", f"0 to {MOST_TIMES:g}", all(0 <= one <= MOST_TIMES for one in self.gap_noise))
        yield Law("persistence", "at least 0, and below 1", 0 <= self.persistence < 1)
        yield Law("errors", f"0 or more; mean_relative -1 or more, drift up to {MOST_DRIFT:g}", self.errors.is_sound)
        yield Law("num_steps", "0 or more", self.num_steps >= 0)

    def step_time(
        self, shape: StepShape, pace: float = 1.0, noise: float | None = None, apart: float = 0.0
    ) -> StepTime:
        """Returns what the step takes on a machine that takes `pace` times as long as in the mean. noise: how unusual
        the step is among its like, in standard deviations; None: it takes their mean. apart: the same of the gap behind
        it and of pauses, which have nothing to do with the step before. Raises OutOfRange."""
        self._require_near(shape)
        bucket, factor = self.buckets.get(bucket_of(shape)), pace
        if bucket is not None:
            factor *= bucket.factor if noise is None else bucket.factor * bucket.times(noise, apart)
        rows, tokens, _, _, _, moved, _ = shape
        device_ns = _on_line(self.device, shape)
        if self.compute:
            device_ns = max(device_ns, _on_line(self.compute, shape))
        if len(self.device) == len(FEATURES):
            *parts, gap_ns = [a + b * rows + c * tokens for a, b, c in self.host]
        else:
            device_ns = self._device_ns(shape)
            host = self.basis.host_features(shape)
            *parts, gap_ns = [sum(map(mul, part, host)) for part in self.host]
        plan, launch, sample, commit = [round(factor * part_ns) for part_ns in parts]
        longer = factor if not self.gap_noise else pace if noise is None else pace * quantile(self.gap_noise, apart)
        gap = round(longer * gap_ns)
        return StepTime(plan, launch, round(self.move_ns * moved), round(factor * device_ns), sample, commit, gap)

    def times(self, factor: float) -> "CostModel":
        """Returns that of a machine that takes so many times as long."""
        return msgspec.structs.replace(
            self,
            device=tuple(one * factor for one in self.device),
            compute=tuple(one * factor for one in self.compute),
            covariance=tuple(tuple(one * factor**2 for one in row) for row in self.covariance),
            host=tuple(tuple(one * factor for one in part) for part in self.host),
            move_ns=self.move_ns * factor,
        )

    def sample(self, rng: random.Random) -> "CostModel":
        """Returns another model that fits as well: its coefficients are drawn from the normal distribution that the fit
        gives them (`covariance`), cut off at 0."""
        generator = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
        both = np.array((*self.device, *self.compute))
        values = tuple(drawn_above_zero(both, np.array(self.covariance), generator).tolist())
        return msgspec.structs.replace(self, device=values[: len(self.device)], compute=values[len(self.device) :])

    def _device_ns(self, shape: StepShape) -> float:
        """Returns ns, of a server whose steps have more terms than all have."""
        features = self.basis.features(shape)
        return max(sum(map(mul, line, features)) for line in (self.device, self.compute))

    def _require_near(self, shape: StepShape) -> None:
        for name, most, reach in zip(LIMITED, self.most, REACHES, strict=True):
            value: int = getattr(shape, name)
            if value > reach * most:
                words = f"a step would have {value} {name}; of the recorded ones none has more than {most}"
                hint = "Record a load that has such steps, and simulate that."
                raise OutOfRange(words, param=name, value=value, limit=round(reach * most), hint=hint)


def are_times(values: Iterable[float]) -> bool:
    return all(0 <= one <= MOST_NS for one in values)


def _is_square(matrix: Sequence[Sequence[float]], size: int) -> bool:
    return [len(row) for row in matrix] == [size] * size


def _is_spread(matrix: Sequence[Sequence[float]]) -> bool:
    """Whether a square matrix can be a covariance, up to what rounding leaves of a variance of 0."""
    is_finite = all(abs(one) <= MOST_NS**2 for row in matrix for one in row)
    return is_finite and all(row[at] >= -ROUNDING_NS2 for at, row in enumerate(matrix))


def _on_line(line: tuple[float, ...], shape: StepShape) -> float:
    """Returns ns, before any bucket's factor."""
    _, tokens, decode_rows, kv_tokens, pairs, _, _ = shape
    c0, c1, c2, c3, c4, c5 = line[:6]
    prompt_tokens = tokens - decode_rows
    line_ns = c0 + c2 * decode_rows + c4 * kv_tokens
    return line_ns + c1 + c3 * prompt_tokens + c5 * pairs if prompt_tokens > 0 else line_ns


class PaceOf(msgspec.Struct, frozen=True):
    """How long one kind of steps took against its mean: `factors[i]` times as long from `begins_ns[i]` on."""

    begins_ns: tuple[int, ...] = (0,)
    factors: tuple[float, ...] = (1.0,)

    def at(self, now_ns: int) -> float:
        return self.factors[max(bisect_right(self.begins_ns, now_ns) - 1, 0)]

    @property
    def is_sound(self) -> bool:
        is_whole = len(self.begins_ns) == len(self.factors) > 0 and list(self.begins_ns) == sorted(self.begins_ns)
        return is_whole and all(0 < one <= MOST_TIMES for one in self.factors)


class Pace(msgspec.Struct, frozen=True):
    """How fast the machine was when. What slows a step of half a millisecond (who wakes when) hardly slows one that
    computes prompts for 30, so the two have a pace each."""

    decode: PaceOf
    prompts: PaceOf

    def at(self, now_ns: int, shape: StepShape) -> float:
        return (self.decode if shape.tokens == shape.decode_rows else self.prompts).at(now_ns)

    def times(self, factor: float) -> "Pace":
        """Returns that of another hour, slower or faster throughout."""
        kinds = ((kind.begins_ns, tuple(one * factor for one in kind.factors)) for kind in (self.decode, self.prompts))
        return Pace(*(PaceOf(*kind) for kind in kinds))


class Noise:
    """How unusual the steps of a run are, one after the other: what slows one slows the next."""

    def __init__(self, rng: random.Random, persistence: float) -> None:
        self._gauss, self._kept, self._new = rng.gauss, persistence, math.sqrt(1 - persistence**2)
        self._now = rng.gauss(0.0, 1.0)

    def next(self) -> float:
        """Returns the next step's, in standard deviations."""
        self._now = self._kept * self._now + self._new * self._gauss(0.0, 1.0)
        return self._now


def bucket_of(shape: StepShape) -> str:
    """Returns the name of the steps alike: by how many tokens, and whether there are prompts among them."""
    at = bisect_left(BUCKET_EDGES, shape.tokens)
    kind = "decode" if shape.tokens == shape.decode_rows else "prompts"
    return f"{kind}, over {BUCKET_EDGES[-1]}" if at == len(BUCKET_EDGES) else f"{kind}, up to {BUCKET_EDGES[at]}"


def quantile(values: tuple[float, ...], deviations: float) -> float:
    """Returns the value that lies where a normal variable is so many standard deviations from its middle."""
    share = 0.5 + 0.5 * math.erf(deviations / math.sqrt(2))
    return values[min(int(share * len(values)), len(values) - 1)]
