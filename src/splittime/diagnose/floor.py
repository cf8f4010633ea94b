"""The floor of a step: the least time that this machine needs for it, and what share of the step that was.

    bytes      = weights (less the head's, when no row samples) + KV bytes x positions that are read or written
    operations = tokens x operations_per_token + samples x operations_per_sample
                 + pairs x operations_per_context_token
    floor      = max(bytes / read_bytes_per_s, operations / peak_operations_per_s)       (the roofline of Williams,
    share      = floor / device_ns                                                        Waterman, Patterson 2009)
    products   = operations / operations_per_s

The floor is the machine's: its memory, and the fastest instructions it has. What a step is bound by is a question to
the server as it is, so there its own kernels' rate counts: by its products, where those take longer than its bytes,
however much faster the processor could multiply. Where the peak is not known the kernels' rate stands for it.

With a row of n tokens from position s on: its positions are s + n (the s old ones are read, the n new ones written),
its pairs n s + n (n + 1) / 2; under a sliding window of w positions, the layers that have it see w at most.
A step reads each weight once, whatever is in it. `samples` are the rows known to sample, those of one token; the last
chunk of a longer prompt samples too, which a step's record does not tell, so a floor of prefill may lack one product
with the head, and its bytes. Also left out: norms, activations, the embedding's rows, of a mixture of experts all that
more than one token chooses (`TokenCost`).

A floor is an estimate and is stored nowhere. It errs on both sides: too low by what is left out; too high where rows of
one step share a prefix, which then is read from memory once, and by as much as the ceilings were measured in a better
moment than the step ran (memory of virtual machines varies by a factor of 1.7 within minutes: `Machine`). A share above
1 means the reverse, a ceiling measured in a worse one.

The rate of reading is that of as many bytes as this step reads (`Machine.read_rates`; between two sizes in proportion
to the logarithm of the bytes). What the machine reports of its caches is not believed, but for books of an earlier
version, which know one rate alone: there `bytes_ns` is 0 where weights and KV fit the reported cache.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from splittime.core.facts import Machine, TokenCost
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

FROM_CACHE = 1.5  # times memory's rate


class Bound(StrEnum):
    """What a step's time is bound by, at the least: the largest part of its floor, or the host where that took longer
    than the device."""

    WEIGHTS = "weights"
    KV = "kv"
    COMPUTE = "compute"
    HOST = "host"
    NONE = "none"  # nothing was measured that could say


class Kind(StrEnum):
    """decode: one token for each row. prefill: no row that decodes. mixed: both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class StepFloor(msgspec.Struct, frozen=True, kw_only=True):
    """One step's floor. weights_ns, kv_ns: reading them, one after the other. fits_cache: they come from a cache,
    clearly faster than memory. operations_ns: its products by the server's kernels; None if their rate is not known.
    peak_ns: by the processor's fastest instructions; None if that is not known. host_ns: what the host took of the
    step, and before it."""

    weights_ns: int
    kv_ns: int
    operations_ns: int | None
    device_ns: int
    host_ns: int
    fits_cache: bool
    peak_ns: int | None = None

    @property
    def bytes_ns(self) -> int:
        return self.weights_ns + self.kv_ns

    @property
    def floor_ns(self) -> int:
        return max(self.bytes_ns, (self.operations_ns if self.peak_ns is None else self.peak_ns) or 0)

    @property
    def share(self) -> float | None:
        """None for a step that took no time."""
        return self.floor_ns / self.device_ns if self.device_ns > 0 else None

    @property
    def bound(self) -> Bound:
        if self.host_ns > self.device_ns:
            return Bound.HOST
        if self.operations_ns is None or max(self.bytes_ns, self.operations_ns) == 0:
            return Bound.NONE  # what is not measured may be the longer one
        if self.operations_ns >= self.bytes_ns:
            return Bound.COMPUTE
        return Bound.WEIGHTS if self.weights_ns >= self.kv_ns else Bound.KV


class FloorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one kind and, for decoding, of one class of batch size, taken together: sums of their times in ns.

    rows: the class, as (fewest, most) rows; only decoding is told apart by it. bound: of most of the time.
    """

    kind: Kind
    rows: tuple[int, int]
    num_steps: int
    tokens: int
    device_ns: int
    host_ns: int
    floor_ns: int
    weights_ns: int
    kv_ns: int
    operations_ns: int
    fits_cache: bool
    bound: Bound

    @property
    def bytes_ns(self) -> int:
        return self.weights_ns + self.kv_ns

    @property
    def share(self) -> float | None:
        return self.floor_ns / self.device_ns if self.device_ns > 0 else None

    @property
    def attained(self) -> float | None:
        """The share that these steps would have if the server's kernels were the fastest there are."""
        own_ns = max(self.operations_ns, self.floor_ns)
        return own_ns / self.device_ns if self.device_ns > 0 else None


def kind(step: StepRecord) -> Kind:
    if step.prefill_tokens == 0:
        return Kind.DECODE
    return Kind.PREFILL if step.decode_tokens == 0 else Kind.MIXED


def batch_class(num_rows: int) -> tuple[int, int]:
    """1, 2, 3-4, 5-8, 9-16, ...: (fewest, most) rows."""
    most = 1 << max(0, num_rows - 1).bit_length()
    return most // 2 + 1 if most > 1 else 1, most


def step_floor(step: StepRecord, cost: TokenCost, machine: Machine) -> StepFloor | None:
    """None if the machine's bandwidth was not measured, or the step computed nothing."""
    if machine.read_bytes_per_s is None or not step.rows:
        return None
    weight_bytes = cost.weight_bytes if step.decode_tokens else cost.weight_bytes - cost.head_bytes
    kv_bytes = _positions(step, cost) * cost.kv_bytes_per_token + 2 * len(step.rows) * cost.state_bytes
    read_rate = read_bytes_per_s(machine, weight_bytes + kv_bytes)
    ns_per_byte = 0.0 if read_rate is None else 1e9 / read_rate
    needed, rate, peak = operations(step, cost), machine.operations_per_s, machine.peak_operations_per_s
    return StepFloor(
        weights_ns=round(weight_bytes * ns_per_byte),
        kv_ns=round(kv_bytes * ns_per_byte),
        operations_ns=None if rate is None else round(needed / rate * 1e9),
        peak_ns=None if peak is None else round(needed / peak * 1e9),
        device_ns=step.device_ns,
        host_ns=step.host_gap_ns + step.plan_ns + step.launch_ns + step.commit_ns,
        fits_cache=read_rate is None or read_rate > FROM_CACHE * machine.read_bytes_per_s,
    )


def read_bytes_per_s(machine: Machine, num_bytes: float) -> float | None:
    """The rate at which so many bytes are read over and over; None for no bound. The machine's must be known."""
    if not machine.read_rates:
        is_cached = machine.cache_bytes is not None and num_bytes <= machine.cache_bytes
        return None if is_cached else machine.read_bytes_per_s
    sizes, rates = zip(*machine.read_rates, strict=True)
    return float(np.interp(math.log(max(1.0, num_bytes)), np.log(sizes), rates))


def operations(step: StepRecord, cost: TokenCost) -> float:
    tokens = sum(num_tokens for _, _, num_tokens in step.rows)
    pairs = sum(
        _windowed(cost, _pairs(start, n, None), _pairs(start, n, cost.window_tokens)) for _, start, n in step.rows
    )
    products = tokens * cost.operations_per_token + step.decode_tokens * cost.operations_per_sample
    return products + pairs * cost.operations_per_context_token


def _positions(step: StepRecord, cost: TokenCost) -> float:
    """Positions of the KV cache that are read or written, over all rows."""
    window = cost.window_tokens
    total = 0.0
    for _, start, num_tokens in step.rows:
        old = start if window is None else min(start, window - 1)
        total += _windowed(cost, start, old) + num_tokens
    return total


def _pairs(start: int, num_tokens: int, window: int | None) -> int:
    """Returns the number of pairs of a token and a position that it attends to, for tokens `start` to `start +
    num_tokens - 1`."""
    if window is None:
        return num_tokens * start + num_tokens * (num_tokens + 1) // 2
    growing = min(max(0, window - start), num_tokens)  # tokens that still see all before them
    return _pairs(start, growing, None) + (num_tokens - growing) * window


def _windowed(cost: TokenCost, everywhere: float, in_window: float) -> float:
    """The mean over the layers."""
    return everywhere + cost.windowed_share * (in_window - everywhere)


def floors(steps: Iterable[StepRecord], facts: ServerFacts | None) -> list[FloorGroup]:
    """By kind and batch class, the most device time first; empty if facts, cost or ceilings are missing."""
    if facts is None or facts.cost is None or facts.machine is None:
        return []
    groups: dict[tuple[Kind, tuple[int, int]], list[tuple[StepRecord, StepFloor]]] = {}
    for step in steps:
        floor = step_floor(step, facts.cost, facts.machine)
        if floor is not None:
            what = kind(step)
            key = (what, batch_class(len(step.rows)) if what is Kind.DECODE else (1, 1 << 20))
            groups.setdefault(key, []).append((step, floor))
    made = [_group(what, rows, members) for (what, rows), members in groups.items()]
    return sorted(made, key=lambda group: -group.device_ns)


def _group(what: Kind, rows: tuple[int, int], members: Sequence[tuple[StepRecord, StepFloor]]) -> FloorGroup:
    floors = [floor for _, floor in members]
    time_ns: dict[Bound, int] = {}
    for floor in floors:
        time_ns[floor.bound] = time_ns.get(floor.bound, 0) + floor.device_ns + floor.host_ns
    return FloorGroup(
        kind=what,
        rows=rows,
        num_steps=len(members),
        tokens=sum(step.prefill_tokens + step.decode_tokens for step, _ in members),
        device_ns=sum(floor.device_ns for floor in floors),
        host_ns=sum(floor.host_ns for floor in floors),
        floor_ns=sum(floor.floor_ns for floor in floors),
        weights_ns=sum(floor.weights_ns for floor in floors),
        kv_ns=sum(floor.kv_ns for floor in floors),
        operations_ns=sum(floor.operations_ns or 0 for floor in floors),
        fits_cache=all(floor.fits_cache for floor in floors),
        bound=max(time_ns, key=lambda bound: time_ns[bound]),
    )


def sentence(group: FloorGroup) -> str:
    """For people: what it runs at, and of what; what a step took, and how much of that it needed."""
    who = group.kind.value if group.kind is not Kind.DECODE else f"decode of {_span(group.rows)}"
    device, floor, host = (
        f"{ns / group.num_steps / 1e6:.3g}" for ns in (group.device_ns, group.floor_ns, group.host_ns)
    )
    times = f"of the {device} ms that a step takes on the device it needs {floor}; the host adds {host}"
    if group.bound is Bound.HOST:
        return f"{who}: the host takes longer than the device, {host} ms a step and {device}"
    if group.share is None or group.bound is Bound.NONE:
        return f"{who}: no floor is known; a step takes {device} ms on the device"
    percent = f"{100 * group.share:.0f} %"
    beyond = f" (more than all of it: {_why_beyond(group)})" if group.share > 1 else ""
    if group.bound is Bound.COMPUTE:
        note = (
            "; what it reads fits in the processor's cache, memory's bandwidth is no bound" if group.fits_cache else ""
        )
        own = _of_own_kernels(group)
        return f"{who} runs at {percent} of what this machine can multiply{own}{beyond}: {times}{note}"
    of_weights = group.weights_ns / max(1, group.weights_ns + group.kv_ns)
    reads = f"{100 * of_weights:.0f} % of the bytes are weights, {100 * (1 - of_weights):.0f} % KV"
    return f"{who} runs at {percent} of what this memory can do{beyond}: {times}; {reads}"


def _of_own_kernels(group: FloorGroup) -> str:
    """Where the kernels are not the fastest there could be."""
    if group.attained is None or group.share is None or group.attained <= group.share:
        return ""
    return f", {100 * group.attained:.0f} % of what its kernels can"


def _why_beyond(group: FloorGroup) -> str:
    """One row shares nothing; where more do, what they share is read once and counted for each."""
    slower = "the ceiling was measured in a slower moment"
    is_shared = group.rows[1] > 1 and group.kv_ns > 0 and group.bound is not Bound.COMPUTE
    return f"{slower}, or rows share a prefix, which is read once" if is_shared else slower


def _span(rows: tuple[int, int]) -> str:
    low, high = rows
    return f"{low} to {high} rows" if low < high else f"{low} row{'s' if low > 1 else ''}"
